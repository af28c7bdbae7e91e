package prove

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceledger/onceledger/internal/sandbox"
)

// monitor looks at what runs a few times a second: how much memory it has held,
// how much of the log Postgres keeps, and what counts itself but forgets it when
// it dies.
type monitor struct {
	pool      *pgxpool.Pool
	processes []*sandbox.Process
	billing   *sandbox.Process

	mutex    sync.Mutex
	memory   map[string]int64 // the most that a process of a name has held
	retained int64            // the most bytes of log that a slot held back
	counts   map[life]map[Bite]float64
}

// life is one life of a process.
type life struct {
	name   string
	number int
}

const monitorEvery = 500 * time.Millisecond

func newMonitor(pool *pgxpool.Pool, billing *sandbox.Process, processes ...*sandbox.Process) *monitor {
	return &monitor{
		pool: pool, processes: processes, billing: billing,
		memory: make(map[string]int64), counts: make(map[life]map[Bite]float64),
	}
}

func (m *monitor) run(ctx context.Context) {
	ticker := time.NewTicker(monitorEvery)
	defer ticker.Stop()
	for {
		m.look(ctx)
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

// look looks once. What does not answer is looked at the next time.
func (m *monitor) look(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	for _, process := range m.processes {
		held := process.PeakMemory()
		m.mutex.Lock()
		m.memory[process.Name] = max(m.memory[process.Name], held)
		m.mutex.Unlock()
	}
	number := m.billing.Lives()
	if _, text, err := m.billing.Get("/metrics"); err == nil && number == m.billing.Lives() {
		m.count(life{m.billing.Name, number}, text)
	}
	var retained *int64
	err := m.pool.QueryRow(ctx, "SELECT max(pg_current_wal_lsn() - restart_lsn)::bigint FROM pg_replication_slots WHERE database = current_database()").Scan(&retained)
	if err == nil && retained != nil {
		m.mutex.Lock()
		m.retained = max(m.retained, *retained)
		m.mutex.Unlock()
	}
}

func (m *monitor) count(of life, metrics string) {
	sum := func(name string, labels ...string) float64 {
		value, _ := sandbox.SumMetric(metrics, name, labels...)
		return value
	}
	const rebalances = "onceledger_consumer_rebalances_total"
	taken := sum(rebalances, `group="billing"`, `kind="revoked"`) + sum(rebalances, `group="billing"`, `kind="lost"`)
	if of.number > 1 {
		taken += sum(rebalances, `group="billing"`, `kind="assigned"`)
	}
	m.mutex.Lock()
	defer m.mutex.Unlock()
	m.counts[of] = map[Bite]float64{
		BiteRedelivery: sum("onceledger_inbox_records_total", `outcome="duplicate"`),
		BiteRebalance:  taken,
	}
}

// bites are what was counted, over all lives.
func (m *monitor) bites() map[Bite]int64 {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	sums := make(map[Bite]int64)
	for _, counts := range m.counts {
		for bite, count := range counts {
			sums[bite] += int64(count)
		}
	}
	return sums
}

func (m *monitor) peaks() (memory map[string]int64, retained int64) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	return maps.Clone(m.memory), m.retained
}

// counter counts what cells have caused.
type counter struct {
	mutex  sync.Mutex
	counts map[Bite]int64
}

func (c *counter) add(what Bite, times int64) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.counts[what] += times
}

func (c *counter) all() map[Bite]int64 {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return maps.Clone(c.counts)
}

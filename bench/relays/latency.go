package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/bench/drain"
	"github.com/onceledger/onceledger/bench/stack"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/relay"
)

// latencyLeg is one contender's time from a transaction's commit, by Postgres'
// own timestamp, to the arrival of its record at a consumer that reads committed
// records. Milliseconds.
type latencyLeg struct {
	Contender string  `json:"contender"`
	P50       float64 `json:"p50_ms"`
	P90       float64 `json:"p90_ms"`
	P99       float64 `json:"p99_ms"`
	Max       float64 `json:"max_ms"`
	CPU       float64 `json:"cpu_seconds"`
}

// latencyRatio is a contender's, divided by wal's of the same round.
type latencyRatio struct {
	Of  string       `json:"of"`
	P50 stack.Spread `json:"p50"`
	P99 stack.Spread `json:"p99"`
}

type latency struct {
	Rate    int            `json:"events_per_second"`
	Seconds int            `json:"seconds"`
	Rounds  int            `json:"rounds"`
	Ratios  []latencyRatio `json:"divided_by_wal"`
	Legs    []latencyLeg   `json:"legs"`
}

// warmUp is for how long events come before they count.
const warmUp = 5

func (b *bench) latency(ctx context.Context, rate, seconds, rounds int) (latency, error) {
	all := latency{Rate: rate, Seconds: seconds, Rounds: rounds}
	if err := b.worker(ctx, true); err != nil {
		return all, err
	}
	others := []contender{shipped, tuned, poll}
	p50, p99 := make(map[string][]float64), make(map[string][]float64)
	for round := range rounds {
		order := append([]contender{wal}, others...)
		if round%2 == 1 {
			slices.Reverse(order)
		}
		legs := make(map[string]latencyLeg)
		for _, c := range order {
			l, err := b.latencyLeg(ctx, c, rate, seconds)
			if err != nil {
				return all, fmt.Errorf("latency of %s: %w", c.name, err)
			}
			progress("%d/s  %-30s  p50 %6.1f ms  p90 %6.1f  p99 %6.1f  max %6.1f  cpu %.1f s",
				rate, c.name, l.P50, l.P90, l.P99, l.Max, l.CPU)
			legs[c.name] = l
			all.Legs = append(all.Legs, l)
		}
		for _, c := range others {
			p50[c.name] = append(p50[c.name], legs[c.name].P50/legs[wal.name].P50)
			p99[c.name] = append(p99[c.name], legs[c.name].P99/legs[wal.name].P99)
		}
	}
	for _, c := range others {
		all.Ratios = append(all.Ratios, latencyRatio{Of: c.name, P50: stack.SpreadOf(p50[c.name]), P99: stack.SpreadOf(p99[c.name])})
	}
	b.stopConnect()
	b.stopConnect = func() {}
	return all, nil
}

func (b *bench) latencyLeg(ctx context.Context, c contender, rate, seconds int) (l latencyLeg, err error) {
	err = errors.Join(b.forget(ctx), drain.Empty(ctx, b.conn), b.makeTopic(ctx))
	if err == nil && c.kind == relay.KindPoll {
		err = b.assignPoll(ctx)
	}
	if err == nil && c.kind == relay.KindDebezium { // wal makes its own
		_, err = b.conn.Exec(ctx, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", slot)
	}
	if err != nil {
		return l, fmt.Errorf("prepare: %w", err)
	}
	pool, err := pgxpool.New(ctx, b.Postgres.AdminURL(database)+"&pool_max_conns=8&application_name="+database)
	if err != nil {
		return l, err
	}
	defer pool.Close()
	consumer, err := consume(b.Brokers)
	if err != nil {
		return l, err
	}
	defer consumer.close()
	r, err := b.start(ctx, c)
	if err != nil {
		return l, err
	}

	write := func(ctx context.Context) error { return writeEvent(ctx, pool) }
	measure := func() error {
		if err := stack.AtRate(ctx, rate, warmUp, write); err != nil { // connections, statements, plans
			return err
		}
		if err := consumer.wait(ctx, rate*warmUp, r); err != nil {
			return err
		}
		if _, err := b.conn.Exec(ctx, "ANALYZE outbox_events"); err != nil {
			return err
		}
		used := stack.CPU(r.pid)
		if err := stack.AtRate(ctx, rate, seconds, write); err != nil {
			return err
		}
		err := consumer.wait(ctx, rate*(warmUp+seconds), r)
		l.CPU = stack.CPU(r.pid) - used
		return err
	}
	if err := errors.Join(measure(), r.stop(context.WithoutCancel(ctx))); err != nil {
		return l, err
	}
	if _, err := drain.Check(ctx, b.Brokers, rate*(warmUp+seconds)); err != nil {
		return l, err
	}
	if c.kind != relay.KindPoll {
		if err := drain.DropSlot(ctx, b.conn, slot); err != nil {
			return l, err
		}
	}
	took, err := b.took(ctx, consumer, rate*seconds)
	if err != nil {
		return l, err
	}
	l.Contender = c.name
	l.P50, l.P90, l.P99, l.Max = percentile(took, 50), percentile(took, 90), percentile(took, 99), took[len(took)-1]
	return l, nil
}

// writeEvent commits the first event of an order.
func writeEvent(ctx context.Context, pool *pgxpool.Pool) error {
	_, err := pool.Exec(ctx, `
		INSERT INTO outbox_events (id, tenant_id, aggregate_type, aggregate_id, aggregate_version, event_type, payload, occurred_at)
		VALUES (uuidv7(), $1, 'order', uuidv7(), 1, 'OrderPaid', json_build_object('padding', repeat('x', 370)), now())`, tenant)
	return err
}

var tenant = uuid.New()

// took is how long the last n events took, in order of length.
func (b *bench) took(ctx context.Context, consumer *consumer, n int) ([]float64, error) {
	rows, err := b.conn.Query(ctx, "SELECT id, pg_xact_commit_timestamp(xmin) FROM outbox_events ORDER BY 2 DESC LIMIT $1", n)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var took []float64
	for rows.Next() {
		var id uuid.UUID
		var committed time.Time
		if err := rows.Scan(&id, &committed); err != nil {
			return nil, err
		}
		arrived, ok := consumer.arrived[id]
		if !ok {
			return nil, fmt.Errorf("event %s did not arrive", id)
		}
		took = append(took, float64(arrived.Sub(committed))/float64(time.Millisecond))
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	if len(took) != n {
		return nil, fmt.Errorf("%d events are in the outbox, not %d", len(took), n)
	}
	slices.Sort(took)
	return took, nil
}

func percentile(sorted []float64, p int) float64 { return sorted[(len(sorted)-1)*p/100] }

// consumer notes when each event arrives.
type consumer struct {
	client *kgo.Client
	done   chan struct{}

	mutex   sync.Mutex
	arrived map[uuid.UUID]time.Time
	fault   error
}

func consume(brokers string) (*consumer, error) {
	client, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(brokers, ",")...), kgo.ConsumeTopics(event.OrderEvents),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()))
	if err != nil {
		return nil, err
	}
	c := &consumer{client: client, done: make(chan struct{}), arrived: make(map[uuid.UUID]time.Time)}
	go c.run()
	return c, nil
}

func (c *consumer) run() {
	defer close(c.done)
	for {
		fetches := c.client.PollFetches(context.Background())
		if fetches.IsClientClosed() {
			return
		}
		now := time.Now()
		c.mutex.Lock()
		c.fault = errors.Join(c.fault, fetches.Err())
		for record := range fetches.RecordsAll() {
			for _, header := range record.Headers {
				if header.Key == event.HeaderID {
					id, err := uuid.ParseBytes(header.Value)
					c.fault = errors.Join(c.fault, err)
					c.arrived[id] = now
				}
			}
		}
		c.mutex.Unlock()
	}
}

// wait returns when n events have arrived.
func (c *consumer) wait(ctx context.Context, n int, r *running) error {
	var arrived int
	err := until(ctx, stall, func() (bool, error) {
		c.mutex.Lock()
		defer c.mutex.Unlock()
		arrived = len(c.arrived)
		return arrived >= n, c.fault
	})
	if err != nil {
		return errors.Join(fmt.Errorf("%d of %d events have arrived: %w", arrived, n, err), r.fault(context.WithoutCancel(ctx)))
	}
	return nil
}

func (c *consumer) close() {
	c.client.Close()
	<-c.done
}

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/onceledger/onceledger/bench/drain"
	"github.com/onceledger/onceledger/bench/stack"
	"github.com/onceledger/onceledger/internal/relay"
)

// slot is what each leg's contender reads; it also names the records that wal
// and poll keep.
const slot = "drain"

// leg is one drain. CPU is counted from the first record on the topic to the
// last, memory from the start of the leg.
type leg struct {
	Contender       string  `json:"contender"`
	EventsPerSecond float64 `json:"events_per_second"`
	Start           float64 `json:"seconds_to_first_record"`
	CPU             float64 `json:"cpu_seconds_per_million"`
	PostgresCPU     float64 `json:"postgres_cpu_seconds_per_million"`
	BrokerCPU       float64 `json:"broker_cpu_seconds_per_million"`
	RSS             int64   `json:"rss_bytes"`
}

// ratio is what legs in pairs came to, wal's divided by the other's.
type ratio struct {
	Against string       `json:"against"`
	Pairs   int          `json:"pairs"`
	Speed   stack.Spread `json:"events_per_second"`
	CPU     stack.Spread `json:"cpu"`
	RSS     stack.Spread `json:"rss"`
}

type series struct {
	RowsPerTransaction int     `json:"rows_per_transaction"`
	Ratios             []ratio `json:"wal_divided_by"`
	Legs               []leg   `json:"legs"`
}

// backlog is what is there to drain.
type backlog struct {
	rows   int    // in a transaction
	slot   string // before it
	before string // a snapshot, before it
	into   *series
}

// series makes a backlog and has it drained by all contenders.
func (b *bench) series(ctx context.Context, rows int) (series, error) {
	one := series{RowsPerTransaction: rows}
	log := &backlog{rows: rows, slot: fmt.Sprintf("backlog_%d", rows), into: &one}
	progress("%d rows/tx: writing %d events", rows, b.events)
	if err := b.fill(ctx, log); err != nil {
		return one, fmt.Errorf("fill the outbox: %w", err)
	}

	// A worker's first drain is cold, and warms it for those that follow.
	colds := &pairs{against: cold}
	for range b.pairs.cold {
		if err := b.worker(ctx, true); err != nil {
			return one, err
		}
		if err := b.pair(ctx, log, colds); err != nil {
			return one, err
		}
	}
	if b.pairs.cold > 0 {
		one.Ratios = append(one.Ratios, colds.ratio())
	} else if err := b.warmWorker(ctx, log, tuned, b.pairs.tuned+b.pairs.defaults); err != nil {
		return one, err
	}
	if err := b.contest(ctx, log, tuned, b.pairs.tuned); err != nil {
		return one, err
	}
	if err := b.contest(ctx, log, defaults, b.pairs.defaults); err != nil {
		return one, err
	}
	if err := b.warmWorker(ctx, log, plain, b.pairs.plain); err != nil {
		return one, err
	}
	if err := b.contest(ctx, log, plain, b.pairs.plain); err != nil {
		return one, err
	}
	b.stopConnect()
	b.stopConnect = func() {}
	if err := b.contest(ctx, log, poll, b.pairs.poll); err != nil {
		return one, err
	}

	_, err := b.conn.Exec(ctx, "SELECT pg_drop_replication_slot($1)", log.slot)
	return one, errors.Join(err, drain.Empty(ctx, b.conn))
}

// warmWorker starts a worker for a contender, if it is to have legs, and has it
// drain once.
func (b *bench) warmWorker(ctx context.Context, log *backlog, c contender, legs int) error {
	if legs == 0 {
		return nil
	}
	if err := b.worker(ctx, c.name != plain.name); err != nil {
		return err
	}
	progress("%3d rows/tx  %-30s  warming up", log.rows, c.name)
	_, err := b.leg(ctx, log, c)
	return err
}

func (b *bench) fill(ctx context.Context, log *backlog) error {
	err := b.conn.QueryRow(ctx, "SELECT pg_current_snapshot()::text FROM pg_create_logical_replication_slot($1, 'pgoutput')", log.slot).
		Scan(&log.before)
	if err != nil {
		return err
	}
	if err := drain.Fill(ctx, b.conn, b.events, log.rows); err != nil {
		return err
	}
	_, err = b.conn.Exec(ctx, "VACUUM (ANALYZE) outbox_events") // as autovacuum would, for who reads the table
	return err
}

// pairs are the legs of wal and another in turn.
type pairs struct {
	against         contender
	speed, cpu, rss []float64
}

func (p *pairs) ratio() ratio {
	return ratio{
		Against: p.against.name, Pairs: len(p.speed),
		Speed: stack.SpreadOf(p.speed), CPU: stack.SpreadOf(p.cpu), RSS: stack.SpreadOf(p.rss),
	}
}

// contest has wal and another drain in turn.
func (b *bench) contest(ctx context.Context, log *backlog, against contender, wanted int) error {
	if wanted == 0 {
		return nil
	}
	p := &pairs{against: against}
	for range wanted {
		if err := b.pair(ctx, log, p); err != nil {
			return err
		}
	}
	log.into.Ratios = append(log.into.Ratios, p.ratio())
	return nil
}

func (b *bench) pair(ctx context.Context, log *backlog, p *pairs) error {
	legs := make(map[string]leg)
	order := []contender{wal, p.against}
	if len(p.speed)%2 == 1 {
		order = []contender{p.against, wal}
	}
	for _, c := range order {
		l, err := b.leg(ctx, log, c)
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
		progress("%3d rows/tx  %-30s  %6.0f events/s  cpu %5.1f  postgres %5.1f  broker %5.1f  rss %4d MB",
			log.rows, c.name, l.EventsPerSecond, l.CPU, l.PostgresCPU, l.BrokerCPU, l.RSS>>20)
		legs[c.name] = l
		log.into.Legs = append(log.into.Legs, l)
	}
	ours, other := legs[wal.name], legs[p.against.name]
	p.speed = append(p.speed, ours.EventsPerSecond/other.EventsPerSecond)
	p.cpu = append(p.cpu, ours.CPU/other.CPU)
	p.rss = append(p.rss, float64(ours.RSS)/float64(other.RSS))
	return nil
}

// leg has a contender drain the backlog, and checks what is on the topic.
func (b *bench) leg(ctx context.Context, log *backlog, c contender) (l leg, err error) {
	if err := b.prepare(ctx, log, c); err != nil {
		return l, fmt.Errorf("prepare: %w", err)
	}
	if c.kind == relay.KindDebezium {
		if err := stack.ForgetRSS(b.connect.Pid()); err != nil {
			return l, err
		}
	}
	begun := time.Now()
	r, err := b.start(ctx, c)
	if err != nil {
		return l, err
	}
	first, last, err := b.watch(ctx, r)
	l.RSS = stack.RSS(r.pid)
	// In order, or all that came to nothing would show as errors of its own.
	if err := errors.Join(err, r.stop(context.WithoutCancel(ctx))); err != nil {
		return l, err
	}
	published, err := drain.Check(ctx, b.Brokers, b.events)
	if err != nil {
		return l, err
	}
	if published.LZ4 < b.events*9/10 { // a batch that gains nothing by it is sent as it is
		return l, fmt.Errorf("%d of %d records are compressed with lz4", published.LZ4, b.events)
	}
	if c.kind != relay.KindPoll {
		err = drain.DropSlot(ctx, b.conn, slot)
	}
	millions := float64(b.events-first.records) / 1e6
	l.Contender = c.name
	l.EventsPerSecond = float64(b.events) / published.Last.Sub(published.First).Seconds()
	l.Start = published.First.Sub(begun).Seconds()
	l.CPU = (last.relay - first.relay) / millions
	l.PostgresCPU = last.postgresSince(first) / millions
	l.BrokerCPU = (last.broker - first.broker) / millions
	return l, err
}

// prepare puts a contender before the backlog, and makes the topic anew. The
// broker dates the records, and so the drain, by one clock for all.
func (b *bench) prepare(ctx context.Context, log *backlog, c contender) error {
	if err := b.forget(ctx); err != nil {
		return err
	}
	if c.kind == relay.KindPoll {
		_, err := b.conn.Exec(ctx, `
			INSERT INTO relay_position (slot_name, system_id, timeline, publication_oid, lsn, snapshot_xmin, snapshot)
			SELECT $1, (SELECT system_identifier FROM pg_control_system())::text, (SELECT timeline_id FROM pg_control_checkpoint()),
			  0, '0/0', pg_snapshot_xmin($2::text::pg_snapshot), $2::text::pg_snapshot`, slot, log.before)
		if err != nil {
			return err
		}
		if err := b.assignPoll(ctx); err != nil {
			return err
		}
	} else {
		if err := drain.CopySlot(ctx, b.conn, log.slot, slot); err != nil {
			return err
		}
		if c.kind == relay.KindWAL {
			if err := drain.Own(ctx, b.conn, slot); err != nil {
				return err
			}
		}
	}
	_, err := b.conn.Exec(ctx, "CHECKPOINT")
	return errors.Join(err, b.makeTopic(ctx))
}

// forget takes out what the last relay has left behind.
func (b *bench) forget(ctx context.Context) error {
	_, err := b.conn.Exec(ctx, "DELETE FROM relay_position; DELETE FROM relay_assignment; DELETE FROM relay_status")
	return err
}

func (b *bench) assignPoll(ctx context.Context) error {
	_, err := b.conn.Exec(ctx, "INSERT INTO relay_assignment (slot_name, relay, target) VALUES ($1, 'poll', 'poll')", slot)
	return err
}

func (b *bench) makeTopic(ctx context.Context) error {
	byBroker := "LogAppendTime"
	return drain.MakeTopic(ctx, b.admin, map[string]*string{"message.timestamp.type": &byBroker})
}

// usage is the CPU-seconds that have been used so far.
type usage struct {
	records       int
	relay, broker float64
	postgres      map[int]float64 // by process
}

func (u usage) postgresSince(earlier usage) (sum float64) {
	for pid, cpu := range u.postgres {
		sum += cpu - earlier.postgres[pid]
	}
	return sum
}

// stall is how long nothing may come.
const stall = 90 * time.Second

// watch waits until the records are on the topic, and takes the usage at the
// first of them and at the last. Ends of transactions are counted with the
// records, so the last is when nothing more comes for half a second.
func (b *bench) watch(ctx context.Context, r *running) (first, last usage, err error) {
	count, since, asked := int64(0), time.Now(), time.Now()
	for {
		now, err := drain.Count(ctx, b.admin)
		if err != nil && time.Since(since) > stall {
			return first, last, err
		}
		now = max(now, count)
		if count == 0 && now > 0 {
			if first, err = b.use(ctx, r, now); err != nil {
				return first, last, err
			}
		}
		quiet := time.Since(since)
		switch {
		case now != count:
			count, since = now, time.Now()
		case now >= int64(b.events) && quiet > 500*time.Millisecond:
			last, err = b.use(ctx, r, now)
			return first, last, err
		case quiet > stall:
			return first, last, errors.Join(fmt.Errorf("%d of %d records are there, and nothing came for %v", now, b.events, stall), r.fault(ctx))
		case quiet > time.Second && time.Since(asked) > time.Second:
			asked = time.Now()
			if err := r.fault(ctx); err != nil {
				return first, last, fmt.Errorf("%d of %d records are there: %w", now, b.events, err)
			}
		}
		select {
		case <-ctx.Done():
			return first, last, ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (b *bench) use(ctx context.Context, r *running, records int64) (usage, error) {
	u := usage{
		records: int(records), relay: stack.CPU(r.pid), broker: stack.CPU(b.Broker), postgres: make(map[int]float64),
	}
	rows, err := b.conn.Query(ctx, `
		SELECT pid FROM pg_stat_activity
		WHERE datname = current_database() AND backend_type IN ('client backend', 'walsender') AND application_name <> $1`, database)
	if err != nil {
		return u, err
	}
	defer rows.Close()
	for rows.Next() {
		var pid int
		if err := rows.Scan(&pid); err != nil {
			return u, err
		}
		u.postgres[pid] = stack.CPU(pid)
	}
	return u, rows.Err()
}

func progress(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

// Command relay measures how fast the relay drains a backlog of the outbox, in
// transactions of one row and of a hundred, beside a plain reader that throws
// away what it reads. Each leg reads a copy of one slot; relay, walsender and
// broker are processes of their own, so each one's CPU and memory is known. What
// the relay published is read back and checked: every event, once, each order's
// versions in order.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/bench/drain"
	"github.com/onceledger/onceledger/bench/stack"
)

const database = "relay"

// leg is one drain, per million events where it says so.
type leg struct {
	Kind            string  `json:"kind"`
	EventsPerSecond float64 `json:"events_per_second"`
	CPU             float64 `json:"cpu_seconds_per_million"`
	WalsenderCPU    float64 `json:"walsender_cpu_seconds_per_million"`
	BrokerCPU       float64 `json:"broker_cpu_seconds_per_million"`
	RSS             int64   `json:"rss_bytes"`
}

type series struct {
	RowsPerTransaction int          `json:"rows_per_transaction"`
	Reader             stack.Spread `json:"reader_events_per_second"`
	Relay              stack.Spread `json:"relay_events_per_second"`
	Ratio              stack.Spread `json:"relay_to_reader"`
	Legs               []leg        `json:"legs"`
}

type result struct {
	Events int      `json:"events"`
	Pairs  int      `json:"pairs"`
	Series []series `json:"series"`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	stack.BeBroker(ctx)
	drain.Be()

	events := flag.Int("events", 400_000, "rows in the backlog")
	pairs := flag.Int("pairs", 5, "pairs of legs for each size of transaction")
	flag.Parse()
	if err := run(ctx, *events, *pairs); err != nil {
		fmt.Fprintln(os.Stderr, "bench relay:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, events, pairs int) error {
	s, stop, err := stack.Start(ctx)
	if err != nil {
		return err
	}
	defer stop()
	if err := s.Database(ctx, database); err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, s.Postgres.AdminURL(database))
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	client, err := kgo.NewClient(kgo.SeedBrokers(s.Brokers))
	if err != nil {
		return err
	}
	defer client.Close()
	b := &bench{Stack: s, conn: conn, admin: kadm.NewClient(client), events: events}

	r := result{Events: events, Pairs: pairs}
	for _, rows := range []int{1, 100} {
		one, err := b.series(ctx, rows, pairs)
		if err != nil {
			return fmt.Errorf("transactions of %d: %w", rows, err)
		}
		r.Series = append(r.Series, one)
	}
	print(r)
	return stack.Save("relay.json", r)
}

type bench struct {
	*stack.Stack
	conn   *pgx.Conn
	admin  *kadm.Client
	events int
}

// series makes a backlog behind a slot and drains copies of the slot, reader
// and relay in turn.
func (b *bench) series(ctx context.Context, rows, pairs int) (series, error) {
	slot := fmt.Sprintf("backlog_%d", rows)
	if _, err := b.conn.Exec(ctx, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", slot); err != nil {
		return series{}, err
	}
	if err := drain.Fill(ctx, b.conn, b.events, rows); err != nil {
		return series{}, fmt.Errorf("fill the outbox: %w", err)
	}

	one := series{RowsPerTransaction: rows}
	var reader, relay, ratio []float64
	for pair := range pairs {
		kinds := []string{drain.Reader, drain.Relay}
		if pair%2 == 1 {
			kinds = []string{drain.Relay, drain.Reader}
		}
		speed := make(map[string]float64)
		for _, kind := range kinds {
			l, err := b.leg(ctx, kind, slot)
			if err != nil {
				return series{}, fmt.Errorf("%s: %w", kind, err)
			}
			fmt.Fprintf(os.Stderr, "%3d rows/tx  %-6s %7.0f events/s  cpu %5.1f  walsender %5.1f  broker %5.1f  rss %3d MB\n",
				rows, kind, l.EventsPerSecond, l.CPU, l.WalsenderCPU, l.BrokerCPU, l.RSS>>20)
			speed[kind] = l.EventsPerSecond
			one.Legs = append(one.Legs, l)
		}
		reader, relay = append(reader, speed[drain.Reader]), append(relay, speed[drain.Relay])
		ratio = append(ratio, speed[drain.Relay]/speed[drain.Reader])
	}
	one.Reader, one.Relay, one.Ratio = stack.SpreadOf(reader), stack.SpreadOf(relay), stack.SpreadOf(ratio)
	_, err := b.conn.Exec(ctx, "SELECT pg_drop_replication_slot($1)", slot)
	return one, errors.Join(err, drain.Empty(ctx, b.conn))
}

func (b *bench) leg(ctx context.Context, kind, slot string) (leg, error) {
	if err := drain.MakeTopic(ctx, b.admin, nil); err != nil {
		return leg{}, fmt.Errorf("make the topic: %w", err)
	}
	const copied = "drain"
	if err := drain.CopySlot(ctx, b.conn, slot, copied); err != nil {
		return leg{}, err
	}
	if err := drain.Own(ctx, b.conn, copied); err != nil {
		return leg{}, err
	}
	if _, err := b.conn.Exec(ctx, "CHECKPOINT"); err != nil {
		return leg{}, err
	}

	brokerBefore := stack.CPU(b.Broker)
	process, err := drain.Start(drain.Config{
		Kind: kind, URL: b.Postgres.AdminURL(database), Slot: copied, Brokers: b.Brokers, Events: b.events,
	})
	if err != nil {
		return leg{}, err
	}
	got, err := process.Result(ctx)
	if err != nil {
		return leg{}, errors.Join(err, process.Stop())
	}
	var walsender int
	err = b.conn.QueryRow(ctx, "SELECT active_pid FROM pg_replication_slots WHERE slot_name = $1", copied).Scan(&walsender)
	millions := float64(b.events) / 1e6
	l := leg{
		Kind:            kind,
		EventsPerSecond: float64(b.events) / got.Seconds,
		CPU:             stack.CPU(process.Pid()) / millions,
		WalsenderCPU:    stack.CPU(walsender) / millions,
		BrokerCPU:       (stack.CPU(b.Broker) - brokerBefore) / millions,
		RSS:             stack.RSS(process.Pid()),
	}
	if err := errors.Join(err, process.Stop()); err != nil {
		return leg{}, err
	}
	if got.Records != b.events {
		return leg{}, fmt.Errorf("%d events, not %d", got.Records, b.events)
	}
	if kind == drain.Relay {
		if _, err := drain.Check(ctx, b.Brokers, b.events); err != nil {
			return leg{}, err
		}
	}
	return l, drain.DropSlot(ctx, b.conn, copied)
}

func print(r result) {
	fmt.Printf("\nDrain of %d events, %d pairs: min / median / max\n\n", r.Events, r.Pairs)
	fmt.Printf("%-9s %-26s %-26s %s\n", "rows/tx", "plain reader, events/s", "relay, events/s", "relay ÷ reader")
	for _, s := range r.Series {
		fmt.Printf("%-9d %-26s %-26s %.2f / %.2f / %.2f\n", s.RowsPerTransaction, thousands(s.Reader), thousands(s.Relay),
			s.Ratio.Min, s.Ratio.Median, s.Ratio.Max)
	}
}

func thousands(s stack.Spread) string {
	return fmt.Sprintf("%.1fk / %.1fk / %.1fk", s.Min/1000, s.Median/1000, s.Max/1000)
}

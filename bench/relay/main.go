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
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/bench/stack"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/postgres"
	"github.com/onceledger/onceledger/internal/relay"
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
	beDrain()

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
	b := &bench{Stack: s, conn: conn, events: events}

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
	events int
}

// series makes a backlog behind a slot and drains copies of the slot, reader
// and relay in turn.
func (b *bench) series(ctx context.Context, rows, pairs int) (series, error) {
	slot := fmt.Sprintf("backlog_%d", rows)
	if _, err := b.conn.Exec(ctx, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", slot); err != nil {
		return series{}, err
	}
	if err := b.fill(ctx, rows); err != nil {
		return series{}, fmt.Errorf("fill the outbox: %w", err)
	}

	one := series{RowsPerTransaction: rows}
	var reader, relay, ratio []float64
	for pair := range pairs {
		kinds := []string{"reader", "relay"}
		if pair%2 == 1 {
			kinds = []string{"relay", "reader"}
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
		reader, relay = append(reader, speed["reader"]), append(relay, speed["relay"])
		ratio = append(ratio, speed["relay"]/speed["reader"])
	}
	one.Reader, one.Relay, one.Ratio = stack.SpreadOf(reader), stack.SpreadOf(relay), stack.SpreadOf(ratio)
	_, err := b.conn.Exec(ctx, "SELECT pg_drop_replication_slot($1)", slot)
	return one, errors.Join(err, b.empty(ctx))
}

// fill writes the backlog: payloads of some 390 bytes, ten headers, versions in
// turn for a thousand orders.
func (b *bench) fill(ctx context.Context, rows int) error {
	if _, err := b.conn.Exec(ctx, "SET synchronous_commit = off"); err != nil {
		return err
	}
	_, err := b.conn.Exec(ctx, fmt.Sprintf(`
		DO $$
		DECLARE
		  tenant uuid := uuidv7();
		BEGIN
		  FOR i IN 0 .. %d / %d - 1 LOOP
		    INSERT INTO outbox_events (id, tenant_id, aggregate_type, aggregate_id, aggregate_version,
		      event_type, payload, traceparent, occurred_at)
		    SELECT uuidv7(), tenant, 'order', ('019b0000-0000-7000-8000-' || lpad((n %% 1000)::text, 12, '0'))::uuid, n / 1000 + 1,
		      'OrderPaid',
		      json_build_object('order_id', uuidv7(), 'version', n / 1000 + 1, 'status', 'paid', 'customer_id', 'c-' || n,
		        'customer_email', 'customer-' || n || '@example.com', 'currency', 'EUR', 'total_amount', n,
		        'lines', json_build_array(json_build_object('sku', 'book-' || n %% 97, 'description', md5(n::text),
		          'quantity', 2, 'unit_amount', 1250, 'tax_rate', '0.19')), 'reference', md5((n * 7)::text)),
		      '00-' || md5(n::text) || '-00f067aa0ba902b7-01', now()
		    FROM generate_series(i * %d, i * %d + %d - 1) AS n;
		    COMMIT;
		  END LOOP;
		END $$`, b.events, rows, rows, rows, rows))
	return err
}

func (b *bench) empty(ctx context.Context) error {
	_, err := b.conn.Exec(ctx, "TRUNCATE outbox_events; DELETE FROM relay_position; CHECKPOINT")
	return err
}

func (b *bench) leg(ctx context.Context, kind, slot string) (leg, error) {
	if err := b.makeTopics(ctx); err != nil {
		return leg{}, fmt.Errorf("make topics: %w", err)
	}
	const copied = "drain"
	if _, err := b.conn.Exec(ctx, "SELECT pg_copy_logical_replication_slot($1, $2)", slot, copied); err != nil {
		return leg{}, err
	}
	// As if the relay had made the slot: otherwise it makes a new one and sends
	// what the table holds.
	_, err := b.conn.Exec(ctx, `
		INSERT INTO relay_position (slot_name, system_id, timeline, publication_oid, lsn, snapshot_xmin)
		SELECT slot_name, (SELECT system_identifier FROM pg_control_system())::text, (SELECT timeline_id FROM pg_control_checkpoint()),
		  (SELECT oid::bigint FROM pg_publication WHERE pubname = $2), confirmed_flush_lsn, '3'
		FROM pg_replication_slots WHERE slot_name = $1
		ON CONFLICT (slot_name) DO UPDATE SET lsn = excluded.lsn, snapshot_xmin = excluded.snapshot_xmin`,
		copied, relay.DefaultPublication)
	if err != nil {
		return leg{}, err
	}
	if _, err := b.conn.Exec(ctx, "CHECKPOINT"); err != nil {
		return leg{}, err
	}

	brokerBefore := stack.CPU(b.Broker)
	got, pid, end, err := startDrain(drainConfig{
		Kind: kind, URL: b.Postgres.AdminURL(database), Slot: copied, Brokers: b.Brokers, Events: b.events,
	})
	if err != nil {
		return leg{}, err
	}
	var walsender int
	err = b.conn.QueryRow(ctx, "SELECT active_pid FROM pg_replication_slots WHERE slot_name = $1", copied).Scan(&walsender)
	millions := float64(b.events) / 1e6
	l := leg{
		Kind:            kind,
		EventsPerSecond: float64(b.events) / got.Seconds,
		CPU:             stack.CPU(pid) / millions,
		WalsenderCPU:    stack.CPU(walsender) / millions,
		BrokerCPU:       (stack.CPU(b.Broker) - brokerBefore) / millions,
		RSS:             stack.RSS(pid),
	}
	if err := errors.Join(err, end()); err != nil {
		return leg{}, err
	}
	if got.Records != b.events {
		return leg{}, fmt.Errorf("%d events, not %d", got.Records, b.events)
	}
	if kind == "relay" {
		if err := b.check(ctx); err != nil {
			return leg{}, err
		}
	}
	return l, b.drop(ctx, copied)
}

// drop waits for the walsender to be gone: it may outlive its client a little.
func (b *bench) drop(ctx context.Context, slot string) error {
	for {
		_, err := b.conn.Exec(ctx, "SELECT pg_drop_replication_slot($1)", slot)
		if postgres.Code(err) != "55006" {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (b *bench) makeTopics(ctx context.Context) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(b.Brokers))
	if err != nil {
		return err
	}
	defer client.Close()
	admin := kadm.NewClient(client)
	_, _ = admin.DeleteTopic(ctx, event.OrderEvents)
	_, err = admin.CreateTopic(ctx, 6, 1, nil, event.OrderEvents)
	return err
}

// check reads back what was published.
func (b *bench) check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	client, err := kgo.NewClient(kgo.SeedBrokers(b.Brokers), kgo.ConsumeTopics(event.OrderEvents))
	if err != nil {
		return err
	}
	defer client.Close()
	ids := make(map[uuid.UUID]bool, b.events)
	versions := make(map[uuid.UUID]int64)
	for len(ids) < b.events {
		fetches := client.PollFetches(ctx)
		if err := errors.Join(ctx.Err(), fetches.Err()); err != nil {
			return fmt.Errorf("%d of %d events are on the topic: %w", len(ids), b.events, err)
		}
		for record := range fetches.RecordsAll() {
			e, err := event.Decode(toRecord(record))
			switch {
			case err != nil:
				return err
			case ids[e.ID]:
				return fmt.Errorf("event %s is there twice", e.ID)
			case e.AggregateVersion != versions[e.AggregateID]+1:
				return fmt.Errorf("version %d of order %s follows version %d", e.AggregateVersion, e.AggregateID, versions[e.AggregateID])
			}
			ids[e.ID] = true
			versions[e.AggregateID] = e.AggregateVersion
		}
	}
	return nil
}

func toRecord(record *kgo.Record) event.Record {
	headers := make([]event.Header, len(record.Headers))
	for i, header := range record.Headers {
		headers[i] = event.Header(header)
	}
	return event.Record{Topic: record.Topic, Key: record.Key, Value: record.Value, Headers: headers}
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

// Command billing measures how fast the billing worker drains a backlog of
// OrderPaid events, beside the same work as one transaction per event and beside
// a binary COPY of the same rows into the same tables. All three read the same
// topic, and each leg has a new database on one server that syncs to disk.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/pprof"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/onceledger/onceledger/bench/stack"
	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/money"
	"github.com/onceledger/onceledger/internal/postgres"
)

const topic = event.OrderEvents

type bench struct {
	*stack.Stack
	events   int
	single   int // how many of them the leg with one transaction per event applies
	tenantID uuid.UUID
	legs     int
}

// leg is one way to do the work.
type leg struct {
	name    string
	events  int
	batch   int
	writers int
	copy    bool
}

// result is what one leg came to.
type result struct {
	Leg             string  `json:"leg"`
	Events          int     `json:"events"`
	Seconds         float64 `json:"seconds"`
	EventsPerSecond float64 `json:"events_per_second"`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	stack.BeBroker(ctx)
	events := flag.Int("events", 100_000, "events in the backlog")
	single := flag.Int("single", 10_000, "events of it for the leg with one transaction per event")
	profile := flag.String("cpuprofile", "", "write a CPU profile of this process to a file")
	pairs := flag.Int("pairs", 5, "rounds, each with every leg once")
	only := flag.String("only", "", "one leg alone: batch, single or copy")
	flag.Parse()
	if *profile != "" {
		file, err := os.Create(*profile)
		if err == nil {
			err = pprof.StartCPUProfile(file)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "bench/billing:", err)
			os.Exit(1)
		}
		defer pprof.StopCPUProfile()
	}
	if err := run(ctx, *events, *single, *pairs, *only); err != nil {
		fmt.Fprintln(os.Stderr, "bench/billing:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, events, single, pairs int, only string) error {
	s, stop, err := stack.Start(ctx)
	if err != nil {
		return err
	}
	defer stop()
	b := &bench{Stack: s, events: events, single: single, tenantID: uuid.Must(uuid.NewV7())}
	if err := b.produce(ctx); err != nil {
		return err
	}

	legs := []leg{
		{name: "batch", events: events, batch: 2000, writers: 2},
		{name: "one writer", events: events, batch: 1000, writers: 1},
		{name: "single", events: single, batch: 1},
		{name: "copy", events: events, batch: 1000, copy: true},
	}
	rates := make(map[string][]float64)
	var results []result
	for round := range pairs {
		for i := range legs {
			l := legs[(i+round)%len(legs)] // no leg is always first
			if only != "" && only != l.name {
				continue
			}
			r, err := b.run(ctx, l)
			if err != nil {
				return fmt.Errorf("leg %s: %w", l.name, err)
			}
			fmt.Printf("round %d  %-11s %7d events  %7.2f s  %8.0f events/s\n", round+1, r.Leg, r.Events, r.Seconds, r.EventsPerSecond)
			results = append(results, r)
			rates[l.name] = append(rates[l.name], r.EventsPerSecond)
		}
	}
	if only != "" {
		return nil
	}

	ratio := func(name string) stack.Spread {
		ratios := make([]float64, pairs)
		for i := range ratios {
			ratios[i] = rates["batch"][i] / rates[name][i]
		}
		return stack.SpreadOf(ratios)
	}
	summary := struct {
		Batch       stack.Spread `json:"batch_events_per_second"`
		ToSingle    stack.Spread `json:"batch_to_one_transaction_per_event"`
		ToCopy      stack.Spread `json:"batch_to_copy"`
		WorkerRSS   int64        `json:"process_rss_bytes"`
		Measured    time.Time    `json:"measured_at"`
		Repetitions []result     `json:"repetitions"`
	}{stack.SpreadOf(rates["batch"]), ratio("single"), ratio("copy"), stack.RSS(os.Getpid()), time.Now().UTC(), results}
	fmt.Printf("\nbatch ÷ one transaction per event: %.1f (%.1f to %.1f), goal 7\n", summary.ToSingle.Median, summary.ToSingle.Min, summary.ToSingle.Max)
	fmt.Printf("batch ÷ binary COPY:               %.2f (%.2f to %.2f), goal 0.9\n", summary.ToCopy.Median, summary.ToCopy.Min, summary.ToCopy.Max)
	return stack.Save("billing.json", summary)
}

// run does one leg on a new database and checks that all of it is there.
func (b *bench) run(ctx context.Context, l leg) (result, error) {
	b.legs++
	name := fmt.Sprintf("leg%d", b.legs)
	if err := b.Database(ctx, name); err != nil {
		return result{}, err
	}
	defer func() { _ = b.Drop(context.WithoutCancel(ctx), name) }()
	owner, err := pgx.Connect(ctx, b.Postgres.AdminURL(name))
	if err != nil {
		return result{}, err
	}
	defer func() { _ = owner.Close(context.WithoutCancel(ctx)) }()
	if _, err := owner.Exec(ctx, "INSERT INTO tenants (id, name) VALUES ($1, 'bench')", b.tenantID); err != nil {
		return result{}, err
	}

	login := b.URL(name, "worker")
	if l.copy {
		login = b.Postgres.AdminURL(name) // COPY is refused where row security applies
	}
	pool, err := postgres.Open(ctx, login, postgres.Options{
		ApplicationName: "bench", MaxConns: 4, TransactionTimeout: 30 * time.Second, LockTimeout: 30 * time.Second,
	})
	if err != nil {
		return result{}, err
	}
	defer pool.Close()

	var apply kafka.Handler
	if l.copy {
		apply = (&copier{pool: pool}).apply
	} else {
		apply = inbox.New(inbox.Config{
			Consumer: billing.Consumer, Pool: pool, Handler: billing.Handler{Now: time.Now}, Writers: l.writers,
			Log: slog.New(slog.NewTextHandler(os.Stderr, nil)), Metrics: prometheus.NewRegistry(), Now: time.Now,
		}).Process
	}
	seconds, err := b.drain(ctx, l, name, apply)
	if err != nil {
		return result{}, err
	}

	// A leg counts only if it did all of the work.
	for table, want := range map[string]int{
		"invoices": l.events, "invoice_lines": l.events, "ledger_entries": l.events,
		"ledger_lines": 2 * l.events, "order_billing": l.events, "outbox_events": l.events,
	} {
		var got int
		if err := owner.QueryRow(ctx, "SELECT count(*) FROM "+table).Scan(&got); err != nil {
			return result{}, err
		}
		if got != want {
			return result{}, fmt.Errorf("%s has %d rows, not %d", table, got, want)
		}
	}
	return result{l.name, l.events, seconds, float64(l.events) / seconds}, nil
}

// drain reads the topic as a new group until enough events are applied, and
// returns the seconds from the first batch to the last.
func (b *bench) drain(ctx context.Context, l leg, group string, apply kafka.Handler) (float64, error) {
	consumer, err := kafka.NewConsumer(kafka.ConsumerConfig{
		Brokers: b.Brokers, Group: group, Topics: []string{topic}, MaxBatch: l.batch,
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		return 0, err
	}
	ctx, enough := context.WithCancel(ctx)
	defer enough()
	var begin, end time.Time
	var fault error
	applied := 0
	err = consumer.Run(ctx, func(ctx context.Context, batch []event.Record) error {
		if begin.IsZero() {
			begin = time.Now()
		}
		if applied >= l.events { // the consumer drains what it had read
			return context.Canceled
		}
		batch = batch[:min(len(batch), l.events-applied)]
		if err := apply(ctx, batch); err != nil {
			fault = err
			enough()
			return err
		}
		applied += len(batch)
		if applied >= l.events {
			end = time.Now()
			enough()
		}
		return nil
	})
	if fault != nil {
		return 0, fault
	}
	return end.Sub(begin).Seconds(), err
}

// produce fills the topic with events of as many orders.
func (b *bench) produce(ctx context.Context) error {
	if err := kafka.EnsureTopics(ctx, b.Brokers, []kafka.TopicSpec{{Name: topic, Partitions: 6, ReplicationFactor: 1}}); err != nil {
		return err
	}
	delivered := make(chan error, b.events)
	producer, err := kafka.NewProducer(kafka.ProducerConfig{
		Brokers: b.Brokers, ClientID: "bench", Log: slog.New(slog.DiscardHandler),
		Delivered: func(_ uint64, err error) { delivered <- err },
		Reachable: func(error) {},
	})
	if err != nil {
		return err
	}
	defer producer.Close()
	const window = 20_000
	for i := range b.events {
		e, err := b.paid(i)
		if err != nil {
			return err
		}
		if err := producer.Publish(e.Record(), uint64(i)); err != nil {
			return err
		}
		if i >= window {
			if err := <-delivered; err != nil {
				return err
			}
		}
	}
	for range min(window, b.events) {
		if err := <-delivered; err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) paid(i int) (event.Event, error) {
	now := time.Now().UTC().Truncate(time.Microsecond)
	orderID := uuid.Must(uuid.NewV7())
	payload, err := event.Encode(event.Order{
		OrderID: orderID, Version: 1, Status: "paid",
		CustomerID: fmt.Sprintf("c-%d", i), CustomerEmail: fmt.Sprintf("c-%d@example.com", i), Currency: "EUR",
		Lines:     []event.Line{{SKU: "book", Description: "A book", Quantity: 2, UnitAmount: 1250, NetAmount: 2500, TaxRate: money.Rate(190_000)}},
		Taxes:     []event.Tax{{Rate: money.Rate(190_000), NetAmount: 2500, TaxAmount: 475}},
		NetAmount: 2500, TaxAmount: 475, TotalAmount: 2975, Metadata: []byte("{}"), CreatedAt: now,
		Payment: &event.Payment{Reference: fmt.Sprintf("pi_%d", i), Amount: 2975, PaidAt: now},
	})
	return event.Event{
		ID: uuid.Must(uuid.NewV7()), TenantID: b.tenantID, AggregateType: event.AggregateOrder, AggregateID: orderID,
		AggregateVersion: 1, Type: event.OrderPaid, SchemaVersion: event.SchemaVersion, OccurredAt: now, Payload: payload,
	}, err
}

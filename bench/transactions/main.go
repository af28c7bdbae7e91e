// Command transactions measures what Kafka transactions cost the role balances:
// the same stage drains the same backlog of billing.events from Apache Kafka, once
// as the product runs it, records and offsets in one transaction, and once at
// least once, with the idempotent producer and offsets committed afterwards. Both
// have batches of the same bound and wait for every record to be acknowledged by
// all; the clock runs from the first batch in hand to the last one done.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/bench/stack"
	"github.com/onceledger/onceledger/internal/balances"
	"github.com/onceledger/onceledger/internal/devstack"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/transact"
)

const (
	partitions    = 6
	transactional = "transactional"
	atLeastOnce   = "at least once"
)

type bench struct {
	brokers string
	admin   *kadm.Client
	client  *kgo.Client
	events  int
	legs    int
}

type leg struct {
	Kind            string  `json:"kind"`
	Batch           int     `json:"batch"`
	Seconds         float64 `json:"seconds"`
	EventsPerSecond float64 `json:"events_per_second"`
	CPUSeconds      float64 `json:"cpu_seconds"` // of this process: the client's work
}

type series struct {
	Batch         int          `json:"batch"`
	Transactional stack.Spread `json:"transactional_events_per_second"`
	AtLeastOnce   stack.Spread `json:"at_least_once_events_per_second"`
	Ratio         stack.Spread `json:"transactional_to_at_least_once"` // of each pair
	Legs          []leg        `json:"legs"`
}

type result struct {
	Events int      `json:"events"`
	Pairs  int      `json:"pairs"`
	Series []series `json:"series"`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	events := flag.Int("events", 100_000, "documents in the backlog")
	pairs := flag.Int("pairs", 5, "pairs of legs for each batch size")
	flag.Parse()
	if err := run(ctx, *events, *pairs); err != nil {
		fmt.Fprintln(os.Stderr, "bench transactions:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, events, pairs int) error {
	dir, err := os.MkdirTemp("", "onceledger-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	cluster, err := devstack.StartKafka(ctx, devstack.KafkaConfig{Dir: dir, Heap: "512m", JavaHome: os.Getenv("JAVA_HOME"),
		Logf: func(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }})
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		_ = cluster.Stop(ctx)
	}()
	client, err := kgo.NewClient(kgo.SeedBrokers(cluster.Bootstrap()), kgo.RecordPartitioner(kgo.StickyKeyPartitioner(nil)))
	if err != nil {
		return err
	}
	defer client.Close()
	b := &bench{brokers: cluster.Bootstrap(), admin: kadm.NewClient(client), client: client, events: events}
	if err := kafka.EnsureTopics(ctx, b.brokers, kafka.ServiceTopics(partitions, 1)); err != nil {
		return err
	}
	if err := b.fill(ctx); err != nil {
		return fmt.Errorf("make the backlog: %w", err)
	}

	r := result{Events: events, Pairs: pairs}
	for _, batch := range []int{100, 1000} {
		s := series{Batch: batch}
		var rates [2][]float64
		var ratios []float64
		for pair := range pairs + 1 { // the first is to get warm
			kinds := []string{transactional, atLeastOnce}
			if pair%2 == 1 {
				slices.Reverse(kinds)
			}
			rate := make(map[string]float64)
			for _, kind := range kinds {
				one, err := b.leg(ctx, kind, batch)
				if err != nil {
					return fmt.Errorf("%s in batches of %d: %w", kind, batch, err)
				}
				rate[kind] = one.EventsPerSecond
				if pair > 0 {
					s.Legs = append(s.Legs, one)
				}
				fmt.Printf("batch %4d  %-14s %9.0f events/s  %6.2f CPU s\n", batch, kind, one.EventsPerSecond, one.CPUSeconds)
			}
			if pair > 0 {
				rates[0], rates[1] = append(rates[0], rate[transactional]), append(rates[1], rate[atLeastOnce])
				ratios = append(ratios, rate[transactional]/rate[atLeastOnce])
			}
		}
		s.Transactional, s.AtLeastOnce, s.Ratio = stack.SpreadOf(rates[0]), stack.SpreadOf(rates[1]), stack.SpreadOf(ratios)
		fmt.Printf("batch %4d  transactional ÷ at least once: %.2f (%.2f to %.2f)\n", batch, s.Ratio.Median, s.Ratio.Min, s.Ratio.Max)
		r.Series = append(r.Series, s)
	}
	return stack.Save("transactions.json", r)
}

// fill publishes invoices of a hundred tenants.
func (b *bench) fill(ctx context.Context) error {
	var tenants []uuid.UUID
	for range 100 {
		tenants = append(tenants, uuid.Must(uuid.NewV7()))
	}
	var fault atomic.Pointer[error]
	for n := range b.events {
		now := time.Now().UTC().Truncate(time.Microsecond)
		order, net := uuid.Must(uuid.NewV7()), int64(1000+n%1000)
		payload, err := event.Encode(event.Invoice{
			InvoiceID: uuid.Must(uuid.NewV7()), Number: "INV-2026-000001", OrderID: order, CustomerID: "c", CustomerEmail: "c@example.com",
			Currency: "EUR", Lines: []event.Line{{SKU: "book", Description: "A book", Quantity: 1, UnitAmount: net, NetAmount: net, TaxRate: 190_000}},
			Taxes:     []event.Tax{{Rate: 190_000, NetAmount: net, TaxAmount: net / 5}},
			NetAmount: net, TaxAmount: net / 5, TotalAmount: net + net/5, PaidAt: now, IssuedAt: now,
		})
		if err != nil {
			return err
		}
		record := event.Event{
			ID: uuid.Must(uuid.NewV7()), TenantID: tenants[n%len(tenants)], AggregateType: event.AggregateBilling, AggregateID: order,
			AggregateVersion: 1, Type: event.InvoiceIssued, SchemaVersion: event.SchemaVersion, OccurredAt: now, Payload: payload,
		}.Record()
		sent := &kgo.Record{Topic: record.Topic, Key: record.Key, Value: record.Value}
		for _, header := range record.Headers {
			sent.Headers = append(sent.Headers, kgo.RecordHeader(header))
		}
		b.client.Produce(ctx, sent, func(_ *kgo.Record, err error) {
			if err != nil {
				fault.Store(&err)
			}
		})
	}
	if err := b.client.Flush(ctx); err != nil {
		return err
	}
	if err := fault.Load(); err != nil {
		return *err
	}
	return nil
}

// measured is a stage with a clock.
type measured struct {
	*balances.Stage
	first  time.Time
	cpu    time.Duration
	events int
	done   func(events int)
}

func (m *measured) Process(batch []event.Record) (transact.Output, error) {
	if m.first.IsZero() {
		m.first, m.cpu = time.Now(), cpuTime()
	}
	output, err := m.Stage.Process(batch)
	committed := output.Committed
	output.Committed = func() {
		committed()
		m.events += len(batch)
		m.done(m.events)
	}
	return output, err
}

// leg drains the backlog with new state and a new group, and checks the sums.
func (b *bench) leg(ctx context.Context, kind string, batch int) (leg, error) {
	b.legs++
	name := fmt.Sprintf("leg-%d", b.legs)
	if err := b.renewState(ctx); err != nil {
		return leg{}, err
	}
	log := slog.New(slog.DiscardHandler)
	stage, err := balances.New(balances.Config{Log: log})
	if err != nil {
		return leg{}, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var end time.Time
	var cpu time.Duration
	m := &measured{Stage: stage}
	m.done = func(events int) {
		if events == b.events {
			end, cpu = time.Now(), cpuTime()-m.cpu
			cancel()
		}
	}
	reading := kafka.ConsumerConfig{
		Brokers: b.brokers, Group: name, ClientID: name, Topics: []string{event.BillingEvents}, MaxBatch: batch, Log: log,
	}
	if kind == transactional {
		err = b.transactional(ctx, reading, m)
	} else {
		err = b.atLeastOnce(ctx, reading, m)
	}
	if err != nil || end.IsZero() {
		return leg{}, errors.Join(err, fmt.Errorf("%d of %d events done", m.events, b.events))
	}
	if err := b.check(context.WithoutCancel(ctx)); err != nil {
		return leg{}, err
	}
	seconds := end.Sub(m.first).Seconds()
	return leg{Kind: kind, Batch: batch, Seconds: seconds, EventsPerSecond: float64(b.events) / seconds, CPUSeconds: cpu.Seconds()}, nil
}

func (b *bench) transactional(ctx context.Context, reading kafka.ConsumerConfig, m *measured) error {
	transactor, err := kafka.NewTransactor(kafka.TransactorConfig{
		ConsumerConfig: reading, TransactionalID: reading.Group, State: []string{event.LedgerBalances, event.LedgerBalanceOrders},
	}, m)
	if err != nil {
		return err
	}
	return transactor.Run(ctx)
}

func (b *bench) atLeastOnce(ctx context.Context, reading kafka.ConsumerConfig, m *measured) error {
	for partition := range int32(partitions) {
		m.Begin(partition)
		if _, err := m.Resume(partition, transact.Source{Committed: -1}); err != nil {
			return err
		}
	}
	delivered := make(chan error, 100_000)
	producer, err := kafka.NewProducer(kafka.ProducerConfig{
		Brokers: b.brokers, ClientID: reading.ClientID, Log: reading.Log,
		Delivered: func(_ uint64, err error) { delivered <- err }, Reachable: func(error) {},
	})
	if err != nil {
		return err
	}
	defer producer.Close()
	consumer, err := kafka.NewConsumer(reading)
	if err != nil {
		return err
	}
	return consumer.Run(ctx, func(_ context.Context, batch []event.Record) error {
		output, err := m.Process(batch)
		if err != nil {
			return err
		}
		for _, record := range output.Records {
			if err := producer.Publish(record, 0); err != nil {
				return err
			}
		}
		for range output.Records {
			if err := <-delivered; err != nil {
				return err
			}
		}
		output.Committed()
		return nil
	})
}

// renewState empties the topics of the state.
func (b *bench) renewState(ctx context.Context) error {
	topics := []string{event.LedgerBalances, event.LedgerBalanceOrders}
	if _, err := b.admin.DeleteTopics(ctx, topics...); err != nil {
		return err
	}
	for {
		err := kafka.EnsureTopics(ctx, b.brokers, kafka.ServiceTopics(partitions, 1))
		ends, listErr := b.admin.ListEndOffsets(ctx, topics...)
		if err == nil && listErr == nil && ends.Error() == nil && len(ends[topics[0]]) == partitions && len(ends[topics[1]]) == partitions {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err, listErr)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// check wants every document in the sums, once.
func (b *bench) check(ctx context.Context) error {
	entries := make(map[string]balances.Balance)
	err := kafka.ReadTopic(ctx, b.brokers, event.LedgerBalances, func(record event.Record) error {
		var balance balances.Balance
		err := json.Unmarshal(record.Value, &balance)
		entries[string(record.Key)] = balance
		return err
	})
	var cash int64
	for _, balance := range entries {
		if balance.Account == "cash" {
			cash += balance.Entries
		}
	}
	if err == nil && cash != int64(b.events) {
		err = fmt.Errorf("the topic has %d documents, not %d", cash, b.events)
	}
	return err
}

// cpuTime is what this process has used.
func cpuTime() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

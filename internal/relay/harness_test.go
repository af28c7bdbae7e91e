package relay_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/kafkatest"
	"github.com/onceledger/onceledger/internal/outbox"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
	"github.com/onceledger/onceledger/internal/relay"
)

// bench is a database, a broker with the two topics, and relays between them.
type bench struct {
	database *pgtest.Database
	pool     *pgxpool.Pool // the owner's
	broker   *kafkatest.Broker
	slot     string
	topic    *kgo.Client // reads all that comes on order.events
	records  []kafkatest.Record
}

func setup(t *testing.T) *bench {
	t.Helper()
	return setupOn(t, pgtest.New(t))
}

func setupOn(t *testing.T, database *pgtest.Database) *bench {
	t.Helper()
	broker := kafkatest.New(t)
	for _, topic := range []string{event.OrderEvents, event.BillingEvents} {
		require.NoError(t, broker.CreateTopic(topic, 3, nil))
	}
	topic, err := kgo.NewClient(kgo.SeedBrokers(broker.Brokers()), kgo.ConsumeTopics(event.OrderEvents))
	require.NoError(t, err)
	t.Cleanup(topic.Close)
	return &bench{
		database: database,
		pool:     database.Pool(t, ""),
		broker:   broker,
		slot:     "slot_" + database.Name, // slots belong to the whole server
		topic:    topic,
	}
}

func (b *bench) config(t *testing.T) relay.Config {
	return relay.Config{
		URL:          b.database.URL("relay"),
		Slot:         b.slot,
		NewPublisher: newPublisher(b.broker.Brokers()),
		ConfirmEvery: 50 * time.Millisecond,
		Log:          slog.New(slog.NewTextHandler(t.Output(), nil)),
	}
}

func newPublisher(brokers string) func(relay.Reports) (relay.Publisher, error) {
	return func(reports relay.Reports) (relay.Publisher, error) {
		return kafka.NewProducer(kafka.ProducerConfig{
			Brokers:      brokers,
			Log:          slog.New(slog.DiscardHandler),
			Delivered:    reports.Delivered,
			Reachable:    reports.Reachable,
			TopicTimeout: time.Second,
		})
	}
}

// running is a relay at work.
type running struct {
	*relay.Relay
	stop func() error // and wait for the end
}

func (b *bench) start(t *testing.T, change ...func(*relay.Config)) *running {
	t.Helper()
	config := b.config(t)
	for _, change := range change {
		change(&config)
	}
	r, err := relay.NewRelay(config)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	var stopped atomic.Bool
	stop := func() error {
		if stopped.Swap(true) {
			return nil
		}
		cancel()
		select {
		case err := <-done:
			return err
		case <-time.After(20 * time.Second):
			return fmt.Errorf("the relay does not stop")
		}
	}
	t.Cleanup(func() { require.NoError(t, stop()) })
	return &running{Relay: r, stop: stop}
}

// waitFor waits until relay_status shows a state.
func (b *bench) waitFor(t *testing.T, state relay.State) (detail string) {
	t.Helper()
	require.Eventually(t, func() bool {
		var now string
		err := b.pool.QueryRow(t.Context(), "SELECT state, detail FROM relay_status WHERE slot_name = $1", b.slot).Scan(&now, &detail)
		return err == nil && now == string(state)
	}, 20*time.Second, 5*time.Millisecond, "relay_status never shows %s", state)
	return detail
}

// receive reads the topic until it has brought n different events, and returns
// their ids in the order of their first occurrence.
func (b *bench) receive(t *testing.T, n int) []uuid.UUID {
	t.Helper()
	for len(b.firstOccurrences(t)) < n {
		b.poll(t)
	}
	return b.firstOccurrences(t)
}

// poll waits for records.
func (b *bench) poll(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	fetches := b.topic.PollFetches(ctx)
	require.NoError(t, ctx.Err(), "no more than %d records have come", len(b.records))
	fetches.EachRecord(func(record *kgo.Record) { b.records = append(b.records, *record) })
}

// status is what relay_status shows.
func (b *bench) status(t *testing.T) (state string) {
	t.Helper()
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT state FROM relay_status WHERE slot_name = $1", b.slot).Scan(&state))
	return state
}

// decode reads the records that were received, in order.
func (b *bench) decode(t *testing.T) []event.Event {
	t.Helper()
	events := make([]event.Event, len(b.records))
	for i, record := range b.records {
		headers := make([]event.Header, len(record.Headers))
		for j, header := range record.Headers {
			headers[j] = event.Header(header)
		}
		decoded, err := event.Decode(event.Record{
			Topic: record.Topic, Key: record.Key, Value: record.Value, Headers: headers,
		})
		require.NoError(t, err)
		events[i] = decoded
	}
	return events
}

// firstOccurrences also checks that the versions of each aggregate first occur
// in order, and each event with one content only.
func (b *bench) firstOccurrences(t *testing.T) []uuid.UUID {
	t.Helper()
	seen := make(map[uuid.UUID]string)
	versions := make(map[uuid.UUID]int64)
	var ids []uuid.UUID
	for _, e := range b.decode(t) {
		fingerprint := string(e.Fingerprint())
		if before, again := seen[e.ID]; again {
			require.Equal(t, before, fingerprint, "event %s came with two contents", e.ID)
			continue
		}
		seen[e.ID] = fingerprint
		ids = append(ids, e.ID)
		require.Equal(t, versions[e.AggregateID]+1, e.AggregateVersion, "aggregate %s", e.AggregateID)
		versions[e.AggregateID] = e.AggregateVersion
	}
	return ids
}

// orders makes events: the next version of each of some orders, in turn.
type orders struct {
	tenant   uuid.UUID
	ids      []uuid.UUID
	versions []int64
	next     int
}

func newOrders(t *testing.T, n int) *orders {
	t.Helper()
	o := &orders{tenant: uuid.New(), versions: make([]int64, n)}
	for range n {
		o.ids = append(o.ids, uuid.New())
	}
	return o
}

func (o *orders) event(t *testing.T) event.Event {
	t.Helper()
	which := o.next % len(o.ids)
	o.next++
	o.versions[which]++
	id, err := uuid.NewV7()
	require.NoError(t, err)
	return event.Event{
		ID:               id,
		TenantID:         o.tenant,
		AggregateType:    event.AggregateOrder,
		AggregateID:      o.ids[which],
		AggregateVersion: o.versions[which],
		Type:             event.OrderPaid,
		SchemaVersion:    event.SchemaVersion,
		OccurredAt:       time.Now(),
		Payload:          json.RawMessage(fmt.Sprintf(`{"version":%d}`, o.versions[which])),
	}
}

func (o *orders) events(t *testing.T, n int) []event.Event {
	t.Helper()
	events := make([]event.Event, n)
	for i := range events {
		events[i] = o.event(t)
	}
	return events
}

// commit writes events in one transaction.
func (b *bench) commit(t *testing.T, events ...event.Event) []uuid.UUID {
	t.Helper()
	require.NoError(t, postgres.InTx(t.Context(), b.pool, func(tx pgx.Tx) error {
		return outbox.AppendMany(t.Context(), tx, events)
	}))
	return idsOf(events)
}

func idsOf(events []event.Event) []uuid.UUID {
	ids := make([]uuid.UUID, len(events))
	for i, e := range events {
		ids[i] = e.ID
	}
	return ids
}

// counts is how often each event has come.
func (b *bench) counts(t *testing.T) map[uuid.UUID]int {
	t.Helper()
	counts := make(map[uuid.UUID]int)
	for _, e := range b.decode(t) {
		counts[e.ID]++
	}
	return counts
}

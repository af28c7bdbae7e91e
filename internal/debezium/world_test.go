//go:build apache

package debezium_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/onceledger/onceledger/internal/debezium"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/outbox"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
)

// partitions is how many each topic has.
const partitions = 6

// waiting bounds each wait for something that comes by itself.
const waiting = 3 * time.Minute

// world is a database with a connector of its own. The topics are those of all
// tests; only events of this one's tenant count.
type world struct {
	database *pgtest.Database
	pool     *pgxpool.Pool // the owner's
	client   *debezium.Client
	params   debezium.Params
	tenant   uuid.UUID
	connect  string
	name     string // of the connector

	topics  *kgo.Client
	records []*kgo.Record
}

func setup(t *testing.T) *world {
	t.Helper()
	return setupOn(t, pgtest.New(t))
}

func setupOn(t *testing.T, database *pgtest.Database) *world {
	t.Helper()
	services := sharedServices(t)
	brokers := services.kafka.Bootstrap()
	makeTopics(t, brokers)
	unique := uuid.NewString()[:8]
	w := &world{
		database: database,
		pool:     database.Pool(t, ""),
		connect:  services.connect.URL(),
		name:     "outbox-" + unique,
		tenant:   uuid.New(),
		params: debezium.Params{
			DatabaseURL: database.URL("relay"),
			Slot:        "debezium_" + unique,
			Publication: "onceledger_outbox",
			TopicPrefix: "test-" + unique,
		},
	}
	var err error
	w.client, err = debezium.NewClient(debezium.ClientConfig{URL: w.connect, Connector: w.name, Wait: waiting})
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), waiting)
		defer cancel()
		require.NoError(t, w.client.Remove(ctx))
	})
	w.topics, err = kgo.NewClient(
		kgo.SeedBrokers(strings.Split(brokers, ",")...),
		kgo.ConsumeTopics(event.OrderEvents, event.BillingEvents),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.FetchMaxWait(100*time.Millisecond),
	)
	require.NoError(t, err)
	t.Cleanup(w.topics.Close)
	return w
}

func makeTopics(t *testing.T, brokers string) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(brokers, ",")...))
	require.NoError(t, err)
	defer client.Close()
	request := kmsg.NewPtrCreateTopicsRequest()
	for _, name := range []string{event.OrderEvents, event.BillingEvents} {
		topic := kmsg.NewCreateTopicsRequestTopic()
		topic.Topic, topic.NumPartitions, topic.ReplicationFactor = name, partitions, -1
		request.Topics = append(request.Topics, topic)
	}
	response, err := request.RequestWith(t.Context(), client)
	require.NoError(t, err)
	for _, topic := range response.Topics {
		if err := kerr.ErrorForCode(topic.ErrorCode); !errors.Is(err, kerr.TopicAlreadyExists) {
			require.NoError(t, err, topic.Topic)
		}
	}
}

// register starts the connector and returns when it reads the slot: what is
// committed from then on comes from the log.
func (w *world) register(t *testing.T) {
	t.Helper()
	require.NoError(t, w.client.Register(t.Context(), w.params))
	w.waitForSlot(t, true)
}

func (w *world) waitForSlot(t *testing.T, active bool) {
	t.Helper()
	require.Eventually(t, func() bool {
		var is bool
		err := w.pool.QueryRow(t.Context(),
			"SELECT active AND confirmed_flush_lsn IS NOT NULL FROM pg_replication_slots WHERE slot_name = $1", w.params.Slot).Scan(&is)
		return err == nil && is == active
	}, waiting, 20*time.Millisecond, "slot %s never has active = %v", w.params.Slot, active)
}

// now is a transaction id above those of the rows that are there: this test has
// no transaction open, though others on the server may.
func (w *world) now(t *testing.T) uint64 {
	t.Helper()
	var next string
	require.NoError(t, w.pool.QueryRow(t.Context(), "SELECT pg_snapshot_xmax(pg_current_snapshot())::text").Scan(&next))
	since, err := strconv.ParseUint(next, 10, 64)
	require.NoError(t, err)
	return since
}

// newEvent is the version of an aggregate.
func (w *world) newEvent(t *testing.T, aggregate uuid.UUID, version int64, payload string) event.Event {
	t.Helper()
	id, err := uuid.NewV7()
	require.NoError(t, err)
	return event.Event{
		ID: id, TenantID: w.tenant, AggregateType: event.AggregateOrder, AggregateID: aggregate,
		AggregateVersion: version, Type: event.OrderPaid, SchemaVersion: event.SchemaVersion,
		OccurredAt: time.Now().UTC().Truncate(time.Microsecond), Payload: json.RawMessage(payload),
	}
}

// events are the first n versions of a new aggregate.
func (w *world) events(t *testing.T, n int) []event.Event {
	t.Helper()
	aggregate := uuid.New()
	var events []event.Event
	for i := range n {
		events = append(events, w.newEvent(t, aggregate, int64(i+1), fmt.Sprintf(`{"version":%d}`, i+1)))
	}
	return events
}

// commit writes events in one transaction.
func (w *world) commit(t *testing.T, events ...event.Event) {
	t.Helper()
	require.NoError(t, w.append(t.Context(), events))
}

func (w *world) append(ctx context.Context, events []event.Event) error {
	return postgres.InTx(ctx, w.pool, func(tx pgx.Tx) error { return outbox.AppendMany(ctx, tx, events) })
}

// receive reads the topics until it has n records of this test's tenant.
func (w *world) receive(t *testing.T, n int) []*kgo.Record {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), waiting)
	defer cancel()
	for len(w.records) < n {
		fetches := w.topics.PollFetches(ctx)
		if ctx.Err() != nil {
			status, err := w.client.Status(t.Context())
			require.FailNow(t, "no more records come", "%d of %d; the connector is %+v (%v)", len(w.records), n, status, err)
		}
		fetches.EachRecord(func(record *kgo.Record) {
			if header(record, event.HeaderTenant) == w.tenant.String() {
				w.records = append(w.records, record)
			}
		})
	}
	return w.records
}

// receiveAll reads what has been published, which is everything up to an event
// that is committed now, and returns it without that.
func (w *world) receiveAll(t *testing.T) []*kgo.Record {
	t.Helper()
	// One for each partition: partitions are read side by side.
	marks := make(map[string]bool)
	missing := make(map[int32]bool)
	for partition := range int32(partitions) {
		missing[partition] = true
	}
	for len(missing) > 0 {
		mark := w.events(t, 1)[0]
		if partition := partitionOf(mark.AggregateID); missing[partition] {
			delete(missing, partition)
			w.commit(t, mark)
			mark.AggregateType, mark.ID = event.AggregateBilling, uuid.Must(uuid.NewV7())
			w.commit(t, mark)
			marks[mark.AggregateID.String()] = true
		}
	}
	seen := func() (n int) {
		for _, record := range w.records {
			if marks[string(record.Key)] {
				n++
			}
		}
		return n
	}
	for seen() < 2*partitions {
		w.receive(t, len(w.records)+1)
	}
	w.records = slices.DeleteFunc(w.records, func(record *kgo.Record) bool { return marks[string(record.Key)] })
	return w.records
}

func header(record *kgo.Record, key string) string {
	for _, header := range record.Headers {
		if header.Key == key {
			return string(header.Value)
		}
	}
	return ""
}

// partitionOf is where all producers of ours put a key.
func partitionOf(aggregate uuid.UUID) int32 {
	partitioner := kgo.StickyKeyPartitioner(nil).ForTopic("")
	return int32(partitioner.Partition(&kgo.Record{Key: []byte(aggregate.String())}, partitions))
}

func ids(events []event.Event) []string {
	var ids []string
	for _, e := range events {
		ids = append(ids, e.ID.String())
	}
	return ids
}

func recordIDs(records []*kgo.Record) []string {
	var ids []string
	for _, record := range records {
		ids = append(ids, header(record, event.HeaderID))
	}
	return ids
}

package conformance_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/outbox"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
	"github.com/onceledger/onceledger/internal/relay"
)

// partitions is how many each topic has.
const partitions = 6

// waiting bounds each wait for something that comes by itself.
const waiting = 4 * time.Minute

// world is a database of one test's own, the topics of a broker, and an account
// of what was committed to the one and has come on the others. The topics may be
// shared: only events of this world's tenants count.
type world struct {
	database  *pgtest.Database
	pool      *pgxpool.Pool // the owner's
	slot      string
	bootstrap string
	tenant    uuid.UUID

	topics *kgo.Client

	mutex     sync.Mutex
	committed map[uuid.UUID]event.Event // or about to be

	// What has come. It belongs to the goroutine that receives.
	seen     map[uuid.UUID]int
	order    []uuid.UUID // of first occurrences
	versions map[aggregate]int64
	records  int

	// tolerant counts what is out of order and goes on.
	tolerant  bool
	reordered int
}

type aggregate struct {
	kind string
	id   uuid.UUID
}

func newWorld(t *testing.T, bootstrap string) *world {
	t.Helper()
	return newWorldOn(t, pgtest.New(t), bootstrap)
}

func newWorldOn(t *testing.T, database *pgtest.Database, bootstrap string) *world {
	t.Helper()
	w := &world{
		database: database,
		pool:     database.Pool(t, ""),
		// Slots belong to the whole server, and Debezium's has a longer name.
		slot:      "conformance_" + strings.ReplaceAll(uuid.NewString()[:13], "-", "_"),
		bootstrap: bootstrap,
		tenant:    uuid.New(),
		committed: make(map[uuid.UUID]event.Event),
		seen:      make(map[uuid.UUID]int),
		versions:  make(map[aggregate]int64),
	}
	var err error
	w.topics, err = kgo.NewClient(
		kgo.SeedBrokers(strings.Split(bootstrap, ",")...),
		kgo.ConsumePartitions(endsOf(t, bootstrap)),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.FetchMaxWait(100*time.Millisecond),
	)
	require.NoError(t, err)
	t.Cleanup(w.topics.Close)
	return w
}

// endsOf is where the topics end: what others have written there is left alone.
func endsOf(t *testing.T, bootstrap string) map[string]map[int32]kgo.Offset {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(bootstrap, ",")...))
	require.NoError(t, err)
	defer client.Close()
	listed, err := kadm.NewClient(client).ListEndOffsets(t.Context(), event.OrderEvents, event.BillingEvents)
	require.NoError(t, err)
	require.NoError(t, listed.Error())
	return listed.KOffsets()
}

// assign makes a kind of relay the one that carries the outbox.
func (w *world) assign(t *testing.T, kind relay.Kind) {
	t.Helper()
	require.NoError(t, db.New().RelayAssignmentBegin(t.Context(), w.pool, w.slot, string(kind)))
	settled, err := db.New().RelayAssignmentSettle(t.Context(), w.pool, 0, w.slot, string(kind))
	require.NoError(t, err)
	require.EqualValues(t, 1, settled)
}

func (w *world) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	_, err := w.pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// orders are some aggregates whose versions are handed out in turn. They are for
// one goroutine.
type orders struct {
	w        *world
	ids      []uuid.UUID
	versions []int64
	next     int
}

func (w *world) orders(n int) *orders {
	o := &orders{w: w, versions: make([]int64, n)}
	for range n {
		o.ids = append(o.ids, uuid.New())
	}
	return o
}

// event is the next version of the next aggregate.
func (o *orders) event() event.Event {
	which := o.next % len(o.ids)
	o.next++
	o.versions[which]++
	return event.Event{
		ID:               uuid.Must(uuid.NewV7()),
		TenantID:         o.w.tenant,
		AggregateType:    event.AggregateOrder,
		AggregateID:      o.ids[which],
		AggregateVersion: o.versions[which],
		Type:             event.OrderPaid,
		SchemaVersion:    event.SchemaVersion,
		OccurredAt:       time.Now().UTC().Truncate(time.Microsecond),
		Payload:          json.RawMessage(fmt.Sprintf(`{"version":%d}`, o.versions[which])),
	}
}

func (o *orders) events(n int) []event.Event {
	events := make([]event.Event, n)
	for i := range events {
		events[i] = o.event()
	}
	return events
}

// commit writes events in one transaction.
func (w *world) commit(t *testing.T, events ...event.Event) {
	t.Helper()
	require.NoError(t, w.write(t.Context(), events...))
}

func (w *world) write(ctx context.Context, events ...event.Event) error {
	w.expect(events...)
	return postgres.InTx(ctx, w.pool, func(tx pgx.Tx) error { return outbox.AppendMany(ctx, tx, events) })
}

// append writes events in a transaction that the test commits.
func (w *world) append(t *testing.T, tx pgx.Tx, events ...event.Event) {
	t.Helper()
	w.expect(events...)
	require.NoError(t, outbox.AppendMany(t.Context(), tx, events))
}

// expect has the world wait for events; any other is one too many.
func (w *world) expect(events ...event.Event) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	for _, e := range events {
		w.committed[e.ID] = e
	}
}

func (w *world) expected() int {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return len(w.committed)
}

// receive reads the topics until n different events have come.
func (w *world) receive(t *testing.T, n int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), waiting)
	defer cancel()
	for len(w.order) < n {
		fetches := w.topics.PollFetches(ctx)
		if ctx.Err() != nil {
			require.FailNow(t, "no more events come", "%d of %d have, in %d records", len(w.order), n, w.records)
		}
		w.take(t, fetches)
	}
}

// receiveAll reads until everything that was committed has come. That nothing
// else comes shows at the next call, and at the end.
func (w *world) receiveAll(t *testing.T) {
	t.Helper()
	w.receive(t, w.expected())
}

func (w *world) take(t *testing.T, fetches kgo.Fetches) {
	t.Helper()
	for iter := fetches.RecordIter(); !iter.Done(); {
		record := iter.Next()
		if header(record, event.HeaderTenant) == w.tenant.String() {
			w.account(t, record)
		}
	}
}

// account holds a record against the contract: it is a committed event's, in its
// partition, with its very bytes and headers, and each aggregate's events first
// occur in the order of their versions.
func (w *world) account(t *testing.T, record *kgo.Record) {
	t.Helper()
	w.records++
	id, err := uuid.Parse(header(record, event.HeaderID))
	require.NoError(t, err, "a record without an event's id")
	w.mutex.Lock()
	e, known := w.committed[id]
	w.mutex.Unlock()
	require.True(t, known, "event %s was never committed", id)
	requireSame(t, e, record)
	if w.seen[id]++; w.seen[id] > 1 {
		return
	}
	w.order = append(w.order, id)
	of := aggregate{e.AggregateType, e.AggregateID}
	if w.tolerant && w.versions[of]+1 != e.AggregateVersion {
		w.reordered++
		w.versions[of] = max(w.versions[of], e.AggregateVersion)
		return
	}
	w.versions[of]++
	require.Equal(t, w.versions[of], e.AggregateVersion, "the next event of %s %s to occur", of.kind, of.id)
}

// duplicates is how many records came beyond the first of each event.
func (w *world) duplicates() int { return w.records - len(w.order) }

// requireSame compares a record with the one that the contract makes of the
// event: all of it, but for the order of headers and for a header that is null,
// which counts as none.
func requireSame(t *testing.T, e event.Event, got *kgo.Record) {
	t.Helper()
	want := e.Record()
	if got.Topic != want.Topic || string(got.Key) != string(want.Key) || got.Partition != partitionOf(e.AggregateID) {
		require.FailNow(t, "a record is in the wrong place", "event %s is on %s, partition %d, with key %q", e.ID, got.Topic, got.Partition, got.Key)
	}
	if string(got.Value) != string(want.Value) {
		require.FailNow(t, "a value is not the payload", "want %.300s, got %.300s", want.Value, got.Value)
	}
	headers := make(map[string]string, len(got.Headers))
	for _, header := range got.Headers {
		if header.Value != nil {
			_, twice := headers[header.Key]
			require.False(t, twice, "two headers %s", header.Key)
			headers[header.Key] = string(header.Value)
		}
	}
	for _, header := range want.Headers {
		if value, ok := headers[header.Key]; !ok || value != string(header.Value) {
			require.FailNow(t, "a header is not that of the contract", "%s: want %q, got %q", header.Key, header.Value, value)
		}
	}
	require.Len(t, headers, len(want.Headers), "%v", headers)
}

func header(record *kgo.Record, key string) string {
	for _, header := range record.Headers {
		if header.Key == key {
			return string(header.Value)
		}
	}
	return ""
}

// partitionOf is where every producer puts a key, by Kafka's default partitioner.
func partitionOf(id uuid.UUID) int32 {
	record := kgo.Record{Key: []byte(id.String())}
	return int32(partitioner.ForTopic("").Partition(&record, partitions))
}

var partitioner = kgo.StickyKeyPartitioner(nil)

// load is writers that commit events, each of aggregates of its own.
type load struct {
	cancel  context.CancelFunc
	writers sync.WaitGroup

	mutex sync.Mutex
	fault error
	done  int           // transactions
	more  chan struct{} // closed at the next one
}

// startLoad starts writers; each makes a transaction of one to three events, and
// the next one after a pause.
func (w *world) startLoad(t *testing.T, writers int, pause time.Duration) *load {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	l := &load{cancel: cancel, more: make(chan struct{})}
	t.Cleanup(func() {
		cancel()
		l.writers.Wait()
	})
	for range writers {
		l.writers.Go(func() {
			o, ticker := w.orders(5), time.NewTicker(pause)
			defer ticker.Stop()
			for n := 0; ; n++ {
				select {
				case <-ctx.Done():
					return
				case <-ticker.C:
				}
				// What was begun is finished: whether it was committed is never in doubt.
				err := w.write(context.WithoutCancel(ctx), o.events(1+n%3)...)
				l.note(err)
				if err != nil {
					return
				}
			}
		})
	}
	return l
}

func (l *load) note(err error) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.done++
	if err != nil {
		l.fault = err
	}
	close(l.more)
	l.more = make(chan struct{})
}

// advance waits until n more transactions are committed.
func (l *load) advance(t *testing.T, n int) {
	t.Helper()
	l.mutex.Lock()
	target := l.done + n
	l.mutex.Unlock()
	deadline := time.After(waiting)
	for {
		l.mutex.Lock()
		done, fault, more := l.done, l.fault, l.more
		l.mutex.Unlock()
		require.NoError(t, fault)
		if done >= target {
			return
		}
		select {
		case <-more:
		case <-deadline:
			require.FailNow(t, "the writers get no further")
		}
	}
}

// finish ends the writers.
func (l *load) finish(t *testing.T) {
	t.Helper()
	l.cancel()
	l.writers.Wait()
	require.NoError(t, l.fault)
}

//go:build apache

package debezium_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/pgtest"
)

const traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

// oddPayloads are JSON that a relay could well spell in another way.
var oddPayloads = []string{
	`{"":{}}`,
	`{"b":1,"a":2,"b":3}`,
	"{ \"spaced\" :\t[ 1 ,2 ]\n}",
	`{"exponent":1e3,"capital":1E+3,"zeros":10.500,"minus":-0,"digits":1234567890123456789012,"small":1e-400}`,
	`{"escaped":"\u017e \u0001 \" \\ \/ \ud83d\ude00","raw":"ž 木 😀","empty":"","\u00e9":null}`,
	`{"html":"<a href='x'>&amp;</a>","dollar":"${SLOT} ${routedByValue} $1 %s"}`,
	`{"date":"2026-02-29","uuid":"01976f00-1111-7000-8000-00000000000b","nested":{"op":"d","before":{},"after":null,"payload":{}}}`,
	`{"array":[[[[]]],{"true":true,"false":false,"null":null}]}`,
}

// TestRecords compares each record with the one that this service's own relay
// makes of the row, whether Debezium read it from the table or from the log.
func TestRecords(t *testing.T) {
	t.Parallel()

	w := setup(t)
	odd := func(n int) (events []event.Event) {
		for i, payload := range oddPayloads {
			e := w.newEvent(t, uuid.New(), int64(i+1), payload)
			e.Type = []event.Type{event.OrderCreated, event.OrderPaid, "OrderArchivedÄ"}[i%3]
			e.SchemaVersion = int32(i + 1)
			e.OccurredAt = time.Date(2026, time.March, 4, 5, 6, n, []int{0, 89_000, 120_000_000, 999_999_000}[i%4], time.UTC)
			if i%2 == 0 {
				e.Traceparent = traceparent
			}
			if i%3 == 0 {
				e.AggregateType = event.AggregateBilling
			}
			events = append(events, e)
		}
		large := w.newEvent(t, uuid.New(), 1<<62, largePayload())
		old := w.newEvent(t, uuid.New(), 1, `{"old":true}`)
		old.OccurredAt = time.Date(1999, time.December, 31, 23, 59, 59, 1000, time.UTC)
		far := w.newEvent(t, uuid.New(), 1, `{"far":true}`)
		far.OccurredAt = time.Date(9999, time.December, 31, 23, 59, 59, 999_999_000, time.UTC)
		return append(events, large, old, far)
	}
	stored := odd(1)
	for _, e := range stored {
		w.commit(t, e)
	}
	w.register(t)
	logged := odd(2)
	for _, e := range logged {
		w.commit(t, e)
	}
	together := append(w.events(t, 5), w.events(t, 5)...)
	w.commit(t, together...)
	sent := slices.Concat(stored, logged, together)
	w.receive(t, len(sent))

	got := w.receiveAll(t)
	require.ElementsMatch(t, ids(sent), recordIDs(got), "each once")
	for _, e := range sent {
		at := slices.IndexFunc(got, func(record *kgo.Record) bool { return header(record, event.HeaderID) == e.ID.String() })
		requireSame(t, e, got[at])
	}
}

// requireSame compares a record with the contract: all of it, but for the order of
// headers and for a header that is null, which is none.
func requireSame(t *testing.T, e event.Event, got *kgo.Record) {
	t.Helper()
	want := e.Record()
	require.Equal(t, want.Topic, got.Topic)
	require.Equal(t, string(want.Key), string(got.Key))
	require.Equal(t, partitionOf(e.AggregateID), got.Partition)
	if string(want.Value) != string(got.Value) { // may be too large to print
		require.FailNow(t, "another value", "want %.300s, got %.300s", want.Value, got.Value)
	}

	headers := []event.Header{}
	for _, header := range got.Headers {
		if header.Value == nil {
			require.Equal(t, event.HeaderTraceparent, header.Key)
			require.Empty(t, e.Traceparent)
			continue
		}
		headers = append(headers, event.Header(header))
	}
	require.ElementsMatch(t, want.Headers, headers)

	record := event.Record{Topic: got.Topic, Key: got.Key, Value: got.Value}
	for _, header := range got.Headers {
		record.Headers = append(record.Headers, event.Header(header))
	}
	decoded, err := event.Decode(record)
	require.NoError(t, err)
	require.Equal(t, e, decoded)
}

// largePayload has the most bytes that a payload may have, most of them in
// characters of two, and does not compress well.
func largePayload() string {
	const frame = len(`{"large":""}`)
	random := rand.New(rand.NewPCG(1, 2))
	var text strings.Builder
	text.WriteString(`{"large":"`)
	for range (event.MaxPayload - frame) / 2 {
		text.WriteRune(rune(0xA1 + random.IntN(0x700-0xA1)))
	}
	text.WriteString(`"}`)
	return text.String()
}

// TestLargeTransaction: what is in flight is bounded by bytes.
func TestLargeTransaction(t *testing.T) {
	t.Parallel()

	w := setup(t)
	large := func() (events []event.Event) {
		payload, aggregate := largePayload(), uuid.New()
		for version := range int64(60) {
			events = append(events, w.newEvent(t, aggregate, version+1, payload))
		}
		return events
	}
	stored, logged := large(), large()
	w.commit(t, stored...)
	w.register(t)
	w.commit(t, logged...)

	for _, record := range w.receive(t, len(stored)+len(logged)) {
		require.Len(t, record.Value, event.MaxPayload)
	}
	require.Equal(t, append(ids(stored), ids(logged)...), byAggregate(w.records, stored[0].AggregateID, logged[0].AggregateID))
}

// byAggregate lists the ids of events of some aggregates, one after the other.
func byAggregate(records []*kgo.Record, aggregates ...uuid.UUID) (ids []string) {
	for _, aggregate := range aggregates {
		for _, record := range records {
			if string(record.Key) == aggregate.String() {
				ids = append(ids, header(record, event.HeaderID))
			}
		}
	}
	return ids
}

// TestSnapshot: the rows that are there already come in the order of their
// versions, however they lie in the table, and only those that are asked for.
func TestSnapshot(t *testing.T) {
	t.Parallel()

	w := setup(t)
	delivered := w.events(t, 3)
	w.commit(t, delivered...)
	w.params.Since = w.now(t)

	const aggregates, versions = 40, 6
	var all []event.Event
	perAggregate := make([][]event.Event, aggregates)
	for i := range perAggregate {
		perAggregate[i] = w.events(t, versions)
		all = append(all, perAggregate[i]...)
	}
	// The last version lies first, and some versions lie in another partition.
	for version := versions - 1; version >= 0; version-- {
		var batch []event.Event
		for i := range perAggregate {
			if version%3 == 0 {
				perAggregate[i][version].ID = idOfDay(t, time.Now().Add(24*time.Hour))
				all[i*versions+version].ID = perAggregate[i][version].ID
			}
			batch = append(batch, perAggregate[i][version])
		}
		w.commit(t, batch...)
	}

	w.register(t)
	w.receive(t, len(all))
	next := w.newEvent(t, perAggregate[0][0].AggregateID, versions+1, `{"from":"the log"}`)
	w.commit(t, next)
	got := w.receiveAll(t)
	require.ElementsMatch(t, append(ids(all), next.ID.String()), recordIDs(got))
	for i, events := range perAggregate {
		want := ids(events)
		if i == 0 {
			want = append(want, next.ID.String())
		}
		require.Equal(t, want, byAggregate(got, events[0].AggregateID))
	}
}

// idOfDay is an event id of another time.
func idOfDay(t *testing.T, at time.Time) uuid.UUID {
	t.Helper()
	id, err := uuid.NewV7()
	require.NoError(t, err)
	millis := at.UnixMilli()
	for i := range 6 {
		id[i] = byte(millis >> (40 - 8*i))
	}
	return id
}

// TestFrom: a slot that is there already is read from its position on, without a
// snapshot, and with what was being committed when the connector began. Such a
// commit, which is in the log and to be seen by nobody, is held there by a replica
// that never answers.
func TestFrom(t *testing.T) {
	t.Parallel()

	w := setupOn(t, pgtest.Server(t).New(t))
	exec := func(sql string) {
		t.Helper()
		_, err := w.pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	w.commit(t, w.events(t, 2)...) // delivered by another relay
	require.NoError(t, w.pool.QueryRow(t.Context(),
		"SELECT (lsn - '0/0')::bigint FROM pg_create_logical_replication_slot($1, 'pgoutput')", w.params.Slot).Scan(&w.params.From))
	before := w.events(t, 2)
	w.commit(t, before...)
	exec("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
	exec("SELECT pg_reload_conf()")
	// The server follows in its own time: events are committed until one is held.
	stop, outcome := make(chan struct{}), make(chan error, 1)
	held := w.events(t, 10_000)
	go func() {
		for i := range held {
			if err := w.append(t.Context(), held[i:i+1]); err != nil {
				outcome <- err
				return
			}
			select {
			case <-stop:
				held = held[:i+1]
				outcome <- nil
				return
			default:
			}
		}
		outcome <- errors.New("no commit is held")
	}()
	require.Eventually(t, func() bool {
		var waits bool
		err := w.pool.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep')").Scan(&waits)
		return err == nil && waits
	}, waiting, 20*time.Millisecond)
	close(stop)

	w.register(t)
	exec("ALTER SYSTEM RESET synchronous_standby_names")
	exec("SELECT pg_reload_conf()")
	require.NoError(t, <-outcome)
	after := w.events(t, 2)
	w.commit(t, after...)
	require.ElementsMatch(t, ids(slices.Concat(before, held, after)), recordIDs(w.receiveAll(t)))
}

// TestPartitions: a partition that is attached under way is read as the others
// are, and one that goes takes with it only what is written to it afterwards.
func TestPartitions(t *testing.T) {
	t.Parallel()

	w := setup(t)
	w.register(t)
	exec := func(sql string, args ...any) {
		t.Helper()
		_, err := w.pool.Exec(t.Context(), sql, args...)
		require.NoError(t, err)
	}
	inPartition := func(day time.Time) event.Event {
		t.Helper()
		e := w.events(t, 1)[0]
		e.ID = idOfDay(t, day)
		return e
	}
	day := time.Now().UTC().Truncate(24*time.Hour).AddDate(0, 0, 20)
	dropped := day.AddDate(0, 0, 1)
	name := func(day time.Time) string { return "outbox_events_" + day.Format("20060102") }

	exec("SELECT make_day_partition('outbox_events', $1::date), make_day_partition('outbox_events', $2::date)",
		day.Format(time.DateOnly), dropped.Format(time.DateOnly))
	attached, gone, today := inPartition(day), inPartition(dropped), w.events(t, 1)[0]
	w.commit(t, attached, gone, today)

	// The connector need not have read a row by the time that its partition goes.
	exec("ALTER TABLE outbox_events DETACH PARTITION " + name(day) + " CONCURRENTLY")
	exec(`INSERT INTO ` + name(day) + ` SELECT uuidv7(interval '20 days'), tenant_id, aggregate_type, aggregate_id, 2,
		event_type, schema_version, payload, traceparent, occurred_at FROM ` + name(day))
	exec("DROP TABLE " + name(day))
	exec("ALTER TABLE outbox_events DETACH PARTITION " + name(dropped))
	exec("DROP TABLE " + name(dropped))
	exec("DELETE FROM outbox_events WHERE id = $1", today.ID)

	// A day that was dropped by mistake and is made again.
	exec("SELECT make_day_partition('outbox_events', $1::date)", day.Format(time.DateOnly))
	again, last := inPartition(day), w.events(t, 1)[0]
	w.commit(t, again, last)

	require.ElementsMatch(t, ids([]event.Event{attached, gone, today, again, last}), recordIDs(w.receiveAll(t)))
	for _, e := range []event.Event{attached, gone, again} {
		at := slices.Index(recordIDs(w.records), e.ID.String())
		requireSame(t, e, w.records[at])
	}
}

// TestIdleDatabase: the slot keeps no log of what other tables and databases
// write while this outbox has nothing.
func TestIdleDatabase(t *testing.T) {
	t.Parallel()

	w := setup(t)
	w.register(t)
	other := pgtest.New(t).Pool(t, "")
	write := func(n int) {
		t.Helper()
		_, err := other.Exec(t.Context(), fmt.Sprintf("CREATE TABLE noise_%d AS SELECT repeat(md5(i::text), 10) FROM generate_series(1, 20000) AS i", n))
		require.NoError(t, err)
		_, err = w.pool.Exec(t.Context(), fmt.Sprintf("CREATE TABLE noise_%d AS SELECT repeat(md5(i::text), 10) FROM generate_series(1, 20000) AS i", n))
		require.NoError(t, err)
	}
	for n := range 2 {
		write(n)
		var written string
		require.NoError(t, w.pool.QueryRow(t.Context(), "SELECT pg_current_wal_lsn()::text").Scan(&written))
		require.Eventually(t, func() bool {
			var confirmed bool
			err := w.pool.QueryRow(t.Context(),
				"SELECT confirmed_flush_lsn >= $2::pg_lsn FROM pg_replication_slots WHERE slot_name = $1", w.params.Slot, written).Scan(&confirmed)
			return err == nil && confirmed
		}, waiting, 100*time.Millisecond, "the slot is never confirmed past %s", written)
	}

	// What others say in the log is no event, and stops nothing.
	_, err := w.pool.Exec(t.Context(), "SELECT pg_logical_emit_message(true, 'other', 'x'), pg_logical_emit_message(false, 'onceledger-heartbeat', '')")
	require.NoError(t, err)
	require.Empty(t, w.receiveAll(t))
}

// TestRegisterTwice: the second time changes nothing, and what was paused or
// stopped runs again.
func TestRegisterTwice(t *testing.T) {
	t.Parallel()

	w := setup(t)
	stored := w.events(t, 2)
	w.commit(t, stored...)
	w.register(t)
	w.receive(t, len(stored))
	w.register(t)
	require.Len(t, w.receiveAll(t), len(stored), "no second snapshot")

	w.request(t, http.MethodPut, "/pause", http.StatusAccepted)
	require.Eventually(t, func() bool {
		status, err := w.client.Status(t.Context())
		return err == nil && status.Fault() == "the connector is PAUSED"
	}, waiting, 50*time.Millisecond)
	paused := w.events(t, 3)
	w.commit(t, paused...)
	w.register(t)
	require.ElementsMatch(t, append(ids(stored), ids(paused)...), recordIDs(w.receiveAll(t)))
}

func (w *world) request(t *testing.T, method, path string, want int) string {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, w.connect+"/connectors/"+w.name+path, nil)
	require.NoError(t, err)
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	require.Equal(t, want, response.StatusCode, "%s", text)
	return string(text)
}

// TestRemove: a connector that comes after it knows nothing of the one before,
// not even when that was deleted by hand and its offsets were left.
func TestRemove(t *testing.T) {
	t.Parallel()

	w := setup(t)
	require.NoError(t, w.client.Remove(t.Context()), "there is none yet")
	first := w.events(t, 2)
	w.commit(t, first[0])
	w.register(t)
	w.commit(t, first[1])
	w.receive(t, 2)
	w.waitForOffsets(t)

	require.NoError(t, w.client.Remove(t.Context()))
	require.NoError(t, w.client.Remove(t.Context()))
	status, err := w.client.Status(t.Context())
	require.NoError(t, err)
	require.Equal(t, "the connector is not registered", status.Fault())
	w.dropSlot(t)

	// Between the two, another relay delivers.
	w.commit(t, w.events(t, 2)...)
	w.params.Since = w.now(t)
	second := w.events(t, 2)
	w.commit(t, second[0])
	w.register(t)
	w.commit(t, second[1])
	require.ElementsMatch(t, append(ids(first), ids(second)...), recordIDs(w.receiveAll(t)))

	w.waitForOffsets(t)
	w.request(t, http.MethodDelete, "", http.StatusNoContent)
	w.dropSlot(t)
	w.commit(t, w.events(t, 2)...)
	w.params.Since = w.now(t)
	third := w.events(t, 2)
	w.commit(t, third...)
	w.records = nil
	w.register(t)
	require.ElementsMatch(t, ids(third), recordIDs(w.receiveAll(t)))
}

// waitForOffsets waits until Connect has a position of the connector to forget.
func (w *world) waitForOffsets(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		var answer struct{ Offsets []json.RawMessage }
		err := json.Unmarshal([]byte(w.request(t, http.MethodGet, "/offsets", http.StatusOK)), &answer)
		return err == nil && len(answer.Offsets) > 0
	}, waiting, 50*time.Millisecond)
}

func (w *world) dropSlot(t *testing.T) {
	t.Helper()
	w.waitForSlot(t, false)
	_, err := w.pool.Exec(t.Context(), "SELECT pg_drop_replication_slot($1)", w.params.Slot)
	require.NoError(t, err)
}

// TestLostSlot: a slot that is dropped while the connector is away leaves no hole;
// what Since asks for comes again.
func TestLostSlot(t *testing.T) {
	t.Parallel()

	w := setup(t)
	w.commit(t, w.events(t, 2)...)
	w.params.Since = w.now(t)
	w.register(t)
	before := w.events(t, 2)
	w.commit(t, before...)
	w.receive(t, len(before))
	w.waitForOffsets(t)
	w.request(t, http.MethodPut, "/stop", http.StatusNoContent)
	w.dropSlot(t)
	hole := w.newEvent(t, before[0].AggregateID, 3, `{"in":"the hole"}`)
	w.commit(t, hole)
	w.request(t, http.MethodPut, "/resume", http.StatusAccepted)
	w.waitForSlot(t, true)

	got := recordIDs(w.receiveAll(t))
	require.Equal(t, slices.Concat(ids(before), ids(before), []string{hole.ID.String()}), got)
}

func TestRegisterRefusals(t *testing.T) {
	t.Parallel()

	t.Run("TellsConnectsReasonWithoutThePassword", func(t *testing.T) {
		t.Parallel()

		w := setup(t)
		w.params.DatabaseURL = strings.Replace(w.params.DatabaseURL, "onceledger-test@", "wrong-secret@", 1)
		err := w.client.Register(t.Context(), w.params)
		require.ErrorContains(t, err, "password authentication failed")
		require.NotContains(t, err.Error(), "wrong-secret")
		status, err := w.client.Status(t.Context())
		require.NoError(t, err)
		require.Empty(t, status.Connector, "nothing is left of it")
	})

	t.Run("FailsWithoutThePublication", func(t *testing.T) {
		t.Parallel()

		w := setup(t)
		w.params.Publication = "not_there"
		require.ErrorContains(t, w.client.Register(t.Context(), w.params), "Publication autocreation is disabled")
		status, err := w.client.Status(t.Context())
		require.NoError(t, err)
		require.False(t, status.Running())
		require.Contains(t, status.Fault(), "the connector's task has failed: ")

		w.params.Publication = "onceledger_outbox"
		w.register(t)
		sent := w.events(t, 1)
		w.commit(t, sent...)
		require.Equal(t, ids(sent), recordIDs(w.receiveAll(t)))
	})
}

package conformance_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/relay"
)

// bench is a world with the kind of relay under test, at one broker.
type bench struct {
	*world

	kind relay.Kind
	// carrier makes a relay; where the kind allows for several they take turns.
	carrier func(t *testing.T, name string) carrier
	result  *result
}

// cases are the suite: what each relay does, at each broker. All of them end
// with everything that was committed having come.
var cases = []struct {
	name string
	run  func(t *testing.T, b *bench)
}{
	{"TheRecordOfTheContract", theRecordOfTheContract},
	{"EachAggregateInOrder", eachAggregateInOrder},
	{"NothingThatIsRolledBack", nothingThatIsRolledBack},
	{"TheEarlierTransactionThatIsCommittedLast", theEarlierTransactionThatIsCommittedLast},
	{"TheFirstVersionInTheLaterTransaction", theFirstVersionInTheLaterTransaction},
	{"InSpiteOfALongTransactionElsewhere", inSpiteOfALongTransactionElsewhere},
	{"StoppedInOrder", stoppedInOrder},
	{"KilledAtEachPoint", killedAtEachPoint},
	{"PartitionsComeAndGo", partitionsComeAndGo},
	{"ABacklog", aBacklog},
	{"OneThatHangs", oneThatHangs},
	{"TwoOfAKind", twoOfAKind},
}

const traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

// oddPayloads are JSON that a relay could well spell in another way.
var oddPayloads = []string{
	`{"":{}}`,
	`{"b":1,"a":2,"b":3}`,
	"{ \"spaced\" :\t[ 1 ,2 ]\r\n}",
	`{"exponent":1e3,"capital":1E+3,"zeros":10.500,"minus":-0,"digits":1234567890123456789012,"small":1e-400}`,
	`{"escaped":"\u017e \u0001 \" \\ \/ \ud83d\ude00","raw":"ž 木 😀","empty":"","\u00e9":null}`,
	`{"html":"<a href='x'>&amp;</a>","dollar":"${SLOT} ${routedByValue} $1 %s"}`,
	`{"nested":{"op":"d","before":{},"after":null,"payload":{}},"ts_ms":1}`,
	`{"array":[[[[]]],{"true":true,"false":false,"null":null}]}`,
}

// Goal: a consumer cannot tell the relays apart: topic, partition, key, value
// bytes and every header, from the table as from the log.
func theRecordOfTheContract(t *testing.T, b *bench) {
	odd := func() (events []event.Event) {
		for i, payload := range oddPayloads {
			e := b.orders(1).event()
			e.Payload = json.RawMessage(payload)
			e.Type = []event.Type{event.OrderCreated, event.OrderPaid, "OrderArchivedÄ"}[i%3]
			e.SchemaVersion = int32(i + 1)
			e.OccurredAt = time.Date(2026-i*200, time.March, 4, 5, 6, i, []int{0, 89_000, 120_000_000, 999_999_000}[i%4], time.UTC)
			if i%2 == 0 {
				e.Traceparent = traceparent
			}
			if i%3 == 0 {
				e.AggregateType = event.AggregateBilling
			}
			events = append(events, e)
		}
		large := b.orders(1).event()
		large.Payload = largePayload()
		return append(events, large)
	}
	for _, e := range odd() {
		b.commit(t, e)
	}
	r := b.carrier(t, "relay")
	r.start(t)
	r.waitCarrying(t)
	for _, e := range odd() {
		b.commit(t, e)
	}
	b.commit(t, odd()...)
	b.receiveAll(t)
}

// largePayload has as many bytes as a payload may have, most of them in
// characters of two, and does not compress well.
func largePayload() json.RawMessage {
	const frame = len(`{"large":""}`)
	random := rand.New(rand.NewPCG(1, 2))
	var text strings.Builder
	text.WriteString(`{"large":"`)
	for range (event.MaxPayload - frame) / 2 {
		text.WriteRune(rune(0xA1 + random.IntN(0x700-0xA1)))
	}
	text.WriteString(`"}`)
	return json.RawMessage(text.String())
}

// Goal: an aggregate's events keep the order of its versions (account looks at
// that, here and in all other cases).
func eachAggregateInOrder(t *testing.T, b *bench) {
	r := b.carrier(t, "relay")
	r.start(t)
	r.waitCarrying(t)
	o := b.orders(7)
	for range 20 {
		b.commit(t, o.events(50)...)
	}
	l := b.startLoad(t, 4, 2*time.Millisecond)
	l.advance(t, 200)
	l.finish(t)
	b.receiveAll(t)
}

func nothingThatIsRolledBack(t *testing.T, b *bench) {
	r := b.carrier(t, "relay")
	r.start(t)
	r.waitCarrying(t)
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	undone := b.orders(1).event()
	b.append(t, tx, undone)
	delete(b.committed, undone.ID) // so that it would be one too many
	b.commit(t, b.orders(1).event())
	require.NoError(t, tx.Rollback(t.Context()))
	b.commit(t, b.orders(1).event())
	b.receiveAll(t)
}

// Goal: no gap. Two write at once; the one with the earlier id and the earlier
// transaction commits last. A reader that goes by the highest id or transaction
// leaves it out.
func theEarlierTransactionThatIsCommittedLast(t *testing.T, b *bench) {
	r := b.carrier(t, "relay")
	r.start(t)
	r.waitCarrying(t)
	b.waitRecorded(t)
	slow, quick := b.orders(1), b.orders(1)
	early, late := slow.event(), quick.event()
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	b.append(t, tx, early)
	b.commit(t, late)
	b.receive(t, 1) // it does not wait for the other
	require.Equal(t, []uuid.UUID{late.ID}, b.world.order)
	// And once more around a restart, with the transaction still open.
	r.stop(t)
	r.start(t)
	r.waitCarrying(t)
	b.commit(t, quick.event())
	b.receive(t, 2)
	require.NoError(t, tx.Commit(t.Context()))
	b.receiveAll(t)
	b.commit(t, slow.event(), quick.event())
	b.receiveAll(t)
}

// waitRecorded waits until wal has written down where it is. One that is killed
// before that begins anew, and a new slot waits for open transactions.
func (b *bench) waitRecorded(t *testing.T) {
	t.Helper()
	if b.kind != relay.KindWAL {
		return
	}
	require.Eventually(t, func() bool {
		var recorded bool
		err := b.pool.QueryRow(t.Context(), `
			SELECT EXISTS (SELECT FROM relay_position WHERE slot_name = $1 AND lsn > '0/0')`, b.slot).Scan(&recorded)
		return err == nil && recorded
	}, waiting, 10*time.Millisecond, "the relay records nothing")
}

// Goal: order goes by version. Version 1 is written by a transaction with a
// higher number than version 2's, which began first and wrote something else.
func theFirstVersionInTheLaterTransaction(t *testing.T, b *bench) {
	r := b.carrier(t, "relay")
	r.start(t)
	r.waitCarrying(t)
	for range 5 {
		o, other := b.orders(1), b.orders(1)
		first := o.event()
		tx, err := b.pool.Begin(t.Context())
		require.NoError(t, err)
		b.append(t, tx, other.event())
		b.commit(t, first)
		b.append(t, tx, o.event())
		require.NoError(t, tx.Commit(t.Context()))
	}
	b.receiveAll(t)
}

// Goal: a transaction that stays open in another database of the server holds
// nothing up, not even around a restart.
func inSpiteOfALongTransactionElsewhere(t *testing.T, b *bench) {
	r := b.carrier(t, "relay")
	r.start(t)
	r.waitCarrying(t)
	b.waitRecorded(t)
	elsewhere, err := pgtest.New(t).Pool(t, "").Begin(t.Context())
	require.NoError(t, err)
	_, err = elsewhere.Exec(t.Context(), "SELECT pg_current_xact_id()")
	require.NoError(t, err)
	o := b.orders(3)
	b.commit(t, o.events(30)...)
	b.receiveAll(t)
	r.kill(t)
	b.commit(t, o.events(30)...)
	r.start(t)
	b.receiveAll(t)
	require.NoError(t, elsewhere.Commit(t.Context()))
	b.commit(t, o.events(30)...)
	b.receiveAll(t)
}

func stoppedInOrder(t *testing.T, b *bench) {
	r := b.carrier(t, "relay")
	l := b.startLoad(t, 4, 5*time.Millisecond)
	for range 2 {
		r.start(t)
		r.waitCarrying(t)
		l.advance(t, 50)
		r.stop(t)
	}
	l.advance(t, 20)
	r.start(t)
	l.finish(t)
	b.receiveAll(t)
}

func killedAtEachPoint(t *testing.T, b *bench) {
	b.commit(t, b.orders(5).events(200)...) // are there before any relay
	r := b.carrier(t, "relay")
	l := b.startLoad(t, 4, 5*time.Millisecond)
	for _, point := range r.points() {
		r.dieAt(t, point, l)
		l.advance(t, 20)
	}
	r.start(t)
	r.waitCarrying(t)
	l.advance(t, 20)
	l.finish(t)
	b.receiveAll(t)
}

// Goal: what is in a partition that is made under way comes as all else, and one
// that goes when the janitor's question says that it may takes nothing with it.
func partitionsComeAndGo(t *testing.T, b *bench) {
	r := b.carrier(t, "relay")
	r.start(t)
	r.waitCarrying(t)
	l := b.startLoad(t, 2, 10*time.Millisecond)
	day := time.Now().UTC().Truncate(24*time.Hour).AddDate(0, 0, 20)
	o := b.orders(3)
	for range 2 { // the second time by the same name
		b.exec(t, "SELECT make_day_partition('outbox_events', $1::date)", day.Format(time.DateOnly))
		inPartition := o.events(30)
		for i := range inPartition {
			inPartition[i].ID = idOf(day.Add(time.Duration(i) * time.Second))
		}
		b.commit(t, inPartition...)
		l.advance(t, 20)
		require.Eventually(t, func() bool {
			var needed bool
			err := b.pool.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM partition_needed_by('outbox_events', $1::date, $2))",
				day.Format(time.DateOnly), b.slot).Scan(&needed)
			return err == nil && !needed
		}, waiting, 50*time.Millisecond, "the partition is never known to be delivered")
		name := "outbox_events_" + day.Format("20060102")
		b.exec(t, "ALTER TABLE outbox_events DETACH PARTITION "+name+" CONCURRENTLY")
		b.exec(t, "DROP TABLE "+name)
		l.advance(t, 20)
	}
	l.finish(t)
	b.receiveAll(t)
}

// idOf is an event's id of a moment.
func idOf(at time.Time) uuid.UUID {
	id, millis := uuid.Must(uuid.NewV7()), at.UnixMilli()
	for i := range 6 {
		id[i] = byte(millis >> (40 - 8*i))
	}
	return id
}

func aBacklog(t *testing.T, b *bench) {
	o := b.orders(b.result.backlog / 20)
	for left := b.result.backlog; left > 0; left -= 1000 {
		b.commit(t, o.events(min(left, 1000))...)
	}
	r := b.carrier(t, "relay")
	r.start(t)
	b.receive(t, b.result.backlog/3)
	r.kill(t)
	r.start(t)
	b.receiveAll(t)
	b.commit(t, o.events(10)...)
	b.receiveAll(t)
}

// Goal: another takes over from a relay that hangs, and what that one still does
// when it wakes up does no harm. Where only one process can be, it goes on.
func oneThatHangs(t *testing.T, b *bench) {
	a := b.carrier(t, "relay-a")
	a.start(t)
	a.waitCarrying(t)
	l := b.startLoad(t, 4, 5*time.Millisecond)
	l.advance(t, 50)
	if b.kind == relay.KindDebezium {
		a.signal(t, syscall.SIGSTOP)
		l.advance(t, 800)
		a.signal(t, syscall.SIGCONT)
	} else {
		other := b.carrier(t, "relay-b").(*worker)
		other.start(t)
		other.waitState(t, relay.StateStandby)
		stopped := time.Now()
		a.signal(t, syscall.SIGSTOP)
		other.waitCarrying(t)
		b.result.tookOver(time.Since(stopped))
		l.advance(t, 50)
		a.signal(t, syscall.SIGCONT)
		a.(*worker).waitState(t, relay.StateStandby)
		l.advance(t, 50)
	}
	l.finish(t)
	b.receiveAll(t)
}

// Goal: two relays of a kind, killed and woken in turns, never turn an
// aggregate's events round.
func twoOfAKind(t *testing.T, b *bench) {
	if b.kind == relay.KindDebezium {
		// Its tasks are Connect's to place; there is one for a connector.
		a := b.carrier(t, "relay")
		l := b.startLoad(t, 4, 5*time.Millisecond)
		for range 2 {
			a.start(t)
			a.waitCarrying(t)
			l.advance(t, 50)
			a.kill(t)
		}
		a.start(t)
		l.finish(t)
		b.receiveAll(t)
		return
	}
	pair := []*worker{b.carrier(t, "relay-a").(*worker), b.carrier(t, "relay-b").(*worker)}
	for _, r := range pair {
		r.start(t)
	}
	l := b.startLoad(t, 4, 5*time.Millisecond)
	for range 4 {
		var active, standby *worker
		require.Eventually(t, func() bool {
			for i, r := range pair {
				if is, err := r.Metric("onceledger_relay_state", fmt.Sprintf(`state=%q`, relay.StateStreaming)); err == nil && is == 1 {
					active, standby = r, pair[1-i]
				}
			}
			return active != nil
		}, waiting, 10*time.Millisecond)
		standby.waitState(t, relay.StateStandby)
		l.advance(t, 30)
		active.kill(t)
		standby.waitCarrying(t)
		active.start(t)
	}
	l.finish(t)
	b.receiveAll(t)
}

// runCases runs the suite on a relay at a broker.
func runCases(t *testing.T, of *result, parallel bool, newBench func(t *testing.T) *bench) {
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			if parallel {
				t.Parallel()
			}
			b := newBench(t)
			b.result = of
			t.Cleanup(func() { of.add(c.name, !t.Failed(), b.world) })
			c.run(t, b)
			b.requireNothingElse(t)
		})
	}
}

// requireNothingElse looks once more at all that has come: at the end of each
// partition is an event that was committed last.
func (b *bench) requireNothingElse(t *testing.T) {
	t.Helper()
	missing := make(map[int32]bool)
	for partition := range int32(partitions) {
		missing[partition] = true
	}
	var last []event.Event
	for len(missing) > 0 {
		e := b.orders(1).event()
		if partition := partitionOf(e.AggregateID); missing[partition] {
			delete(missing, partition)
			last = append(last, e)
		}
	}
	b.commit(t, last...)
	b.receiveAll(t)
	slices.SortFunc(last, func(x, y event.Event) int { return strings.Compare(x.ID.String(), y.ID.String()) })
	for _, e := range last {
		require.Contains(t, b.seen, e.ID)
	}
}

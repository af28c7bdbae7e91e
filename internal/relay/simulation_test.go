package relay

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/onceledger/onceledger/internal/event"
)

// Ten thousand seeds of each simulation; -rapid.checks says otherwise.
func TestMain(m *testing.M) {
	if err := flag.Set("rapid.checks", "10000"); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// simulated is a world around one relay after another: the log of a database,
// the slot, and a broker with a few partitions. What it checks is what the relay
// promises, and it knows nothing of how the relay keeps it:
//
//   - what is confirmed to Postgres is never behind an event that the broker has
//     not got, since Postgres never brings that again;
//   - in the end the broker has every event, and each aggregate's in order.
//
// After a crash Postgres brings each transaction that ends behind the confirmed
// position, whole, and with it rows that were written long before that position.
type simulated struct {
	log  []simTransaction // in the order of their ends
	rows []simRow
	end  position // of the log
	slot position // what is confirmed

	mutex   sync.Mutex
	topic   map[int]bool        // rows that the broker has
	highest [partitions]int     // of the rows of a partition, the last that came for the first time
	broken  string              // the promise that is broken
	open    [partitions][]*sent // what the publisher of today has taken, oldest first
	unread  int                 // the first transaction that is not wholly read, and
	inside  int                 // how many of its rows are
	begun   bool
}

const partitions = 3

type simTransaction struct {
	rows []int
	end  position
}

// simRow is an event: an insert at its own place in the log, before its
// transaction's end and possibly before other transactions' ends.
type simRow struct {
	partition int
	at        position
}

// sent is a record on its way: the broker has it, or has it and has said so.
type sent struct {
	row     int
	seq     uint64
	arrived bool
}

func newSimulated() *simulated {
	return &simulated{end: 100, slot: 100, topic: make(map[int]bool), highest: [partitions]int{-1, -1, -1}}
}

// write commits a few transactions that were open at the same time: their rows
// lie among each other in the log, and before all their ends. Some have no rows.
// Rows are numbered in the order in which they are committed.
func (w *simulated) write(t *rapid.T) {
	open := make([][]position, rapid.IntRange(1, 3).Draw(t, "transactions"))
	for range rapid.IntRange(0, 5).Draw(t, "rows") {
		w.end += 10
		into := rapid.IntRange(0, len(open)-1).Draw(t, "into")
		open[into] = append(open[into], w.end)
	}
	for _, places := range open {
		var transaction simTransaction
		for _, at := range places {
			transaction.rows = append(transaction.rows, len(w.rows))
			w.rows = append(w.rows, simRow{partition: rapid.IntRange(0, partitions-1).Draw(t, "partition"), at: at})
		}
		w.end += 10
		transaction.end = w.end
		w.log = append(w.log, transaction)
	}
}

// restart has Postgres begin again from what is confirmed.
func (w *simulated) restart() {
	w.unread = slices.IndexFunc(w.log, func(transaction simTransaction) bool { return transaction.end > w.slot })
	if w.unread < 0 {
		w.unread = len(w.log)
	}
	w.inside, w.begun = 0, false
	for partition := range w.open {
		w.open[partition] = nil
	}
}

// next is what Postgres sends next; false if it has sent all.
func (w *simulated) next() (message, bool) {
	if w.unread == len(w.log) {
		return message{}, false
	}
	transaction := w.log[w.unread]
	switch {
	case !w.begun:
		w.begun = true
		return message{kind: kindBegin}, true
	case w.inside < len(transaction.rows):
		row := transaction.rows[w.inside]
		w.inside++
		return message{kind: kindInsert, at: w.rows[row].at, event: &event.Event{
			AggregateType: event.AggregateOrder, AggregateID: uuid.UUID{15: byte(w.rows[row].partition)},
			Payload: []byte(strconv.Itoa(row)),
		}}, true
	default:
		w.unread++
		w.inside, w.begun = 0, false
		return message{kind: kindCommit, at: transaction.end}, true
	}
}

// keepalive is how far the server has read its log: up to what it sends next.
// Within a transaction that is its end already, since it sends one only when it
// has seen it end.
func (w *simulated) keepalive(asked bool) message {
	at := w.end
	if w.unread < len(w.log) {
		at = w.log[w.unread].end - 1
		if w.begun {
			at = w.log[w.unread].end
		}
	}
	return message{kind: kindKeepalive, at: at, asked: asked}
}

// publish takes a record to send.
func (w *simulated) publish(value []byte, seq uint64) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	row, err := strconv.Atoi(string(value))
	if err != nil {
		panic(err)
	}
	partition := w.rows[row].partition
	w.open[partition] = append(w.open[partition], &sent{row: row, seq: seq})
}

// isOnItsWay reports that a partition has a record that the broker has not got.
func (w *simulated) isOnItsWay(partition int) bool {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return slices.ContainsFunc(w.open[partition], func(record *sent) bool { return !record.arrived })
}

// arrive puts the first of these on the topic: a partition keeps the order in
// which it is sent to.
func (w *simulated) arrive(partition int) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	first := slices.IndexFunc(w.open[partition], func(record *sent) bool { return !record.arrived })
	record := w.open[partition][first]
	record.arrived = true
	w.put(partition, record.row)
}

// hasArrived reports that the broker has a record that it has not acknowledged.
func (w *simulated) hasArrived(partition int) bool {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return len(w.open[partition]) > 0 && w.open[partition][0].arrived
}

// acknowledged is the record whose acknowledgement comes back next.
func (w *simulated) acknowledged(partition int) (seq uint64) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	seq = w.open[partition][0].seq
	w.open[partition] = w.open[partition][1:]
	return seq
}

// givenUp are the records that the broker will not get.
func (w *simulated) givenUp(partition int) []*sent {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	first := slices.IndexFunc(w.open[partition], func(record *sent) bool { return !record.arrived })
	up := w.open[partition][first:]
	w.open[partition] = w.open[partition][:first]
	return up
}

func (w *simulated) put(partition, row int) {
	if w.topic[row] {
		return
	}
	w.topic[row] = true
	if row < w.highest[partition] {
		w.broken = fmt.Sprintf("row %d of partition %d comes behind %d", row, partition, w.highest[partition])
	}
	w.highest[partition] = max(w.highest[partition], row)
}

// confirm is what Postgres is told.
func (w *simulated) confirm(at position) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	for _, transaction := range w.log {
		for _, row := range transaction.rows {
			if transaction.end <= at && !w.topic[row] {
				w.broken = fmt.Sprintf("%d is confirmed, and row %d, which was committed at %d, is not delivered", at, row, transaction.end)
			}
		}
	}
	w.slot = max(w.slot, at)
}

func (w *simulated) requireWhole(t *rapid.T) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	require.Empty(t, w.broken)
}

func (w *simulated) requireAllDelivered(t *rapid.T) {
	for row := range w.rows {
		require.True(t, w.topic[row], "row %d is lost", row)
	}
	if len(w.log) > 0 {
		require.GreaterOrEqual(t, w.slot, w.log[len(w.log)-1].end, "Postgres is never told, and keeps its log for ever")
	}
}

// anyPartition draws one of those for which wanted holds.
func anyPartition(t *rapid.T, wanted func(partition int) bool) int {
	var those []int
	for partition := range partitions {
		if wanted(partition) {
			those = append(those, partition)
		}
	}
	if len(those) == 0 {
		t.Skip()
	}
	return rapid.SampledFrom(those).Draw(t, "partition")
}

// TestSimulatedProgress drives the tracker by itself through everything that a
// session does with it.
func TestSimulatedProgress(t *testing.T) {
	t.Parallel()

	rapid.Check(t, func(t *rapid.T) {
		w := newSimulated()
		var p *progress
		start := func() {
			w.restart()
			p = newProgress(window{events: 8, bytes: 100}, w.slot)
		}
		start()
		read := func() bool {
			if p.crowded() {
				return false
			}
			m, more := w.next()
			switch m.kind {
			case kindBegin:
				p.begin()
			case kindInsert:
				w.publish(m.event.Payload, p.event(20, time.Time{}))
			case kindCommit:
				p.commit(m.at)
			default:
			}
			return more
		}
		t.Repeat(map[string]func(*rapid.T){
			"write": w.write,
			"read": func(t *rapid.T) {
				for range rapid.IntRange(1, 12).Draw(t, "messages") {
					read()
				}
			},
			"keepalive": func(*rapid.T) { p.keepalive(w.keepalive(false).at) },
			"arrive":    func(t *rapid.T) { w.arrive(anyPartition(t, w.isOnItsWay)) },
			"acknowledge": func(t *rapid.T) {
				p.delivered(w.acknowledged(anyPartition(t, w.hasArrived)))
			},
			"acknowledge what was never sent": func(t *rapid.T) {
				p.delivered(p.summary().delivered + uint64(p.summary().inFlight) + rapid.Uint64Range(0, 3).Draw(t, "beyond"))
			},
			"confirm": func(*rapid.T) { w.confirm(p.summary().confirmable) },
			"crash":   func(*rapid.T) { start() },
			"":        w.requireWhole,
		})

		start()
		for more := true; more; {
			require.False(t, p.crowded(), "with nothing in flight")
			more = read()
			for partition := range partitions {
				for w.isOnItsWay(partition) {
					w.arrive(partition)
					p.delivered(w.acknowledged(partition))
				}
			}
		}
		w.confirm(p.summary().confirmable)
		w.requireWhole(t)
		w.requireAllDelivered(t)
		p.keepalive(w.end)
		require.Equal(t, w.end, p.summary().confirmable, "an idle relay lets the log go")
	})
}

// TestSimulatedSession drives a whole session, with its goroutines and clocks:
// what it takes for delivered, what it makes of errors, and what it tells
// Postgres at its end.
func TestSimulatedSession(t *testing.T) {
	t.Parallel()

	rapid.Check(t, func(t *rapid.T) {
		rapid.SyncTest(t, func(t *rapid.T) {
			w := newSimulated()
			r := &Relay{metrics: shared, config: Config{
				Log: slog.New(slog.DiscardHandler), ConfirmEvery: time.Second, StopTimeout: 3 * time.Second, WindowEvents: 8, WindowBytes: 100,
			}}
			now := w.start(r)
			defer func() { now.crash() }()
			// Whatever has been done, the session does what it does next, and then
			// waits: for a report, for its clock, or for Postgres.
			settle := func(*rapid.T) {
				synctest.Wait()
				if now.hasEnded() {
					now = w.start(r)
					synctest.Wait()
				}
			}
			t.Repeat(map[string]func(*rapid.T){
				"write": w.write,
				"read":  func(t *rapid.T) { now.bring(rapid.IntRange(1, 12).Draw(t, "messages")) },
				"keepalive": func(t *rapid.T) {
					now.feed <- []message{w.keepalive(rapid.Bool().Draw(t, "asked"))}
				},
				"arrive": func(t *rapid.T) { w.arrive(anyPartition(t, w.isOnItsWay)) },
				"acknowledge": func(t *rapid.T) {
					now.session.Delivered(w.acknowledged(anyPartition(t, w.hasArrived)), nil)
				},
				"give up": func(t *rapid.T) { // what is behind it in its partition is not sent either
					partition := anyPartition(t, w.isOnItsWay)
					for _, record := range w.givenUp(partition) {
						now.session.Delivered(record.seq, errSimulated)
					}
				},
				"broker": func(t *rapid.T) {
					now.session.Reachable(rapid.SampledFrom([]error{nil, errSimulated}).Draw(t, "away"))
				},
				"time passes": func(t *rapid.T) {
					<-time.After(time.Duration(rapid.IntRange(1, 20).Draw(t, "tenths")) * time.Second / 10)
				},
				"Postgres ends": func(*rapid.T) { now.fail(errSimulated) },
				"stop":          func(*rapid.T) { now.stop() },
				"crash": func(*rapid.T) {
					now.crash()
					now = w.start(r)
				},
				"": func(t *rapid.T) {
					settle(t)
					w.requireWhole(t)
				},
			})

			now.crash()
			now = w.start(r)
			for more := true; more; {
				more = now.bring(1)
				synctest.Wait()
				for partition := range partitions {
					for w.isOnItsWay(partition) {
						w.arrive(partition)
						now.session.Delivered(w.acknowledged(partition), nil)
					}
				}
			}
			<-time.After(2 * time.Second) // for the next tick
			synctest.Wait()
			w.requireWhole(t)
			w.requireAllDelivered(t)
		})
	})
}

// shared are metrics that nobody looks at: to make them takes longer than a simulation.
var shared = newMetrics(nil)

var errSimulated = errors.New("simulated")

// life is one session, as its source and its publisher.
type life struct {
	world   *simulated
	session *session
	feed    chan []message
	broken  chan error // what Postgres fails with
	dead    bool       // the process is gone: nothing that it does counts
	cancel  context.CancelFunc
	ended   chan struct{}
}

func (w *simulated) start(r *Relay) *life {
	w.restart()
	ctx, cancel := context.WithCancel(context.Background())
	l := &life{world: w, feed: make(chan []message, 100), broken: make(chan error, 1), cancel: cancel, ended: make(chan struct{})}
	l.session = newSession(r, nil, l, w.slot)
	l.session.publisher = l
	go func() {
		defer close(l.ended)
		err := l.session.run(ctx)
		l.session.finish(ctx, errors.Is(err, errStop))
		l.Close()
	}()
	return l
}

// bring has Postgres send what comes next. It reports whether there was so much.
func (l *life) bring(messages int) bool {
	var batch []message
	for range messages {
		if m, more := l.world.next(); more {
			batch = append(batch, m)
		}
	}
	if len(batch) > 0 {
		l.feed <- batch
	}
	return len(batch) == messages
}

func (l *life) read(ctx context.Context, batches chan<- []message) error {
	bring := bringTo(ctx, batches)
	for {
		var err error
		select {
		case batch := <-l.feed:
			err = bring(batch)
		case err = <-l.broken:
		case <-ctx.Done():
			err = ctx.Err()
		}
		if err != nil {
			return err
		}
	}
}

func (l *life) confirm(_ context.Context, now summary, _, _ bool) (moved bool, err error) {
	if l.isDead() {
		return false, errSimulated
	}
	l.world.confirm(now.confirmable)
	return true, nil
}

func (l *life) lag(summary) float64   { return 0 }
func (l *life) close(context.Context) {}

func (l *life) Publish(record event.Record, seq uint64) error {
	if l.isDead() {
		return errSimulated
	}
	l.world.publish(record.Value, seq)
	return nil
}

func (l *life) Close() {
	l.world.mutex.Lock()
	defer l.world.mutex.Unlock()
	l.world.open = [partitions][]*sent{}
}

func (l *life) isDead() bool {
	l.world.mutex.Lock()
	defer l.world.mutex.Unlock()
	return l.dead
}

func (l *life) fail(err error) {
	select {
	case l.broken <- err:
	default: // it has failed already
	}
}

// stop asks it to end in order. It waits for what is in flight, and not for ever.
func (l *life) stop() {
	l.cancel()
	synctest.Wait()
}

// crash ends it at once: from here on it tells nobody anything.
func (l *life) crash() {
	l.world.mutex.Lock()
	l.dead = true
	l.world.mutex.Unlock()
	l.fail(errSimulated)
	l.cancel()
	<-l.ended
}

func (l *life) hasEnded() bool {
	select {
	case <-l.ended:
		return true
	default:
		return false
	}
}

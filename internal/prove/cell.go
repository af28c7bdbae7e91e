package prove

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/sandbox"
)

// Cell is one kind of fault. Cells are listed in cells.go.
//
// When Run is called, the processes of the World are ready, clients place, pay,
// refund and cancel orders all the while, and no other fault is under way. Run
// does its harm and undoes it: when it returns, the processes that it was given
// have been started again (they need not be ready), what it started besides is
// gone, and nothing is between the processes and their services any more. Then
// the time is taken until an order that is placed and paid has its whole receipt.
//
// An error of Run says that the harm could not be done or undone. It counts as a
// violation (of I8): a process that does not come back is what a proof looks for.
type Cell struct {
	// Name is what --cells knows it by, such as "kill-api". It is in the group
	// that Groups name, and in the one that its name begins with.
	Name   string
	Groups []string
	// About is a line: what is done to what.
	About string
	// Needs are what it must be able to do to the services. A cell whose needs
	// are not met here is left out, and that is said.
	Needs []Need
	// Bites are what it is there to cause. Where a cell was run, each of its
	// bites must have been seen at the end of the whole run, or it proved nothing.
	Bites []Bite
	Run   func(ctx context.Context, w *World) error
}

// Need is something that is not there in every sandbox.
type Need string

// What a cell may need. Its own processes it may always kill.
const (
	NeedPostgres Need = "postgres"      // a server of the sandbox's own, to kill, restart and configure (World.Sandbox.Postgres)
	NeedApache   Need = "apache"        // Apache Kafka (World.Sandbox.Kafka): the embedded broker is never killed
	NeedThree    Need = "three-brokers" // three of them
	NeedWAL      Need = "relay-wal"     // the relay reads the log
	NeedTmpfs    Need = "tmpfs"         // Postgres' data folder on a small tmpfs (--tmpfs), to be filled
)

// Bite is what a fault leaves behind although nothing is lost: the proof that it
// struck where it hurts.
type Bite string

// The bites. Those that the runner counts by itself are marked so; a cell counts
// the others with World.Bit.
const (
	BiteCrash       Bite = "crash recoveries"              // counted: a process died by SIGKILL and was ready again
	BiteUnknown     Bite = "requests with unknown outcome" // counted: sent, and nothing came back
	BiteDone        Bite = "of which had been done"        // counted: the second answer came from store
	BiteDuplicates  Bite = "duplicates on the topics"      // counted: records beyond the first of each event
	BiteRedelivery  Bite = "redeliveries to billing"       // counted: events that it had applied before
	BiteRebalance   Bite = "rebalances"                    // counted: partitions revoked or lost, or taken again after a death
	BiteServer      Bite = "database outages"              // by the cell: Postgres was away or broke connections
	BiteBroker      Bite = "broker outages"                // by the cell: a broker was away or silent
	BiteCommit      Bite = "commits cut off"               // by the cell: a COMMIT was sent and its answer was not let through
	BiteRetry       Bite = "transactions tried again"      // by the cell: 40001, 40P01, a lost connection in a transaction
	BiteDeadLetters Bite = "dead letters"                  // by the cell: records that must become one
	BiteStale       Bite = "stale events refused"          // by the cell: old state that must change nothing
)

// World is what a cell has to do with. It is made anew for each fault.
type World struct {
	// Sandbox has the services, their addresses and their processes.
	Sandbox *sandbox.Sandbox
	// The processes: an API, a worker with the role relay, and one with billing,
	// balances and janitor. All returns them.
	API, Relay, Billing *sandbox.Process
	// Rand is for every choice of the cell; it is this fault's alone, from the
	// seed and the fault's number.
	Rand *rand.Rand
	// Fault is its number, from 1.
	Fault int
	// Options are those of the run.
	Options Options

	run *run

	mutex       sync.Mutex
	notes       []string
	begun, done time.Time
}

// All are the processes that are there for all cells.
func (w *World) All() []*sandbox.Process { return []*sandbox.Process{w.API, w.Relay, w.Billing} }

// Note says what the cell does, for the log and for the report of a violation.
func (w *World) Note(format string, args ...any) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.notes = append(w.notes, fmt.Sprintf(format, args...))
}

// Notes are what the cell has said.
func (w *World) Notes() []string {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return slices.Clone(w.notes)
}

// Begun says that the harm begins now. Without it, it began with Run.
func (w *World) Begun() {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.begun = time.Now()
}

// Ended says that the harm is over: recovery is counted from here. Without it,
// it ends when Run returns.
func (w *World) Ended() {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.done = time.Now()
}

// Bit counts something that the fault has caused and that the runner cannot see.
func (w *World) Bit(what Bite, times int) { w.run.bites.add(what, int64(times)) }

// Advance waits until the clients have got so many more answers: that the harm is
// done under load and not between two requests. When the API is away, they get
// none.
func (w *World) Advance(ctx context.Context, answers int) error {
	return w.run.load.advance(ctx, answers)
}

// Burst lets every client send without a pause for as long as fn runs: a batch
// builds up behind what is held up.
func (w *World) Burst(fn func() error) error {
	w.run.load.burst.Add(1)
	defer w.run.load.burst.Add(-1)
	return fn()
}

// CrashAt starts a process anew so that it kills itself the n-th time it reaches
// a point of internal/crash, waits for that, and starts it again.
func (w *World) CrashAt(process *sandbox.Process, point string, nth int) error {
	w.Note("%s dies at %s, the time number %d", process.Name, point, nth)
	if err := process.Stop(); err != nil {
		return err
	}
	if err := process.Start(fmt.Sprintf("ONCELEDGER_CRASH=%s:%d", point, nth)); err != nil {
		return err
	}
	if err := process.WaitKilled(); err != nil {
		return fmt.Errorf("%s was to die at %s: %w", process.Name, point, err)
	}
	w.Begun()
	return process.Start()
}

// Kill kills a process and starts it again at once.
func (w *World) Kill(process *sandbox.Process) error {
	w.Begun()
	if err := process.Kill(); err != nil {
		return err
	}
	return process.Start()
}

// Inject puts a record on a topic that no relay has sent, and tells the
// accounting what must come of it. A record without an aggregate of the clients'
// (undecodable, unknown type) must become a dead letter of that class, once, and
// hold up nobody. It returns where the record lies.
func (w *World) Inject(ctx context.Context, record event.Record, want Injected) (Place, error) {
	return w.run.inject(ctx, w.Fault, record, want)
}

// Injected says what must become of a record that a cell put on a topic.
type Injected struct {
	// DeadLetter is the class of the one dead letter that it must become; "" if
	// it must become none.
	DeadLetter string
	// Applied says that it is an event of its own that billing marks as applied
	// (a stale state, for instance) and that must have no other effect.
	Applied bool
	// Again says that it is a copy of an event that the relay has sent: a
	// duplicate, byte for byte, which must have no effect at all.
	Again bool
	// Parks is an order whose later events must be dead letters of the class
	// parked until the one that DeadLetter asks for is discarded, and be applied
	// then.
	Parks string
}

// Place is where a record lies.
type Place struct {
	Topic     string `json:"topic"`
	Partition int32  `json:"partition"`
	Offset    int64  `json:"offset"`
}

// SentEvents are records that the relay has sent to a topic, as far as they have
// been read: at most so many of the newest, oldest first.
func (w *World) SentEvents(ctx context.Context, topic string, most int) ([]event.Record, error) {
	if err := w.run.topics.drain(ctx); err != nil {
		return nil, err
	}
	return w.run.topics.newest(topic, most), nil
}

// TopicRemade says that a topic was deleted and made again, or got other
// partitions: it is read from its beginning from now on, and what was read before
// still counts. Call SentEvents right before the topic goes, or what nobody has
// read yet is missing from the accounting.
func (w *World) TopicRemade(topic string) { w.run.topicRemade(topic) }

// Quiet stops the clients after the request they are at, waits until all that
// they have done is applied, runs fn, and lets them go on.
func (w *World) Quiet(ctx context.Context, fn func() error) error {
	resume, err := w.run.quiet(ctx)
	if err != nil {
		return err
	}
	defer resume()
	return fn()
}

// Orders are ids of some orders of the clients that are in a state ("created",
// "paid", "cancelled"), with their tenants: the newest, at most so many. The
// clients will not change them any more.
func (w *World) Orders(status string, most int) []KnownOrder { return w.run.load.settled(status, most) }

package relay

import (
	"sync"
	"time"
)

// progress works out what may be confirmed to the source. It is told what is
// read from it, in order, and which events the broker has, in any order. It does
// no I/O.
//
// To confirm a position is to give up everything before it: the source never
// brings it again. So a position is confirmable only when
//
//   - it is the end of a transaction, and every event up to it is delivered; or
//   - it came with a keepalive while nothing was in flight and no transaction
//     half read.
//
// After a crash the source goes on from the last confirmed position: what was
// delivered behind it is sent twice, nothing is left out.
type progress struct {
	window window

	mutex sync.Mutex
	ring  []flight // events head … tail-1, each at its number modulo the length
	head  uint64   // the first event that is not delivered
	tail  uint64   // the number of the next event
	bytes int      // what the events from head on weigh

	waiting bool // for the window to be half free

	ends          []end // of transactions that are not wholly delivered, in order
	inTransaction bool
	confirmable   position
}

// position is a place in what a source brings: in the log, or among the rounds
// of a poller.
type position uint64

// window bounds what is between the first undelivered event and the last read
// one. A batch that is let in may go beyond it.
type window struct{ events, bytes int }

type flight struct {
	size      int
	committed time.Time
	delivered bool
}

type end struct {
	events uint64 // the number of events up to it
	at     position
}

// midTransaction reports that a transaction is half read.
func (p *progress) midTransaction() bool {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return p.inTransaction
}

// summary is where things stand.
type summary struct {
	confirmable position
	delivered   uint64 // events, without gaps
	inFlight    int
	oldest      time.Time // when the first undelivered event was committed; zero if none is
}

func newProgress(w window, confirmed position) *progress {
	return &progress{window: w, ring: make([]flight, w.events+maxBatch), confirmable: confirmed}
}

// begin says that what comes now belongs to one transaction.
func (p *progress) begin() {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.inTransaction = true
}

// event takes in the next event and numbers it. See crowded first.
func (p *progress) event(size int, committed time.Time) uint64 {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	seq := p.tail
	*p.flight(seq) = flight{size: size, committed: committed}
	p.tail++
	p.bytes += size
	return seq
}

// commit ends the transaction; at is the position behind it.
func (p *progress) commit(at position) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.inTransaction = false
	p.ends = append(p.ends, end{events: p.tail, at: at})
	p.advance()
}

// delivered says that the broker has an event. It reports whether that is worth
// waking up for: nothing is in flight any more, or a crowd has thinned out.
func (p *progress) delivered(seq uint64) bool {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.head <= seq && seq < p.tail {
		p.flight(seq).delivered = true
		p.advance()
	}
	return p.inFlight() == 0 || p.waiting && p.halfFree()
}

// keepalive says that the source has brought everything before a position. It
// reports whether everything is delivered, too.
func (p *progress) keepalive(at position) bool {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.inFlight() > 0 || p.inTransaction {
		return false
	}
	p.confirmable = max(p.confirmable, at)
	return true
}

// advance moves head over what is delivered, and confirmable to the last
// transaction that ends at or before head.
func (p *progress) advance() {
	for p.head < p.tail && p.flight(p.head).delivered {
		p.bytes -= p.flight(p.head).size
		p.head++
	}
	done := 0
	for done < len(p.ends) && p.ends[done].events <= p.head {
		p.confirmable = max(p.confirmable, p.ends[done].at)
		done++
	}
	p.ends = p.ends[done:]
}

func (p *progress) flight(seq uint64) *flight { return &p.ring[seq%uint64(len(p.ring))] }

// crowded reports that no batch may be taken in: the window is full, or was and
// is not half free again. With nothing in flight it never is.
func (p *progress) crowded() bool {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	full := p.inFlight() >= p.window.events || p.inFlight() > 0 && p.bytes >= p.window.bytes
	p.waiting = full || p.waiting && !p.halfFree()
	return p.waiting
}

func (p *progress) halfFree() bool {
	return p.inFlight() <= p.window.events/2 && p.bytes <= p.window.bytes/2
}

func (p *progress) inFlight() int { return int(p.tail - p.head) }

func (p *progress) summary() summary {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	s := summary{confirmable: p.confirmable, delivered: p.head, inFlight: p.inFlight()}
	if s.inFlight > 0 {
		s.oldest = p.flight(p.head).committed
	}
	return s
}

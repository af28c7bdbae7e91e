package kafka

import (
	"slices"
	"sync"
	"time"

	"github.com/onceledger/onceledger/internal/event"
)

// place is one partition of one topic.
type place struct {
	topic     string
	partition int32
}

// tracker knows which partitions are this member's, whether they are read from,
// which of their records are in hand, and up to where each partition may be
// committed. It does no I/O.
//
// Records pass through it in one direction:
//
//	take       read from Kafka, in hand
//	applied    in the database; from here on, and not before, to be committed
//	committed  known to Kafka
//
// release forgets a partition wherever its records are. Its next owner, which
// may be this member again, then starts at the offset that Kafka knows: it sees
// a record twice, perhaps, but misses none.
type tracker struct {
	mutex  sync.Mutex
	owned  map[place]progress
	paused bool
	inHand []event.Record
}

// progress is how far a partition has come: the offset after the last record
// that is applied, or that Kafka knows to be. Zero means none yet.
type progress struct {
	applied   int64
	committed int64
}

func newTracker() *tracker {
	return &tracker{owned: make(map[place]progress)}
}

func (t *tracker) assign(partitions []place) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	for _, partition := range partitions {
		t.owned[partition] = progress{}
	}
}

func (t *tracker) release(partitions []place) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	for _, partition := range partitions {
		delete(t.owned, partition)
	}
	t.inHand = slices.DeleteFunc(t.inHand, func(record event.Record) bool {
		_, mine := t.owned[place{record.Topic, record.Partition}]
		return !mine
	})
}

// pause says whether reading is to stop, for all partitions that this member has
// or is yet to be given. It reports whether that is news; if it is, Kafka's client
// has to be told of every partition.
func (t *tracker) pause(paused bool) (changed bool) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	changed = t.paused != paused
	t.paused = paused
	return changed
}

func (t *tracker) isPaused() bool {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	return t.paused
}

// take puts a record in hand, if its partition is this member's.
func (t *tracker) take(record event.Record) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if _, mine := t.owned[place{record.Topic, record.Partition}]; mine {
		t.inHand = append(t.inHand, record)
	}
}

// drop forgets what is in hand of a partition: it will be read again.
func (t *tracker) drop(partition place) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	t.inHand = slices.DeleteFunc(t.inHand, func(record event.Record) bool {
		return place{record.Topic, record.Partition} == partition
	})
}

// batch is what is in hand, in the order in which it was read.
func (t *tracker) batch() []event.Record {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	return t.inHand
}

// applied says that all that is in hand has taken effect for good.
func (t *tracker) applied() {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	for _, record := range t.inHand {
		partition := place{record.Topic, record.Partition}
		now := progress{applied: record.Offset + 1, committed: t.owned[partition].committed}
		if now.applied < now.committed {
			now.committed = 0 // the topic was made anew, and its offsets begin again
		}
		t.owned[partition] = now
	}
	t.inHand = nil
}

// pending is what Kafka has to be told: where to go on in each partition.
func (t *tracker) pending() map[place]int64 {
	return t.offsets(func(p progress) bool { return p.applied > p.committed })
}

// positions is where each partition goes on of which a record was applied.
func (t *tracker) positions() map[place]int64 {
	return t.offsets(func(p progress) bool { return p.applied > 0 })
}

func (t *tracker) offsets(wanted func(progress) bool) map[place]int64 {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	offsets := make(map[place]int64)
	for partition, progress := range t.owned {
		if wanted(progress) {
			offsets[partition] = progress.applied
		}
	}
	return offsets
}

// committed says that Kafka knows these offsets.
func (t *tracker) committed(offsets map[place]int64) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	for partition, offset := range offsets {
		if progress, mine := t.owned[partition]; mine {
			progress.committed = max(progress.committed, offset)
			t.owned[partition] = progress
		}
	}
}

// partitions are this member's.
func (t *tracker) partitions() []place {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	partitions := make([]place, 0, len(t.owned))
	for partition := range t.owned {
		partitions = append(partitions, partition)
	}
	return partitions
}

// verdict is what follows from an attempt at a batch.
type verdict int

const (
	durable verdict = iota // its offsets may be committed
	again                  // an outage: the same records come once more, after a pause
	undone                 // told to stop; whoever comes next reads it again
	tooLate                // done or not, the group has gone on, and another reads it
)

// judge decides by what the handler said, how long it took and how long the group
// waits for it, and whether this member is to stop. What took too long is never
// durable: its offsets are another member's by now.
func judge(err error, took, limit time.Duration, stopping bool) verdict {
	switch {
	case took >= limit:
		return tooLate
	case err == nil:
		return durable
	case stopping:
		return undone
	default:
		return again
	}
}

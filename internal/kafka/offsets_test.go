package kafka

import (
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/onceledger/onceledger/internal/event"
)

// Goal: whatever is read, applied, committed, revoked and lost in whatever
// order, no record below a committed offset is without effect. Method: a model
// of Kafka and of the database around the tracker, driven at random; commits
// take their time and may be answered after partitions have gone, or never.
func TestTrackerLosesNothing(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		m := newModel(t)
		t.Repeat(map[string]func(*rapid.T){
			"assign":       m.assign,
			"read":         m.read,
			"stray":        m.stray,
			"apply":        m.apply,
			"begin commit": m.beginCommit,
			"end commit":   m.endCommit,
			"revoke":       m.revoke,
			"lose":         m.lose,
			"":             m.check,
		})
		m.finish(t)
	})
}

// model is Kafka, the database and the consumer around the tracker under test.
type model struct {
	tracker    *tracker
	partitions []place
	log        map[place][]int64        // offsets that hold a record; some do not
	known      map[place]int64          // committed, as Kafka has it
	applied    map[place]map[int64]bool // in the database
	position   map[place]int            // index in log to read next, of owned partitions
	inHand     map[place][]int64
	underWay   map[place]int64 // the commit being sent
}

func newModel(t *rapid.T) *model {
	m := &model{
		tracker:  newTracker(),
		log:      make(map[place][]int64),
		known:    make(map[place]int64),
		applied:  make(map[place]map[int64]bool),
		position: make(map[place]int),
		inHand:   make(map[place][]int64),
	}
	for i := range rapid.IntRange(1, 4).Draw(t, "partitions") {
		partition := place{"order.events", int32(i)}
		m.partitions = append(m.partitions, partition)
		m.applied[partition] = make(map[int64]bool)
		offset := int64(0)
		for range rapid.IntRange(0, 12).Draw(t, "records") {
			offset += int64(rapid.IntRange(0, 2).Draw(t, "gap")) // transactions leave gaps
			m.log[partition] = append(m.log[partition], offset)
			offset++
		}
	}
	return m
}

func (m *model) draw(t *rapid.T, wanted func(place) bool) []place {
	var candidates, drawn []place
	for _, partition := range m.partitions {
		if wanted(partition) {
			candidates = append(candidates, partition)
		}
	}
	for _, partition := range candidates {
		if rapid.Bool().Draw(t, "this one") {
			drawn = append(drawn, partition)
		}
	}
	if len(drawn) == 0 {
		t.Skip()
	}
	return drawn
}

func (m *model) isOwned(partition place) bool {
	_, owned := m.position[partition]
	return owned
}

func (m *model) assign(t *rapid.T) {
	partitions := m.draw(t, func(p place) bool { return !m.isOwned(p) })
	m.tracker.assign(partitions)
	for _, partition := range partitions {
		m.position[partition], _ = slices.BinarySearch(m.log[partition], m.known[partition])
	}
}

func (m *model) read(t *rapid.T) {
	for _, partition := range m.draw(t, func(p place) bool { return m.isOwned(p) && m.position[p] < len(m.log[p]) }) {
		offset := m.log[partition][m.position[partition]]
		m.position[partition]++
		m.inHand[partition] = append(m.inHand[partition], offset)
		m.tracker.take(event.Record{Topic: partition.topic, Partition: partition.partition, Offset: offset})
	}
}

// stray is a record of a partition that has gone.
func (m *model) stray(t *rapid.T) {
	for _, partition := range m.draw(t, func(p place) bool { return !m.isOwned(p) }) {
		m.tracker.take(event.Record{Topic: partition.topic, Partition: partition.partition, Offset: 1000})
	}
}

// apply is a handler that succeeds. One that fails changes nothing.
func (m *model) apply(*rapid.T) {
	for partition, offsets := range m.inHand {
		for _, offset := range offsets {
			m.applied[partition][offset] = true
		}
	}
	clear(m.inHand)
	m.tracker.applied()
}

func (m *model) beginCommit(t *rapid.T) {
	if m.underWay != nil {
		t.Skip()
	}
	m.underWay = m.tracker.pending()
}

func (m *model) endCommit(t *rapid.T) {
	if m.underWay == nil {
		t.Skip()
	}
	if rapid.Bool().Draw(t, "it succeeds") {
		maps.Copy(m.known, m.underWay)
		m.tracker.committed(m.underWay)
	}
	m.underWay = nil
}

// revoke waits for the commit that is under way, and then commits what is left.
func (m *model) revoke(t *rapid.T) {
	partitions := m.draw(t, m.isOwned)
	if m.underWay != nil {
		m.endCommit(t)
	}
	m.beginCommit(t)
	m.endCommit(t)
	m.release(partitions)
}

// lose leaves the commit that is under way to end whenever it will.
func (m *model) lose(t *rapid.T) {
	m.release(m.draw(t, m.isOwned))
}

func (m *model) release(partitions []place) {
	m.tracker.release(partitions)
	for _, partition := range partitions {
		delete(m.position, partition)
		delete(m.inHand, partition)
	}
}

func (m *model) check(t *rapid.T) {
	inHand := make(map[place][]int64)
	for _, record := range m.tracker.batch() {
		partition := place{record.Topic, record.Partition}
		inHand[partition] = append(inHand[partition], record.Offset)
	}
	require.Equal(t, m.inHand, inHand, "in hand is what was read and not applied, in order")

	for partition, offset := range m.tracker.pending() {
		require.True(t, m.isOwned(partition), "%v is not ours to commit", partition)
		m.requireApplied(t, partition, offset)
	}
	for partition, offset := range m.known {
		m.requireApplied(t, partition, offset)
	}
}

func (m *model) requireApplied(t *rapid.T, partition place, below int64) {
	for _, offset := range m.log[partition] {
		require.True(t, offset >= below || m.applied[partition][offset], "%v: %d is lost below %d", partition, offset, below)
	}
}

// finish lets the member have all partitions in peace.
func (m *model) finish(t *rapid.T) {
	m.underWay = nil
	var missing []place
	for _, partition := range m.partitions {
		if !m.isOwned(partition) {
			missing = append(missing, partition)
			m.position[partition], _ = slices.BinarySearch(m.log[partition], m.known[partition])
		}
	}
	m.tracker.assign(missing)
	for _, partition := range m.partitions {
		for ; m.position[partition] < len(m.log[partition]); m.position[partition]++ {
			m.tracker.take(event.Record{Topic: partition.topic, Partition: partition.partition, Offset: m.log[partition][m.position[partition]]})
			m.inHand[partition] = append(m.inHand[partition], m.log[partition][m.position[partition]])
		}
	}
	m.apply(t)
	pending := m.tracker.pending()
	m.tracker.committed(pending)
	maps.Copy(m.known, pending)
	m.check(t)
	require.Empty(t, m.tracker.pending())
	for partition, offsets := range m.log {
		for _, offset := range offsets {
			require.Less(t, offset, m.known[partition], "%v is read and committed to its end", partition)
		}
	}
}

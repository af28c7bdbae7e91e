package kafka

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"testing"
	"time"

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

// TestSimulatedGroup drives the decisions of several members at once: their
// trackers and verdicts, in a group that takes partitions from them and gives
// them to others, with handlers that fail or are too slow, commits that are late
// or whose answers are lost, and processes that die and come back.
//
// What is checked owes nothing to how a member keeps account:
//
//   - what Kafka knows of a partition is never beyond what is applied;
//   - each record's effect happens once, and those of a partition in order;
//   - a member with nothing to wait for reads from all its partitions;
//   - when all is quiet everything is applied, and Kafka knows it.
func TestSimulatedGroup(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		g := newSimGroup(t)
		t.Repeat(map[string]func(*rapid.T){
			"produce":        g.produce,
			"join":           g.join,
			"move":           g.move,
			"expel":          g.expel,
			"work":           g.work,
			"poll":           g.poll,
			"read":           g.read,
			"begin batch":    g.beginBatch,
			"end batch":      g.endBatch,
			"send commit":    g.sendCommit,
			"commit arrives": g.commitArrives,
			"answer arrives": g.answerArrives,
			"die":            g.die,
			"come back":      g.comeBack,
			"":               g.check,
		})
		g.finish(t)
	})
}

// simGroup is a topic, a group's coordinator and a database.
type simGroup struct {
	partitions []place
	log        map[place][]int64 // offsets that hold a record
	end        map[place]int64

	known      map[place]int64 // committed
	generation int
	owner      map[place]*simMember // until it has given the partition back
	members    []*simMember

	effects map[place][]int64 // in the database, in the order in which they happened
	broken  string
}

// simMember is a process: what it believes, and what the group knows of it.
type simMember struct {
	name        string
	tracker     *tracker
	incarnation int // a process that comes back as the same static member is another
	alive       bool

	inGroup    bool // as far as the group is concerned
	generation int  // the last that it has heard of
	gone       bool // it was out of the group since it last polled
	revoked    []place
	assigned   []place

	position map[place]int  // in the log, of what it reads
	halted   map[place]bool // the client remembers this, also of partitions that have gone

	batch     []event.Record // at the handler
	handling  bool
	slow      bool // and takes longer than the group waits
	commit    *simCommit
	unsettled []*simCommit // nobody waits for them any more
}

type simCommit struct {
	offsets     map[place]int64
	generation  int
	incarnation int
	arrived     bool
	accepted    bool
}

const simBatch = 4

func newSimGroup(t *rapid.T) *simGroup {
	g := &simGroup{
		log: make(map[place][]int64), end: make(map[place]int64), known: make(map[place]int64),
		owner: make(map[place]*simMember), effects: make(map[place][]int64),
	}
	for i := range rapid.IntRange(1, 3).Draw(t, "partitions") {
		g.partitions = append(g.partitions, place{"order.events", int32(i)})
	}
	for i := range rapid.IntRange(1, 3).Draw(t, "members") {
		m := &simMember{name: fmt.Sprint("member ", i)}
		m.start()
		m.inGroup = rapid.Bool().Draw(t, "joined")
		g.members = append(g.members, m)
	}
	g.produce(t)
	if slices.ContainsFunc(g.members, func(m *simMember) bool { return m.inGroup }) {
		g.move(t)
	}
	return g
}

// start is a process at its beginning, which knows nothing.
func (m *simMember) start() {
	commits := m.unsettled
	if m.commit != nil {
		commits = append(commits, m.commit)
	}
	*m = simMember{
		name: m.name, incarnation: m.incarnation + 1, alive: true, tracker: newTracker(),
		position: make(map[place]int), halted: make(map[place]bool), unsettled: commits,
	}
}

// any draws a member for which wanted holds.
func (g *simGroup) any(t *rapid.T, wanted func(*simMember) bool) *simMember {
	var those []*simMember
	for _, m := range g.members {
		if wanted(m) {
			those = append(those, m)
		}
	}
	if len(those) == 0 {
		t.Skip()
	}
	return those[rapid.IntRange(0, len(those)-1).Draw(t, "member")]
}

func (g *simGroup) produce(t *rapid.T) {
	for _, partition := range g.partitions {
		for range rapid.IntRange(0, 4).Draw(t, "records") {
			offset := g.end[partition] + int64(rapid.IntRange(0, 2).Draw(t, "gap")) // transactions leave gaps
			g.log[partition] = append(g.log[partition], offset)
			g.end[partition] = offset + 1
		}
	}
}

// rebalance begins a generation. Members hear of it when they poll next, and till
// then their commits are refused.
func (g *simGroup) rebalance() { g.generation++ }

func (g *simGroup) join(t *rapid.T) {
	m := g.any(t, func(m *simMember) bool { return m.alive && !m.inGroup && !m.gone })
	m.inGroup = true
	g.rebalance()
}

// move is a cooperative rebalance: partitions without an owner are given to
// somebody, and from owners some are taken. Those are given to others only in a
// later one, when they have been given back.
func (g *simGroup) move(t *rapid.T) {
	var joined []*simMember
	for _, m := range g.members {
		if m.inGroup {
			joined = append(joined, m)
		}
	}
	if len(joined) == 0 {
		t.Skip()
	}
	g.rebalance()
	for _, partition := range g.partitions {
		owner := g.owner[partition]
		if !rapid.Bool().Draw(t, "this one") {
			continue
		}
		switch {
		case owner == nil:
			to := joined[rapid.IntRange(0, len(joined)-1).Draw(t, "to")]
			g.owner[partition] = to
			to.assigned = append(to.assigned, partition)
		case slices.Contains(owner.assigned, partition): // it has not heard of it yet
		case !slices.Contains(owner.revoked, partition):
			owner.revoked = append(owner.revoked, partition)
		}
	}
}

// expel takes a member out of the group: it was silent for too long. It may be at
// work, and learns of it when it polls next.
func (g *simGroup) expel(t *rapid.T) {
	m := g.any(t, func(m *simMember) bool { return m.inGroup })
	g.leave(m)
	m.slow = m.handling && rapid.Bool().Draw(t, "its handler is what took so long")
}

func (g *simGroup) leave(m *simMember) {
	for partition, owner := range g.owner {
		if owner == m {
			delete(g.owner, partition)
		}
	}
	m.inGroup, m.gone = false, m.alive
	m.assigned, m.revoked = nil, nil
	g.rebalance()
}

// poll is where a member hears of what the group has decided, between two calls
// of its handler.
func (g *simGroup) poll(t *rapid.T) {
	g.hear(t, g.any(t, func(m *simMember) bool { return m.alive && !m.handling && (m.inGroup || m.gone) }))
}

func (g *simGroup) hear(t *rapid.T, m *simMember) {
	if m.gone { // lost: nothing is committed any more
		m.gone = false
		if rapid.Bool().Draw(t, "as a new member") {
			m.start()
			return
		}
		m.release(m.tracker.partitions())
		return
	}
	m.generation = g.generation
	if len(m.revoked) > 0 {
		g.flush(t, m)
		m.release(m.revoked)
		for _, partition := range m.revoked {
			delete(g.owner, partition)
		}
		m.revoked = nil
	}
	if len(m.assigned) > 0 {
		m.tracker.assign(m.assigned)
		for _, partition := range m.assigned {
			m.position[partition], _ = slices.BinarySearch(g.log[partition], g.known[partition])
			m.halted[partition] = m.tracker.isPaused()
		}
		m.assigned = nil
	}
}

func (m *simMember) release(partitions []place) {
	m.tracker.release(partitions)
	for _, partition := range partitions {
		delete(m.position, partition)
	}
}

// flush waits for the commit that is under way and sends one more; neither need
// come to its end, and nobody waits for ever.
func (g *simGroup) flush(t *rapid.T, m *simMember) {
	if m.commit != nil {
		g.await(t, m)
	}
	if m.commit == nil && g.send(m) {
		g.await(t, m)
	}
	if m.commit != nil {
		m.unsettled = append(m.unsettled, m.commit)
		m.commit = nil
	}
}

func (g *simGroup) await(t *rapid.T, m *simMember) {
	if m.commit.arrived || rapid.Bool().Draw(t, "the commit arrives") {
		g.accept(m, m.commit)
		if rapid.Bool().Draw(t, "and its answer") {
			m.answered(m.commit)
		}
	}
}

func (g *simGroup) sendCommit(t *rapid.T) {
	m := g.any(t, func(m *simMember) bool { return m.alive && m.commit == nil })
	if !g.send(m) {
		t.Skip()
	}
}

func (g *simGroup) send(m *simMember) bool {
	offsets := m.tracker.pending()
	if len(offsets) == 0 {
		return false
	}
	m.commit = &simCommit{offsets: offsets, generation: m.generation, incarnation: m.incarnation}
	return true
}

// accept is the coordinator's part: it looks at the generation and the member, and
// not at whose the partitions are.
func (g *simGroup) accept(m *simMember, commit *simCommit) {
	if commit.arrived {
		return
	}
	commit.arrived = true
	commit.accepted = m.inGroup && commit.generation == g.generation && commit.incarnation == m.incarnation
	if !commit.accepted {
		return
	}
	for partition := range commit.offsets {
		if owner := g.owner[partition]; owner != nil && owner != m {
			g.broken = fmt.Sprintf("%s commits for %v, which is %s's", m.name, partition, owner.name)
		}
	}
	maps.Copy(g.known, commit.offsets)
}

// answered is the member's part: of a commit that was refused it only knows that.
func (m *simMember) answered(commit *simCommit) {
	if commit.accepted && commit.incarnation == m.incarnation {
		m.tracker.committed(commit.offsets)
	}
	m.commit = nil
}

// commitArrives lets the coordinator see a commit, perhaps one that was sent by a
// process that is no more.
func (g *simGroup) commitArrives(t *rapid.T) {
	m := g.any(t, func(m *simMember) bool { return m.commit != nil && !m.commit.arrived || len(m.unsettled) > 0 })
	if len(m.unsettled) > 0 && (m.commit == nil || rapid.Bool().Draw(t, "an old one")) {
		g.accept(m, m.unsettled[0])
		m.unsettled = m.unsettled[1:]
		return
	}
	g.accept(m, m.commit)
}

func (g *simGroup) answerArrives(t *rapid.T) {
	m := g.any(t, func(m *simMember) bool { return m.alive && m.commit != nil && m.commit.arrived })
	if rapid.Bool().Draw(t, "it is lost") {
		m.commit = nil
		return
	}
	m.answered(m.commit)
}

func (g *simGroup) read(t *rapid.T) {
	m := g.any(t, func(m *simMember) bool { return m.alive && !m.handling })
	g.fetch(m)
	// The client may have had a record ready of a partition that has gone since.
	for _, partition := range g.partitions {
		if _, owned := m.position[partition]; !owned && len(g.log[partition]) > 0 && rapid.Bool().Draw(t, "a stray one") {
			m.take(partition, g.log[partition][0])
		}
	}
}

func (m *simMember) take(partition place, offset int64) {
	m.tracker.take(event.Record{Topic: partition.topic, Partition: partition.partition, Offset: offset})
}

func (g *simGroup) fetch(m *simMember) (more bool) {
	for _, partition := range g.partitions {
		next, owned := m.position[partition]
		if !owned || m.halted[partition] || next == len(g.log[partition]) || len(m.tracker.batch()) >= simBatch {
			continue
		}
		m.take(partition, g.log[partition][next])
		m.position[partition]++
		more = true
	}
	return more
}

// work is what a member does when all is well.
func (g *simGroup) work(t *rapid.T) {
	g.workWell(t, g.any(t, func(m *simMember) bool { return m.alive && !m.handling && m.inGroup }))
}

// workWell reports whether there was something to read.
func (g *simGroup) workWell(t *rapid.T, m *simMember) bool {
	g.hear(t, m)
	more := g.fetch(m)
	g.apply(m.tracker.batch())
	g.returned(m, nil)
	if m.commit == nil && g.send(m) {
		g.accept(m, m.commit)
		m.answered(m.commit)
	}
	return more
}

func (g *simGroup) beginBatch(t *rapid.T) {
	m := g.any(t, func(m *simMember) bool { return m.alive && !m.handling && len(m.tracker.batch()) > 0 })
	m.batch, m.handling = m.tracker.batch(), true
}

var errSimulated = errors.New("simulated")

// endBatch is a transaction's end, however it ends.
func (g *simGroup) endBatch(t *rapid.T) {
	m := g.any(t, func(m *simMember) bool { return m.handling })
	switch rapid.SampledFrom([]string{"applied", "failed", "applied, and nobody knows"}).Draw(t, "outcome") {
	case "applied":
		g.apply(m.batch)
		g.returned(m, nil)
	case "failed":
		g.returned(m, errSimulated)
	default:
		g.apply(m.batch)
		g.returned(m, errSimulated)
	}
}

// apply is the database with its dedupe gate.
func (g *simGroup) apply(batch []event.Record) {
	for _, record := range batch {
		partition := place{record.Topic, record.Partition}
		done := g.effects[partition]
		if slices.Contains(done, record.Offset) {
			continue
		}
		if next := g.log[partition][len(done)]; next != record.Offset {
			g.broken = fmt.Sprintf("%v: %d is applied before %d", partition, record.Offset, next)
		}
		g.effects[partition] = append(done, record.Offset)
	}
}

// returned is what a member does when its handler has returned.
func (g *simGroup) returned(m *simMember, err error) {
	took := time.Second
	if m.slow {
		took = time.Minute
	}
	m.handling, m.slow, m.batch = false, false, nil
	switch judge(err, took, 30*time.Second, false) {
	case durable:
		m.tracker.applied()
		m.pause(false)
	case again:
		m.pause(true)
	case tooLate:
		if m.inGroup {
			g.leave(m)
		}
		m.gone = false
		m.start()
	case undone:
	}
}

func (m *simMember) pause(paused bool) {
	if !m.tracker.pause(paused) {
		return
	}
	for _, partition := range m.tracker.partitions() {
		m.halted[partition] = paused
	}
}

// die ends a process. What it has sent may still arrive.
func (g *simGroup) die(t *rapid.T) {
	m := g.any(t, func(m *simMember) bool { return m.alive })
	m.alive, m.handling, m.gone, m.slow = false, false, false, false
}

// comeBack is the same static member again, for which its partitions have waited,
// or a new one, which has to join.
func (g *simGroup) comeBack(t *rapid.T) {
	m := g.any(t, func(m *simMember) bool { return !m.alive })
	inGroup := m.inGroup
	m.start()
	if !inGroup {
		return
	}
	m.inGroup = true
	if rapid.Bool().Draw(t, "as a static member") {
		for _, partition := range g.partitions {
			if g.owner[partition] == m {
				m.assigned = append(m.assigned, partition)
			}
		}
		return
	}
	g.leave(m)
	m.gone = false
}

func (g *simGroup) check(t *rapid.T) {
	require.Empty(t, g.broken)
	for partition, offset := range g.known {
		for i, at := range g.log[partition] {
			require.True(t, at >= offset || i < len(g.effects[partition]),
				"%v: Kafka knows %d, and %d is not applied", partition, offset, at)
		}
	}
	for _, m := range g.members {
		if !m.alive {
			continue
		}
		for _, partition := range m.tracker.partitions() {
			require.Equal(t, m.tracker.isPaused(), m.halted[partition], "%s: whether %v is read", m.name, partition)
		}
	}
}

// finish lets one member have everything in peace.
func (g *simGroup) finish(t *rapid.T) {
	for _, m := range g.members {
		if m.inGroup {
			g.leave(m)
		}
		m.start()
	}
	m := g.members[0]
	m.inGroup = true
	g.rebalance()
	for _, partition := range g.partitions {
		g.owner[partition] = m
		m.assigned = append(m.assigned, partition)
	}
	for more := true; more; more = g.workWell(t, m) {
	}
	g.check(t)
	require.Empty(t, m.tracker.pending())
	for _, partition := range g.partitions {
		require.Equal(t, g.log[partition], g.effects[partition], "%v: each record once, in order", partition)
		require.Equal(t, g.end[partition], g.known[partition], "%v is committed to its end", partition)
	}
}

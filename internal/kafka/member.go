package kafka

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/confluentinc/confluent-kafka-go/v2/kafka"

	"github.com/onceledger/onceledger/internal/crash"
	"github.com/onceledger/onceledger/internal/event"
)

// member is one membership of a consumer in its group.
//
// One goroutine polls Kafka and calls the handler in turn. So there is one
// batch in hand at a time, and Kafka can take partitions away only between two
// calls of the handler: what the handler has begun, it has finished. Why
// nothing is lost is to be seen in three places: work (offsets move only after
// the handler has returned nil), rebalanced (what becomes of a partition that
// goes) and the tracker, which keeps account for both.
type member struct {
	*Consumer
	client  *kafka.Consumer
	tracker *tracker
	origins *origins
	end     error // why the membership cannot go on

	// The group goes on without this member, or will have by the time it asks.
	expelled atomic.Bool

	// To the goroutine that commits (see commitApplied): there is something;
	// commit and then close this; commit for the last time.
	applied chan struct{}
	flushes chan chan struct{}
	stop    chan struct{}
}

const (
	// tick is how often a member looks up while nothing arrives.
	tick = 100 * time.Millisecond

	// Between two attempts at a batch.
	minBackOff = 100 * time.Millisecond
	maxBackOff = 10 * time.Second

	// patience is for a broker that does not answer when partitions or the
	// group are to be left in order. The client itself would wait for ever.
	patience = 5 * time.Second

	// longInHand is after how long a batch in hand shows in Ready.
	longInHand = 30 * time.Second

	// One fence may be a mistake (see fencedAs); this many within this time are
	// somebody else.
	maxFences   = 3
	fenceWindow = time.Minute
)

// errExpelled ends a membership that the group has ended already. The consumer
// then joins again, with a new client: the old one would go on with partitions
// that are another's by now, and a static member whose commit arrives while it
// is joining is fenced, by itself.
var errExpelled = errors.New("the group has gone on without this member")

func (m *member) run(ctx context.Context, handle Handler) error {
	var committing sync.WaitGroup
	committing.Go(m.commitApplied)
	defer m.leave(&committing)

	// The handler's context ends later than ours, so that it can finish.
	handlerCtx, cancel := outlive(ctx, m.config.DrainTimeout)
	defer cancel()

	for ctx.Err() == nil && m.end == nil {
		m.read()
		m.work(ctx, handlerCtx, handle)
		m.checkTopics()
	}
	return m.end
}

// read waits a moment for a record and takes what else is there.
func (m *member) read() {
	for wait := tick; len(m.tracker.batch()) < m.config.MaxBatch && m.poll(wait); wait = 0 {
	}
}

// work hands the batch to handle until its effects are durable. Meanwhile
// nothing else is read, but Kafka is polled, so that this member stays in its
// group. Work ends early when ctx is done or when the group has given all of
// the batch's partitions to others; their offsets have then not moved.
func (m *member) work(ctx, handlerCtx context.Context, handle Handler) {
	defer m.inHand.Store(nil)
	for attempt := 1; m.end == nil; attempt++ {
		batch := m.tracker.batch()
		if len(batch) == 0 && m.atRest() {
			break
		}
		started := time.Now()
		m.inHand.CompareAndSwap(nil, &started)
		err := handle(handlerCtx, batch)
		took := time.Since(started)
		switch judge(err, took, m.config.MaxPollInterval, ctx.Err() != nil) {
		case tooLate:
			m.config.Log.Warn("handler took longer than MaxPollInterval; its records may be read again", "took", took)
			m.expelled.Store(true)
			if m.end == nil {
				m.end = errExpelled
			}
		case durable:
			m.tracker.applied()
			m.wakeCommitting()
			if len(batch) > 0 {
				m.metrics.applied(len(batch), took)
			}
			m.setPaused(false)
			return
		case undone:
			m.config.Log.Warn("stopped with a batch undone; it will be read again", "records", len(batch), "error", err)
			return
		case again:
			m.waitOut(ctx, err, attempt)
		}
	}
	m.setPaused(false)
}

// atRest tells whether there is nothing to do without a record.
func (m *member) atRest() bool { return m.transactor == nil || m.transactor.idle(m) }

// waitOut pauses all partitions and polls until it is time for another attempt.
func (m *member) waitOut(ctx context.Context, cause error, attempt int) {
	delay := backOff(attempt)
	m.setPaused(true)
	reason := fmt.Sprintf("paused after %d failed attempts at a batch: %v", attempt, cause)
	m.outage.Store(&reason)
	m.metrics.retries.Inc()
	m.config.Log.Warn("batch failed, trying again", "error", cause, "attempt", attempt, "in", delay)

	again := time.Now().Add(delay)
	for ctx.Err() == nil && m.end == nil && (len(m.tracker.batch()) > 0 || !m.atRest()) {
		left := time.Until(again)
		if left <= 0 {
			return
		}
		m.poll(min(left, tick))
	}
}

// backOff is how long to wait after a failed attempt: at random, so that the
// members do not come back together, and below a bound that doubles.
func backOff(attempt int) time.Duration {
	bound := min(maxBackOff, minBackOff<<min(attempt, 10))
	return minBackOff + rand.N(bound-minBackOff)
}

// setPaused stops or starts reading from all partitions.
func (m *member) setPaused(paused bool) {
	if !m.tracker.pause(paused) {
		return
	}
	m.metrics.setPaused(paused)
	if !paused {
		m.outage.Store(nil)
	}
	m.applyPaused(topicPartitions(m.tracker.partitions()))
}

func (m *member) applyPaused(partitions []kafka.TopicPartition) {
	set := m.client.Resume
	if m.tracker.isPaused() {
		set = m.client.Pause
	} else if m.transactor != nil {
		partitions = slices.DeleteFunc(slices.Clone(partitions), m.transactor.halts)
	}
	if err := set(partitions); err != nil {
		m.end = fmt.Errorf("pause or resume partitions of group %s: %w", m.config.Group, err)
	}
}

// poll waits for one thing from Kafka and says if there was one. Rebalances
// happen here: the client calls rebalanced from within.
func (m *member) poll(wait time.Duration) bool {
	milliseconds := (wait + time.Millisecond - 1) / time.Millisecond
	e := m.client.Poll(int(milliseconds))
	if m.end == nil && m.expelled.Load() {
		m.end = errExpelled
	}
	switch e := e.(type) {
	case nil:
		return false
	case *kafka.Message:
		if err := e.TopicPartition.Error; err != nil {
			m.config.Log.Warn("partition cannot be read", "partition", e.String(), "error", err)
			break
		}
		m.tracker.take(toRecord(e))
	case kafka.Error:
		m.failed(e)
	}
	return true
}

func (m *member) failed(err kafka.Error) {
	switch {
	case err.Code() == kafka.ErrFencedInstanceID:
		m.end = m.fencedAs(err, time.Now())
	case err.IsFatal():
		m.end = fmt.Errorf("consumer of group %s: %w", m.config.Group, err)
	case err.Code() == kafka.ErrAllBrokersDown:
		m.doubtful.Store(true)
	default:
		m.config.Log.Warn("Kafka client", "error", err)
	}
}

// fencedAs says what is to become of a static member that is told of another one
// under its id. There may be none: when coordinators are killed one after the
// other, a member's own request to join may count twice, and the member that the
// group then knows is nobody. So it joins again, as a new member under its id,
// which fences that other one. If there is another process, it does the same, and
// whoever was first to be fenced is first to have been it too often.
func (c *Consumer) fencedAs(err error, now time.Time) error {
	c.fenced = slices.DeleteFunc(append(c.fenced, now), func(at time.Time) bool { return now.Sub(at) > fenceWindow })
	if len(c.fenced) < maxFences {
		return fmt.Errorf("%w, and knows another as instance %q: %w", errExpelled, c.config.InstanceID, err)
	}
	return fmt.Errorf("another process has joined group %s as instance %q, and this one must stop; "+
		"every process needs an id of its own (fenced %d times within %s): %w", c.config.Group, c.config.InstanceID,
		len(c.fenced), fenceWindow, err)
}

// rebalanced is told which partitions come and go.
func (m *member) rebalanced(client *kafka.Consumer, change kafka.Event) error {
	var err error
	switch change := change.(type) {
	case kafka.AssignedPartitions:
		m.metrics.rebalances.WithLabelValues("assigned").Inc()
		m.config.Log.Info("partitions assigned", "partitions", change.String())
		partitions := m.begin(change.Partitions)
		m.tracker.assign(places(partitions))
		err = client.IncrementalAssign(partitions)
		// The client remembers a pause from when a partition was last ours.
		m.applyPaused(change.Partitions)
		m.joined.Store(true)

	case kafka.RevokedPartitions:
		// What is in hand was not begun, or has failed: the next owner reads it
		// again. What is done gets committed while the partition is ours; if it
		// is not any more, its offsets are its new owner's.
		crash.Point(crash.WorkerRevokedNotReleased)
		kind := "revoked"
		if client.AssignmentLost() {
			kind = "lost"
			m.joined.Store(false)
		} else {
			m.flush()
		}
		m.metrics.rebalances.WithLabelValues(kind).Inc()
		m.config.Log.Info("partitions "+kind, "partitions", change.String())
		m.tracker.release(places(change.Partitions))
		if m.transactor != nil {
			m.transactor.released(places(change.Partitions))
		}
		err = client.IncrementalUnassign(change.Partitions)
	}
	if err != nil { // the group would wait for ever for the answer
		m.end = fmt.Errorf("answer a rebalance of group %s: %w", m.config.Group, err)
	}
	return nil
}

// leave commits for the last time and leaves the group. Where the client is
// beyond repair or the broker silent its Close would never return; then the end
// of the process has to do.
func (m *member) leave(committing *sync.WaitGroup) {
	crash.Point(crash.WorkerEndingNotLeft)
	m.joined.Store(false)
	close(m.stop)
	if m.end != nil && !joinsAgain(m.end) {
		return
	}
	left := make(chan error, 1)
	go func() {
		committing.Wait()
		left <- m.client.Close()
	}()
	select {
	case err := <-left:
		if err != nil {
			m.config.Log.Warn("consumer group not left in order", "error", err)
		}
	case <-time.After(patience):
		m.config.Log.Warn("Kafka does not answer; left without its word that the last offsets are committed")
	}
}

// outlive is ctx with its end put off by grace.
func outlive(ctx context.Context, grace time.Duration) (context.Context, context.CancelFunc) {
	longer, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(grace, cancel) })
	return longer, func() {
		stop()
		cancel()
	}
}

// toRecord keeps the difference between no value (a tombstone) and an empty one.
func toRecord(message *kafka.Message) event.Record {
	headers := make([]event.Header, len(message.Headers))
	for i, header := range message.Headers {
		headers[i] = event.Header(header)
	}
	return event.Record{
		Topic:     *message.TopicPartition.Topic,
		Partition: message.TopicPartition.Partition,
		Offset:    int64(message.TopicPartition.Offset),
		Time:      message.Timestamp,
		Key:       message.Key,
		Value:     message.Value,
		Headers:   headers,
	}
}

func places(partitions []kafka.TopicPartition) []place {
	places := make([]place, len(partitions))
	for i, partition := range partitions {
		places[i] = place{*partition.Topic, partition.Partition}
	}
	return places
}

func topicPartitions(places []place) []kafka.TopicPartition {
	partitions := make([]kafka.TopicPartition, len(places))
	for i, place := range places {
		partitions[i] = kafka.TopicPartition{Topic: &place.topic, Partition: place.partition}
	}
	return partitions
}

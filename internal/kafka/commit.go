package kafka

import (
	"errors"
	"time"

	"github.com/confluentinc/confluent-kafka-go/v2/kafka"
)

// commitApplied commits what was applied, in a goroutine of its own, so that
// the next batch need not wait for Kafka. While one commit is under way, the
// offsets of further batches become one commit. At the end it commits what is
// left.
func (m *member) commitApplied() {
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-m.stop:
			m.commit()
			return
		case <-m.applied:
			m.commit()
		case flushed := <-m.flushes:
			m.commit()
			close(flushed)
		case <-ticker.C:
			m.lookAround()
			m.commit() // what failed, again
		}
	}
}

func (m *member) wakeCommitting() {
	select {
	case m.applied <- struct{}{}:
	default: // it will see this batch too
	}
}

// flush waits until what was applied is committed.
func (m *member) flush() {
	timeout := time.After(patience)
	flushed := make(chan struct{})
	select {
	case m.flushes <- flushed:
	case <-m.stop: // the last commit has been
		return
	case <-timeout:
		return
	}
	select {
	case <-flushed:
	case <-timeout:
	}
}

// commit tells Kafka which offsets are applied. If it fails nothing is lost:
// the offsets stay pending, and if this member dies or loses the partition, the
// records are read again and the handler knows them.
func (m *member) commit() {
	origins := m.origins.all() // before the offsets (see topicIDs)
	offsets := m.tracker.pending()
	if m.transactor != nil { // its transactions have moved them already
		m.tracker.committed(offsets)
		return
	}
	if len(offsets) == 0 || m.expelled.Load() || m.client.AssignmentLost() {
		return
	}
	var partitions []kafka.TopicPartition
	for place, offset := range offsets {
		partitions = append(partitions, kafka.TopicPartition{
			Topic: &place.topic, Partition: place.partition, Offset: kafka.Offset(offset), Metadata: new(origins[place]),
		})
	}
	if _, err := m.client.CommitOffsets(partitions); err != nil {
		m.metrics.commitFailures.Inc()
		m.config.Log.Warn("offsets not committed; records may be read again", "error", err)
		if fault, ok := errors.AsType[kafka.Error](err); ok && fault.Code() == kafka.ErrUnknownMemberID {
			m.expelled.Store(true)
		}
		return
	}
	m.tracker.committed(offsets)
	m.config.OnCommitted()
}

// lookAround measures how far behind each partition is, and finds out whether
// brokers that seemed away are (the client says so of an idle connection too)
// or are back (which it does not say).
func (m *member) lookAround() {
	if m.transactor == nil { // which measures it by itself
		m.metrics.lag.Reset()
		for place, offset := range m.tracker.positions() {
			if _, end, err := m.client.GetWatermarkOffsets(place.topic, place.partition); err == nil && end >= 0 {
				m.metrics.setLag(place, end-offset)
			}
		}
	}
	if m.doubtful.Load() {
		_, err := m.client.GetMetadata(&m.config.Topics[0], false, 1000)
		m.unreachable.Store(err != nil)
		m.doubtful.Store(err != nil)
	}
}

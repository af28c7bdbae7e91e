package kafka

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/confluentinc/confluent-kafka-go/v2/kafka"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/transact"
)

// replay reads partitions from their beginning to where they ended when it was
// opened, committed records only.
//
// The end is that of all records, not the last stable offset, which is where
// committed records end at that moment: a transaction may be decided while its
// marker is not in every partition yet, and its records would be left out. So
// replay waits for each transaction that was open.
type replay struct {
	client *kafka.Consumer
	ends   map[place]int64 // where each partition ends
	left   map[place]int64 // those that are not read to their end
	at     map[place]int64
}

func openReplay(ctx context.Context, brokers string, places []place) (*replay, error) {
	ends, err := listOffsets(ctx, brokers, places, kafka.LatestOffsetSpec, kafka.IsolationLevelReadUncommitted)
	if err != nil {
		return nil, err
	}
	client, err := newReplayClient(brokers, "error") // if a partition loses what is being read
	if err != nil {
		return nil, err
	}
	r := &replay{client: client, ends: ends, left: make(map[place]int64), at: make(map[place]int64)}
	var partitions []kafka.TopicPartition
	for at, end := range ends {
		if end > 0 {
			r.left[at] = end
			partitions = append(partitions, kafka.TopicPartition{Topic: &at.topic, Partition: at.partition, Offset: kafka.OffsetBeginning})
		}
	}
	if err := client.Assign(partitions); err != nil {
		r.close()
		return nil, fmt.Errorf("read topics: %w", err)
	}
	return r, nil
}

func newReplayClient(brokers, reset string) (*kafka.Consumer, error) {
	client, err := kafka.NewConsumer(&kafka.ConfigMap{
		"bootstrap.servers":          brokers,
		"client.id":                  "onceledger-replay",
		"group.id":                   "onceledger-replay", // never joined
		"enable.auto.commit":         false,
		"enable.auto.offset.store":   false,
		"auto.offset.reset":          reset,
		"isolation.level":            "read_committed",
		"enable.partition.eof":       true,
		"queued.max.messages.kbytes": 16 << 10,
		"fetch.queue.backoff.ms":     10,
		"fetch.wait.max.ms":          100,
		"socket.timeout.ms":          10_000,
		"enable.metrics.push":        false,
		"log_level":                  0,
	})
	if err != nil {
		return nil, fmt.Errorf("read topics: %w", err)
	}
	return client, nil
}

// read goes on for a time and says whether all is read.
func (r *replay) read(wait time.Duration, use func(event.Record) error) (bool, error) {
	until := time.Now().Add(wait)
	for len(r.left) > 0 {
		left := time.Until(until)
		if left <= 0 {
			return false, nil
		}
		switch e := r.client.Poll(int(min(left, tick)/time.Millisecond) + 1).(type) {
		case *kafka.Message:
			if err := e.TopicPartition.Error; err != nil {
				return false, fmt.Errorf("read %s: %w", e.String(), err)
			}
			at := place{*e.TopicPartition.Topic, e.TopicPartition.Partition}
			offset := int64(e.TopicPartition.Offset)
			r.at[at] = offset + 1
			end, wanted := r.left[at]
			if !wanted || offset >= end {
				delete(r.left, at)
				continue // written since; there may be more that is not committed yet
			}
			if err := use(toRecord(e)); err != nil {
				return false, err
			}
			if offset+1 >= end {
				delete(r.left, at)
			}
		case kafka.PartitionEOF:
			// The client says so at the last stable offset, with all markers
			// and aborted records before it counted.
			at := place{*e.Topic, e.Partition}
			r.at[at] = int64(e.Offset)
			if int64(e.Offset) >= r.left[at] {
				delete(r.left, at)
			}
		case kafka.Error:
			if e.IsFatal() || e.Code() == kafka.ErrAutoOffsetReset {
				return false, fmt.Errorf("read topics: %w", e)
			}
		}
	}
	return true, nil
}

// close does not wait for brokers that are silent.
func (r *replay) close() {
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = r.client.Close()
	}()
	select {
	case <-done:
	case <-time.After(patience):
	}
}

// describe says what is waited for.
func (r *replay) describe() string {
	for at, end := range r.left {
		return fmt.Sprintf("restoring state: %s[%d] is read to offset %d of %d; if that does not move, a transaction is open there",
			at.topic, at.partition, r.at[at], end)
	}
	return "restoring state"
}

// checkPartitions refuses topics in which a partition has no place for its state.
func (t *Transactor) checkPartitions(ctx context.Context) error {
	return withAdmin(t.config.Brokers, func(admin *kafka.AdminClient) error {
		specs := []TopicSpec{{Name: t.source}}
		for _, topic := range t.config.State {
			specs = append(specs, TopicSpec{Name: topic})
		}
		counts, err := countPartitions(ctx, admin, specs)
		if err != nil {
			return err
		}
		for _, topic := range t.config.State {
			if counts[topic] < counts[t.source] {
				return fmt.Errorf("topic %[1]s has %[2]d partitions and %[3]s has %[4]d: give it as many with "+
					"kafka-topics.sh --alter --topic %[1]s --partitions %[4]d", topic, counts[topic], t.source, counts[t.source])
			}
		}
		return nil
	})
}

// ReadTopic gives use every committed record of a topic, in the order of its
// partitions, up to where the topic ends at the moment of the call.
func ReadTopic(ctx context.Context, brokers, topic string, use func(event.Record) error) error {
	var places []place
	err := withAdmin(brokers, func(admin *kafka.AdminClient) error {
		count, err := countPartitions(ctx, admin, []TopicSpec{{Name: topic}})
		for partition := range int32(count[topic]) {
			places = append(places, place{topic, partition})
		}
		if err == nil && count[topic] == 0 {
			err = fmt.Errorf("topic %s is missing", topic)
		}
		return err
	})
	if err != nil {
		return err
	}
	r, err := openReplay(ctx, brokers, places)
	if err != nil {
		return err
	}
	defer r.close()
	for {
		done, err := r.read(time.Second, use)
		if err != nil || done {
			return err
		}
		if ctx.Err() != nil {
			return fmt.Errorf("%s: %w", r.describe(), ctx.Err())
		}
	}
}

// listOffsets asks for an offset of each of some partitions.
func listOffsets(ctx context.Context, brokers string, places []place, spec kafka.OffsetSpec, level kafka.IsolationLevel) (map[place]int64, error) {
	var offsets map[place]int64
	err := withAdmin(brokers, func(admin *kafka.AdminClient) (err error) {
		offsets, err = askOffsets(ctx, admin, places, spec, level)
		return err
	})
	return offsets, err
}

func askOffsets(ctx context.Context, admin *kafka.AdminClient, places []place, spec kafka.OffsetSpec, level kafka.IsolationLevel) (map[place]int64, error) {
	asked := make(map[kafka.TopicPartition]kafka.OffsetSpec)
	for _, at := range places {
		asked[kafka.TopicPartition{Topic: &at.topic, Partition: at.partition}] = spec
	}
	offsets := make(map[place]int64)
	if len(asked) == 0 {
		return offsets, nil
	}
	answer, err := admin.ListOffsets(ctx, asked, kafka.SetAdminIsolationLevel(level), kafka.SetAdminRequestTimeout(10*time.Second))
	if err != nil {
		return nil, fmt.Errorf("read offsets of topics: %w", err)
	}
	for at, result := range answer.ResultInfos {
		if result.Error.Code() != kafka.ErrNoError {
			return nil, fmt.Errorf("read offsets of %s[%d]: %w", *at.Topic, at.Partition, result.Error)
		}
		offsets[place{*at.Topic, at.Partition}] = int64(result.Offset)
	}
	return offsets, nil
}

// loader restores partitions of a transactor.
type loader struct {
	*replay
	partitions []int32
	sources    map[int32]transact.Source
}

func (t *Transactor) openLoader(ctx context.Context, m *member, partitions []int32) (*loader, error) {
	l := &loader{partitions: partitions, sources: make(map[int32]transact.Source)}
	origins := m.origins.all() // before the offsets (see topicIDs)
	var sources []place
	var states []place
	var wanted []kafka.TopicPartition
	for _, partition := range partitions {
		t.stage.Begin(partition)
		sources = append(sources, place{t.source, partition})
		wanted = append(wanted, kafka.TopicPartition{Topic: &t.source, Partition: partition})
		for _, topic := range t.config.State {
			states = append(states, place{topic, partition})
		}
	}
	// The offsets before the state. Kafka does not answer while a transaction
	// that would move them is undecided, so afterwards none of an earlier owner
	// can be committed any more, and what was committed is below the end.
	if err := t.checkPartitions(ctx); err != nil {
		return nil, err
	}
	committed, err := m.client.Committed(wanted, int(patience/time.Millisecond))
	if err != nil {
		return nil, fmt.Errorf("read offsets of group %s: %w", t.config.Group, err)
	}
	first, err := listOffsets(ctx, t.config.Brokers, sources, kafka.EarliestOffsetSpec, kafka.IsolationLevelReadUncommitted)
	if err != nil {
		return nil, err
	}
	for _, at := range committed {
		if at.Error != nil {
			return nil, fmt.Errorf("read offset of group %s in %s[%d]: %w", t.config.Group, *at.Topic, at.Partition, at.Error)
		}
		source := transact.Source{Committed: int64(at.Offset), First: first[place{t.source, at.Partition}],
			Topic: origins[place{t.source, at.Partition}]}
		if at.Offset < 0 {
			source.Committed = -1
		}
		l.sources[at.Partition] = source
		t.mutex.Lock()
		if _, known := t.reached[at.Partition]; !known {
			t.reached[at.Partition] = max(source.Committed, source.First)
		}
		t.mutex.Unlock()
	}
	l.replay, err = openReplay(ctx, t.config.Brokers, states)
	return l, err
}

// groupOffsets is what a group has committed in partitions of one topic, without
// those of which it has committed nothing. A consumer that joins nothing is
// asked: librdkafka's admin client, asked for a group's offsets, crashes the
// process when the group's coordinator moves or is only being chosen
// (librdkafka issue 5040).
func groupOffsets(brokers, group string, partitions []kafka.TopicPartition) (map[int32]int64, error) {
	client, err := kafka.NewConsumer(&kafka.ConfigMap{
		"bootstrap.servers":   brokers,
		"client.id":           "onceledger-admin",
		"group.id":            group,
		"enable.auto.commit":  false,
		"isolation.level":     "read_uncommitted", // or it waits while a transaction on the offsets is open
		"socket.timeout.ms":   10_000,
		"enable.metrics.push": false,
		"log_level":           0,
	})
	if err != nil {
		return nil, fmt.Errorf("read offsets of group %s: %w", group, err)
	}
	defer func() { _ = client.Close() }()
	answered, err := client.Committed(partitions, 10_000)
	if fault, ok := errors.AsType[kafka.Error](err); ok && fault.Code() == kafka.ErrGroupIDNotFound {
		return map[int32]int64{}, nil // it has committed nothing yet
	}
	if err != nil {
		return nil, fmt.Errorf("read offsets of group %s: %w", group, err)
	}
	committed := make(map[int32]int64)
	for _, at := range answered {
		if at.Error != nil {
			return nil, fmt.Errorf("read offset of group %s in %s[%d]: %w", group, *at.Topic, at.Partition, at.Error)
		}
		if at.Offset >= 0 {
			committed[at.Partition] = int64(at.Offset)
		}
	}
	return committed, nil
}

// GroupProgress is how far a group has come in each partition of a topic, and
// where each partition ends, records of open transactions included: whoever asks
// whether the group has read what is there must not take for the end what a
// transaction that hangs holds up. A group that has read every record counts as
// being at the end, though only markers of transactions may lie there.
func GroupProgress(ctx context.Context, brokers, group, topic string) (reached, end map[int32]int64, err error) {
	reached, stable, err := GroupLag(ctx, brokers, group, topic)
	if err != nil {
		return nil, nil, err
	}
	var places []place
	for partition := range stable {
		places = append(places, place{topic, partition})
	}
	ends, err := listOffsets(ctx, brokers, places, kafka.LatestOffsetSpec, kafka.IsolationLevelReadUncommitted)
	if err != nil {
		return nil, nil, err
	}
	end = make(map[int32]int64)
	for at, offset := range ends {
		end[at.partition] = offset
		if reached[at.partition] >= offset || stable[at.partition] < offset {
			continue
		}
		holds, err := holdsRecord(ctx, brokers, at, reached[at.partition], offset)
		if err != nil {
			return nil, nil, err
		}
		if !holds {
			reached[at.partition] = offset
		}
	}
	return reached, end, nil
}

// Behind is how many offsets a group has not come to in a topic.
func Behind(ctx context.Context, brokers, group, topic string) (int64, error) {
	reached, end, err := GroupProgress(ctx, brokers, group, topic)
	var behind int64
	for partition, end := range end {
		behind += max(0, end-reached[partition])
	}
	return behind, err
}

// holdsRecord tells whether a committed record lies between two offsets.
func holdsRecord(ctx context.Context, brokers string, at place, from, end int64) (bool, error) {
	client, err := newReplayClient(brokers, "earliest") // what is gone by retention is not waited for
	if err != nil {
		return false, err
	}
	defer func() { _ = client.Close() }()
	err = client.Assign([]kafka.TopicPartition{{Topic: &at.topic, Partition: at.partition, Offset: kafka.Offset(from)}})
	if err != nil {
		return false, fmt.Errorf("read %s[%d]: %w", at.topic, at.partition, err)
	}
	for until := time.Now().Add(patience); ctx.Err() == nil && time.Now().Before(until); {
		switch e := client.Poll(int(tick / time.Millisecond)).(type) {
		case *kafka.Message:
			if err := e.TopicPartition.Error; err != nil {
				return false, fmt.Errorf("read %s: %w", e.String(), err)
			}
			return int64(e.TopicPartition.Offset) < end, nil
		case kafka.PartitionEOF:
			if int64(e.Offset) >= end {
				return false, nil
			}
		}
	}
	return false, fmt.Errorf("read %s[%d]: no answer in time", at.topic, at.partition)
}

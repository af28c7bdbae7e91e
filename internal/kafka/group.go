package kafka

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/confluentinc/confluent-kafka-go/v2/kafka"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/event"
)

// GroupMember is a member of a consumer group, as the brokers know it.
type GroupMember struct {
	InstanceID string // of a static member, which stays for its session timeout after it has ended
	ClientID   string
	Host       string
	Partitions map[string][]int32 // by topic
}

func (m GroupMember) String() string {
	text := fmt.Sprintf("%s of %s at %s", cmp.Or(m.InstanceID, "a member"), m.ClientID, strings.TrimPrefix(m.Host, "/"))
	for _, topic := range slices.Sorted(maps.Keys(m.Partitions)) {
		text += fmt.Sprintf(" with %s%d", topic, m.Partitions[topic])
	}
	return text
}

// GroupMembers asks the brokers who is in a group; nobody is in one that they do
// not know.
func GroupMembers(ctx context.Context, brokers, group string) ([]GroupMember, error) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	// Not librdkafka's: its answers have no instance ids.
	client, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(brokers, ",")...), kgo.ClientID("onceledger-admin"))
	if err != nil {
		return nil, fmt.Errorf("ask for group %s: %w", group, err)
	}
	defer client.Close()
	described, err := kadm.NewClient(client).DescribeGroups(ctx, group)
	if err == nil {
		err = described.Error()
	}
	if errors.Is(err, kerr.GroupIDNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("ask for the members of group %s: %w", group, err)
	}
	var members []GroupMember
	for _, member := range described[group].Members {
		m := GroupMember{ClientID: member.ClientID, Host: member.ClientHost, Partitions: make(map[string][]int32)}
		if member.InstanceID != nil {
			m.InstanceID = *member.InstanceID
		}
		if assigned, ok := member.Assigned.AsConsumer(); ok {
			for _, topic := range assigned.Topics {
				m.Partitions[topic.Topic] = slices.Sorted(slices.Values(topic.Partitions))
			}
		}
		members = append(members, m)
	}
	return members, nil
}

// Range is some of a partition: from the record at From up to, and without, the
// one at To.
type Range struct{ From, To int64 }

// FirstOffsets is where each partition of a topic begins.
func FirstOffsets(ctx context.Context, brokers, topic string) (map[int32]int64, error) {
	return topicOffsets(ctx, brokers, topic, kafka.EarliestOffsetSpec)
}

// OffsetsAt is the first record of each partition that was written at a moment or
// later. A partition that has none is not in it.
func OffsetsAt(ctx context.Context, brokers, topic string, at time.Time) (map[int32]int64, error) {
	offsets, err := topicOffsets(ctx, brokers, topic, kafka.NewOffsetSpecForTimestamp(at.UnixMilli()))
	maps.DeleteFunc(offsets, func(_ int32, offset int64) bool { return offset < 0 })
	return offsets, err
}

func topicOffsets(ctx context.Context, brokers, topic string, spec kafka.OffsetSpec) (map[int32]int64, error) {
	offsets := make(map[int32]int64)
	err := withAdmin(brokers, func(admin *kafka.AdminClient) error {
		count, err := countPartitions(ctx, admin, []TopicSpec{{Name: topic}})
		if err != nil {
			return err
		}
		if count[topic] == 0 {
			return fmt.Errorf("topic %s is missing", topic)
		}
		var places []place
		for partition := range int32(count[topic]) {
			places = append(places, place{topic, partition})
		}
		found, err := askOffsets(ctx, admin, places, spec, kafka.IsolationLevelReadUncommitted)
		for at, offset := range found {
			offsets[at.partition] = offset
		}
		return err
	})
	return offsets, err
}

// silence is how long a reader of ranges waits for brokers that bring nothing.
const silence = 30 * time.Second

// ReadRanges gives use the committed records of some ranges of a topic, up to most
// at once, those of a partition in order. It joins no group and commits nothing:
// for everybody else it has not happened.
func ReadRanges(ctx context.Context, brokers, topic string, ranges map[int32]Range, most int, use func([]event.Record) error) error {
	client, err := newReplayClient(brokers, "error") // if the records go while they are being read
	if err != nil {
		return err
	}
	defer (&replay{client: client}).close()
	left := make(map[int32]int64)
	var partitions []kafka.TopicPartition
	for partition, r := range ranges {
		if r.From < r.To {
			left[partition] = r.To
			partitions = append(partitions, kafka.TopicPartition{Topic: &topic, Partition: partition, Offset: kafka.Offset(r.From)})
		}
	}
	if err := client.Assign(partitions); err != nil {
		return fmt.Errorf("read topic %s: %w", topic, err)
	}

	var batch []event.Record
	heard := time.Now()
	flush := func() error {
		if len(batch) == 0 {
			return nil
		}
		err := use(batch)
		batch, heard = nil, time.Now() // what use has taken is not the brokers' silence
		return err
	}
	for len(left) > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		switch e := client.Poll(int(tick / time.Millisecond)).(type) {
		case *kafka.Message:
			if err := e.TopicPartition.Error; err != nil {
				return fmt.Errorf("read %s: %w", e.String(), err)
			}
			heard = time.Now()
			partition, offset := e.TopicPartition.Partition, int64(e.TopicPartition.Offset)
			end, wanted := left[partition]
			if wanted && offset < end {
				batch = append(batch, toRecord(e))
			}
			if offset+1 >= end {
				delete(left, partition)
			}
			if len(batch) >= most {
				if err := flush(); err != nil {
					return err
				}
			}
		case kafka.PartitionEOF:
			heard = time.Now()
			if int64(e.Offset) >= left[e.Partition] {
				delete(left, e.Partition)
			}
		case kafka.Error:
			if e.IsFatal() || e.Code() == kafka.ErrAutoOffsetReset {
				return fmt.Errorf("read topic %s: %w", topic, e)
			}
		case nil:
			if err := flush(); err != nil {
				return err
			}
			if time.Since(heard) > silence {
				return fmt.Errorf("read topic %s: the brokers have brought nothing for %s", topic, silence)
			}
		}
	}
	return flush()
}

package kafka_test

import (
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/kafkatest"
)

// outcomes are what a producer has reported.
type outcomes struct {
	mutex     sync.Mutex
	delivered map[uint64]error
	reachable []error
}

func (o *outcomes) of(seq uint64) (err error, known bool) {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	err, known = o.delivered[seq]
	return err, known
}

func (o *outcomes) brokers() []error {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	return o.reachable
}

func (o *outcomes) wait(t *testing.T, until func() bool) {
	t.Helper()
	require.Eventually(t, until, 30*time.Second, time.Millisecond)
}

func (o *outcomes) waitFor(t *testing.T, seqs uint64) {
	t.Helper()
	o.wait(t, func() bool {
		o.mutex.Lock()
		defer o.mutex.Unlock()
		return uint64(len(o.delivered)) == seqs
	})
}

func newProducer(t *testing.T, brokers string) (*kafka.Producer, *outcomes) {
	t.Helper()
	seen := &outcomes{delivered: make(map[uint64]error)}
	producer, err := kafka.NewProducer(kafka.ProducerConfig{
		Brokers: brokers,
		Log:     slog.New(slog.DiscardHandler),
		Delivered: func(seq uint64, err error) {
			seen.mutex.Lock()
			defer seen.mutex.Unlock()
			seen.delivered[seq] = err
		},
		Reachable: func(err error) {
			seen.mutex.Lock()
			defer seen.mutex.Unlock()
			seen.reachable = append(seen.reachable, err)
		},
		TopicTimeout: 500 * time.Millisecond,
	})
	require.NoError(t, err)
	t.Cleanup(producer.Close)
	return producer, seen
}

func recordFor(topic, key, value string) event.Record {
	return event.Record{
		Topic:   topic,
		Key:     []byte(key),
		Value:   []byte(value),
		Headers: []event.Header{{Key: "ce_id", Value: []byte(value)}},
	}
}

func TestProducer(t *testing.T) {
	t.Parallel()

	t.Run("PutsAKeyWhereTheJavaClientsPutIt", func(t *testing.T) {
		t.Parallel()

		topic := kafkatest.Topic(t, 6)
		producer, seen := newProducer(t, kafkatest.Brokers(t))
		for i := range uint64(50) {
			require.NoError(t, producer.Publish(recordFor(topic, fmt.Sprint("key", i), "ours"), i))
			kafkatest.Produce(t, topic, kafkatest.Record{Key: []byte(fmt.Sprint("key", i)), Value: []byte("theirs")})
		}
		seen.waitFor(t, 50)
		partitions := make(map[string]map[int32]bool)
		for _, record := range kafkatest.Records(t, topic) {
			if partitions[string(record.Key)] == nil {
				partitions[string(record.Key)] = make(map[int32]bool)
			}
			partitions[string(record.Key)][record.Partition] = true
			if string(record.Value) == "ours" {
				id, ok := kafkatest.Header(record, "ce_id")
				require.True(t, ok)
				require.Equal(t, "ours", id)
			}
		}
		require.Len(t, partitions, 50)
		for key, used := range partitions {
			require.Len(t, used, 1, key)
		}
	})

	// The connection breaks between a record and its acknowledgement, again and
	// again: what is sent twice is there once, in order.
	t.Run("SendsOnceAndInOrderThroughOutages", func(t *testing.T) {
		t.Parallel()

		broker := kafkatest.New(t)
		topic := broker.Topic(t, 1)
		producer, seen := newProducer(t, broker.Brokers())
		const records = 3000
		for i := range uint64(records) {
			if i%500 == 250 {
				broker.Pause()
			}
			require.NoError(t, producer.Publish(recordFor(topic, "key", strconv.FormatUint(i, 10)), i))
			if i%500 == 260 {
				broker.Resume()
			}
		}
		seen.waitFor(t, records)
		onTopic := broker.Records(t, topic)
		require.Len(t, onTopic, records)
		for i, record := range onTopic {
			require.Equal(t, strconv.Itoa(i), string(record.Value))
		}
	})

	t.Run("SaysWhenTheBrokerIsAwayAndWhenItIsBack", func(t *testing.T) {
		t.Parallel()

		broker := kafkatest.New(t)
		topic := broker.Topic(t, 1)
		broker.Pause()
		producer, seen := newProducer(t, broker.Brokers())
		require.NoError(t, producer.Publish(recordFor(topic, "key", "value"), 1))
		seen.wait(t, func() bool { return len(seen.brokers()) == 1 })
		require.ErrorContains(t, seen.brokers()[0], broker.Brokers())
		_, known := seen.of(1)
		require.False(t, known, "it waits")

		broker.Resume()
		seen.wait(t, func() bool { return len(seen.brokers()) == 2 })
		require.NoError(t, seen.brokers()[1])
		seen.waitFor(t, 1)
		err, _ := seen.of(1)
		require.NoError(t, err)
	})

	for name, tt := range map[string]struct {
		topic   func(t *testing.T, broker *kafkatest.Broker) string
		refused bool
	}{
		"RefusesWhatIsTooLarge": {func(t *testing.T, broker *kafkatest.Broker) string {
			size := "200"
			require.NoError(t, broker.CreateTopic("small", 1, map[string]string{"max.message.bytes": size}))
			return "small"
		}, true},
		"RefusesATopicThatIsNotThere": {func(*testing.T, *kafkatest.Broker) string { return "nowhere" }, true},
		"RefusesATopicThatIsNotAllowed": {func(t *testing.T, broker *kafkatest.Broker) string {
			topic := broker.Topic(t, 1)
			broker.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Err: kerr.TopicAuthorizationFailed, Count: -1})
			return topic
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			broker := kafkatest.New(t)
			topic := tt.topic(t, broker)
			producer, seen := newProducer(t, broker.Brokers())
			require.NoError(t, producer.Publish(recordFor(topic, "key", string(noise(500))), 1))
			for i := range uint64(10) {
				if producer.Publish(recordFor(topic, "key", "small"), 2+i) != nil {
					break // it is done
				}
			}
			seen.wait(t, func() bool { _, known := seen.of(1); return known })
			err, _ := seen.of(1)
			var refused *kafka.RefusedError
			require.ErrorAs(t, err, &refused)
			require.True(t, refused.Refused())
			require.Equal(t, topic, refused.Topic)
			if name != "RefusesATopicThatIsNotThere" {
				require.Empty(t, broker.Records(t, topic), "nothing passes a record that is refused")
			}
		})
	}

	t.Run("TriesAgainWhatMayPass", func(t *testing.T) {
		t.Parallel()

		broker := kafkatest.New(t)
		topic := broker.Topic(t, 1)
		broker.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Err: kerr.NotEnoughReplicas, Count: 3})
		producer, seen := newProducer(t, broker.Brokers())
		require.NoError(t, producer.Publish(recordFor(topic, "key", "value"), 1))
		seen.waitFor(t, 1)
		err, _ := seen.of(1)
		require.NoError(t, err)
		require.Len(t, broker.Records(t, topic), 1)
	})
}

// noise does not compress.
func noise(size int) []byte {
	noise := make([]byte, size)
	state := uint32(1)
	for i := range noise {
		state = state*1664525 + 1013904223
		noise[i] = byte('!' + state>>24%90)
	}
	return noise
}

// TestTopicIsMadeAnewUnderAProducer: the producer is done, whatever its client makes
// of the new topic, and says so.
func TestTopicIsMadeAnewUnderAProducer(t *testing.T) {
	t.Parallel()

	broker := kafkatest.New(t)
	topic := broker.Topic(t, 1)
	producer, seen := newProducer(t, broker.Brokers())
	require.NoError(t, producer.Publish(recordFor(topic, "a", "a"), 1))
	seen.waitFor(t, 1)

	// Again and again: what it has not looked at yet, it cannot miss.
	var err error
	require.Eventually(t, func() bool {
		require.NoError(t, broker.DeleteTopic(topic))
		require.NoError(t, broker.CreateTopic(topic, 1, nil))
		err, _ = seen.of(0)
		return err != nil
	}, 30*time.Second, time.Second)
	require.ErrorContains(t, err, "topic "+topic+" was deleted and made again")
	var refused *kafka.RefusedError
	require.NotErrorAs(t, err, &refused, "starting over helps")
}

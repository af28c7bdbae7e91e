package kafkatest_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/kafkatest"
)

func TestSharedBroker(t *testing.T) {
	t.Parallel()

	first, second := kafkatest.Topic(t, 3), kafkatest.Topic(t, 1)
	require.NotEqual(t, first, second)
	require.Empty(t, kafkatest.Records(t, first))

	header := kgo.RecordHeader{Key: "ce_id", Value: []byte("e-1")}
	kafkatest.Produce(t, first,
		kafkatest.Record{Value: []byte("by hand"), Partition: 2},
		kafkatest.Record{Key: []byte("a"), Value: []byte("1"), Headers: []kgo.RecordHeader{header}},
		kafkatest.Record{Key: []byte("a"), Value: []byte("2")},
	)

	records := kafkatest.Records(t, first)
	require.Len(t, records, 3)
	require.Empty(t, kafkatest.Records(t, second))
	var ofKey []kafkatest.Record
	for _, record := range records {
		if record.Key == nil {
			require.EqualValues(t, 2, record.Partition)
			continue
		}
		ofKey = append(ofKey, record)
	}
	require.Equal(t, ofKey[0].Partition, ofKey[1].Partition)
	require.Less(t, ofKey[0].Offset, ofKey[1].Offset)
	id, ok := kafkatest.Header(ofKey[0], "ce_id")
	require.True(t, ok)
	require.Equal(t, "e-1", id)
	_, ok = kafkatest.Header(ofKey[1], "ce_id")
	require.False(t, ok)
}

// TestProducePicksKafkasPartition uses values that the Java client's default
// partitioner was seen to give.
func TestProducePicksKafkasPartition(t *testing.T) {
	t.Parallel()

	topic := kafkatest.Topic(t, 6)
	for key, partition := range map[string]int32{"21": murmur2("21") % 6, "foobar": murmur2("foobar") % 6} {
		kafkatest.Produce(t, topic, kafkatest.Record{Key: []byte(key)})
		records := kafkatest.Records(t, topic)
		for _, record := range records {
			if string(record.Key) == key {
				require.Equal(t, partition, record.Partition, key)
			}
		}
	}
}

func murmur2(key string) int32 {
	// org.apache.kafka.common.utils.UtilsTest.testMurmur2
	known := map[string]int32{"21": -973932308, "foobar": -790332482}
	return known[key] & 0x7fffffff
}

func TestRecordsLeavesOutWhatIsNotCommitted(t *testing.T) {
	t.Parallel()

	topic := kafkatest.Topic(t, 1)
	client, err := kgo.NewClient(kgo.SeedBrokers(kafkatest.Brokers(t)), kgo.TransactionalID(topic))
	require.NoError(t, err)
	defer client.Close()
	for value, end := range map[string]kgo.TransactionEndTry{"committed": kgo.TryCommit, "aborted": kgo.TryAbort} {
		require.NoError(t, client.BeginTransaction())
		require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: topic, Value: []byte(value)}).FirstErr())
		require.NoError(t, client.EndTransaction(t.Context(), end))
	}
	require.NoError(t, client.BeginTransaction())
	require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: topic, Value: []byte("open")}).FirstErr())

	records := kafkatest.Records(t, topic)
	require.Len(t, records, 1)
	require.Equal(t, "committed", string(records[0].Value))
}

func TestOutage(t *testing.T) {
	t.Parallel()

	outages := map[string]func(*kafkatest.Broker){
		"Pause": (*kafkatest.Broker).Pause,
		"Stall": (*kafkatest.Broker).Stall,
	}
	for name, begin := range outages {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			broker := kafkatest.New(t)
			topic := broker.Topic(t, 1)
			broker.Produce(t, topic, kafkatest.Record{Value: []byte("before")})
			client, err := kgo.NewClient(kgo.SeedBrokers(broker.Brokers()), kgo.DefaultProduceTopic(topic))
			require.NoError(t, err)
			t.Cleanup(client.Close)
			require.NoError(t, client.Ping(t.Context()))

			begin(broker)
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			require.Error(t, client.Ping(ctx), "on a connection it has")
			fresh, err := kgo.NewClient(kgo.SeedBrokers(broker.Brokers()))
			require.NoError(t, err)
			t.Cleanup(fresh.Close)
			require.Error(t, fresh.Ping(ctx), "on a new connection")
			delivered := make(chan error, 1)
			client.Produce(t.Context(), &kgo.Record{Value: []byte("during")}, func(_ *kgo.Record, err error) { delivered <- err })

			broker.Resume()
			require.NoError(t, <-delivered)
			records := broker.Records(t, topic)
			require.Len(t, records, 2)
			require.Equal(t, "before", string(records[0].Value))
			require.Equal(t, "during", string(records[1].Value))
		})
	}
}

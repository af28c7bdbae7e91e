package faults_test

import (
	"context"
	"log/slog"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/faults"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/kafkatest"
)

func splitAddr(t *testing.T, addr string) (host string, port uint16) {
	t.Helper()
	host, text, err := net.SplitHostPort(addr)
	require.NoError(t, err)
	number, err := strconv.ParseUint(text, 10, 16)
	require.NoError(t, err)
	return host, uint16(number)
}

// TestKafkaProxy cuts off acknowledgements, and has a broker be away and silent,
// for a client that was told of nothing but the proxy.
func TestKafkaProxy(t *testing.T) {
	t.Parallel()

	broker := kafkatest.New(t)
	proxy, err := faults.StartKafkaProxy(t.Context(), broker.Brokers())
	require.NoError(t, err)
	t.Cleanup(proxy.Close)
	topic := broker.Topic(t, 1)
	// Not idempotent: what it sends again is there twice.
	client, err := kgo.NewClient(kgo.SeedBrokers(proxy.Brokers()), kgo.DefaultProduceTopic(topic),
		kgo.DisableIdempotentWrite(), kgo.RetryBackoffFn(func(int) time.Duration { return 10 * time.Millisecond }))
	require.NoError(t, err)
	t.Cleanup(client.Close)
	require.NoError(t, client.ProduceSync(t.Context(), kgo.StringRecord("1")).FirstErr())

	proxy.CutAnswers(kmsg.Produce, 1)
	require.NoError(t, client.ProduceSync(t.Context(), kgo.StringRecord("2")).FirstErr())
	require.Equal(t, 1, proxy.Cut())
	var values []string
	for _, record := range broker.Records(t, topic) {
		values = append(values, string(record.Value))
	}
	require.Equal(t, []string{"1", "2", "2"}, values)

	for name, begin := range map[string]func(){"Shut": proxy.Shut, "Silence": proxy.Silence} {
		begin()
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		require.Error(t, client.Ping(ctx), name)
		cancel()
		proxy.Open()
		require.NoError(t, client.Ping(t.Context()), name)
	}
	require.Positive(t, proxy.Break())
	require.NoError(t, client.ProduceSync(t.Context(), kgo.StringRecord("3")).FirstErr())
}

// TestKafkaProxySwallows loses what is written to one partition: the broker never
// sees it, the producer never hears of it, and the other partition's records go on.
func TestKafkaProxySwallows(t *testing.T) {
	t.Parallel()

	broker := kafkatest.New(t)
	proxy, err := faults.StartKafkaProxy(t.Context(), broker.Brokers())
	require.NoError(t, err)
	t.Cleanup(proxy.Close)
	topic := broker.Topic(t, 2)
	delivered := make(chan uint64, 10)
	producer, err := kafka.NewProducer(kafka.ProducerConfig{
		Brokers: proxy.Brokers(), Log: slog.New(slog.DiscardHandler), Reachable: func(error) {},
		Delivered: func(seq uint64, err error) {
			if err == nil {
				delivered <- seq
			}
		},
	})
	require.NoError(t, err)
	t.Cleanup(producer.Close)
	byKey := kgo.StickyKeyPartitioner(nil).ForTopic(topic)
	keys := make(map[int][]byte)
	for i := 0; len(keys) < 2; i++ {
		key := []byte(strconv.Itoa(i))
		keys[byKey.Partition(&kgo.Record{Key: key}, 2)] = key
	}
	write := func(partition int, seq uint64) {
		require.NoError(t, producer.Publish(event.Record{Topic: topic, Key: keys[partition], Value: []byte("{}")}, seq))
	}
	write(0, 1)
	require.EqualValues(t, 1, <-delivered)

	proxy.Swallow(topic, 0)
	write(0, 2)
	require.Eventually(t, func() bool { return proxy.Swallowed() > 0 }, 10*time.Second, 10*time.Millisecond)
	write(1, 3)
	require.EqualValues(t, 3, <-delivered)
	proxy.Release()
	write(1, 4)
	require.EqualValues(t, 4, <-delivered)
	require.Len(t, broker.Records(t, topic), 3, "all but the one that was swallowed")
}

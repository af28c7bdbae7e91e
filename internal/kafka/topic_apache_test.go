//go:build apache

package kafka_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/kafka"
)

// TestTopicIsMadeAnewAtApacheKafka: the same as at the embedded broker, which
// keeps the offsets of a topic that is deleted. A topic of one partition, and a
// static member, which is not to be given what it had.
func TestTopicIsMadeAnewAtApacheKafka(t *testing.T) {
	t.Parallel()
	brokers := startApache(t, nil).Bootstrap()
	const topic = "order.events"
	var mutex sync.Mutex
	applied := make(map[string]bool)
	all := func(round string, count int) bool {
		mutex.Lock()
		defer mutex.Unlock()
		for i := range count {
			if !applied[fmt.Sprintf("%s-%d", round, i)] {
				return false
			}
		}
		return true
	}
	remake := func(round string, partitions, records int) {
		client, err := kgo.NewClient(kgo.SeedBrokers(brokers), kgo.RecordPartitioner(kgo.RoundRobinPartitioner()))
		require.NoError(t, err)
		defer client.Close()
		admin := kadm.NewClient(client)
		if round != "first" {
			_, err := admin.DeleteTopic(t.Context(), topic)
			require.NoError(t, err)
		}
		require.Eventually(t, func() bool { // it may be on its way out still
			_, err := admin.CreateTopic(t.Context(), int32(partitions), 1, nil, topic)
			return err == nil
		}, patience, 20*time.Millisecond)
		for i := range records {
			client.Produce(t.Context(), &kgo.Record{Topic: topic, Value: fmt.Appendf(nil, "%s-%d", round, i)}, nil)
		}
		require.NoError(t, client.Flush(t.Context()))
	}
	start := func() (stop func()) {
		ctx, cancel := context.WithCancel(t.Context())
		consumer, err := kafka.NewConsumer(kafka.ConsumerConfig{
			Brokers: brokers, Group: group, Topics: []string{topic}, InstanceID: "worker-1",
			Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Metrics: prometheus.NewRegistry(),
		})
		require.NoError(t, err)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			err := consumer.Run(ctx, func(_ context.Context, batch []event.Record) error {
				mutex.Lock()
				defer mutex.Unlock()
				for _, record := range batch {
					applied[string(record.Value)] = true
				}
				return nil
			})
			if err != nil {
				t.Errorf("run: %v", err)
			}
		}()
		return func() {
			cancel()
			<-ended
		}
	}

	remake("first", 3, 300)
	stop := start()
	require.Eventually(t, func() bool { return all("first", 300) }, patience, 20*time.Millisecond)
	remake("second", 1, 1000)
	require.Eventually(t, func() bool { return all("second", 1000) }, patience, 20*time.Millisecond)
	remake("third", 4, 8000)
	require.Eventually(t, func() bool { return all("third", 8000) }, patience, 20*time.Millisecond)
	stop()
	remake("fourth", 4, 20000)
	stop = start()
	defer stop()
	require.Eventually(t, func() bool { return all("fourth", 20000) }, patience, 20*time.Millisecond)
}

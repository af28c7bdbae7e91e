//go:build apache

package kafka_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/devstack"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/kafka"
)

func startApache(t *testing.T, settings map[string]string) *devstack.Kafka {
	t.Helper()
	cluster, err := devstack.StartKafka(t.Context(), devstack.KafkaConfig{
		Dir: t.TempDir(), JavaHome: os.Getenv("JAVA_HOME"), Logf: t.Logf, Settings: settings,
	})
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
		defer cancel()
		require.NoError(t, cluster.Stop(ctx))
	})
	return cluster
}

// TestTopicsOfApacheKafka: what is made is as it should be, what a broker's own
// defaults come to is read as it counts, and what is wrong is found.
func TestTopicsOfApacheKafka(t *testing.T) {
	t.Parallel()
	brokers := startApache(t, nil).Bootstrap()
	service := kafka.ServiceTopics(3, 1)
	require.NoError(t, kafka.EnsureTopics(t.Context(), brokers, service))
	// A broker learns of a new topic a moment after the controller has made it.
	require.Eventually(t, func() bool { return kafka.CheckTopics(t.Context(), brokers, service) == nil }, 20*time.Second, 20*time.Millisecond)
	retention, err := kafka.TopicRetention(t.Context(), brokers, event.OrderEvents, event.BillingEvents)
	require.NoError(t, err)
	for topic, kept := range retention {
		require.Equal(t, 14*24*time.Hour, kept, "%s: a week, and a week for a segment", topic)
	}

	require.NoError(t, kafka.EnsureTopics(t.Context(), brokers, []kafka.TopicSpec{
		{Name: "compacted", Partitions: 1, ReplicationFactor: 1, Config: map[string]string{"cleanup.policy": "compact"}},
		{Name: "ever", Partitions: 1, ReplicationFactor: 1, Config: map[string]string{"retention.ms": "-1"}},
	}))
	require.Eventually(t, func() bool {
		err = kafka.CheckTopics(t.Context(), brokers, []kafka.TopicSpec{{Name: "compacted", Partitions: 2}, {Name: "absent", Partitions: 1}})
		return err != nil && strings.Contains(err.Error(), "topic compacted has 1 partitions and 2 are wanted")
	}, 20*time.Second, 20*time.Millisecond)
	require.ErrorContains(t, err, "topic compacted has cleanup.policy=compact")
	require.ErrorContains(t, err, "topic absent is missing")
	require.Eventually(t, func() bool {
		retention, err = kafka.TopicRetention(t.Context(), brokers, "ever")
		return err == nil && retention["ever"] == -1
	}, 20*time.Second, 20*time.Millisecond)
}

// TestAdvertisedWhereNobodyIs: a broker that answers, and sends its clients where
// they find nobody.
func TestAdvertisedWhereNobodyIs(t *testing.T) {
	t.Parallel()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	nowhere := fmt.Sprintf("127.0.0.1:%d", listener.Addr().(*net.TCPAddr).Port)
	// It is somebody while the broker starts, which says that it is ready only then.
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_ = conn.Close()
		}
	}()
	cluster := startApache(t, map[string]string{"advertised.listeners": "PLAINTEXT://" + nowhere})
	require.NoError(t, listener.Close())

	begin := time.Now()
	err = kafka.CheckTopics(t.Context(), cluster.Bootstrap(), kafka.ServiceTopics(3, 1))
	require.ErrorContains(t, err, "Kafka answers at "+cluster.Bootstrap())
	require.ErrorContains(t, err, "tells its clients to come to "+nowhere)
	require.ErrorContains(t, err, "set advertised.listeners")
	t.Logf("said after %s", time.Since(begin))
}

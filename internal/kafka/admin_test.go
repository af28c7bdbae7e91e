package kafka_test

import (
	"context"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"

	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/kafkatest"
)

func TestEnsureTopics(t *testing.T) {
	t.Parallel()
	broker := kafkatest.New(t)
	wanted := []kafka.TopicSpec{
		{Name: "order.events", Partitions: 6, ReplicationFactor: 1, Config: map[string]string{"retention.ms": "60000"}},
		{Name: "billing.events", Partitions: 3, ReplicationFactor: 1},
	}

	for range 2 { // the second time nothing is to do
		require.NoError(t, kafka.EnsureTopics(t.Context(), broker.Brokers(), wanted))
		require.NoError(t, kafka.CheckTopics(t.Context(), broker.Brokers(), wanted))
	}
	require.Len(t, broker.PartitionInfos("order.events"), 6)
	require.Len(t, broker.PartitionInfos("billing.events"), 3)
	require.Equal(t, "60000", *broker.TopicInfo("order.events").Configs["retention.ms"])

	wanted[1].Partitions = 6
	err := kafka.EnsureTopics(t.Context(), broker.Brokers(), wanted)
	require.EqualError(t, err, "topic billing.events has 3 partitions and 6 are wanted: ask for 3, or stop the writers, "+
		"let the readers catch up and add some with kafka-topics.sh --alter --topic billing.events --partitions 6")
	wanted[1].Partitions = 2
	require.NoError(t, kafka.EnsureTopics(t.Context(), broker.Brokers(), wanted))
}

func TestCheckTopics(t *testing.T) {
	t.Parallel()
	broker := kafkatest.New(t)
	require.NoError(t, broker.CreateTopic("good", 3, nil))
	require.NoError(t, broker.CreateTopic("few", 1, nil))
	require.NoError(t, broker.CreateTopic("compacted", 3, map[string]string{"cleanup.policy": "compact"}))

	err := kafka.CheckTopics(t.Context(), broker.Brokers(), []kafka.TopicSpec{
		{Name: "good", Partitions: 3}, {Name: "few", Partitions: 3}, {Name: "compacted", Partitions: 3}, {Name: "absent", Partitions: 3},
	})
	require.EqualError(t, err, "topic few has 1 partitions and 3 are wanted: ask for 1, or stop the writers, "+
		"let the readers catch up and add some with kafka-topics.sh --alter --topic few --partitions 3\n"+
		"topic compacted has cleanup.policy=compact, which loses events: set it with "+
		"kafka-configs.sh --alter --topic compacted --add-config cleanup.policy=delete\n"+
		"topic absent is missing: make it with kafka-topics.sh --create --topic absent --partitions 3 --config cleanup.policy=delete")
	require.Nil(t, broker.TopicInfo("absent"), "looking does not make it")
}

// TestCheckTopicsOfTheBrokers: what is wrong with the brokers themselves is said
// before anything else waits for them.
func TestCheckTopicsOfTheBrokers(t *testing.T) {
	t.Parallel()
	wanted := []kafka.TopicSpec{{Name: "order.events", Partitions: 1}}
	open := func(t *testing.T, options ...kfake.Opt) (*kfake.Cluster, string) {
		t.Helper()
		cluster, err := kfake.NewCluster(append(options, kfake.NumBrokers(1), kfake.SeedTopics(1, "order.events"))...)
		require.NoError(t, err)
		t.Cleanup(cluster.Close)
		return cluster, cluster.ListenAddrs()[0]
	}

	t.Run("TooOld", func(t *testing.T) {
		t.Parallel()
		_, address := open(t, kfake.MaxVersions(kversion.V2_4_0()))
		require.EqualError(t, kafka.CheckTopics(t.Context(), address, wanted),
			"the Kafka at "+address+" is too old: it speaks TxnOffsetCommit up to version 2 and 3 is needed, "+
				"which came with Kafka 2.5: upgrade the brokers to that or newer")
	})

	t.Run("JustNewEnough", func(t *testing.T) {
		t.Parallel()
		_, address := open(t, kfake.MaxVersions(kversion.V2_5_0()))
		require.NoError(t, kafka.CheckTopics(t.Context(), address, wanted))
	})

	t.Run("AdvertisedWhereNobodyIs", func(t *testing.T) {
		t.Parallel()
		cluster, address := open(t)
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		port := listener.Addr().(*net.TCPAddr).Port
		require.NoError(t, listener.Close())
		cluster.ControlKey(int16(kmsg.Metadata), func(request kmsg.Request) (kmsg.Response, error, bool) {
			cluster.KeepControl()
			response := request.ResponseKind().(*kmsg.MetadataResponse)
			broker := kmsg.NewMetadataResponseBroker()
			broker.Host, broker.Port = "127.0.0.1", int32(port)
			response.Brokers = append(response.Brokers, broker)
			return response, nil, true
		})
		err = kafka.CheckTopics(t.Context(), address, wanted)
		require.ErrorContains(t, err, fmt.Sprintf("Kafka answers at %s, but broker 0 tells its clients to come to 127.0.0.1:%d", address, port))
		require.ErrorContains(t, err, "set advertised.listeners on that broker")
	})

	t.Run("NobodyAtAll", func(t *testing.T) {
		t.Parallel()
		cluster, address := open(t)
		cluster.Close()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.ErrorContains(t, kafka.CheckTopics(ctx, address, wanted), "no Kafka broker answers at "+address)
	})
}

func TestCheckTopicsOfWhatIsAsked(t *testing.T) {
	t.Parallel()
	broker := kafkatest.New(t)
	compact := map[string]string{"cleanup.policy": "compact"}
	require.NoError(t, broker.CreateTopic("balances", 1, compact))
	require.NoError(t, broker.CreateTopic("forgets", 1, map[string]string{"cleanup.policy": "delete"}))
	require.NoError(t, broker.CreateTopic("deaf", 1, map[string]string{"min.insync.replicas": "2"}))

	require.NoError(t, kafka.CheckTopics(t.Context(), broker.Brokers(), []kafka.TopicSpec{{Name: "balances", Partitions: 1, Config: compact}}))
	err := kafka.CheckTopics(t.Context(), broker.Brokers(), []kafka.TopicSpec{
		{Name: "forgets", Partitions: 1, Config: compact}, {Name: "deaf", Partitions: 1}, {Name: "absent", Partitions: 1, Config: compact},
	})
	require.EqualError(t, err, "topic forgets has cleanup.policy=delete, which loses the last value of a key that rests: set it with "+
		"kafka-configs.sh --alter --topic forgets --add-config cleanup.policy=compact\n"+
		"topic deaf has 1 replicas and min.insync.replicas=2, so that no record is ever accepted: set it with "+
		"kafka-configs.sh --alter --topic deaf --add-config min.insync.replicas=1, or add replicas with kafka-reassign-partitions.sh\n"+
		"topic absent is missing: make it with kafka-topics.sh --create --topic absent --partitions 1 --config cleanup.policy=compact")
}

// TestCheckTopicsOfThreeReplicas: a record that one broker has is not safe.
func TestCheckTopicsOfThreeReplicas(t *testing.T) {
	t.Parallel()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(3))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	brokers := strings.Join(cluster.ListenAddrs(), ",")
	for name, needed := range map[string]string{"unsafe": "1", "safe": "2"} {
		require.NoError(t, kafka.EnsureTopics(t.Context(), brokers, []kafka.TopicSpec{
			{Name: name, Partitions: 1, ReplicationFactor: 3, Config: map[string]string{"min.insync.replicas": needed}},
		}))
	}
	require.NoError(t, kafka.CheckTopics(t.Context(), brokers, []kafka.TopicSpec{{Name: "safe", Partitions: 1}}))
	require.EqualError(t, kafka.CheckTopics(t.Context(), brokers, []kafka.TopicSpec{{Name: "unsafe", Partitions: 1}}),
		"topic unsafe has 3 replicas and min.insync.replicas=1, so that a record may be on one broker only when it is acknowledged, "+
			"and lost with it: set it with kafka-configs.sh --alter --topic unsafe --add-config min.insync.replicas=2")
}

func TestTopicRetention(t *testing.T) {
	t.Parallel()
	broker := kafkatest.New(t)
	require.NoError(t, broker.CreateTopic("week", 1, map[string]string{"retention.ms": "604800000", "segment.ms": "86400000"}))
	require.NoError(t, broker.CreateTopic("standard", 1, nil))
	require.NoError(t, broker.CreateTopic("ever", 1, map[string]string{"retention.ms": "-1"}))
	got, err := kafka.TopicRetention(t.Context(), broker.Brokers(), "week", "standard", "ever")
	require.NoError(t, err)
	const day = 24 * time.Hour
	require.Equal(t, map[string]time.Duration{"week": 8 * day, "standard": 14 * day, "ever": -1}, got)

	_, err = kafka.TopicRetention(t.Context(), broker.Brokers(), "absent")
	require.ErrorContains(t, err, "read settings of topic absent")
}

func TestGroupLag(t *testing.T) {
	t.Parallel()
	world := newWorld(t, 2)
	world.produce(t, 3)

	committed, end, err := kafka.GroupLag(t.Context(), world.broker.Brokers(), group, world.topic)
	require.NoError(t, err)
	require.Empty(t, committed)
	require.Equal(t, map[int32]int64{0: 3, 1: 3}, end)

	member := world.join(t, kafka.ConsumerConfig{})
	go member.serve()
	world.waitBehind(t, 0)
	require.NoError(t, member.stop(t))
	world.broker.Produce(t, world.topic, kafkatest.Record{Partition: 1, Value: []byte("{}")})
	committed, end, err = kafka.GroupLag(t.Context(), world.broker.Brokers(), group, world.topic)
	require.NoError(t, err)
	require.Equal(t, map[int32]int64{0: 3, 1: 4}, end)
	require.Equal(t, map[int32]int64{0: 3, 1: 3}, committed)

	_, _, err = kafka.GroupLag(t.Context(), world.broker.Brokers(), group, "absent")
	require.EqualError(t, err, "topic absent is missing")
}

func TestReachable(t *testing.T) {
	t.Parallel()
	broker := kafkatest.New(t)
	require.NoError(t, kafka.Reachable(t.Context(), broker.Brokers()))

	broker.Pause()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	err := kafka.Reachable(ctx, broker.Brokers())
	require.ErrorContains(t, err, "no Kafka broker answers at "+broker.Brokers())
	_, _, err = kafka.GroupLag(ctx, broker.Brokers(), group, "order.events")
	require.ErrorContains(t, err, "no Kafka broker answers at "+broker.Brokers())
}

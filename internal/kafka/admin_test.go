package kafka_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

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

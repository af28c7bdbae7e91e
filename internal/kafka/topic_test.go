package kafka_test

import (
	"maps"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/kafka"
)

// TestTopicIsMadeAnewUnderAConsumer deletes a topic and makes it again while a
// member reads it: offsets begin again, and are committed again, though they are
// below those that were committed before.
func TestTopicIsMadeAnewUnderAConsumer(t *testing.T) {
	t.Parallel()

	world := newWorld(t, 2)
	world.produce(t, 10)
	member := world.join(t, kafka.ConsumerConfig{})
	go member.serve()
	world.waitBehind(t, 0)

	require.NoError(t, world.broker.DeleteTopic(world.topic))
	require.NoError(t, world.broker.CreateTopic(world.topic, 2, nil))
	world.produced = 0
	world.produce(t, 3)
	world.waitBehind(t, 0)
	require.Len(t, world.applied(), 2*10+2*3)
}

// TestPartitionsAreAddedUnderAConsumer: a member reads what is in partitions that
// its topic did not have when it joined.
func TestPartitionsAreAddedUnderAConsumer(t *testing.T) {
	t.Parallel()

	world := newWorld(t, 1)
	world.produce(t, 5)
	member := world.join(t, kafka.ConsumerConfig{})
	go member.serve()
	world.waitBehind(t, 0)

	client, err := kgo.NewClient(kgo.SeedBrokers(world.broker.Brokers()))
	require.NoError(t, err)
	defer client.Close()
	grown, err := kadm.NewClient(client).UpdatePartitions(t.Context(), 3, world.topic)
	require.NoError(t, err)
	require.NoError(t, grown.Error())
	world.partitions = 3
	only := world.produced
	world.produced = 0
	world.produce(t, 4) // the first one has more than the others
	want := map[int32]int64{0: only + 4, 1: 4, 2: 4}
	world.waitGroup(t, func(info *kfake.GroupInfo) bool { return maps.Equal(want, commits(info, world.topic)) })
}

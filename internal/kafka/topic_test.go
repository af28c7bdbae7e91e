package kafka_test

import (
	"encoding/base64"
	"errors"
	"maps"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

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

// TestTopicIsMadeAnewAndGrowsUnderAConsumer: by the time that the member could
// notice, the new topic reaches beyond where it stood in the earlier one. It reads
// what is there all the same, from the beginning.
func TestTopicIsMadeAnewAndGrowsUnderAConsumer(t *testing.T) {
	t.Parallel()

	world := newWorld(t, 2)
	world.produce(t, 10)
	member := world.join(t, kafka.ConsumerConfig{})
	go member.serve()
	world.waitBehind(t, 0)

	// Nobody reads in between: the offset would be out of range for a moment, and
	// reading would begin anew for that.
	var remaking atomic.Bool
	remaking.Store(true)
	world.broker.ControlKey(int16(kmsg.Fetch), func(kmsg.Request) (kmsg.Response, error, bool) {
		world.broker.KeepControl()
		return nil, errors.New("not now"), remaking.Load()
	})
	world.remake(t, 25)
	remaking.Store(false)
	world.waitAllApplied(t)
	world.waitBehind(t, 0)
	require.Equal(t, 1.0, member.metric(t, "topics_remade_total", ""))
	require.Contains(t, member.log.String(), "topic was deleted and made again")

	// It stays where it is.
	world.produce(t, 5)
	world.waitAllApplied(t)
	require.Equal(t, 1.0, member.metric(t, "topics_remade_total", ""))
	for _, commit := range world.groupCommits(t) {
		require.Equal(t, world.topicID(t), commit.Metadata)
	}
}

// TestOffsetsOfAnEarlierTopic: a consumer that begins with offsets that were
// committed in an earlier topic of the name, as a broker leaves them that keeps
// them, or whoever copies them.
func TestOffsetsOfAnEarlierTopic(t *testing.T) {
	t.Parallel()

	world := newWorld(t, 2)
	world.produce(t, 10)
	member := world.join(t, kafka.ConsumerConfig{})
	go member.serve()
	world.waitBehind(t, 0)
	member.cancel()
	require.NoError(t, member.wait(t))
	earlier := world.groupCommits(t)
	require.Len(t, earlier, 2)

	world.remake(t, 25)
	world.commit(t, earlier)
	member = world.join(t, kafka.ConsumerConfig{})
	go member.serve()
	world.waitAllApplied(t)
	world.waitBehind(t, 0)
	require.Equal(t, 1.0, member.metric(t, "topics_remade_total", ""))
	member.cancel()
	require.NoError(t, member.wait(t))

	// Those that say nothing of their topic are taken at their word.
	for i := range earlier {
		earlier[i].Metadata = ""
	}
	world.commit(t, earlier)
	world.forget()
	member = world.join(t, kafka.ConsumerConfig{})
	go member.serve()
	world.waitBehind(t, 0)
	for partition := range world.partitions {
		require.Equal(t, world.allOffsets()[10:], world.appliedOffsets(partition, true))
	}
	require.Equal(t, 0.0, member.metric(t, "topics_remade_total", ""))
}

func (w *world) admin(t *testing.T) *kadm.Client {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(w.broker.Brokers()))
	require.NoError(t, err)
	t.Cleanup(client.Close)
	return kadm.NewClient(client)
}

// remake deletes the topic and makes it again, with so many records in each
// partition. What was applied before is forgotten.
func (w *world) remake(t *testing.T, records int64) {
	t.Helper()
	before := w.topicID(t)
	require.NoError(t, w.broker.DeleteTopic(w.topic))
	require.NoError(t, w.broker.CreateTopic(w.topic, w.partitions, nil))
	require.NotEqual(t, before, w.topicID(t))
	w.forget()
	w.produced = 0
	w.produce(t, records)
}

func (w *world) forget() {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.database = nil
}

// waitAllApplied waits until every record is in the database, however often.
func (w *world) waitAllApplied(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		for partition := range w.partitions {
			offsets := w.appliedOffsets(partition, true)
			slices.Sort(offsets)
			if !slices.Equal(w.allOffsets(), offsets) {
				return false
			}
		}
		return true
	}, patience, 10*time.Millisecond)
}

func (w *world) topicID(t *testing.T) string {
	t.Helper()
	topics, err := w.admin(t).ListTopics(t.Context(), w.topic)
	require.NoError(t, err)
	id := topics[w.topic].ID
	return base64.RawURLEncoding.EncodeToString(id[:]) // as kafka-topics.sh shows it
}

func (w *world) groupCommits(t *testing.T) []kadm.Offset {
	t.Helper()
	fetched, err := w.admin(t).FetchOffsets(t.Context(), group)
	require.NoError(t, err)
	var commits []kadm.Offset
	fetched.Offsets().Each(func(offset kadm.Offset) { commits = append(commits, offset) })
	return commits
}

func (w *world) commit(t *testing.T, commits []kadm.Offset) {
	t.Helper()
	offsets := make(kadm.Offsets)
	for _, commit := range commits {
		offsets.Add(commit)
	}
	require.NoError(t, w.admin(t).CommitAllOffsets(t.Context(), group, offsets))
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

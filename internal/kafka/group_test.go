package kafka_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/kafkatest"
)

func TestGroupMembers(t *testing.T) {
	t.Parallel()
	world := newWorld(t, 2)

	members, err := kafka.GroupMembers(t.Context(), world.broker.Brokers(), group)
	require.NoError(t, err)
	require.Empty(t, members, "nobody knows the group")

	static := world.join(t, kafka.ConsumerConfig{InstanceID: "worker-1", ClientID: "onceledger-billing", SessionTimeout: time.Second})
	go static.serve()
	other := world.join(t, kafka.ConsumerConfig{ClientID: "onceledger-billing"})
	go other.serve()
	world.waitShared(t, 1, 1)
	members, err = kafka.GroupMembers(t.Context(), world.broker.Brokers(), group)
	require.NoError(t, err)
	require.Len(t, members, 2)
	instances := []string{members[0].InstanceID, members[1].InstanceID}
	require.ElementsMatch(t, []string{"worker-1", ""}, instances)
	for _, member := range members {
		require.Equal(t, "onceledger-billing", member.ClientID)
		require.Len(t, member.Partitions[world.topic], 1)
		require.Contains(t, member.String(), " of onceledger-billing at 127.0.0.1")
	}

	require.NoError(t, other.stop(t))
	require.NoError(t, static.stop(t))
	require.Eventually(t, func() bool { // a static one goes with its session
		members, err := kafka.GroupMembers(t.Context(), world.broker.Brokers(), group)
		return err == nil && len(members) == 0
	}, patience, 20*time.Millisecond)

	world.broker.Pause()
	_, err = kafka.GroupMembers(t.Context(), world.broker.Brokers(), group)
	require.ErrorContains(t, err, "ask for the members of group billing")
}

func TestReadRanges(t *testing.T) {
	t.Parallel()

	read := func(t *testing.T, w *world, most int, ranges map[int32]kafka.Range) (found map[int32][]int64, largest int, err error) {
		t.Helper()
		found = make(map[int32][]int64)
		err = kafka.ReadRanges(t.Context(), w.broker.Brokers(), w.topic, ranges, most, func(records []event.Record) error {
			largest = max(largest, len(records))
			for _, record := range records {
				found[record.Partition] = append(found[record.Partition], record.Offset)
			}
			return nil
		})
		return found, largest, err
	}

	t.Run("BringsTheRangesInOrderAndNoMore", func(t *testing.T) {
		t.Parallel()
		world := newWorld(t, 3)
		world.produce(t, 10)
		found, largest, err := read(t, world, 4, map[int32]kafka.Range{0: {From: 2, To: 7}, 1: {From: 0, To: 10}, 2: {From: 5, To: 5}})
		require.NoError(t, err)
		require.Equal(t, map[int32][]int64{0: {2, 3, 4, 5, 6}, 1: {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}}, found)
		require.Equal(t, 4, largest)
		require.Empty(t, world.committed(), "nobody knows of it")
	})

	t.Run("LeavesOutWhatWasAborted", func(t *testing.T) {
		t.Parallel()
		world := newWorld(t, 1)
		client, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(world.broker.Brokers(), ",")...), kgo.TransactionalID("somebody"))
		require.NoError(t, err)
		defer client.Close()
		for _, end := range []kgo.TransactionEndTry{kgo.TryAbort, kgo.TryCommit, kgo.TryAbort} {
			require.NoError(t, client.BeginTransaction())
			require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Topic: world.topic, Value: []byte("x")}).FirstErr())
			require.NoError(t, client.EndTransaction(t.Context(), end))
		}
		// Each record is followed by the marker of its transaction: the range ends
		// with one, and none is a record.
		found, _, err := read(t, world, 10, map[int32]kafka.Range{0: {From: 0, To: 6}})
		require.NoError(t, err)
		require.Equal(t, map[int32][]int64{0: {2}}, found)
	})

	t.Run("SaysThatTheRecordsAreGone", func(t *testing.T) {
		t.Parallel()
		world := newWorld(t, 1)
		world.produce(t, 5)
		_, _, err := read(t, world, 10, map[int32]kafka.Range{0: {From: 50, To: 60}})
		require.ErrorContains(t, err, "read topic "+world.topic)
	})

	t.Run("EndsWithTheErrorOfItsUser", func(t *testing.T) {
		t.Parallel()
		world := newWorld(t, 1)
		world.produce(t, 5)
		enough := errors.New("enough")
		calls := 0
		err := kafka.ReadRanges(t.Context(), world.broker.Brokers(), world.topic, map[int32]kafka.Range{0: {From: 0, To: 5}}, 2, func([]event.Record) error {
			calls++
			return enough
		})
		require.ErrorIs(t, err, enough)
		require.Equal(t, 1, calls)
	})
}

func TestOffsetsAt(t *testing.T) {
	t.Parallel()
	world := newWorld(t, 2)
	moment := time.Now().Truncate(time.Second)
	for i := range 4 {
		world.broker.Produce(t, world.topic, kafkatest.Record{Partition: 0, Value: []byte("x"), Timestamp: moment.Add(time.Duration(i) * time.Minute)})
	}
	first, err := kafka.FirstOffsets(t.Context(), world.broker.Brokers(), world.topic)
	require.NoError(t, err)
	require.Equal(t, map[int32]int64{0: 0, 1: 0}, first)
	for at, want := range map[time.Duration]map[int32]int64{
		-time.Hour: {0: 0}, 0: {0: 0}, 90 * time.Second: {0: 2}, 3 * time.Minute: {0: 3}, 4 * time.Minute: {},
	} {
		offsets, err := kafka.OffsetsAt(t.Context(), world.broker.Brokers(), world.topic, moment.Add(at))
		require.NoError(t, err)
		require.Equal(t, want, offsets, at)
	}
	_, err = kafka.OffsetsAt(t.Context(), world.broker.Brokers(), "absent", moment)
	require.EqualError(t, err, "topic absent is missing")
}

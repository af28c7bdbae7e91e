package crash_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/test/stack"
)

// An empty WORKER_ID makes an ordinary member of the consumer group: when it
// ends, its partitions go to others at once instead of waiting for it.
const ordinaryMember = "WORKER_ID="

// Goal: an event that was applied stays applied once, however often it comes.
// Method: put billing's offsets back to the beginning, have it read the whole
// topic again, and compare every row of every table.
func TestReplayFromTheBeginning(t *testing.T) {
	t.Parallel()

	s := stack.New(t)
	api, relay := s.API(t), s.Worker(t, "relay", "relay,janitor")
	worker := s.Worker(t, "billing", "billing", ordinaryMember)
	stack.StartAll(t, api, relay, worker)
	s.Run(t, api, 8, 60, 1)
	s.RequireBooks(t, api)
	before := s.Checksums(t)

	for range 2 {
		require.NoError(t, worker.Stop())
		rewind(t, s)
		require.NoError(t, worker.StartReady())
		waitGroup(t, s, func(info *kfake.GroupInfo) bool { return lag(s, info) == 0 })

		require.Equal(t, before, s.Checksums(t))
		known, err := duplicates(worker)
		require.NoError(t, err)
		all, err := worker.Metric("onceledger_inbox_records_total")
		require.NoError(t, err)
		require.EqualValues(t, len(s.Broker.Records(t, event.OrderEvents)), all, "records read again")
		require.Equal(t, all, known, "all of them known")
	}
	s.Run(t, api, 8, 10, 2) // and what is new is applied
	s.RequireBooks(t, api)
}

// Goal: partitions that change hands in the middle of the work lose nothing and
// repeat nothing that counts.
// Method: under load, workers join the group, leave it in order, and are killed
// in it: ordinary members, and a static one that comes back.
func TestWorkersComeAndGo(t *testing.T) {
	t.Parallel()

	s := stack.New(t)
	api, relay := s.API(t), s.Worker(t, "relay", "relay,janitor")
	a := s.Worker(t, "billing-a", "billing", ordinaryMember)
	b := s.Worker(t, "billing-b", "billing", ordinaryMember)
	c := s.Worker(t, "billing-c", "billing")
	stack.StartAll(t, api, relay, a)
	load := s.StartLoad(t, api, 8, 1)
	for range *rounds {
		require.NoError(t, load.Advance(40))
		require.NoError(t, b.StartReady())
		require.NoError(t, load.Advance(40))
		require.NoError(t, c.StartReady())
		waitShares(t, s, 3)
		require.NoError(t, load.Advance(40))
		require.NoError(t, a.Stop())
		require.NoError(t, load.Advance(40))
		require.NoError(t, c.Kill())
		require.NoError(t, c.StartReady())
		require.NoError(t, load.Advance(40))
		waitShares(t, s, 2)
		require.NoError(t, a.StartReady())
		// Where a member dies in the middle of a rebalance, the embedded broker
		// waits for it as long as it may take for a batch, two minutes.
		waitShares(t, s, 3)
		require.NoError(t, b.Kill()) // its partitions wait until its session has ended
		waitShares(t, s, 2)
		require.NoError(t, load.Advance(40))
	}
	require.NoError(t, load.Finish(100))
	s.RequireBooks(t, api)
}

// waitShares waits until the group has settled with so many members, each with
// some of the partitions.
func waitShares(t *testing.T, s *stack.Stack, members int) {
	t.Helper()
	waitGroup(t, s, func(info *kfake.GroupInfo) bool {
		if info.State != "Stable" || len(info.Members) != members || info.NumAssigned() != stack.Partitions {
			return false
		}
		for _, member := range info.Members {
			if member.NumAssigned() == 0 {
				return false
			}
		}
		return true
	})
}

// rewind puts billing's offsets back to the beginning, which takes a group
// without members.
func rewind(t *testing.T, s *stack.Stack) {
	t.Helper()
	waitGroup(t, s, func(info *kfake.GroupInfo) bool { return len(info.Members) == 0 })
	client, err := kgo.NewClient(kgo.SeedBrokers(s.Broker.Brokers()))
	require.NoError(t, err)
	defer client.Close()
	offsets := make(kadm.Offsets)
	for partition := range int32(stack.Partitions) {
		offsets.AddOffset(event.OrderEvents, partition, 0, -1)
	}
	require.NoError(t, kadm.NewClient(client).CommitAllOffsets(t.Context(), billing.Consumer, offsets))
}

// lag is how many records of order.events billing has not committed.
func lag(s *stack.Stack, info *kfake.GroupInfo) int64 {
	var sum int64
	for _, partition := range s.Broker.PartitionInfos(event.OrderEvents) {
		sum += partition.HighWatermark - info.Commits[event.OrderEvents][partition.Partition].Offset
	}
	return sum
}

func waitGroup(t *testing.T, s *stack.Stack, is func(*kfake.GroupInfo) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), stack.Patience)
	defer cancel()
	info, err := s.Broker.WaitGroupInfo(ctx, billing.Consumer, func(info *kfake.GroupInfo) bool { return info != nil && is(info) })
	require.NoError(t, err, "the group is %+v", info)
}

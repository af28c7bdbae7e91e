package kafka_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/kafkatest"
)

func TestConsumerRun(t *testing.T) {
	t.Parallel()

	t.Run("HandsOverEachPartitionInOrder", func(t *testing.T) {
		t.Parallel()
		world := newWorld(t, 3)
		world.produce(t, 200)

		member := world.join(t, kafka.ConsumerConfig{MaxBatch: 50})
		for len(world.applied()) < 600 {
			batch := member.receive(t)
			require.LessOrEqual(t, len(batch.records), 50)
			batch.answer(nil)
		}
		world.requireEachOnceInOrder(t)
		record := world.applied()[0]
		require.Equal(t, []event.Header{{Key: "ce_id", Value: []byte("id")}, {Key: "empty", Value: []byte{}}, {Key: "null"}}, record.Headers)
		require.WithinDuration(t, time.Now(), record.Time, time.Minute)
	})

	t.Run("TellsNoValueFromAnEmptyOne", func(t *testing.T) {
		t.Parallel()
		world := newWorld(t, 1)
		world.broker.Produce(t, world.topic, kafkatest.Record{Value: nil}, kafkatest.Record{Value: []byte{}})

		member := world.join(t, kafka.ConsumerConfig{})
		for len(world.applied()) < 2 {
			member.receive(t).answer(nil)
		}
		require.Nil(t, world.applied()[0].Value)
		require.Nil(t, world.applied()[0].Key)
		require.NotNil(t, world.applied()[1].Value)
		require.Empty(t, world.applied()[1].Value)
	})

	t.Run("DoesNotWaitToFillABatch", func(t *testing.T) {
		t.Parallel()
		world := newWorld(t, 1)
		member := world.join(t, kafka.ConsumerConfig{})
		for range 3 {
			world.produce(t, 1)
			batch := member.receive(t)
			require.Len(t, batch.records, 1)
			batch.answer(nil)
		}
	})

	t.Run("CommitsWhenTheHandlerHasReturned", func(t *testing.T) {
		t.Parallel()
		world := newWorld(t, 2)
		world.produce(t, 5)

		member := world.join(t, kafka.ConsumerConfig{})
		batch := member.receive(t)
		require.Empty(t, world.committed())

		batch.answer(nil)
		go member.serve()
		world.waitBehind(t, 0)
		world.requireEachOnceInOrder(t)
	})

	t.Run("ReadsAgainWhatADeadMemberHadInHand", func(t *testing.T) {
		t.Parallel()
		world := newWorld(t, 1)
		world.produce(t, 5)

		// The nearest to kill -9 within a process: no answer, no time to drain.
		member := world.join(t, kafka.ConsumerConfig{DrainTimeout: time.Nanosecond})
		require.Zero(t, member.receive(t).records[0].Offset)
		member.cancel()
		require.NoError(t, member.wait(t))
		require.Empty(t, world.committed())

		again := world.join(t, kafka.ConsumerConfig{}).receive(t)
		require.Zero(t, again.records[0].Offset)
		again.answer(nil)
	})

	t.Run("HandsOverTheSameBatchAfterAnError", func(t *testing.T) {
		t.Parallel()
		world := newWorld(t, 3)
		world.produce(t, 4)

		member := world.join(t, kafka.ConsumerConfig{})
		first := member.receive(t)
		world.produce(t, 4) // not to be mixed in, and not to be lost
		first.answer(errOutage)
		for attempt := 1; attempt <= 3; attempt++ {
			again := member.receive(t)
			require.Equal(t, first.records, again.records)
			ready, reason := member.Ready()
			require.False(t, ready)
			require.Equal(t, fmt.Sprintf("paused after %d failed attempts at a batch: the database is away", attempt), reason)
			require.Equal(t, 1.0, member.metric(t, "paused", ""))
			require.Empty(t, world.committed())
			if attempt < 3 {
				again.answer(errOutage)
			} else {
				again.answer(nil)
			}
		}
		go member.serve()
		world.waitBehind(t, 0)
		world.requireEachOnceInOrder(t)
		ready, reason := member.Ready()
		require.True(t, ready, reason)
		require.Equal(t, 0.0, member.metric(t, "paused", ""))
		require.Equal(t, 3.0, member.metric(t, "retries_total", ""))
		require.Equal(t, 24.0, member.metric(t, "records_total", ""))
	})

	t.Run("StaysInItsGroupWhilePaused", func(t *testing.T) {
		t.Parallel()
		world := newWorld(t, 2)
		world.produce(t, 1)

		member := world.join(t, kafka.ConsumerConfig{SessionTimeout: 2 * time.Second, MaxPollInterval: 2 * time.Second})
		batch := member.receive(t)
		before := world.broker.GroupInfo(group)
		for started := time.Now(); time.Since(started) < 3*time.Second; { // more than what a silent member has
			batch.answer(errOutage)
			batch = member.receive(t)
		}
		batch.answer(nil)
		after := world.broker.GroupInfo(group)
		require.Equal(t, before.Epoch, after.Epoch)
		require.Equal(t, before.Members, after.Members)
	})

	t.Run("FinishesAndCommitsWhenStopped", func(t *testing.T) {
		t.Parallel()
		world := newWorld(t, 1)
		world.produce(t, 5)

		member := world.join(t, kafka.ConsumerConfig{})
		batch := member.receive(t)
		member.cancel()
		require.NoError(t, batch.ctx.Err())
		batch.answer(nil)
		require.NoError(t, member.wait(t))
		require.Equal(t, map[int32]int64{0: int64(len(batch.records))}, world.committed())
		ready, _ := member.Ready()
		require.False(t, ready)
	})

	t.Run("StopsDuringAnOutage", func(t *testing.T) {
		t.Parallel()
		world := newWorld(t, 1)
		world.produce(t, 5)

		member := world.join(t, kafka.ConsumerConfig{})
		member.receive(t).answer(errOutage)
		member.cancel()
		go member.serve()
		require.NoError(t, member.wait(t))
	})

	t.Run("StopsWhenTheBrokerIsAway", func(t *testing.T) {
		t.Parallel()
		for name, takeAway := range outages {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				world := newWorld(t, 1)
				world.produce(t, 5)

				member := world.join(t, kafka.ConsumerConfig{SessionTimeout: 2 * time.Second})
				batch := member.receive(t)
				takeAway(world.broker)
				batch.answer(nil)
				member.cancel()
				require.NoError(t, member.wait(t))
			})
		}
	})

	t.Run("GoesOnWhenTheBrokerIsBack", func(t *testing.T) {
		t.Parallel()
		for name, takeAway := range outages {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				world := newWorld(t, 3)
				world.produce(t, 100)

				member := world.join(t, kafka.ConsumerConfig{MaxBatch: 10, SessionTimeout: 2 * time.Second})
				member.receive(t).answer(nil)
				batch := member.receive(t)
				takeAway(world.broker)
				batch.answer(nil)
				go member.serve()
				member.waitReady(t, false)

				world.broker.Resume()
				world.produce(t, 1)
				world.waitBehind(t, 0)
				world.requireAllInOrder(t)
				member.waitReady(t, true)
			})
		}
	})

	t.Run("SurvivesACommitThatFails", func(t *testing.T) {
		t.Parallel()
		world := newWorld(t, 1)
		world.produce(t, 5)
		fault := world.broker.Fault(kfake.Fault{
			Keys: []kmsg.Key{kmsg.OffsetCommit}, Group: group, Err: kerr.RebalanceInProgress, Count: 1,
		})
		member := world.join(t, kafka.ConsumerConfig{})
		go member.serve()
		world.waitBehind(t, 0)
		world.requireEachOnceInOrder(t)
		require.Equal(t, 1, fault.Hits())
		require.Equal(t, 1.0, member.metric(t, "commit_failures_total", ""))
	})
}

// outages are the two ways in which a broker can be away.
var outages = map[string]func(*kafkatest.Broker){
	"Unreachable": (*kafkatest.Broker).Pause,
	"Silent":      (*kafkatest.Broker).Stall,
}

func TestConsumerRebalance(t *testing.T) {
	t.Parallel()

	t.Run("FinishesItsBatchBeforeGivingPartitionsAway", func(t *testing.T) {
		t.Parallel()
		world := newWorld(t, 6)
		world.produce(t, 20)

		first := world.join(t, kafka.ConsumerConfig{})
		batch := first.receive(t)
		second := world.join(t, kafka.ConsumerConfig{})
		go second.serve()
		world.waitGroup(t, func(info *kfake.GroupInfo) bool { return len(info.Members) == 2 })
		batch.answer(nil)
		go first.serve()

		world.waitShared(t, 3, 3)
		world.produce(t, 20)
		world.waitBehind(t, 0)
		world.requireEachOnceInOrder(t)
		require.Equal(t, 1.0, first.metric(t, "rebalances_total", "revoked"))
		require.Equal(t, 0.0, first.metric(t, "rebalances_total", "lost"))
	})

	t.Run("GivesUpAFailingBatchWhosePartitionsGo", func(t *testing.T) {
		t.Parallel()
		world := newWorld(t, 6)
		world.produce(t, 1)

		sick := world.join(t, kafka.ConsumerConfig{})
		batch := sick.receive(t)
		for batch.partitions() < 6 {
			world.produce(t, 1) // more arrives while the handler is busy
			batch.answer(nil)
			batch = sick.receive(t)
		}
		batch.answer(errOutage)
		sick.failing.Store(true)
		go sick.serve()

		healthy := world.join(t, kafka.ConsumerConfig{})
		go healthy.serve()
		world.waitShared(t, 3, 3)
		world.waitBehind(t, 3)

		// What a paused member is given has to wait.
		healthy.cancel()
		require.NoError(t, healthy.wait(t))
		world.waitShared(t, 6)
		world.produce(t, 1)
		world.waitBehind(t, 6)
		ready, _ := sick.Ready()
		require.False(t, ready)

		sick.failing.Store(false)
		world.waitBehind(t, 0)
		world.requireEachOnceInOrder(t)
	})

	t.Run("ReadsAPartitionAgainThatLeftWhilePaused", func(t *testing.T) {
		t.Parallel()
		world := newWorld(t, 2)
		world.produce(t, 5)

		first := world.join(t, kafka.ConsumerConfig{})
		first.receive(t).answer(errOutage)
		first.failing.Store(true)
		go first.serve()
		second := world.join(t, kafka.ConsumerConfig{})
		go second.serve()
		world.waitShared(t, 1, 1)
		world.waitBehind(t, 1)
		first.failing.Store(false)
		world.waitBehind(t, 0)

		second.cancel()
		require.NoError(t, second.wait(t))
		world.waitShared(t, 2)
		world.produce(t, 5)
		world.waitBehind(t, 0)
		world.requireEachOnceInOrder(t)
	})

	// Field report R24: a handler takes longer than a member may.
	t.Run("CommitsNothingOfWhatItLost", func(t *testing.T) {
		t.Parallel()
		for name, instance := range map[string]string{"Dynamic": "", "Static": "worker-1"} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				world := newWorld(t, 2)
				world.produce(t, 5)

				late := world.join(t, kafka.ConsumerConfig{
					InstanceID: instance, SessionTimeout: 2 * time.Second, MaxPollInterval: 2 * time.Second,
				})
				batch := late.receive(t)
				quick := world.join(t, kafka.ConsumerConfig{})
				go quick.serve()
				world.waitBehind(t, 0)
				world.produce(t, 5)
				world.waitBehind(t, 0)

				batch.answer(nil)
				go late.serve()
				world.waitShared(t, 1, 1)
				require.Equal(t, map[int32]int64{0: 10, 1: 10}, world.committed())
				world.produce(t, 5)
				world.waitBehind(t, 0)
				world.requireAllInOrder(t)
			})
		}
	})

	t.Run("ReadsAgainWhatItLostWithItsSession", func(t *testing.T) {
		t.Parallel()
		world := newWorld(t, 2)
		world.produce(t, 5)

		member := world.join(t, kafka.ConsumerConfig{SessionTimeout: 2 * time.Second})
		batch := member.receive(t)
		world.broker.Pause()
		member.waitLog(t, "Consumer group session timed out")
		world.broker.Resume()
		batch.answer(nil)
		again := member.receive(t)
		require.Empty(t, world.committed())
		require.Equal(t, 1.0, member.metric(t, "rebalances_total", "lost"))

		again.answer(nil)
		go member.serve()
		world.waitBehind(t, 0)
		for _, record := range batch.records {
			require.Equal(t, 2, world.timesApplied(record))
		}
	})

	t.Run("LosesNothingWhileMembersComeAndGo", func(t *testing.T) {
		t.Parallel()
		world := newWorld(t, 6)
		seed := uint64(time.Now().UnixNano())
		t.Logf("seed %d", seed)
		random := rand.New(rand.NewPCG(seed, 0))

		start := func(slot int) *member {
			config := kafka.ConsumerConfig{MaxBatch: 7, DrainTimeout: time.Nanosecond}
			if slot == 0 {
				config.InstanceID = "worker-1"
			}
			member := world.join(t, config)
			go member.serve()
			return member
		}
		members := []*member{start(0), start(1), start(2)}
		for range 12 {
			slot := random.IntN(len(members))
			switch random.IntN(3) {
			case 0:
				require.NoError(t, members[slot].stop(t))
				members[slot] = start(slot)
			case 1:
				members[slot].failing.Store(true)
			case 2:
				members[slot].failing.Store(false)
			}
			world.produce(t, 20)
		}
		for _, member := range members {
			member.failing.Store(false)
		}
		world.waitBehind(t, 0)
		world.requireAllInOrder(t)
	})

	t.Run("LetsASpareMemberBeReady", func(t *testing.T) {
		t.Parallel()
		world := newWorld(t, 1)
		first, spare := world.join(t, kafka.ConsumerConfig{}), world.join(t, kafka.ConsumerConfig{})
		world.waitShared(t, 0, 1)
		first.waitReady(t, true)
		spare.waitReady(t, true)
	})

	t.Run("DoesNotNoticeAStaticMemberThatComesBack", func(t *testing.T) {
		t.Parallel()
		world := newWorld(t, 6)
		stays := world.join(t, kafka.ConsumerConfig{InstanceID: "worker-1"})
		goes := world.join(t, kafka.ConsumerConfig{InstanceID: "worker-2"})
		go stays.serve()
		go goes.serve()
		before := world.waitShared(t, 3, 3)
		revoked := stays.metric(t, "rebalances_total", "revoked")

		goes.cancel()
		require.NoError(t, goes.wait(t))
		world.produce(t, 5)
		back := world.join(t, kafka.ConsumerConfig{InstanceID: "worker-2"})
		go back.serve()
		world.waitBehind(t, 0)
		world.requireEachOnceInOrder(t)

		after := world.waitShared(t, 3, 3)
		require.Equal(t, world.assignments(before), world.assignments(after))
		require.Equal(t, revoked, stays.metric(t, "rebalances_total", "revoked"))
	})

	// As when coordinators are killed one after the other.
	t.Run("JoinsAgainWhenItIsFencedAndNobodyElseIsThere", func(t *testing.T) {
		t.Parallel()
		world := newWorld(t, 2)
		world.produce(t, 5)
		member := world.join(t, kafka.ConsumerConfig{InstanceID: "worker-1"})
		go member.serve()
		world.waitBehind(t, 0)
		for fences := 1; fences <= 2; fences++ {
			world.broker.ControlKey(int16(kmsg.Heartbeat), func(request kmsg.Request) (kmsg.Response, error, bool) {
				answer := request.ResponseKind().(*kmsg.HeartbeatResponse)
				answer.ErrorCode = kerr.FencedInstanceID.Code
				return answer, nil, true
			})
			require.Eventually(t, func() bool {
				return strings.Count(member.log.String(), "joining again") == fences
			}, patience, 5*time.Millisecond)
			world.produce(t, 5)
			world.waitBehind(t, 0)
			member.waitReady(t, true)
		}
		world.requireAllInOrder(t)
		require.NoError(t, member.stop(t))
	})

	t.Run("StopsAProcessWhoseNameAnotherHasTaken", func(t *testing.T) {
		t.Parallel()
		world := newWorld(t, 1)
		first := world.join(t, kafka.ConsumerConfig{InstanceID: "worker-1"})
		first.waitReady(t, true)
		second := world.join(t, kafka.ConsumerConfig{InstanceID: "worker-1"})

		require.ErrorContains(t, first.wait(t), `another process has joined group billing as instance "worker-1"`)
		second.waitReady(t, true)
	})
}

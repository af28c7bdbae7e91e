package balances_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// What the broker refuses, and what it does not answer.

func TestAbortsAndTriesAgain(t *testing.T) {
	t.Parallel()

	w, broker := newWorld(t)
	i := w.start(t, "a")
	w.load(t, 50)
	w.waitCaughtUp(t)

	// The group refuses the offsets, as it does those of a member that is not one
	// any more.
	var refused atomic.Int64
	broker.ControlKey(int16(kmsg.TxnOffsetCommit), func(request kmsg.Request) (kmsg.Response, error, bool) {
		broker.KeepControl()
		if refused.Add(1) > 3 {
			return nil, nil, false
		}
		asked := request.(*kmsg.TxnOffsetCommitRequest)
		answer := asked.ResponseKind().(*kmsg.TxnOffsetCommitResponse)
		for _, topic := range asked.Topics {
			answered := kmsg.NewTxnOffsetCommitResponseTopic()
			answered.Topic = topic.Topic
			for _, partition := range topic.Partitions {
				one := kmsg.NewTxnOffsetCommitResponseTopicPartition()
				one.Partition, one.ErrorCode = partition.Partition, kerr.IllegalGeneration.Code
				answered.Partitions = append(answered.Partitions, one)
			}
			answer.Topics = append(answer.Topics, answered)
		}
		return answer, nil, true
	})
	w.load(t, 50)
	w.waitCaughtUp(t)
	require.EqualValues(t, 3, i.metric(t, "onceledger_transact_aborted_total", ""))
	require.Zero(t, i.metric(t, "onceledger_transact_given_up_total", ""), i.log)
	require.Zero(t, i.metric(t, "onceledger_balances_rebuilds_total", ""), i.log)
}

func TestBeginsAnewWhenItIsFenced(t *testing.T) {
	t.Parallel()

	w, _ := newWorld(t)
	i := w.start(t, "a")
	w.load(t, 50)
	w.waitCaughtUp(t)

	// Somebody begins under its transactional id.
	client, err := kgo.NewClient(kgo.SeedBrokers(w.brokers), kgo.TransactionalID("balances-a"))
	require.NoError(t, err)
	defer client.Close()
	_, _, err = client.ProducerID(t.Context())
	require.NoError(t, err)

	w.load(t, 50)
	w.waitCaughtUp(t)
	require.EqualValues(t, 1, i.metric(t, "onceledger_transact_given_up_total", ""), i.log)
	require.Zero(t, i.metric(t, "onceledger_balances_rebuilds_total", ""), i.log)
}

func TestBrokerIsAwayForAWhile(t *testing.T) {
	t.Parallel()

	w, broker := newWorld(t)
	i := w.start(t, "a")
	w.load(t, 50)
	w.waitCaughtUp(t)

	for _, away := range []func(){broker.Pause, broker.Stall} {
		w.load(t, 500)
		before := i.metric(t, "onceledger_transact_seconds", "")
		require.Eventually(t, func() bool { return i.metric(t, "onceledger_transact_seconds", "") > before }, patience, time.Millisecond)
		away()
		require.Eventually(t, func() bool { ready, _ := i.transactor.Ready(); return !ready }, patience, 50*time.Millisecond)
		broker.Resume()
		w.waitCaughtUp(t)
		require.Eventually(t, func() bool { ready, _ := i.transactor.Ready(); return ready }, patience, 50*time.Millisecond)
	}
	require.Zero(t, i.metric(t, "onceledger_balances_rebuilds_total", ""), i.log)
	require.Positive(t, i.metric(t, "onceledger_transact_producers_replaced_total", "")+
		i.metric(t, "onceledger_transact_given_up_total", ""), "an answer was lost, and its producer goes on")
}

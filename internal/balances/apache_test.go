//go:build apache

package balances_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/onceledger/onceledger/internal/balances"
	"github.com/onceledger/onceledger/internal/crash"
	"github.com/onceledger/onceledger/internal/devstack"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/faults"
	"github.com/onceledger/onceledger/internal/kafka"
)

// apache is a world on Apache Kafka.
func apache(t *testing.T) *world {
	t.Helper()
	cluster, err := devstack.StartKafka(t.Context(), devstack.KafkaConfig{
		Dir: t.TempDir(), JavaHome: os.Getenv("JAVA_HOME"), Logf: t.Logf,
		// The broker looks for transactions that are open for too long this often.
		Settings: map[string]string{"transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000"},
	})
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
		defer cancel()
		require.NoError(t, cluster.Stop(ctx))
	})
	require.NoError(t, kafka.EnsureTopics(t.Context(), cluster.Bootstrap(), kafka.ServiceTopics(partitions, 1)))
	return worldOn(t, cluster.Bootstrap())
}

// helper is an instance in a process of its own.
type helper struct {
	*exec.Cmd
	log  string
	done chan error
}

func (w *world) startHelper(t *testing.T, name, crashPoint string) *helper {
	t.Helper()
	log, err := os.CreateTemp(t.TempDir(), name)
	require.NoError(t, err)
	h := &helper{Cmd: exec.Command(os.Args[0]), log: log.Name(), done: make(chan error, 1)}
	h.Env = append(os.Environ(), helperVariable+"="+name, "BROKERS="+w.brokers, "ONCELEDGER_CRASH="+crashPoint)
	h.Stderr = log
	require.NoError(t, h.Start())
	require.NoError(t, log.Close())
	ended := make(chan struct{})
	go func() { h.done <- h.Wait(); close(ended) }()
	t.Cleanup(func() {
		_ = h.Process.Kill() // it may be stopped, or gone
		<-ended
		if t.Failed() {
			t.Logf("log of %s:\n%s", name, h.text(t))
		}
	})
	return h
}

func (h *helper) text(t *testing.T) string {
	text, err := os.ReadFile(h.log)
	require.NoError(t, err)
	return string(text)
}

func (h *helper) waitKilled(t *testing.T) {
	t.Helper()
	select {
	case err := <-h.done:
		require.Error(t, err)
		status := h.ProcessState.Sys().(syscall.WaitStatus)
		require.True(t, status.Signaled() && status.Signal() == syscall.SIGKILL, "it ended otherwise: %s", h.text(t))
	case <-time.After(patience):
		require.FailNow(t, "it does not come to its crash point", h.text(t))
	}
}

func (h *helper) waitLog(t *testing.T, part string) {
	t.Helper()
	require.Eventually(t, func() bool { return strings.Contains(h.text(t), part) }, patience, 50*time.Millisecond, "log lacks %q", part)
}

func (h *helper) terminate(t *testing.T) {
	t.Helper()
	require.NoError(t, h.Process.Signal(syscall.SIGTERM))
	select {
	case err := <-h.done:
		require.NoError(t, err, h.text(t))
	case <-time.After(patience):
		require.FailNow(t, "it does not stop", h.text(t))
	}
}

// read reads all of ledger.balances, as "partition/offset key=value".
func (w *world) read(t *testing.T, level kgo.IsolationLevel) []string {
	t.Helper()
	admin, client := w.admin(t, kgo.ConsumeTopics(event.LedgerBalances), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(level), kgo.KeepControlRecords())
	ends, err := admin.ListEndOffsets(t.Context(), event.LedgerBalances)
	require.NoError(t, err)
	if level == kgo.ReadCommitted() {
		ends, err = admin.ListCommittedOffsets(t.Context(), event.LedgerBalances)
		require.NoError(t, err)
	}
	left := map[int32]int64{}
	ends.Each(func(end kadm.ListedOffset) {
		if end.Offset > 0 {
			left[end.Partition] = end.Offset
		}
	})
	var found []string
	for len(left) > 0 {
		fetches := client.PollFetches(t.Context())
		require.NoError(t, fetches.Err())
		fetches.EachRecord(func(record *kgo.Record) {
			if record.Offset+1 >= left[record.Partition] {
				delete(left, record.Partition)
			}
			if !record.Attrs.IsControl() {
				found = append(found, fmt.Sprintf("%d/%d %s=%s", record.Partition, record.Offset, record.Key, record.Value))
			}
		})
	}
	slices.Sort(found)
	return found
}

func (w *world) admin(t *testing.T, options ...kgo.Opt) (*kadm.Client, *kgo.Client) {
	t.Helper()
	client, err := kgo.NewClient(append(options, kgo.SeedBrokers(strings.Split(w.brokers, ",")...))...)
	require.NoError(t, err)
	t.Cleanup(client.Close)
	return kadm.NewClient(client), client
}

// unstable is how many records of a topic readers of committed ones wait for.
func unstable(t *testing.T, admin *kadm.Client, topic string) int64 {
	t.Helper()
	stable, err := admin.ListCommittedOffsets(t.Context(), topic)
	require.NoError(t, err)
	ends, err := admin.ListEndOffsets(t.Context(), topic)
	require.NoError(t, err)
	var gap int64
	stable.Each(func(at kadm.ListedOffset) {
		end, _ := ends.Lookup(topic, at.Partition)
		gap += end.Offset - at.Offset
	})
	return gap
}

// Field report R40. Goal: wherever the stage dies, what it has written and what it has read stay
// one. Method: kill -9 with the transaction open, and right after its commit;
// start again under the same name.
func TestKilledAtEachPoint(t *testing.T) {
	t.Parallel()

	w := apache(t)
	for _, point := range []string{crash.BalancesProducedNotCommitted, crash.BalancesCommittedNotPolled} {
		for _, nth := range []int{1, 4} {
			w.load(t, 200)
			w.startHelper(t, "a", fmt.Sprintf("%s:%d", point, nth)).waitKilled(t)
			again := w.startHelper(t, "a", "")
			w.waitCaughtUp(t)
			require.NotContains(t, again.text(t), "rebuilt", "state and offsets differ after %s", point)
			again.terminate(t)
		}
	}

	committed, all := w.read(t, kgo.ReadCommitted()), w.read(t, kgo.ReadUncommitted())
	seen := make(map[string]bool)
	for _, record := range committed {
		seen[record] = true
	}
	aborted := 0
	for _, record := range all {
		if !seen[record] {
			aborted++
		}
	}
	require.Positive(t, aborted, "nothing was aborted, so nobody could have seen it")
	require.Len(t, all, len(committed)+aborted)
}

// Field report R40. Goal: an instance that was thought dead writes nothing when it wakes. Method:
// SIGSTOP in the middle of a transaction, until another has taken over all of
// it; then SIGCONT.
func TestZombie(t *testing.T) {
	t.Parallel()

	w := apache(t)
	admin, _ := w.admin(t)
	zombie := w.startHelper(t, "zombie", "")
	w.load(t, 50)
	w.waitCaughtUp(t)

	// Stopped with a transaction open: the end of the stable records stays where
	// it is while nothing runs.
	w.load(t, 3000)
	require.Eventually(t, func() bool {
		require.NoError(t, zombie.Process.Signal(syscall.SIGSTOP))
		gap := unstable(t, admin, event.LedgerBalances)
		if gap > 0 && unstable(t, admin, event.LedgerBalances) == gap {
			return true
		}
		require.NoError(t, zombie.Process.Signal(syscall.SIGCONT))
		return false
	}, patience, time.Millisecond, "it was never met in the middle of a transaction")
	heir := w.start(t, "heir", func(c *kafka.TransactorConfig, _ *balances.Config) { c.SessionTimeout = helperTimeout })
	w.waitCaughtUp(t)
	require.Zero(t, heir.metric(t, "onceledger_balances_rebuilds_total", ""), heir.log)
	require.Positive(t, heir.metric(t, "onceledger_balances_records_total", "applied"), "there was nothing left to take over")
	before := w.read(t, kgo.ReadCommitted())

	require.NoError(t, zombie.Process.Signal(syscall.SIGCONT))
	zombie.waitLog(t, "transaction")
	zombie.waitLog(t, "partitions lost")
	require.Regexp(t, "transaction (given up|aborted)", zombie.text(t))
	require.Equal(t, before, w.read(t, kgo.ReadCommitted()), "it has written")

	// It is a member like others again.
	w.load(t, 500)
	w.waitCaughtUp(t)
	heir.stop(t)
	w.load(t, 100)
	w.waitCaughtUp(t)
	zombie.terminate(t)
}

// TestKafkaLetsOffsetsOfNobodyPass is why a transactor refuses a membership that
// names no member: within a transaction, a group that is at work takes offsets
// from one that says nothing of itself. It refuses those that say something wrong.
func TestKafkaLetsOffsetsOfNobodyPass(t *testing.T) {
	t.Parallel()

	w := apache(t)
	w.start(t, "a")
	w.load(t, 50)
	w.waitCaughtUp(t)
	_, client := w.admin(t, kgo.TransactionalID("foreign"))
	id, epoch, err := client.ProducerID(t.Context())
	require.NoError(t, err)
	add := kmsg.NewPtrAddOffsetsToTxnRequest()
	add.TransactionalID, add.ProducerID, add.ProducerEpoch, add.Group = "foreign", id, epoch, balances.Group
	added, err := add.RequestWith(t.Context(), client)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(added.ErrorCode))

	for _, test := range []struct {
		member, instance string
		generation       int32
		want             error
	}{
		{"", "", -1, nil},
		{"", "", 0, kerr.UnknownMemberID},
		{"somebody", "", -1, kerr.UnknownMemberID},
		{"", "worker-1", -1, kerr.UnknownMemberID},
	} {
		request := kmsg.NewPtrTxnOffsetCommitRequest()
		request.TransactionalID, request.ProducerID, request.ProducerEpoch, request.Group = "foreign", id, epoch, balances.Group
		request.MemberID, request.Generation = test.member, test.generation
		if test.instance != "" {
			request.InstanceID = &test.instance
		}
		topic := kmsg.NewTxnOffsetCommitRequestTopic()
		topic.Topic = event.BillingEvents
		partition := kmsg.NewTxnOffsetCommitRequestTopicPartition()
		partition.Offset = 1
		topic.Partitions = append(topic.Partitions, partition)
		request.Topics = append(request.Topics, topic)
		answer, err := request.RequestWith(t.Context(), client)
		require.NoError(t, err)
		got := kerr.ErrorForCode(answer.Topics[0].Partitions[0].ErrorCode)
		if test.want == nil {
			require.NoError(t, got)
		} else {
			require.ErrorIs(t, got, test.want, "%+v", test)
		}
	}
}

// Field report R40. Goal: a transaction of somebody else that hangs is noticed, holds up readers no
// longer than its timeout, and can be named and ended by hand. What it wrote is
// never read by the stage: it would stop at it.
func TestHangingTransaction(t *testing.T) {
	t.Parallel()

	w := apache(t)
	i := w.start(t, "a", func(c *kafka.TransactorConfig, _ *balances.Config) { c.WatchEvery = 200 * time.Millisecond })
	w.load(t, 50)
	w.waitCaughtUp(t)
	admin, _ := w.admin(t)
	age := func() float64 { return i.metric(t, "onceledger_kafka_unstable_seconds", event.BillingEvents) }
	require.Zero(t, age())

	hang := func(timeout time.Duration) {
		client, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(w.brokers, ",")...), kgo.TransactionalID("foreign"), kgo.TransactionTimeout(timeout),
			kgo.DefaultProduceTopic(event.BillingEvents), kgo.RecordPartitioner(kgo.ManualPartitioner()))
		require.NoError(t, err)
		require.NoError(t, client.BeginTransaction())
		for partition := range int32(partitions) {
			require.NoError(t, client.ProduceSync(t.Context(), &kgo.Record{Partition: partition, Value: []byte("no event")}).FirstErr())
		}
		client.Close() // without a word about its transaction
		w.load(t, 50)
		require.Eventually(t, func() bool { return age() > 2 }, patience, 50*time.Millisecond, "nothing tells of it")
		require.Positive(t, i.metric(t, "onceledger_kafka_unstable_records", event.BillingEvents))
		require.Positive(t, unstable(t, admin, event.BillingEvents))
		require.NotEmpty(t, w.difference(t), "the readers do not lag")
	}
	freed := func() {
		w.waitRead(t)
		require.Empty(t, w.difference(t))
		require.Eventually(t, func() bool { return age() == 0 }, patience, 50*time.Millisecond, "it is told of still")
		ready, why := i.transactor.Ready()
		require.True(t, ready, why)
	}

	hang(8 * time.Second) // freed by its timeout
	freed()

	hang(10 * time.Minute) // by hand, as the runbook says
	described, err := admin.DescribeTransactions(t.Context(), "foreign")
	require.NoError(t, err)
	require.Equal(t, "Ongoing", described["foreign"].State)
	_, client := w.admin(t, kgo.TransactionalID("foreign"))
	_, _, err = client.ProducerID(t.Context()) // the same id again fences the one that hangs
	require.NoError(t, err)
	freed()
}

// Goal: a connection that is cut between a write and its acknowledgement makes
// the idempotent producer send again, and no record is there twice. Method: a
// proxy in front of Kafka passes requests on and cuts before the answers.
func TestCutBetweenWriteAndAcknowledgement(t *testing.T) {
	t.Parallel()

	proxy, err := faults.StartKafkaProxy(t.Context(), apache(t).brokers)
	require.NoError(t, err)
	t.Cleanup(proxy.Close)
	w := worldOn(t, proxy.Brokers())

	// Our producers, both kinds.
	const count = 300
	delivered := make(chan error, count)
	producer, err := kafka.NewProducer(kafka.ProducerConfig{
		Brokers: proxy.Brokers(), ClientID: "test", Log: slog.New(slog.DiscardHandler),
		Delivered: func(_ uint64, err error) { delivered <- err }, Reachable: func(error) {},
	})
	require.NoError(t, err)
	t.Cleanup(producer.Close)
	i := w.start(t, "a")
	proxy.CutAnswers(kmsg.Produce, 20)
	for n := range count {
		require.NoError(t, producer.Publish(w.issue(t).Record(), uint64(n)))
		if n%15 == 0 { // in many requests
			require.NoError(t, <-delivered)
		}
	}
	for range count - (count+14)/15 {
		require.NoError(t, <-delivered)
	}
	require.Eventually(t, func() bool { return proxy.Cut() >= 20 }, patience, 20*time.Millisecond)
	w.waitCaughtUp(t)
	t.Logf("%d answers to writes were cut, by the stage's transactions and by the producer's", proxy.Cut())
	require.Zero(t, i.metric(t, "onceledger_balances_records_total", "duplicate"), "a document is on the topic twice")
	admin, _ := w.admin(t)
	ends, err := admin.ListEndOffsets(t.Context(), event.BillingEvents)
	require.NoError(t, err)
	var records int64
	ends.Each(func(end kadm.ListedOffset) { records += end.Offset })
	require.EqualValues(t, count, records, "records on billing.events")
}

// Goal: brokers are killed one after the other, each time one that coordinates
// the stage's group or its transactions, under load: the balances are the
// ledger's, and the stage never stands still for two minutes. (The client
// library may never come back from a call then; the stage has to go on without.)
func TestCoordinatorsAreKilled(t *testing.T) {
	t.Parallel()

	cluster, err := devstack.StartKafka(t.Context(), devstack.KafkaConfig{
		Dir: t.TempDir(), JavaHome: os.Getenv("JAVA_HOME"), Logf: t.Logf, Brokers: 3,
	})
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
		defer cancel()
		require.NoError(t, cluster.Stop(ctx))
	})
	topics := kafka.ServiceTopics(partitions, 3)
	require.NoError(t, kafka.EnsureTopics(t.Context(), cluster.Bootstrap(), topics))
	// A broker learns of a new topic a moment after the controller has made it.
	require.Eventually(t, func() bool { return kafka.CheckTopics(t.Context(), cluster.Bootstrap(), topics) == nil }, patience, 50*time.Millisecond)
	w := worldOn(t, cluster.Bootstrap())
	admin, _ := w.admin(t)
	i := w.start(t, "a", func(c *kafka.TransactorConfig, _ *balances.Config) {
		c.InstanceID = "worker-1"
		c.MaxBatch = 20 // many transactions
	})
	w.load(t, 50)
	w.waitCaughtUp(t)

	var longest time.Duration
	for round := range 3 {
		coordinators, id := admin.FindTxnCoordinators, "balances-a"
		if round%2 == 0 {
			coordinators, id = admin.FindGroupCoordinators, balances.Group
		}
		found := coordinators(t.Context(), id)
		require.NoError(t, found.Error())
		node := int(found[id].NodeID)
		killed := make(chan struct{})
		before := i.metric(t, "onceledger_transact_seconds", "")
		go func() {
			defer close(killed)
			ticker := time.NewTicker(time.Millisecond)
			defer ticker.Stop()
			for t.Context().Err() == nil {
				if now, err := i.total("onceledger_transact_seconds", ""); err != nil || now >= before+5 {
					break
				}
				<-ticker.C
			}
			cluster.Kill(node)
		}()
		for dead := false; !dead; {
			w.load(t, 100)
			select {
			case <-killed:
				dead = true
			default:
			}
		}
		w.load(t, 100)
		started, moved, last := time.Now(), time.Now(), -1.0
		require.Eventually(t, func() bool {
			if now := i.metric(t, "onceledger_transact_seconds", ""); now != last {
				moved, last = time.Now(), now
			}
			longest = max(longest, time.Since(moved))
			behind, err := kafka.Behind(t.Context(), w.brokers, balances.Group, event.BillingEvents)
			return longest > 2*time.Minute || err == nil && behind == 0
		}, 5*patience, 50*time.Millisecond, "the group does not catch up")
		require.LessOrEqual(t, longest, 2*time.Minute, "it stood still")
		require.Empty(t, w.difference(t))
		t.Logf("broker %d, coordinator of %s, was killed: caught up after %s", node, id, time.Since(started))
		require.NoError(t, cluster.Start(t.Context(), node))
	}
	require.Eventually(t, func() bool { ready, _ := i.transactor.Ready(); return ready }, patience, 50*time.Millisecond)
	t.Logf("it stood still for %s at most; %v calls did not come back in time, %v still have not",
		longest, i.metric(t, "onceledger_transact_unanswered_calls_total", ""), i.metric(t, "onceledger_transact_abandoned_producers", ""))
	require.Zero(t, i.metric(t, "onceledger_balances_rebuilds_total", ""), i.log)
}

package balances_test

import (
	"bufio"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/balances"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/kafka"
)

// Goal: whatever comes twice and whoever comes and goes, the topic says what the
// ledger says. Method: random documents of three tenants, pieces of the stream
// published again, instances started and stopped; then the sums are compared.
func TestBalancesAreTheLedgers(t *testing.T) {
	t.Parallel()

	w, _ := newWorld(t)
	w.load(t, 200)
	first := w.start(t, "a")
	w.waitCaughtUp(t)
	require.Positive(t, first.metric(t, "onceledger_balances_records_total", "duplicate"))

	// Again, with the state from the topic.
	first.stop(t)
	w.load(t, 100)
	again := w.start(t, "a")
	w.waitCaughtUp(t)
	require.Zero(t, again.metric(t, "onceledger_balances_rebuilds_total", ""), again.log)

	// Shared by two, one of whom goes in the middle.
	w.load(t, 300)
	second := w.start(t, "b")
	require.Eventually(t, func() bool {
		return second.metric(t, "onceledger_balances_orders", "") > 0
	}, patience, 20*time.Millisecond, "the second has no share")
	w.load(t, 300)
	again.stop(t)
	w.load(t, 100)
	w.waitCaughtUp(t)
	require.Zero(t, second.metric(t, "onceledger_balances_rebuilds_total", ""), second.log)
	require.Zero(t, second.metric(t, "onceledger_balances_missing_events", ""))
}

// TestTopicIsMadeAnew: an instance notices that what it relies on has gone under
// it, whether it has something to do or not.
func TestTopicIsMadeAnew(t *testing.T) {
	t.Parallel()

	for _, topic := range []string{event.LedgerBalances, event.LedgerBalanceOrders} {
		t.Run(topic, func(t *testing.T) {
			t.Parallel()

			w, broker := newWorld(t)
			w.load(t, 100)
			i := w.start(t, "a")
			w.waitCaughtUp(t)

			require.NoError(t, broker.DeleteTopic(topic))
			require.NoError(t, broker.CreateTopic(topic, partitions, map[string]string{"cleanup.policy": "compact"}))
			require.Eventually(t, func() bool {
				return i.metric(t, "onceledger_balances_rebuilds_total", "") >= partitions && w.difference(t) == ""
			}, patience, 50*time.Millisecond, "it is not rebuilt")
			require.Contains(t, i.log.String(), "it was made anew")
			w.load(t, 100)
			w.waitCaughtUp(t)
		})
	}
}

// TestOffsetsAreSetBack is how an operator asks for a new beginning.
func TestOffsetsAreSetBack(t *testing.T) {
	t.Parallel()

	w, _ := newWorld(t)
	w.load(t, 100)
	w.start(t, "a").stop(t)
	first := w.start(t, "a")
	w.waitCaughtUp(t)
	first.stop(t)

	client, err := kgo.NewClient(kgo.SeedBrokers(w.brokers))
	require.NoError(t, err)
	defer client.Close()
	var back kadm.Offsets
	for partition := range int32(partitions) {
		back.AddOffset(event.BillingEvents, partition, 0, -1)
	}
	require.NoError(t, kadm.NewClient(client).CommitAllOffsets(t.Context(), balances.Group, back))
	again := w.start(t, "a")
	w.waitCaughtUp(t)
	require.EqualValues(t, partitions, again.metric(t, "onceledger_balances_rebuilds_total", ""))
	require.Contains(t, again.log.String(), "balances are rebuilt from the oldest event")
}

// TestUnknownRecordStopsItsPartitionAlone shows what an operator sees, and how
// the partition goes on.
func TestUnknownRecordStopsItsPartitionAlone(t *testing.T) {
	t.Parallel()

	w, broker := newWorld(t)
	w.load(t, 50)
	i := w.start(t, "a")
	w.waitCaughtUp(t)
	bad := broker.PartitionInfos(event.BillingEvents)[0]
	broker.Produce(t, event.BillingEvents, kgo.Record{Partition: bad.Partition, Value: []byte(`{"not":"ours"}`)})
	require.Eventually(t, func() bool { ready, _ := i.transactor.Ready(); return !ready }, patience, 20*time.Millisecond)
	_, why := i.transactor.Ready()
	require.Contains(t, why, "BALANCES_SKIP=0:")
	require.EqualValues(t, 1, i.metric(t, "onceledger_transact_stopped_partitions", ""))

	w.load(t, 100)
	require.Eventually(t, func() bool {
		committed, end, err := kafka.GroupProgress(t.Context(), w.brokers, balances.Group, event.BillingEvents)
		require.NoError(t, err)
		return committed[0] == bad.HighWatermark && committed[1] == end[1] && committed[2] == end[2] && committed[3] == end[3]
	}, patience, 50*time.Millisecond, "the others do not go on")
	require.NotEmpty(t, w.difference(t), "nothing waits behind it")

	i.stop(t)
	w.start(t, "a", func(_ *kafka.TransactorConfig, c *balances.Config) {
		c.Skip = map[balances.Place]bool{{Partition: 0, Offset: bad.HighWatermark}: true}
	})
	w.waitCaughtUp(t)
}

// TestTooFewPartitions: a partition of the source needs one for its state.
func TestTooFewPartitions(t *testing.T) {
	t.Parallel()

	w, broker := newWorld(t)
	require.NoError(t, broker.DeleteTopic(event.LedgerBalances))
	require.NoError(t, broker.CreateTopic(event.LedgerBalances, partitions-1, nil))
	i := w.start(t, "a")
	require.Eventually(t, func() bool {
		ready, why := i.transactor.Ready()
		return !ready && strings.Contains(why, "topic ledger.balances has 3 partitions and billing.events has 4")
	}, patience, 20*time.Millisecond)
}

// Goal: after an unclean stop of the embedded broker, whose transactions may be
// half visible, the balances are right again, and both logs say what was done.
// Method: kill -9 of the broker's process while the stage works through a
// backlog; start it again.
func TestEmbeddedBrokerIsKilled(t *testing.T) {
	t.Parallel()

	dir := t.TempDir()
	addr, broker, _ := startBroker(t, dir)
	specs := kafka.ServiceTopics(partitions, 1)
	require.NoError(t, kafka.EnsureTopics(t.Context(), addr, specs))
	w := worldOn(t, addr)
	w.load(t, 100)
	i := w.start(t, "a")
	w.waitCaughtUp(t)

	for range 2 {
		w.load(t, 1000)
		before := i.metric(t, "onceledger_transact_seconds", "")
		require.Eventually(t, func() bool { return i.metric(t, "onceledger_transact_seconds", "") > before+3 }, patience, time.Millisecond)
		rebuilds := i.metric(t, "onceledger_balances_rebuilds_total", "")
		require.NoError(t, broker.Process.Signal(syscall.SIGKILL))
		_ = broker.Wait()
		var log string
		var again string
		again, broker, log = startBroker(t, dir)
		require.Equal(t, addr, again)
		require.Eventually(t, func() bool {
			text, err := os.ReadFile(log)
			require.NoError(t, err)
			return strings.Contains(string(text), "topic ledger.balances is emptied and will be rebuilt")
		}, patience, 20*time.Millisecond)
		require.Eventually(t, func() bool {
			return i.metric(t, "onceledger_balances_rebuilds_total", "") >= rebuilds+partitions
		}, patience, 50*time.Millisecond, "it is not rebuilt")
		w.waitCaughtUp(t)
		require.Contains(t, i.log.String(), "balances are rebuilt from the oldest event")
	}
}

// startBroker runs an embedded broker in a process of its own.
func startBroker(t *testing.T, dir string) (addr string, broker *exec.Cmd, log string) {
	t.Helper()
	file, err := os.CreateTemp(t.TempDir(), "broker")
	require.NoError(t, err)
	defer file.Close()
	broker = exec.Command(os.Args[0])
	broker.Env = append(os.Environ(), helperVariable+"=broker", "BROKER_DIR="+dir)
	broker.Stderr = file
	out, err := broker.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, broker.Start())
	t.Cleanup(func() {
		_ = broker.Process.Kill() // it may be gone
		_ = broker.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	return strings.TrimSpace(line), broker, file.Name()
}

package devstack

import (
	"context"
	"errors"
	"net"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

func TestBroker(t *testing.T) {
	t.Parallel()

	t.Run("KeepsRecordsOverAnOrderlyStop", func(t *testing.T) {
		t.Parallel()

		config := BrokerConfig{Dir: t.TempDir(), Topics: []Topic{{Name: "events", Partitions: 3}}}
		broker := startBroker(t, config)
		produce(t, broker.addr, "events", "a", "1")
		broker.stop(t)

		again := startBroker(t, config)
		require.Equal(t, broker.addr, again.addr, "the port is remembered")
		require.Equal(t, []string{"1"}, consume(t, again.addr, "events", 1))
		require.NotContains(t, again.log.String(), "not stopped in order")
	})

	t.Run("KeepsAcknowledgedRecordsOverAKillAndSaysWhatItMeans", func(t *testing.T) {
		t.Parallel()

		dir := t.TempDir()
		killed := startHelper(t, "broker", dir)
		produce(t, killed.ready, "events", "a", "1")
		killed.end(t, syscall.SIGKILL)

		broker := startBroker(t, BrokerConfig{Dir: dir})
		require.Contains(t, broker.log.String(), "not stopped in order")
		require.Equal(t, []string{"1"}, consume(t, broker.addr, "events", 1))
		broker.stop(t)
		require.NotContains(t, startBroker(t, BrokerConfig{Dir: dir}).log.String(), "not stopped in order", "said once")
	})

	t.Run("RefusesASecondOnTheFolder", func(t *testing.T) {
		t.Parallel()

		config := BrokerConfig{Dir: t.TempDir()}
		startBroker(t, config)
		require.ErrorIs(t, RunBroker(t.Context(), config), ErrLocked)
	})

	t.Run("ChoosesAnotherPortWhenItsOwnIsTaken", func(t *testing.T) {
		t.Parallel()

		config := BrokerConfig{Dir: t.TempDir(), Topics: []Topic{{Name: "events", Partitions: 1}}}
		broker := startBroker(t, config)
		broker.stop(t)
		occupy(t, portOf(t, broker.addr))

		again := startBroker(t, config)
		require.NotEqual(t, broker.addr, again.addr)
		produce(t, again.addr, "events", "a", "1")
	})

	t.Run("FailsWhenTheConfiguredPortIsTaken", func(t *testing.T) {
		t.Parallel()

		port, err := FreePort(t.Context())
		require.NoError(t, err)
		occupy(t, port)
		dir := t.TempDir()
		require.ErrorIs(t, RunBroker(t.Context(), BrokerConfig{Dir: dir, Port: port}), syscall.EADDRINUSE)
		require.NotContains(t, startBroker(t, BrokerConfig{Dir: dir}).log.String(), "not stopped in order")
	})

	t.Run("LeavesATopicsPartitionsAlone", func(t *testing.T) {
		t.Parallel()

		config := BrokerConfig{Dir: t.TempDir(), Topics: []Topic{{Name: "events", Partitions: 3}}}
		startBroker(t, config).stop(t)
		config.Topics[0].Partitions = 6
		require.Contains(t, startBroker(t, config).log.String(), "keeps its 3 partitions")
	})

	t.Run("CompactsAlsoAfterARestart", func(t *testing.T) {
		t.Parallel()

		config := BrokerConfig{
			Dir:    t.TempDir(),
			Topics: []Topic{{Name: "balances", Partitions: 1, Configs: map[string]string{"cleanup.policy": "compact"}}},
		}
		startBroker(t, config).stop(t)
		config.MaintainEvery = 20 * time.Millisecond
		broker := startBroker(t, config)
		produce(t, broker.addr, "balances", "a", "1", "2", "3")
		require.Eventually(t, func() bool {
			values := consume(t, broker.addr, "balances", 1)
			return values[0] != "1"
		}, 30*time.Second, 50*time.Millisecond, "the first value of the key is still there")
	})
}

// runningBroker is RunBroker in a goroutine.
type runningBroker struct {
	addr   string
	log    *logLines // read it only before stop
	cancel context.CancelFunc
	done   chan error
}

func startBroker(t *testing.T, config BrokerConfig) *runningBroker {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	broker := &runningBroker{log: &logLines{}, cancel: cancel, done: make(chan error, 1)}
	ready := make(chan string, 1)
	config.Ready = func(addr string) { ready <- addr }
	config.Logf = broker.log.logf
	go func() { broker.done <- RunBroker(ctx, config) }()
	t.Cleanup(func() { broker.stop(t) })

	select {
	case broker.addr = <-ready:
	case err := <-broker.done:
		require.NoError(t, err)
		require.FailNow(t, "the broker ended before it was ready")
	}
	return broker
}

// stop may be called twice.
func (b *runningBroker) stop(t *testing.T) {
	t.Helper()
	b.cancel()
	require.NoError(t, <-b.done)
	b.done <- nil
}

func portOf(t *testing.T, addr string) int {
	t.Helper()
	_, text, err := net.SplitHostPort(addr)
	require.NoError(t, err)
	port, err := strconv.Atoi(text)
	require.NoError(t, err)
	return port
}

func produce(t *testing.T, addr, topic, key string, values ...string) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(addr))
	require.NoError(t, err)
	defer client.Close()
	for _, value := range values {
		record := &kgo.Record{Topic: topic, Key: []byte(key), Value: []byte(value)}
		require.NoError(t, client.ProduceSync(t.Context(), record).FirstErr())
	}
}

// consume reads a topic from its start until it has at least count values.
func consume(t *testing.T, addr, topic string, count int) []string {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(addr), kgo.ConsumeTopics(topic))
	require.NoError(t, err)
	defer client.Close()
	var values []string
	for len(values) < count {
		fetches := client.PollFetches(t.Context())
		require.NoError(t, errors.Join(t.Context().Err(), fetches.Err()))
		fetches.EachRecord(func(record *kgo.Record) { values = append(values, string(record.Value)) })
	}
	return values
}

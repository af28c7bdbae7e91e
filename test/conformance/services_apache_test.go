//go:build apache

package conformance_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/debezium"
	"github.com/onceledger/onceledger/internal/devstack"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/kafkatest"
	"github.com/onceledger/onceledger/internal/relay"
)

// services are a broker with the topics, and a Connect worker on it. All tests
// that use one Connect run one after another: some of them kill it.
type services struct {
	bootstrap string
	connect   *devstack.Connect
}

// java is for two stacks at a time: most of what they do is wait for each other,
// and more of them are too much for a small machine.
var java = make(chan struct{}, 2)

func takeJava(t *testing.T) {
	t.Helper()
	java <- struct{}{}
	t.Cleanup(func() { <-java })
}

// startApache starts Apache Kafka and Connect, for a test and all below it.
func startApache(t *testing.T) *services {
	t.Helper()
	takeJava(t)
	dir := t.TempDir()
	kafka, err := devstack.StartKafka(t.Context(), devstack.KafkaConfig{
		Dir: filepath.Join(dir, "kafka"), JavaHome: os.Getenv("JAVA_HOME"), FallbackDir: jars(), Logf: t.Logf,
	})
	require.NoError(t, err)
	t.Cleanup(func() { kafka.Kill(1) })
	client, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(kafka.Bootstrap(), ",")...))
	require.NoError(t, err)
	defer client.Close()
	made, err := kadm.NewClient(client).CreateTopics(t.Context(), partitions, -1, nil, event.OrderEvents, event.BillingEvents)
	require.NoError(t, err)
	require.NoError(t, made.Error())
	return &services{kafka.Bootstrap(), startConnect(t, filepath.Join(dir, "connect"), kafka.Bootstrap(), nil)}
}

// startOnEmbedded starts an embedded broker and Connect on it. Connect cannot
// make topics there: it does not understand the broker's answers to CreateTopics
// (a setting's source of -1) and DescribeTopicPartitions (no eligible leader
// replicas). So all of them are made ahead.
func startOnEmbedded(t *testing.T) *services {
	t.Helper()
	takeJava(t)
	broker := kafkatest.New(t)
	for _, topic := range []string{event.OrderEvents, event.BillingEvents} {
		require.NoError(t, broker.CreateTopic(topic, partitions, nil))
	}
	for _, topic := range []string{"connect-configs", "connect-offsets", "connect-status", "debezium.heartbeat." + debezium.DefaultTopicPrefix} {
		require.NoError(t, broker.CreateTopic(topic, 1, map[string]string{"cleanup.policy": "compact"}))
	}
	connect := startConnect(t, filepath.Join(t.TempDir(), "connect"), broker.Brokers(), map[string]string{
		"topic.creation.enable": "false",
	})
	return &services{broker.Brokers(), connect}
}

func startConnect(t *testing.T, dir, bootstrap string, settings map[string]string) *devstack.Connect {
	t.Helper()
	connect, err := devstack.StartConnect(t.Context(), devstack.ConnectConfig{
		Dir: dir, Bootstrap: bootstrap, Settings: settings, JavaHome: os.Getenv("JAVA_HOME"), FallbackDir: jars(), Logf: t.Logf,
	})
	require.NoError(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			text, _ := os.ReadFile(connect.LogFile())
			t.Logf("the end of Connect's log:\n%s", text[max(0, len(text)-8000):])
		}
		connect.Kill()
	})
	return connect
}

func jars() string { return filepath.Join(os.TempDir(), "onceledger-jars") }

// connector is Debezium as the relay of a world.
type connector struct {
	w       *world
	connect *devstack.Connect
	client  *debezium.Client
	slot    string

	registered bool // Connect knows it from then on
}

func debeziumSlot(t *testing.T, w *world) string {
	t.Helper()
	slot, err := db.New().DebeziumSlot(t.Context(), w.pool, w.slot)
	require.NoError(t, err)
	return slot
}

// newClient is a client of a connector of a test's own, which is gone when the
// test ends.
func newClient(t *testing.T, s *services) *debezium.Client {
	t.Helper()
	client, err := debezium.NewClient(debezium.ClientConfig{
		URL: s.connect.URL(), Connector: "outbox-" + uuid.NewString()[:8], Wait: waiting,
	})
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		require.NoError(t, s.connect.Start(ctx))
		require.NoError(t, client.Remove(ctx))
	})
	return client
}

// debeziumBench is a bench of Debezium.
func debeziumBench(t *testing.T, s *services) *bench {
	t.Helper()
	w := newWorld(t, s.bootstrap)
	w.assign(t, relay.KindDebezium)
	c := &connector{w: w, connect: s.connect, client: newClient(t, s), slot: debeziumSlot(t, w)}
	return &bench{world: w, kind: relay.KindDebezium, carrier: func(*testing.T, string) carrier { return c }}
}

func (c *connector) start(t *testing.T) {
	t.Helper()
	require.NoError(t, c.begin(t.Context()))
}

func (c *connector) begin(ctx context.Context) error {
	if err := c.connect.Start(ctx); err != nil || c.registered {
		return err
	}
	err := c.client.Register(ctx, debezium.Params{
		DatabaseURL: c.w.database.URL("relay"), Slot: c.slot, Publication: relay.DefaultPublication,
	})
	c.registered = err == nil
	return err
}

func (c *connector) waitCarrying(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		slot, err := db.New().SlotGet(t.Context(), c.w.pool, c.slot)
		return err == nil && slot.Active
	}, waiting, 20*time.Millisecond, "the connector never reads its slot")
}

// stop ends Connect in order: a connector that is stopped by itself forgets
// where it was when it is registered again.
func (c *connector) stop(t *testing.T) {
	t.Helper()
	c.signal(t, syscall.SIGTERM)
	select {
	case <-c.connect.Done():
	case <-time.After(waiting):
		require.FailNow(t, "Connect does not end")
	}
}

func (c *connector) kill(t *testing.T) {
	t.Helper()
	c.connect.Kill()
}

func (c *connector) signal(t *testing.T, signal syscall.Signal) {
	t.Helper()
	require.NoError(t, syscall.Kill(c.connect.Pid(), signal))
}

// The points at which Connect is killed. Debezium has no crash points of ours:
// these are what can be told from outside.
const (
	slotMade      = "slot made, snapshot not published"
	fewStreamed   = "a few events streamed"
	manyStreamed  = "many events streamed"
	startingAgain = "starting again"
)

func (c *connector) points() []string {
	return []string{slotMade, fewStreamed, startingAgain, manyStreamed}
}

func (c *connector) dieAt(t *testing.T, point string, l *load) {
	t.Helper()
	switch point {
	case slotMade:
		began := make(chan error, 1)
		go func() { began <- c.begin(t.Context()) }()
		require.Eventually(t, func() bool {
			_, err := db.New().SlotGet(t.Context(), c.w.pool, c.slot)
			if err != nil && !errors.Is(err, pgx.ErrNoRows) {
				t.Log(err)
			}
			return err == nil
		}, waiting, time.Millisecond, "the connector never makes its slot")
		c.kill(t)
		t.Logf("killed on its way: %v", <-began)
	case startingAgain:
		require.NoError(t, c.connect.Start(t.Context()))
		l.advance(t, 10)
		c.kill(t)
	default:
		c.start(t)
		c.waitCarrying(t)
		l.advance(t, map[string]int{fewStreamed: 10, manyStreamed: 200}[point])
		c.kill(t)
	}
}

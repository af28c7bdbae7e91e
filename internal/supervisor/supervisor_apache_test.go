//go:build apache

package supervisor

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/relay"
)

// TestRunApache: Apache Kafka and Debezium are parts like the others.
func TestRunApache(t *testing.T) {
	t.Parallel()

	t.Run("ThreeBrokers", func(t *testing.T) {
		config := newApacheConfig(t)
		config.Brokers = 3
		run := start(t, config)
		brokers := see(t, run.workerURL(t)).Environ["KAFKA_BROKERS"]
		require.Len(t, strings.Split(brokers, ","), 3)
		require.NoDirExists(t, filepath.Join(config.Home, "kafka"), "the embedded broker is not started as well")

		run.requireComesBack(t, filepath.Join(config.Home, "apache-kafka", "broker-2"), "kafka ended (broker 2: signal: killed")
		require.NoError(t, run.end())
		require.Zero(t, javaPid(t, config.Home))
		require.Equal(t, []string{"api", "worker", "kafka"}, run.stopped())

		// Brokers that were made one way are not taken for the other.
		config.Brokers = 1
		require.ErrorContains(t, Run(t.Context(), config), "holds a cluster of 3, and 1 are wanted")
	})

	t.Run("Debezium", func(t *testing.T) {
		config := newApacheConfig(t)
		config.Relay = "debezium"
		relayBeside(t, config.Home)
		run := start(t, config)
		connections, err := ReadConnections(config.Home)
		require.NoError(t, err)
		waitRunning(t, connections.Connect)
		run.requireComesBack(t, filepath.Join(config.Home, "connect"), "connect ended (signal: killed")
		waitRunning(t, connections.Connect)
		require.NoError(t, run.end())
		require.Zero(t, javaPid(t, config.Home))
		require.Equal(t, []string{"api", "worker", "connect", "kafka"}, run.stopped())

		// Left away, the relay is the one of last time, and what it needs is started.
		config.Relay = ""
		run = start(t, config)
		again, err := ReadConnections(config.Home)
		require.NoError(t, err)
		require.Equal(t, connections.KafkaBrokers, again.KafkaBrokers)
		require.Equal(t, connections.Connect, again.Connect)
		waitRunning(t, again.Connect)
		require.NoError(t, run.end())
	})
}

// relayBeside relays as a worker does, once it is known where: the worker of these
// tests does not, and to hand over to Debezium takes a relay at work.
func relayBeside(t *testing.T, home string) {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		var connections Connections
		for err := error(os.ErrNotExist); err != nil; connections, err = ReadConnections(home) {
			select {
			case <-ctx.Done():
				return
			case <-time.After(100 * time.Millisecond):
			}
		}
		r, err := relay.NewRelay(relay.Config{
			URL: connections.Databases.Relay,
			Log: log,
			NewPublisher: func(reports relay.Reports) (relay.Publisher, error) {
				return kafka.NewProducer(kafka.ProducerConfig{
					Brokers: connections.KafkaBrokers, Log: log, Delivered: reports.Delivered, Reachable: reports.Reachable,
				})
			},
		})
		assert.NoError(t, err)
		assert.NoError(t, r.Run(ctx))
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
}

func newApacheConfig(t *testing.T) Config {
	t.Helper()
	config := newConfig(t)
	config.DatabaseURL = pgtest.Server(t).AdminURL("postgres")
	config.Kafka = KafkaApache
	config.JavaHome = os.Getenv("JAVA_HOME")
	config.ReadyTimeout = 5 * time.Minute
	return config
}

// requireComesBack kills the Java program that has its settings in dir.
func (p *process) requireComesBack(t *testing.T, dir, said string) {
	t.Helper()
	pid := javaPid(t, dir)
	require.NotZero(t, pid)
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	p.stderr.wait(t, said)
	require.Eventually(t, func() bool {
		again := javaPid(t, dir)
		return again != 0 && again != pid
	}, time.Minute, 10*time.Millisecond)
}

// stopped lists the parts that were stopped, in that order.
func (p *process) stopped() []string {
	var parts []string
	for _, line := range regexp.MustCompile(`(?m)^stopping (\w+)$`).FindAllStringSubmatch(p.stderr.String(), -1) {
		parts = append(parts, line[1])
	}
	return parts
}

func waitRunning(t *testing.T, connect string) {
	t.Helper()
	require.Eventually(t, func() bool { return running(connect) }, 2*time.Minute, 100*time.Millisecond)
}

// running tells whether the connector and its task do what they should.
func running(connect string) bool {
	response, err := http.Get(connect + "/connectors?expand=status")
	if err != nil {
		return false
	}
	defer response.Body.Close()
	status, err := io.ReadAll(response.Body)
	return err == nil && bytes.Count(status, []byte(`"state":"RUNNING"`)) == 2
}

// javaPid is the process whose command line is of Java and names path; 0 when
// there is none.
func javaPid(t *testing.T, path string) int {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	require.NoError(t, err)
	for _, file := range files {
		line, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(line), path) || !strings.Contains(string(line), "log4j2.configurationFile") {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		require.NoError(t, err)
		return pid
	}
	return 0
}

package supervisor

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/devstack"
	"github.com/onceledger/onceledger/internal/kafkatest"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/relay"
	"github.com/onceledger/onceledger/internal/tenants"
)

func TestRun(t *testing.T) {
	t.Parallel()

	t.Run("StartsAllAndStopsItInOrderAndStartsAgain", func(t *testing.T) {
		t.Parallel()

		config := newConfig(t)
		config.Environ = append(config.Environ, "DATABASE_URL=someone else's", "LOG_LEVEL=debug")
		run := start(t, config)
		require.Regexp(t, `^ready http://127\.0\.0\.1:\d+\n$`, run.stdout.String())
		require.Contains(t, run.stderr.String(), run.url+"/v1/orders/$ORDER/receipt")

		api := see(t, run.url).Environ
		require.Equal(t, strings.TrimPrefix(run.url, "http://"), api["ONCELEDGER_ADDR"])
		require.Equal(t, "onceledger_api", user(t, api["DATABASE_URL"]))
		require.Equal(t, "debug", api["LOG_LEVEL"])
		require.NotContains(t, api, "RELAY_DATABASE_URL", "the API has one login only")
		worker := see(t, run.workerURL(t)).Environ
		require.Equal(t, "onceledger_worker", user(t, worker["DATABASE_URL"]))
		require.Equal(t, "onceledger_relay", user(t, worker["RELAY_DATABASE_URL"]))
		require.Equal(t, "onceledger_janitor", user(t, worker["JANITOR_DATABASE_URL"]))
		require.NotEmpty(t, worker["WORKER_ID"])
		requireTopics(t, worker["KAFKA_BROKERS"])

		connections, err := ReadConnections(config.Home)
		require.NoError(t, err)
		require.Equal(t, "onceledger_verify", user(t, connections.Databases.Verify))
		require.Equal(t, worker["KAFKA_BROKERS"], connections.KafkaBrokers)
		require.Equal(t, run.url, connections.API)
		key := readPrivate(t, filepath.Join(config.Home, "api-key"))
		requireKeyWorks(t, api["DATABASE_URL"], key)
		readPrivate(t, filepath.Join(config.Home, "connections.json"))
		readPrivate(t, filepath.Join(config.Home, "passwords.json"))

		log, err := os.ReadFile(filepath.Join(config.Home, "logs", "worker.log"))
		require.NoError(t, err)
		require.Contains(t, string(log), "worker started")
		require.Contains(t, run.stderr.String(), "worker: warn: worker warns why=test\n")
		require.NotContains(t, run.stderr.String(), "worker started")

		require.NoError(t, run.end())
		notes, err := os.ReadFile(run.notes)
		require.NoError(t, err)
		require.Equal(t, "api stopped\nworker stopped\n", string(notes))
		require.NoFileExists(t, filepath.Join(config.Home, "kafka", "running"), "the broker stopped in order")
		require.NoFileExists(t, filepath.Join(config.Home, "postgres", "data", "postmaster.pid"))

		again := start(t, config)
		require.Equal(t, key, readPrivate(t, filepath.Join(config.Home, "api-key")))
		requireKeyWorks(t, see(t, again.url).Environ["DATABASE_URL"], key)
		require.Equal(t, api["DATABASE_URL"], see(t, again.url).Environ["DATABASE_URL"], "same port, same password")
		require.Equal(t, run.workerURL(t), again.workerURL(t))
	})

	t.Run("StartsAgainWhatDies", func(t *testing.T) {
		t.Parallel()

		config := newConfig(t)
		run := start(t, config)
		worker := see(t, run.workerURL(t))
		brokers := worker.Environ["KAFKA_BROKERS"]

		for name, url := range map[string]string{"worker": run.workerURL(t), "api": run.url} {
			pid := see(t, url).Pid
			require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
			run.stderr.wait(t, name+" ended (signal: killed); starting it again")
			require.Eventually(t, func() bool {
				again, err := ask(url)
				return err == nil && again.Pid != pid
			}, 30*time.Second, 10*time.Millisecond, name)
		}

		pidFile, err := os.ReadFile(filepath.Join(config.Home, "postgres", "data", "postmaster.pid"))
		require.NoError(t, err)
		first, _, _ := strings.Cut(string(pidFile), "\n")
		postmaster, err := strconv.Atoi(first)
		require.NoError(t, err)
		require.NoError(t, syscall.Kill(postmaster, syscall.SIGKILL))
		run.stderr.wait(t, "postgres ended")
		require.Eventually(t, func() bool {
			conn, err := pgx.Connect(t.Context(), worker.Environ["DATABASE_URL"])
			return err == nil && conn.Close(t.Context()) == nil
		}, 30*time.Second, 10*time.Millisecond)

		lock, err := os.ReadFile(filepath.Join(config.Home, "kafka", "lock"))
		require.NoError(t, err)
		broker, err := strconv.Atoi(strings.TrimSpace(string(lock)))
		require.NoError(t, err)
		require.NoError(t, syscall.Kill(broker, syscall.SIGKILL))
		run.stderr.wait(t, "broker: the broker was not stopped in order")
		require.Eventually(t, func() bool {
			conn, err := net.Dial("tcp", brokers)
			return err == nil && conn.Close() == nil
		}, 30*time.Second, 10*time.Millisecond)
		require.NoError(t, run.end())
	})

	t.Run("MakesANewKeyWhenTheOldOneIsNoGood", func(t *testing.T) {
		t.Parallel()

		config := newConfig(t)
		config.DatabaseURL = pgtest.Server(t).AdminURL("postgres")
		require.NoError(t, os.MkdirAll(config.Home, 0o700))
		path := filepath.Join(config.Home, "api-key")
		require.NoError(t, os.WriteFile(path, []byte("olk_of_another_database\n"), 0o600))
		run := start(t, config)
		require.Contains(t, run.stderr.String(), "is not valid here")
		requireKeyWorks(t, see(t, run.url).Environ["DATABASE_URL"], readPrivate(t, path))
	})

	t.Run("UsesTheGivenDatabaseAndBrokers", func(t *testing.T) {
		t.Parallel()

		server := pgtest.Server(t)
		admin, err := pgx.Connect(t.Context(), server.AdminURL("postgres"))
		require.NoError(t, err)
		_, err = admin.Exec(t.Context(), "CREATE DATABASE given")
		require.NoError(t, err)
		require.NoError(t, admin.Close(t.Context()))

		config := newConfig(t)
		config.DatabaseURL = server.AdminURL("given")
		config.KafkaBrokers = kafkatest.New(t).Brokers()
		config.BrokerCommand = nil
		run := start(t, config)

		worker := see(t, run.workerURL(t)).Environ
		require.Equal(t, config.KafkaBrokers, worker["KAFKA_BROKERS"])
		requireTopics(t, config.KafkaBrokers)
		require.Equal(t, "onceledger_worker", user(t, worker["DATABASE_URL"]))
		require.Contains(t, worker["DATABASE_URL"], fmt.Sprintf(":%d/given", server.Port()))
		connections, err := ReadConnections(config.Home)
		require.NoError(t, err)
		require.Empty(t, connections.Databases.Admin, "the given password is not kept")
		require.NoDirExists(t, filepath.Join(config.Home, "postgres"))
		require.NoDirExists(t, filepath.Join(config.Home, "kafka"))
		require.NoError(t, run.end())
	})

	t.Run("RefusesADatabaseThatWillNotDo", func(t *testing.T) {
		t.Parallel()

		config := newConfig(t)
		config.DatabaseURL = pgtest.New(t).URL("api")
		require.ErrorContains(t, Run(t.Context(), config), "DATABASE_URL: the user must be able to create the service's roles")
		config.DatabaseURL = "host=localhost dbname=x"
		require.ErrorContains(t, Run(t.Context(), config), "DATABASE_URL: it must be a URL")
	})

	t.Run("SaysWhyAPartIsNotReady", func(t *testing.T) {
		t.Parallel()

		server := pgtest.Server(t)
		config := newConfig(t)
		config.DatabaseURL = server.AdminURL("postgres")
		config.Environ = append(config.Environ, "TEST_NEVER_READY=worker")
		config.ReadyTimeout = 2 * time.Second
		err := Run(t.Context(), config)
		require.ErrorContains(t, err, "worker is not ready")
		require.ErrorContains(t, err, "the stars are wrong")
		require.ErrorContains(t, err, "worker.log")
		require.NoFileExists(t, filepath.Join(config.Home, "kafka", "running"), "what had started was stopped")
	})

	t.Run("RefusesBrokersAndRelaysThatAreNone", func(t *testing.T) {
		t.Parallel()

		for want, change := range map[string]func(*Config){
			`--kafka is "redpanda": want embedded or apache`:                   func(c *Config) { c.Kafka = "redpanda" },
			`--brokers is 2: want 1, or 3`:                                     func(c *Config) { c.Kafka, c.Brokers = KafkaApache, 2 },
			`--brokers=3 needs --kafka=apache`:                                 func(c *Config) { c.Brokers = 3 },
			`KAFKA_BROKERS is set (host:9092), so no broker is started`:        func(c *Config) { c.KafkaBrokers, c.Kafka = "host:9092", KafkaApache },
			`--relay: there is no relay "carrier-pigeon": choose wal, poll or`: func(c *Config) { c.Relay = "carrier-pigeon" },
			`--kafka=apache: JAVA_HOME is /nonexistent`:                        func(c *Config) { c.Kafka, c.JavaHome = KafkaApache, "/nonexistent" },
			`--relay=debezium: JAVA_HOME is /nonexistent`:                      func(c *Config) { c.Relay, c.JavaHome = "debezium", "/nonexistent" },
		} {
			config := newConfig(t)
			change(&config)
			require.ErrorContains(t, Run(t.Context(), config), want)
			require.NoDirExists(t, filepath.Join(config.Home, "postgres"), "said before anything is started")
		}
	})

	t.Run("SwitchesToTheWantedRelayAndKeepsIt", func(t *testing.T) {
		t.Parallel()

		config := newConfig(t)
		config.DatabaseURL = pgtest.Server(t).AdminURL("postgres")
		assigned := func(run *process) relay.Kind {
			conn, err := pgx.Connect(t.Context(), see(t, run.workerURL(t)).Environ["RELAY_DATABASE_URL"])
			require.NoError(t, err)
			defer conn.Close(t.Context())
			kind, err := relay.Assigned(t.Context(), conn, relay.DefaultSlot)
			require.NoError(t, err)
			return kind
		}
		config.Relay = "poll"
		run := start(t, config)
		require.Equal(t, relay.KindPoll, assigned(run))
		require.NoError(t, run.end())

		config.Relay = ""
		run = start(t, config)
		require.Equal(t, relay.KindPoll, assigned(run))
		require.NoError(t, run.end())

		config.Relay = "wal"
		run = start(t, config)
		require.Equal(t, relay.KindWAL, assigned(run))
		require.NoError(t, run.end())
	})

	t.Run("RefusesBrokersThatDoNotHaveTheEvents", func(t *testing.T) {
		t.Parallel()

		config := newConfig(t)
		config.DatabaseURL = pgtest.Server(t).AdminURL("postgres")
		require.NoError(t, start(t, config).end())

		// As long as there are none, any brokers will do.
		given := config
		given.KafkaBrokers = kafkatest.New(t).Brokers()
		require.NoError(t, start(t, given).end())

		admin, err := pgx.Connect(t.Context(), config.DatabaseURL)
		require.NoError(t, err)
		defer admin.Close(t.Context())
		_, err = admin.Exec(t.Context(), `
			INSERT INTO processed_events (consumer, event_id, tenant_id, fingerprint, topic, partition, "offset")
			VALUES ('billing', uuidv7(), uuidv7(), sha256(''), 'order.events', 0, 0)`)
		require.NoError(t, err)
		err = Run(t.Context(), config)
		require.ErrorContains(t, err, "the events so far are on other brokers (KAFKA_BROKERS; now embedded)")
		require.ErrorContains(t, err, "set ONCELEDGER_HOME")
		require.NoError(t, start(t, given).end())
	})

	t.Run("RefusesATakenAddress", func(t *testing.T) {
		t.Parallel()

		listener, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		t.Cleanup(func() { _ = listener.Close() })
		config := newConfig(t)
		config.HTTPAddr = listener.Addr().String()
		require.ErrorContains(t, Run(t.Context(), config), "set ONCELEDGER_ADDR to another address")
		require.NoDirExists(t, filepath.Join(config.Home, "postgres"), "said before anything is started")
		config.HTTPAddr = "8080"
		require.ErrorContains(t, Run(t.Context(), config), "ONCELEDGER_ADDR")
	})

	t.Run("RefusesAFolderInUse", func(t *testing.T) {
		t.Parallel()

		config := newConfig(t)
		require.NoError(t, os.MkdirAll(config.Home, 0o700))
		lock, err := devstack.Lock(filepath.Join(config.Home, "lock"))
		require.NoError(t, err)
		require.ErrorContains(t, Run(t.Context(), config), "another 'onceledger up' runs on this folder")
		require.NoError(t, lock.Unlock())
	})

	t.Run("RefusesToStartWithoutThePrograms", func(t *testing.T) {
		t.Parallel()

		config := newConfig(t)
		require.NoError(t, os.Remove(filepath.Join(config.Programs, "worker")))
		require.ErrorContains(t, Run(t.Context(), config), "make build")
	})

	t.Run("StopsWhileStarting", func(t *testing.T) {
		t.Parallel()

		config := newConfig(t)
		config.DatabaseURL = pgtest.Server(t).AdminURL("postgres")
		ctx, cancel := context.WithCancel(t.Context())
		stderr := newOutput()
		config.Stderr = stderr
		config.Environ = append(config.Environ, "TEST_NEVER_READY=api")
		done := make(chan error, 1)
		go func() { done <- Run(ctx, config) }()
		stderr.wait(t, "api: warn: api warns")
		cancel()
		require.NoError(t, <-done)
		require.NoFileExists(t, filepath.Join(config.Home, "kafka", "running"), "what had started was stopped")
	})
}

// process is Run in a goroutine, ready.
type process struct {
	config         Config
	url            string
	notes          string
	stdout, stderr *output
	cancel         context.CancelFunc
	done           chan error
}

// newConfig runs this test program in the places of api, worker and broker.
func newConfig(t *testing.T) Config {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"api", "worker", "broker"} {
		script := fmt.Sprintf("#!/bin/sh\n%s=%s exec %s \"$@\"\n", programVariable, name, os.Args[0])
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755))
	}
	return Config{
		Home:          filepath.Join(dir, "home"),
		HTTPAddr:      "127.0.0.1:0",
		PostgresBin:   os.Getenv("ONCELEDGER_POSTGRES_BIN"),
		Programs:      dir,
		BrokerCommand: []string{filepath.Join(dir, "broker")},
		Environ:       append(os.Environ(), "TEST_NOTES="+filepath.Join(dir, "notes")),
		Stdout:        io.Discard,
		Stderr:        io.Discard,
	}
}

func start(t *testing.T, config Config) *process {
	t.Helper()
	run := &process{
		config: config, notes: filepath.Join(config.Programs, "notes"),
		stdout: newOutput(), stderr: newOutput(), done: make(chan error, 1),
	}
	config.Stdout, config.Stderr = run.stdout, run.stderr
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	run.cancel = cancel
	go func() { run.done <- Run(ctx, config); run.stdout.close() }()
	t.Cleanup(func() { _ = run.end() })
	if !run.stdout.waitFor("\n") {
		require.FailNow(t, "ended before it was ready", "%v\n%s", run.end(), run.stderr)
	}
	run.url = strings.TrimPrefix(strings.TrimSpace(run.stdout.String()), "ready ")
	return run
}

// end may be called twice.
func (p *process) end() error {
	p.cancel()
	err := <-p.done
	p.done <- nil
	return err
}

func (p *process) workerURL(t *testing.T) string {
	t.Helper()
	port, err := os.ReadFile(filepath.Join(p.config.Home, "worker-port"))
	require.NoError(t, err)
	return "http://127.0.0.1:" + strings.TrimSpace(string(port))
}

func see(t *testing.T, url string) seen {
	t.Helper()
	answer, err := ask(url)
	require.NoError(t, err)
	return answer
}

func ask(url string) (answer seen, err error) {
	response, err := http.Get(url + "/seen")
	if err != nil {
		return seen{}, err
	}
	defer response.Body.Close()
	return answer, json.NewDecoder(response.Body).Decode(&answer)
}

func user(t *testing.T, url string) (name string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	defer conn.Close(t.Context())
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT current_user").Scan(&name))
	return name
}

func requireKeyWorks(t *testing.T, url, key string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	defer conn.Close(t.Context())
	_, err = tenants.Authenticate(t.Context(), conn, "Bearer "+strings.TrimSpace(key))
	require.NoError(t, err)
}

func requireTopics(t *testing.T, brokers string) {
	t.Helper()
	for _, topic := range []string{"order.events", "billing.events", "ledger.balances", "ledger.balances.orders"} {
		client, err := kgo.NewClient(kgo.SeedBrokers(brokers), kgo.RecordPartitioner(kgo.ManualPartitioner()))
		require.NoError(t, err)
		defer client.Close()
		last := &kgo.Record{Topic: topic, Partition: 5}
		require.NoError(t, client.ProduceSync(t.Context(), last).FirstErr())
		beyond := &kgo.Record{Topic: topic, Partition: 6}
		require.Error(t, client.ProduceSync(t.Context(), beyond).FirstErr())
	}
}

func readPrivate(t *testing.T, path string) string {
	t.Helper()
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm(), path)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(text)
}

// output collects what is written and tells when something was.
type output struct {
	mutex  sync.Mutex
	news   *sync.Cond
	text   bytes.Buffer
	closed bool
}

func newOutput() *output {
	o := &output{}
	o.news = sync.NewCond(&o.mutex)
	return o
}

func (o *output) Write(p []byte) (int, error) {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	o.news.Broadcast()
	return o.text.Write(p)
}

func (o *output) close() {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	o.closed = true
	o.news.Broadcast()
}

func (o *output) String() string {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	return o.text.String()
}

// waitFor is false when the output was closed without it.
func (o *output) waitFor(part string) bool {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	for !strings.Contains(o.text.String(), part) {
		if o.closed {
			return false
		}
		o.news.Wait()
	}
	return true
}

func (o *output) wait(t *testing.T, part string) {
	t.Helper()
	require.True(t, o.waitFor(part), "never said %q", part)
}

// Package supervisor is `onceledger up`: the whole service on one machine. It
// starts Postgres, the broker, the worker and the API in this order, each a
// process of its own, restarts what dies, and stops all of it in the opposite
// order.
//
// Nothing it started outlives it, even when it is killed with -9, and the next
// start recovers from that. Everything it keeps is in one folder (Config.Home).
package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/onceledger/onceledger/internal/devstack"
	"github.com/onceledger/onceledger/internal/relay"
)

// Config says what to run.
type Config struct {
	// Home is the folder for data, logs, passwords and the API key.
	Home string
	// HTTPAddr is where the API listens, as host:port. Port 0 is a free one.
	HTTPAddr string
	// WorkerAddr is where the worker listens, in the same form. "" is a free port
	// of this machine that is kept from start to start.
	WorkerAddr string

	// DatabaseURL is a Postgres to use instead of one of our own. Its user must
	// be allowed to create roles.
	DatabaseURL string
	// KafkaBrokers are brokers to use instead of one of our own.
	KafkaBrokers string
	// Kafka is which brokers to start: KafkaEmbedded, which "" means too, or
	// KafkaApache.
	Kafka string
	// Brokers is how many: 1, which 0 means too, or 3 of Apache Kafka.
	Brokers int
	// Relay is what carries the outbox to Kafka: wal, poll or debezium. ""
	// leaves it as it is; at first it is wal.
	Relay string
	// RelaySlot is the relay's replication slot, as the worker is told
	// (RELAY_SLOT). "" means relay.DefaultSlot.
	RelaySlot string
	// JavaHome is where Java is, for what needs it. "" means to look on PATH.
	JavaHome string
	// PostgresBin is a folder with Postgres' programs; "" means to look for one.
	PostgresBin string

	// Partitions is how many each topic gets when it is made. 0 means 6.
	Partitions int
	// ReadyTimeout is how long parts may take to become ready. 0 means two
	// minutes.
	ReadyTimeout time.Duration

	// Programs is the folder with api and worker.
	Programs string
	// BrokerCommand runs the embedded broker. Its arguments are followed by --dir
	// and --port; it says "ready host:port" on standard output.
	BrokerCommand []string
	// Environ is what the children's environment begins with.
	Environ []string

	// Stdout gets one line, when everything is ready: "ready http://host:port".
	Stdout io.Writer
	// Stderr gets everything meant for people.
	Stderr io.Writer
}

// How long each part may take to stop before it is killed. The API and the
// worker finish what they have in hand.
const (
	apiStopTimeout      = 15 * time.Second
	workerStopTimeout   = 30 * time.Second
	connectStopTimeout  = 20 * time.Second
	brokerStopTimeout   = 15 * time.Second
	kafkaStopTimeout    = 30 * time.Second
	postgresStopTimeout = 20 * time.Second
)

// supervisor is one Run.
type supervisor struct {
	config Config
	say    devstack.Logf

	// parts are what runs, in the order in which it was started.
	parts []*keeper
}

// Run starts everything, says so on Stdout, and keeps it running until ctx is
// done. Then it stops everything and returns nil. A part that dies is started
// again; Run ends by itself only when the start does not succeed.
func Run(ctx context.Context, config Config) (err error) {
	if config.Partitions == 0 {
		config.Partitions = 6
	}
	if config.RelaySlot == "" {
		config.RelaySlot = relay.DefaultSlot
	}
	if config.ReadyTimeout == 0 {
		config.ReadyTimeout = 2 * time.Minute
	}
	if config.Home, err = filepath.Abs(config.Home); err != nil {
		return err
	}
	if err := errors.Join(config.checkKafka(), config.checkRelay(), config.checkPrograms()); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(config.Home, "logs"), 0o700); err != nil {
		return fmt.Errorf("make the data folder (ONCELEDGER_HOME): %w", err)
	}
	lock, err := devstack.Lock(filepath.Join(config.Home, "lock"))
	if errors.Is(err, devstack.ErrLocked) {
		return fmt.Errorf("another 'onceledger up' runs on this folder: %w; stop it, or set ONCELEDGER_HOME to another folder", err)
	}
	if err != nil {
		return err
	}
	defer lock.Unlock()

	s := &supervisor{config: config, say: newTerminal(config.Stderr)}
	defer func() {
		if stopErr := s.stop(ctx); err == nil {
			err = stopErr
		}
	}()
	if err := s.start(ctx); err != nil {
		if ctx.Err() != nil {
			return nil // asked to stop before everything was up
		}
		return err
	}
	<-ctx.Done()
	return nil
}

// start brings the parts up one after the other: each needs those before it.
func (s *supervisor) start(ctx context.Context) error {
	if err := checkAddr(ctx, "ONCELEDGER_ADDR", s.config.HTTPAddr); err != nil {
		return err
	}
	if s.config.WorkerAddr != "" {
		if err := checkAddr(ctx, "WORKER_ADDR", s.config.WorkerAddr); err != nil {
			return err
		}
	}
	if err := s.checkJava(ctx); err != nil {
		return err
	}
	databases, err := s.startDatabase(ctx)
	if err != nil {
		return err
	}
	keyFile, err := s.ensureAPIKey(ctx, databases.Admin)
	if err != nil {
		return err
	}
	if err := s.checkSameBrokers(ctx, databases); err != nil {
		return err
	}
	brokers, err := s.startBroker(ctx)
	if err != nil {
		return err
	}
	relay, err := s.prepareRelay(ctx, databases, brokers)
	if err != nil {
		return err
	}
	apiAddr, err := withPort(ctx, s.config.HTTPAddr)
	if err != nil {
		return err
	}
	apiURL := baseURL(apiAddr)
	workerAddr, err := s.workerAddr(ctx)
	if err != nil {
		return err
	}
	workerURL := baseURL(workerAddr)
	connections := Connections{Databases: databases, KafkaBrokers: brokers, Connect: relay.connectURL, API: apiURL, Worker: workerURL}
	if err := s.saveConnections(connections); err != nil {
		return err
	}

	s.keepProgram(ctx, "worker", workerStopTimeout,
		"DATABASE_URL="+databases.Worker,
		"RELAY_DATABASE_URL="+databases.Relay,
		"JANITOR_DATABASE_URL="+databases.Janitor,
		"KAFKA_BROKERS="+brokers,
		"WORKER_ID=worker-1",
		"WORKER_ADDR="+workerAddr)
	s.keepProgram(ctx, "api", apiStopTimeout,
		"DATABASE_URL="+databases.API,
		"ONCELEDGER_ADDR="+apiAddr)
	if err := s.switchRelay(ctx, relay); err != nil {
		return err
	}

	s.say("waiting until the pipeline is ready")
	readyCtx, cancel := context.WithTimeout(ctx, s.config.ReadyTimeout)
	defer cancel()
	if err := s.waitReady(readyCtx, "worker", workerURL); err != nil {
		return err
	}
	if err := s.waitReady(readyCtx, "api", apiURL); err != nil {
		return err
	}
	s.say("%s", summary(apiURL, workerURL, keyFile, s.config.Home))
	_, err = fmt.Fprintf(s.config.Stdout, "ready %s\n", apiURL)
	return err
}

// stop ends the parts, the last started first, so that none misses what it
// needs while it finishes.
func (s *supervisor) stop(ctx context.Context) error {
	var faults []error
	for _, part := range slices.Backward(s.parts) {
		s.say("stopping %s", part.name)
		faults = append(faults, part.end(ctx))
	}
	return errors.Join(faults...)
}

func (s *supervisor) keep(ctx context.Context, part *keeper) {
	part.say = s.say
	part.backOff = defaultBackOff
	s.parts = append(s.parts, part)
	part.keep(ctx)
}

func (c Config) checkPrograms() error {
	for _, name := range []string{"api", "worker"} {
		path := filepath.Join(c.Programs, name)
		if info, err := os.Stat(path); err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
			return fmt.Errorf("there is no program %s: 'make build' puts api, worker and onceledger into bin/ together", path)
		}
	}
	return nil
}

// newTerminal prints lines for people, whole ones, from any goroutine.
func newTerminal(to io.Writer) devstack.Logf {
	var mutex sync.Mutex
	return func(format string, args ...any) {
		mutex.Lock()
		defer mutex.Unlock()
		fmt.Fprintf(to, format+"\n", args...)
	}
}

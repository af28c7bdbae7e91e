package supervisor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/devstack"
	"github.com/onceledger/onceledger/internal/kafka"
)

// The brokers that can be started.
const (
	KafkaEmbedded = "embedded" // in a process of our own making
	KafkaApache   = "apache"   // Apache Kafka, which needs Java
)

// topicsTimeout bounds looking for the topics and making those that are missing.
const topicsTimeout = 30 * time.Second

// checkKafka looks at what was asked for, before anything is started.
func (c Config) checkKafka() error {
	var faults []error
	switch c.Kafka {
	case "", KafkaEmbedded:
		if c.Brokers > 1 {
			faults = append(faults, fmt.Errorf("--brokers=%d needs --kafka=apache: the embedded broker is one", c.Brokers))
		}
	case KafkaApache:
	default:
		faults = append(faults, fmt.Errorf("--kafka is %q: want embedded or apache", c.Kafka))
	}
	if c.Brokers != 0 && c.Brokers != 1 && c.Brokers != 3 {
		faults = append(faults, fmt.Errorf("--brokers is %d: want 1, or 3", c.Brokers))
	}
	if c.KafkaBrokers != "" && (c.Kafka != "" || c.Brokers != 0) {
		faults = append(faults, fmt.Errorf("KAFKA_BROKERS is set (%s), so no broker is started: "+
			"unset it, or leave --kafka and --brokers away", c.KafkaBrokers))
	}
	return errors.Join(faults...)
}

// startBroker returns the bootstrap servers of the configured brokers, or of
// our own once they answer. The service's topics are there.
func (s *supervisor) startBroker(ctx context.Context) (brokers string, err error) {
	switch {
	case s.config.KafkaBrokers != "":
		brokers = s.config.KafkaBrokers
		s.say("using the Kafka at %s (KAFKA_BROKERS)", brokers)
	case s.config.Kafka == KafkaApache:
		brokers, err = s.startKafka(ctx)
	default:
		brokers, err = s.startEmbedded(ctx)
	}
	if err != nil {
		return "", err
	}

	ctx, cancel := context.WithTimeout(ctx, topicsTimeout)
	defer cancel()
	err = kafka.EnsureTopics(ctx, brokers, kafka.ServiceTopics(s.config.Partitions, 0))
	if err != nil && s.config.KafkaBrokers != "" {
		err = fmt.Errorf("KAFKA_BROKERS: %w", err)
	}
	return brokers, err
}

// startKafka starts Apache Kafka and keeps it running. It is one part: the
// brokers say goodbye to each other when they are stopped together.
func (s *supervisor) startKafka(ctx context.Context) (string, error) {
	s.say("starting Apache Kafka, %d of it", max(1, s.config.Brokers))
	cluster, err := devstack.StartKafka(ctx, devstack.KafkaConfig{
		Dir:         filepath.Join(s.config.Home, "apache-kafka"),
		Brokers:     s.config.Brokers,
		JavaHome:    s.config.JavaHome,
		FallbackDir: s.config.Home,
		Logf:        s.say,
	})
	if err != nil {
		return "", err
	}
	s.keep(ctx, &keeper{
		name:        "kafka",
		stopTimeout: kafkaStopTimeout,
		start: func(ctx context.Context) (<-chan struct{}, func() string, error) {
			if err := cluster.StartAll(ctx); err != nil { // those that run go on
				return nil, nil, err
			}
			node, done := firstToEnd(ctx, cluster)
			return done, func() string {
				return fmt.Sprintf("broker %d: %v; its log is %s", *node, cluster.Err(*node), cluster.LogFile(*node))
			}, nil
		},
		stop: cluster.Stop,
	})
	return cluster.Bootstrap(), nil
}

// firstToEnd closes done when one of the brokers has ended, and says which.
func firstToEnd(ctx context.Context, cluster *devstack.Kafka) (node *int, done <-chan struct{}) {
	var once sync.Once
	first, ended := new(int), make(chan struct{})
	for id := 1; id <= cluster.Brokers(); id++ {
		process := cluster.Done(id)
		go func() {
			select {
			case <-process:
				once.Do(func() { *first = id; close(ended) })
			case <-ended:
			case <-ctx.Done(): // they are stopped now
			}
		}()
	}
	return first, ended
}

// startEmbedded starts the broker that needs nothing installed, in a process of
// its own: whatever else is killed, it is stopped in order.
func (s *supervisor) startEmbedded(ctx context.Context) (string, error) {
	s.say("starting the broker")
	announced := &announcement{addr: make(chan string, 1)}
	// As an orphan the broker still saves its state, so it gets SIGTERM.
	s.keepCommand(ctx, "broker", brokerStopTimeout, syscall.SIGTERM, func(ctx context.Context) *exec.Cmd {
		args := []string{"--dir", filepath.Join(s.config.Home, "kafka"), "--port", strconv.Itoa(announced.knownPort())}
		cmd := exec.CommandContext(ctx, s.config.BrokerCommand[0], slices.Concat(s.config.BrokerCommand[1:], args)...)
		cmd.Env = s.childEnviron()
		cmd.Stdout = announced
		return cmd
	})

	ctx, cancel := context.WithTimeout(ctx, s.config.ReadyTimeout)
	defer cancel()
	select {
	case addr := <-announced.addr:
		return addr, nil
	case <-ctx.Done():
		return "", fmt.Errorf("the broker is not ready: %w (its log is %s)", ctx.Err(), s.logFile("broker"))
	}
}

// announcement reads "ready host:port" from the broker's standard output.
type announcement struct {
	addr chan string // the first address

	mutex sync.Mutex
	text  string
	port  int
}

func (a *announcement) Write(p []byte) (int, error) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	a.text += string(p)
	for {
		line, rest, whole := strings.Cut(a.text, "\n")
		if !whole {
			return len(p), nil
		}
		a.text = rest
		addr, ok := strings.CutPrefix(line, "ready ")
		if !ok || a.port != 0 {
			continue
		}
		if _, port, ok := strings.Cut(addr, ":"); ok {
			a.port, _ = strconv.Atoi(port)
		}
		a.addr <- addr
	}
}

// knownPort is 0 before the broker was ready for the first time: then it takes
// the port of last time or a free one. Afterwards clients know the port, and it
// stays.
func (a *announcement) knownPort() int {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return a.port
}

// checkSameBrokers refuses to go on with brokers that do not have the events of
// last time: billing would miss those it had not read, and the balances all.
func (s *supervisor) checkSameBrokers(ctx context.Context, databases Databases) error {
	kind := cmp.Or(s.config.Kafka, KafkaEmbedded)
	if s.config.KafkaBrokers != "" {
		kind = "KAFKA_BROKERS"
	}
	file := filepath.Join(s.config.Home, "brokers")
	text, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read which brokers it was: %w", err)
	}
	last := strings.TrimSpace(string(text))
	if _, err := os.Stat(filepath.Join(s.config.Home, "kafka", "data")); err == nil && last == "" {
		last = KafkaEmbedded // of a start that made no note
	}
	if last == kind {
		return nil
	}
	if last != "" {
		events, err := hasEvents(ctx, databases.Verify)
		if err != nil {
			return fmt.Errorf("look for events: %w", err)
		}
		if events {
			return fmt.Errorf("the events so far are on other brokers (%s; now %s), and what was not read there would be missing: "+
				"start on those again, or on a folder of its own (set ONCELEDGER_HOME)", last, kind)
		}
	}
	if err := writePrivate(file, []byte(kind+"\n")); err != nil {
		return fmt.Errorf("note which brokers it is: %w", err)
	}
	return nil
}

// hasEvents needs a login that sees those of every tenant.
func hasEvents(ctx context.Context, verify string) (exist bool, err error) {
	conn, err := pgx.Connect(ctx, verify)
	if err != nil {
		return false, err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	err = conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM outbox_events) OR EXISTS (SELECT FROM processed_events)").Scan(&exist)
	return exist, err
}

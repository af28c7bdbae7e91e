package supervisor

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/onceledger/onceledger/internal/devstack"
)

// keepProgram keeps one of the service's programs running. It is killed when
// the supervisor dies: it is made to survive that.
func (s *supervisor) keepProgram(ctx context.Context, name string, stopTimeout time.Duration, environ ...string) {
	s.keepCommand(ctx, name, stopTimeout, syscall.SIGKILL, func(ctx context.Context) *exec.Cmd {
		cmd := exec.CommandContext(ctx, filepath.Join(s.config.Programs, name))
		cmd.Env = append(s.childEnviron(), environ...)
		return cmd
	})
}

// keepCommand keeps a child running whose standard error is its log.
func (s *supervisor) keepCommand(ctx context.Context, name string, stopTimeout time.Duration, orphanSignal syscall.Signal, command func(context.Context) *exec.Cmd) {
	var process *devstack.Process
	s.keep(ctx, &keeper{
		name:        name,
		stopTimeout: stopTimeout,
		start: func(ctx context.Context) (<-chan struct{}, func() string, error) {
			log, err := openLog(s.logFile(name), name, s.say)
			if err != nil {
				return nil, nil, err
			}
			cmd := command(context.WithoutCancel(ctx)) // stop ends it, in order
			cmd.Stderr = log
			if cmd.Stdout == nil {
				cmd.Stdout = log
			}
			cmd.WaitDelay = time.Second // should a grandchild hold the pipe
			started, err := devstack.StartProcess(cmd, orphanSignal)
			if err != nil {
				_ = log.Close()
				return nil, nil, err
			}
			process = started
			go func() {
				<-started.Done()
				_ = log.Close()
			}()
			return started.Done(), func() string { return howEnded(started) }, nil
		},
		stop: func(ctx context.Context) error {
			if process == nil {
				return nil
			}
			return process.Stop(ctx, syscall.SIGTERM)
		},
	})
}

func howEnded(process *devstack.Process) string {
	if err := process.Err(); err != nil {
		return err.Error()
	}
	return "exit status 0"
}

// childEnviron is our environment without what is addressed to us: a child
// that was given no database of its own must not find the owner's.
func (s *supervisor) childEnviron() []string {
	var environ []string
	for _, variable := range s.config.Environ {
		name, _, _ := strings.Cut(variable, "=")
		switch name {
		case "DATABASE_URL", "RELAY_DATABASE_URL", "JANITOR_DATABASE_URL", "KAFKA_BROKERS",
			"WORKER_ID", "WORKER_ADDR", "ONCELEDGER_ADDR":
		default:
			environ = append(environ, variable)
		}
	}
	return environ
}

// startBroker returns the bootstrap servers of the configured brokers, or of
// one of our own once it answers.
func (s *supervisor) startBroker(ctx context.Context) (string, error) {
	if s.config.KafkaBrokers != "" {
		s.say("using the Kafka at %s (KAFKA_BROKERS)", s.config.KafkaBrokers)
		err := createTopics(ctx, s.config.KafkaBrokers, s.config.Partitions)
		return s.config.KafkaBrokers, err
	}

	s.say("starting the broker")
	announced := &announcement{addr: make(chan string, 1)}
	// As an orphan the broker still saves its state, so it gets SIGTERM.
	s.keepCommand(ctx, "broker", brokerStopTimeout, syscall.SIGTERM, func(ctx context.Context) *exec.Cmd {
		args := []string{"--dir", filepath.Join(s.config.Home, "kafka"), "--port", strconv.Itoa(announced.knownPort())}
		for _, topic := range topics {
			args = append(args, "--topic", fmt.Sprintf("%s=%d", topic, s.config.Partitions))
		}
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

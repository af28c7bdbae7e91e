package supervisor

import (
	"context"
	"os/exec"
	"path/filepath"
	"strings"
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
			if err := s.untilReleased(ctx, name); err != nil {
				return nil, nil, err
			}
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
			go s.stopWhenHeld(ctx, name, started, stopTimeout)
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
			"CONNECT_URL", "WORKER_ID", "WORKER_ADDR", "ONCELEDGER_ADDR":
		default:
			environ = append(environ, variable)
		}
	}
	return environ
}

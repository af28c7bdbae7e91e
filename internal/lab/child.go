package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/onceledger/onceledger/internal/devstack"
)

// spec says what a child is to do. Each field is a flag of `onceledger lab-consumer`.
type spec struct {
	Role    string // what it does: a key of roles
	Name    string // what it is called in what is printed: A, B
	Way     string // which of the ways that the experiment compares
	Topic   string
	Group   string // the consumer group; "" is the role and the way
	Member  string // the static member of the group; a restarted child is the same one
	CrashAt int    // the record, counted from 1, in whose middle it is killed; 0 is never
	HoldAt  int    // the record or batch in whose middle it waits; 0 is never
	Until   int    // so many records of the topic, and it has done its work
	Redis   string // host:port of the filter
}

func (s spec) arguments() []string {
	args := []string{"lab-consumer", s.Role}
	add := func(name, value string) {
		if value != "" && value != "0" {
			args = append(args, "--"+name, value)
		}
	}
	add("name", s.Name)
	add("way", s.Way)
	add("topic", s.Topic)
	add("group", s.Group)
	add("member", s.Member)
	add("crash-at", strconv.Itoa(s.CrashAt))
	add("hold-at", strconv.Itoa(s.HoldAt))
	add("until", strconv.Itoa(s.Until))
	add("redis", s.Redis)
	return args
}

// child is a process that the experiment started.
type child struct {
	room    *room
	spec    spec
	process *devstack.Process

	mutex sync.Mutex
	quiet bool     // lines are shown when show is called
	part  string   // of a line
	lines []string // all so far
	shown int
	log   bytes.Buffer // what it wrote to standard error
}

// start starts a child whose lines are printed as they come.
func (r *room) start(ctx context.Context, s spec) (*child, error) { return r.startChild(ctx, s, false) }

func (r *room) startChild(ctx context.Context, s spec, quiet bool) (*child, error) {
	if s.Topic == "" {
		s.Topic = orderEvents
	}
	if s.Group == "" {
		s.Group = strings.ReplaceAll(s.Role+" "+s.Way, " ", "-")
	}
	if s.Member == "" {
		s.Member = "consumer-1"
	}
	c := &child{room: r, spec: s, quiet: quiet}
	err := r.startCommand(ctx, c, command(ctx, r.config.Command, s.arguments()...),
		"DATABASE_URL="+r.databaseURL(), "KAFKA_BROKERS="+r.brokers)
	return c, err
}

// command is a program of the product's, this one or one beside it. It ends when it is told to, or with this process.
func command(ctx context.Context, path string, args ...string) *exec.Cmd {
	return exec.CommandContext(context.WithoutCancel(ctx), path, args...) //nolint:gosec // which program it is, is the caller's to say
}

// startCommand starts any program as a child; it ends with the experiment.
func (r *room) startCommand(ctx context.Context, c *child, cmd *exec.Cmd, environ ...string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	cmd.Env = append(append([]string{}, r.config.Environ...), environ...)
	cmd.Stdout, cmd.Stderr = c, &lockedWriter{&c.mutex, &c.log}
	cmd.WaitDelay = time.Second
	var err error
	if c.process, err = devstack.StartProcess(cmd, syscall.SIGKILL); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: 'make build' puts api, worker and onceledger into bin/ together", err)
	} else if err != nil {
		return err
	}
	r.onClose(func(context.Context) { c.kill() })
	return nil
}

// kill ends it as kill -9 does, stopped or not.
func (c *child) kill() {
	select {
	case <-c.process.Done():
	default:
		c.process.Kill()
	}
}

func (c *child) signal(signal syscall.Signal) error {
	if err := syscall.Kill(c.process.Pid(), signal); err != nil {
		return fmt.Errorf("signal %s: %w", c.spec.Name, err)
	}
	return nil
}

// Write takes what the child prints.
func (c *child) Write(text []byte) (int, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.part += string(text)
	for {
		line, rest, whole := strings.Cut(c.part, "\n")
		if !whole {
			break
		}
		c.part = rest
		c.lines = append(c.lines, line)
	}
	if !c.quiet {
		c.showLocked()
	}
	return len(text), nil
}

// show prints what a quiet child has printed since.
func (c *child) show() {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.showLocked()
}

func (c *child) showLocked() {
	for ; c.shown < len(c.lines); c.shown++ {
		c.room.line("  %-2s %s", c.spec.Name, c.lines[c.shown])
	}
}

// waitLine waits until the child has printed a line with this in it.
func (c *child) waitLine(ctx context.Context, text string) error {
	return c.room.wait(ctx, c.spec.Name+" says: "+text, func(context.Context) (bool, error) {
		c.mutex.Lock()
		defer c.mutex.Unlock()
		for _, line := range c.lines {
			if strings.Contains(line, text) {
				return true, nil
			}
		}
		select {
		case <-c.process.Done():
			return false, fmt.Errorf("%s ended without saying %q: %s", c.spec.Name, text, c.log.String())
		default:
			return false, nil
		}
	})
}

// finished waits until the child has done its work.
func (c *child) finished(ctx context.Context) error {
	if err := c.ended(ctx); err != nil {
		return err
	}
	if err := c.process.Err(); err != nil {
		return fmt.Errorf("%s: %w: %s", c.spec.Name, err, c.errors())
	}
	return nil
}

// killed waits until the child has died of SIGKILL, and says so.
func (c *child) killed(ctx context.Context) error {
	if err := c.ended(ctx); err != nil {
		return err
	}
	failure, ok := errors.AsType[*exec.ExitError](c.process.Err())
	if !ok {
		return fmt.Errorf("%s was to be killed, and ended well", c.spec.Name)
	}
	if status, ok := failure.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGKILL {
		return fmt.Errorf("%s was to be killed: %w: %s", c.spec.Name, failure, c.errors())
	}
	c.room.step("%s is gone (%s)", c.spec.Name, failure)
	return nil
}

func (c *child) ended(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	select {
	case <-c.process.Done():
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for %s to end: %w: %s", c.spec.Name, ctx.Err(), c.errors())
	}
}

// errors is what it wrote to standard error.
func (c *child) errors() string {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return strings.TrimSpace(c.log.String())
}

type lockedWriter struct {
	mutex *sync.Mutex
	to    *bytes.Buffer
}

func (w *lockedWriter) Write(text []byte) (int, error) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return w.to.Write(text)
}

// crashAndRestart runs a consumer that dies in the middle of a record, then between, then the same consumer again
// until everything is read.
func (r *room) crashAndRestart(ctx context.Context, s spec, between func(context.Context) error) error {
	s.Name = "A"
	first, err := r.start(ctx, s)
	if err != nil {
		return err
	}
	if err := first.killed(ctx); err != nil {
		return err
	}
	if between != nil {
		if err := between(ctx); err != nil {
			return err
		}
	}
	_, err = r.again(ctx, s)
	return err
}

// again runs the consumer once more, as B, until everything is read.
func (r *room) again(ctx context.Context, s spec) (*child, error) {
	r.step("start it again, as B")
	s.Name, s.CrashAt = "B", 0
	second, err := r.start(ctx, s)
	if err != nil {
		return nil, err
	}
	return second, second.finished(ctx)
}

package stack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/onceledger/onceledger/internal/devstack"
)

// Process is a program that is started, ended and started again. It listens on
// another port each time.
//
// Its methods return errors, since they are called from goroutines too; they
// wait for at most two minutes.
type Process struct {
	Name string
	Args []string // of the command line

	ctx  context.Context
	path string
	env  []string
	log  *processLog

	mutex   sync.Mutex
	current *devstack.Process
}

// NewProcess makes a process of a program of cmd/. Its environment is env and
// nothing of the test's own. Its log is shown if the test fails, and it is
// killed when the test ends.
func NewProcess(t testing.TB, name, program string, env ...string) *Process {
	t.Helper()
	p := &Process{Name: name, ctx: t.Context(), path: Program(t, program), env: env, log: &processLog{}}
	t.Cleanup(func() {
		_ = p.Kill()
		for _, trouble := range []string{"panic: ", "fatal error: ", "WARNING: DATA RACE"} {
			if strings.Contains(p.Log(), "\n"+trouble) || strings.HasPrefix(p.Log(), trouble) {
				t.Errorf("%s had a %q", name, trouble)
			}
		}
		if t.Failed() {
			t.Logf("the end of the log of %s:\n%s", name, tail(withoutRequests(p.Log()), 40))
		}
	})
	return p
}

// Start starts the process, with variables for this life only, such as the
// point at which it is to crash.
func (p *Process) Start(env ...string) error {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	cmd := exec.Command(p.path, p.Args...)
	cmd.Env = slices.Concat(p.env, env)
	cmd.Stdout, cmd.Stderr = p.log, p.log
	cmd.WaitDelay = time.Second
	p.log.startOver()
	process, err := devstack.StartProcess(cmd, syscall.SIGKILL)
	if err != nil {
		return fmt.Errorf("%s: %w", p.Name, err)
	}
	p.current = process
	return nil
}

// StartReady starts the process and waits until it is ready.
func (p *Process) StartReady(env ...string) error {
	if err := p.Start(env...); err != nil {
		return err
	}
	return p.WaitReady()
}

func (p *Process) running() *devstack.Process {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return p.current
}

// URL is where the process listens; "" if it does not. The port of one that has
// ended may be another's by now.
func (p *Process) URL() string {
	if addr := p.log.address(); addr != "" && p.Alive() {
		return "http://" + addr
	}
	return ""
}

// Log is what the process has said, in all its lives.
func (p *Process) Log() string { return p.log.text() }

// Alive reports whether the process runs (or is stopped by a signal).
func (p *Process) Alive() bool {
	process := p.running()
	if process == nil {
		return false
	}
	select {
	case <-process.Done():
		return false
	default:
		return true
	}
}

// WaitReady waits until the process says that it is ready.
func (p *Process) WaitReady() error {
	return p.WaitFor("be ready", func() (bool, error) {
		status, body, err := p.Get("/readyz")
		if err == nil && status != http.StatusOK {
			err = fmt.Errorf("%d %s", status, body)
		}
		return err == nil, err
	})
}

// WaitFor waits until the process, alive all the while, is as asked for.
func (p *Process) WaitFor(what string, is func() (bool, error)) error {
	err := Wait(p.ctx, func() (bool, error) {
		ok, err := is()
		if !ok && !p.Alive() {
			return false, hopeless{errors.New("it has ended")}
		}
		return ok, err
	})
	if err != nil {
		return fmt.Errorf("%s did not %s: %w", p.Name, what, err)
	}
	return nil
}

var client = &http.Client{Timeout: 10 * time.Second}

// Get asks the process over HTTP.
func (p *Process) Get(path string) (status int, body string, err error) {
	url := p.URL()
	if url == "" {
		return 0, "", errors.New("it does not listen yet")
	}
	request, err := http.NewRequestWithContext(p.ctx, http.MethodGet, url+path, nil)
	if err != nil {
		return 0, "", err
	}
	response, err := client.Do(request)
	if err != nil {
		return 0, "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return response.StatusCode, string(bytes.TrimSpace(text)), err
}

// Metric is the sum of a metric of this life over all its labels that contain
// each of the texts, such as `outcome="duplicate"`.
func (p *Process) Metric(name string, labels ...string) (float64, error) {
	_, text, err := p.Get("/metrics")
	if err != nil {
		return 0, fmt.Errorf("ask %s for %s: %w", p.Name, name, err)
	}
	var sum float64
lines:
	for line := range strings.Lines(text) {
		rest, is := strings.CutPrefix(line, name)
		if !is || rest == "" || rest[0] != ' ' && rest[0] != '{' {
			continue
		}
		for _, label := range labels {
			if !strings.Contains(rest, label) {
				continue lines
			}
		}
		var value float64
		if _, err := fmt.Sscan(rest[strings.LastIndex(rest, " ")+1:], &value); err != nil {
			return 0, fmt.Errorf("read %q: %w", line, err)
		}
		sum += value
	}
	return sum, nil
}

// Pid is the id of the process, or of the last one that it was.
func (p *Process) Pid() int { return p.running().Pid() }

// Signal sends a signal.
func (p *Process) Signal(signal syscall.Signal) error {
	process := p.running()
	if process == nil {
		return fmt.Errorf("%s was never started", p.Name)
	}
	return syscall.Kill(process.Pid(), signal)
}

// Kill ends the process with SIGKILL, wherever it is, and waits until it is
// gone. One that has ended already is left as it is.
func (p *Process) Kill() error {
	process := p.running()
	if process == nil {
		return nil
	}
	process.Kill()
	return p.wait(process)
}

// KillChild kills a child of the process with SIGKILL, by the name of its
// program.
func (p *Process) KillChild(program string) error {
	pid := p.running().Pid()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		return err
	}
	for _, file := range tasks {
		text, _ := os.ReadFile(file)
		for _, child := range strings.Fields(string(text)) {
			exe, _ := os.Readlink("/proc/" + child + "/exe")
			if filepath.Base(exe) == program {
				number, err := strconv.Atoi(child)
				if err != nil {
					return err
				}
				return syscall.Kill(number, syscall.SIGKILL)
			}
		}
	}
	return fmt.Errorf("%s has no child %s", p.Name, program)
}

// Stop asks the process to end (SIGTERM) and waits for it. It is an error if it
// does not end with exit code 0.
func (p *Process) Stop() error {
	process := p.running()
	if process == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(p.ctx, Patience)
	defer cancel()
	if err := process.Stop(ctx, syscall.SIGTERM); err != nil {
		return fmt.Errorf("%s: %w", p.Name, err)
	}
	if err := process.Err(); err != nil {
		return fmt.Errorf("%s did not end in order: %w", p.Name, err)
	}
	return nil
}

// WaitKilled waits until the process has been killed by SIGKILL, by itself at a
// crash point or by somebody else. Another end is an error.
func (p *Process) WaitKilled() error {
	process := p.running()
	if err := p.wait(process); err != nil {
		return err
	}
	if how := signalOf(process.Err()); how != syscall.SIGKILL {
		return fmt.Errorf("%s was to die by SIGKILL: %w", p.Name, process.Err())
	}
	return nil
}

func (p *Process) wait(process *devstack.Process) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(p.ctx), Patience)
	defer cancel()
	select {
	case <-process.Done():
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%s has not ended: %w", p.Name, ctx.Err())
	}
}

// signalOf is the signal that ended a process, or 0.
func signalOf(err error) syscall.Signal {
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
			return status.Signal()
		}
	}
	return 0
}

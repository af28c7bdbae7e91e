package sandbox

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
	lives   int
	deaths  int // by SIGKILL
}

// NewProcess makes a process of the program at path; it does not start it. Its
// environment is env and nothing else; of a variable that is there twice the last
// one holds. It can be started until ctx is done.
//
// What it says is kept in memory, and in the file logFile unless that is "".
func NewProcess(ctx context.Context, name, path, logFile string, env ...string) *Process {
	return &Process{Name: name, ctx: ctx, path: path, env: env, log: &processLog{path: logFile}}
}

// Start starts the process, with variables for this life only, such as the
// point at which it is to crash.
func (p *Process) Start(env ...string) error {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if err := p.ctx.Err(); err != nil {
		return fmt.Errorf("%s is not to be started any more: %w", p.Name, err)
	}
	cmd := exec.Command(p.path, p.Args...) //nolint:noctx // it ends when it is told to, or with this process
	cmd.Env = slices.Concat(p.env, env)
	cmd.Stdout, cmd.Stderr = p.log, p.log
	cmd.WaitDelay = time.Second
	p.log.startOver()
	process, err := devstack.StartProcess(cmd, syscall.SIGKILL)
	if err != nil {
		return fmt.Errorf("%s: %w", p.Name, err)
	}
	p.current = process
	p.lives++
	go func() {
		<-process.Done()
		if signalOf(process.Err()) == syscall.SIGKILL {
			p.mutex.Lock()
			p.deaths++
			p.mutex.Unlock()
		}
	}()
	return nil
}

// StartReady starts the process and waits until it is ready.
func (p *Process) StartReady(env ...string) error {
	if err := p.Start(env...); err != nil {
		return err
	}
	return p.WaitReady()
}

// SetEnv adds variables for all lives from the next one on, over those of the
// same names.
func (p *Process) SetEnv(env ...string) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.env = slices.Concat(p.env, env)
}

// SetPath has the lives from the next one on be of the program at another path,
// such as one that was built with a fault in it, and returns the path until now.
func (p *Process) SetPath(path string) (before string) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	before, p.path = p.path, path
	return before
}

func (p *Process) running() *devstack.Process {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return p.current
}

// Lives is how often the process was started, and Deaths how often it ended by
// SIGKILL, by its own hand or another's.
func (p *Process) Lives() int {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return p.lives
}

// Deaths is how often the process ended by SIGKILL.
func (p *Process) Deaths() int {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return p.deaths
}

// URL is where the process listens; "" if it does not. The port of one that has
// ended may be another's by now.
func (p *Process) URL() string {
	if addr := p.log.address(); addr != "" && p.Alive() {
		return "http://" + addr
	}
	return ""
}

// Log is what the process has said, in all its lives, as far as it is kept: the
// last megabytes of it.
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
			return false, Hopeless(p.ended())
		}
		return ok, err
	})
	if err != nil {
		return fmt.Errorf("%s did not %s: %w", p.Name, what, err)
	}
	return nil
}

// ended says that the process has ended, and what it said last.
func (p *Process) ended() error {
	text := "it has ended"
	if last := strings.TrimSpace(Tail(WithoutRequests(p.Log()), 1)); last != "" {
		text += "; the last that it said is: " + last
	}
	return errors.New(text)
}

var operator = &http.Client{Timeout: 10 * time.Second}

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
	response, err := operator.Do(request)
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
	return SumMetric(text, name, labels...)
}

// SumMetric is the sum of a metric in what /metrics answered.
func SumMetric(text, name string, labels ...string) (float64, error) {
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

// PeakMemory is the most memory that the process has held in this life, in
// bytes; 0 if it does not run.
func (p *Process) PeakMemory() int64 {
	if !p.Alive() {
		return 0
	}
	return PeakMemory(p.Pid())
}

// PeakMemory is the most memory that a process has held so far, in bytes; 0 if
// there is none of that id.
func PeakMemory(pid int) int64 {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kilobytes, _ := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			return kilobytes << 10
		}
	}
	return 0
}

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

// Err is how the process ended: nil for exit code 0. Only when it is not Alive.
func (p *Process) Err() error { return p.running().Err() }

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
		return fmt.Errorf("%s was to die by SIGKILL, and ended otherwise (%w): %w", p.Name, process.Err(), p.ended())
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

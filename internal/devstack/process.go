package devstack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
)

// Process is a child that does not outlive its parent: when this process ends,
// even by kill -9, the kernel sends the child a signal.
type Process struct {
	cmd  *exec.Cmd
	done chan struct{}
	err  error // what Wait said; read after done
}

// StartProcess starts cmd in a process group of its own, so that a terminal's
// Ctrl-C reaches only the parent, which then stops its children in order.
// orphanSignal is what the child gets if the parent dies first.
func StartProcess(cmd *exec.Cmd, orphanSignal syscall.Signal) (*Process, error) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	cmd.SysProcAttr.Pdeathsig = orphanSignal

	// Linux takes "the parent died" to mean the thread that forked. So that
	// thread is kept, by this goroutine, for as long as the child lives.
	process := &Process{cmd: cmd, done: make(chan struct{})}
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()

		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		process.err = cmd.Wait()
		close(process.done)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	return process, nil
}

// Pid is the child's process id.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Done is closed when the child has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Err says how the child ended; nil for exit code 0. Only after Done.
func (p *Process) Err() error { return p.err }

// running says whether there is a child that has not ended.
func (p *Process) running() bool {
	if p == nil {
		return false
	}
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Stop sends the signal and waits until the child has ended. When ctx ends
// first, the child is killed, and Stop says so.
func (p *Process) Stop(ctx context.Context, signal syscall.Signal) error {
	if err := p.cmd.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signal pid %d: %w", p.Pid(), err)
	}
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		p.Kill()
		return fmt.Errorf("pid %d did not stop on %s and was killed: %w", p.Pid(), signal, ctx.Err())
	}
}

// Kill ends the child with SIGKILL and waits until it is gone.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill()
	<-p.done
}

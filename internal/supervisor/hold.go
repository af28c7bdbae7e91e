package supervisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/onceledger/onceledger/internal/devstack"
)

// worker is the program that can be held.
const worker = "worker"

// holdPatience is how long a hold waits for the supervisor, which looks at the
// lock many times a second and has it for a moment.
const holdPatience = 5 * time.Second

// HoldWorker has the supervisor of a home folder stop its worker, in order, and
// not start it again until release is called or this process ends, however it
// ends. It does not wait for the worker's end.
func HoldWorker(ctx context.Context, home string) (release func(), err error) {
	running, err := devstack.Lock(filepath.Join(home, "lock"))
	if err == nil {
		_ = running.Unlock()
		return nil, fmt.Errorf("no 'onceledger up' runs on %s: there is no worker of its to stop", home)
	}
	if !errors.Is(err, devstack.ErrLocked) {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, holdPatience)
	defer cancel()
	lock, err := devstack.WaitLock(ctx, holdFile(home, worker))
	if err != nil {
		return nil, fmt.Errorf("another command holds the worker of %s: %w", home, err)
	}
	return func() { _ = lock.Unlock() }, nil
}

func holdFile(home, program string) string { return filepath.Join(home, program+".hold") }

// holdEvery is how often it is looked whether somebody holds a program.
const holdEvery = 100 * time.Millisecond

// held reports that somebody holds a program.
func (s *supervisor) held(program string) bool {
	file, err := os.Open(holdFile(s.config.Home, program))
	if err != nil {
		return false // nobody ever has
	}
	defer file.Close()
	return errors.Is(syscall.Flock(int(file.Fd()), syscall.LOCK_SH|syscall.LOCK_NB), syscall.EWOULDBLOCK)
}

// untilReleased waits as long as somebody holds a program.
func (s *supervisor) untilReleased(ctx context.Context, program string) error {
	if program != worker || !s.held(program) {
		return nil
	}
	s.say("%s is held by another command, and not started before that ends", program)
	ticker := time.NewTicker(holdEvery)
	defer ticker.Stop()
	for s.held(program) {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
	return nil
}

// stopWhenHeld stops a program once somebody holds it, as at the end.
func (s *supervisor) stopWhenHeld(ctx context.Context, program string, process *devstack.Process, timeout time.Duration) {
	if program != worker {
		return
	}
	ticker := time.NewTicker(holdEvery)
	defer ticker.Stop()
	for !s.held(program) {
		select {
		case <-process.Done():
			return
		case <-ticker.C:
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
	defer cancel()
	if err := process.Stop(ctx, syscall.SIGTERM); err != nil {
		s.say("stop %s: %v", program, err)
	}
}

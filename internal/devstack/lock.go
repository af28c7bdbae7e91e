package devstack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// ErrLocked is wrapped by Lock when another living process holds the lock.
var ErrLocked = errors.New("in use by another process")

// FileLock is an exclusive lock on a file. The kernel drops it when the holder
// ends, however it ends, so it cannot go stale. Child processes do not inherit
// it.
type FileLock struct {
	file *os.File
}

// Lock takes the lock at path, or says at once who has it.
func Lock(path string) (*FileLock, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock file: %w", err)
	}
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		holder, _ := io.ReadAll(io.LimitReader(file, 20))
		_ = file.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("%s is %w (pid %s)", path, ErrLocked, strings.TrimSpace(string(holder)))
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}

	// The pid is for people reading the error above; the lock is the flock.
	if err := file.Truncate(0); err == nil {
		_, _ = file.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	return &FileLock{file: file}, nil
}

// WaitLock takes the lock at path, waiting for its present holder.
func WaitLock(ctx context.Context, path string) (*FileLock, error) {
	for {
		lock, err := Lock(path)
		if err == nil || !errors.Is(err, ErrLocked) {
			return lock, err
		}
		if err := pause(ctx, 50*time.Millisecond); err != nil {
			return nil, err
		}
	}
}

// Unlock lets the lock go. The file stays: removing it would let two
// processes lock two files of the same name.
func (l *FileLock) Unlock() error {
	// Closing alone is not enough: a child that is being forked at this moment
	// holds a copy of the descriptor until it executes its program.
	unlocked := syscall.Flock(int(l.file.Fd()), syscall.LOCK_UN)
	return errors.Join(unlocked, l.file.Close())
}

// pause waits for d, or less when ctx ends first.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

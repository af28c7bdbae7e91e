package stack

import (
	"context"
	"sync"
	"time"
)

// AtRate begins work every 1/rate seconds, whatever became of what was begun
// before, and returns when all of it has ended, with the first fault.
func AtRate(ctx context.Context, rate, seconds int, work func(ctx context.Context) error) error {
	var group sync.WaitGroup
	faults := make(chan error, rate*seconds)
	ticker := time.NewTicker(time.Second / time.Duration(rate))
	defer ticker.Stop()
	for range rate * seconds {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
		group.Go(func() {
			if err := work(ctx); err != nil {
				faults <- err
			}
		})
	}
	group.Wait()
	close(faults)
	return <-faults
}

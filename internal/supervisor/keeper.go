package supervisor

import (
	"context"
	"fmt"
	"time"

	"github.com/onceledger/onceledger/internal/devstack"
)

// backOff is how long to wait before a part that died is started again.
type backOff struct {
	first, most time.Duration // doubling from first to most
	steady      time.Duration // a part that ran this long begins at first again
}

var defaultBackOff = backOff{first: 100 * time.Millisecond, most: 2 * time.Second, steady: 10 * time.Second}

// keeper keeps one part of the service running.
type keeper struct {
	name string
	// start starts the part; how says how it ended, once done is closed.
	start func(context.Context) (done <-chan struct{}, how func() string, err error)
	// stop ends the part, by force when the context is done. It is called once,
	// also when the part does not run at that moment.
	stop        func(context.Context) error
	stopTimeout time.Duration
	backOff     backOff
	say         devstack.Logf

	cancel context.CancelFunc
	ended  chan struct{}
}

// keep starts the part in the background and starts it again whenever it dies,
// until end.
func (k *keeper) keep(ctx context.Context) {
	// The end of the caller's context does not end the part: the order in which
	// parts are stopped is the supervisor's.
	ctx, k.cancel = context.WithCancel(context.WithoutCancel(ctx))
	k.ended = make(chan struct{})
	go func() {
		defer close(k.ended)
		k.loop(ctx)
	}()
}

// end stops the part for good.
func (k *keeper) end(ctx context.Context) error {
	k.cancel()
	<-k.ended
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), k.stopTimeout)
	defer cancel()
	if err := k.stop(ctx); err != nil {
		return fmt.Errorf("stop %s: %w", k.name, err)
	}
	return nil
}

func (k *keeper) loop(ctx context.Context) {
	for delay := k.backOff.first; ; delay = min(2*delay, k.backOff.most) {
		began := time.Now()
		done, how, err := k.start(ctx)
		if err == nil {
			select {
			case <-ctx.Done():
				return
			case <-done:
			}
		}
		if ctx.Err() != nil {
			return
		}

		if time.Since(began) >= k.backOff.steady {
			delay = k.backOff.first
		}
		if err != nil {
			k.say("%s did not start (%v); trying again in %s", k.name, err, delay)
		} else {
			k.say("%s ended (%s); starting it again in %s", k.name, how(), delay)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(delay):
		}
	}
}

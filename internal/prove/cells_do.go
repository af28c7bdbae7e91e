package prove

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/onceledger/onceledger/internal/sandbox"
)

// until waits until something is to be seen, within sandbox.Patience.
func until(ctx context.Context, what string, is func() (bool, error)) error {
	if err := sandbox.Wait(ctx, is); err != nil {
		return fmt.Errorf("wait until %s: %w", what, err)
	}
	return nil
}

// under runs a process with other variables for as long as fn runs: with the
// addresses of proxies, for instance. Whatever fn comes to, the process is
// started as it was.
func (w *World) under(process *sandbox.Process, env []string, fn func() error) error {
	if err := process.Stop(); err != nil {
		return err
	}
	err := process.StartReady(env...)
	if err == nil {
		w.Begun()
		err = fn()
		w.Ended()
	}
	if process.Alive() {
		err = errors.Join(err, process.Stop())
	} else if err == nil {
		err = fmt.Errorf("%s has ended by itself", process.Name)
	}
	return errors.Join(err, process.Start())
}

// extra starts one more worker with some roles, an ordinary member of its groups,
// for as long as fn runs.
func (w *World) extra(roles string, fn func(*sandbox.Process) error) error {
	worker := w.Sandbox.Worker(fmt.Sprintf("extra-%d", w.Fault), roles, "WORKER_ID=")
	err := worker.StartReady()
	if err == nil {
		err = fn(worker)
	}
	if !worker.Alive() {
		return err
	}
	// In order, or the group would wait until its session has ended.
	return errors.Join(err, worker.Stop())
}

// frozen stops a process in its tracks for as long as fn runs.
func frozen(process *sandbox.Process, fn func() error) error {
	if err := process.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	return errors.Join(fn(), process.Signal(syscall.SIGCONT))
}

// rebalances is how often a worker's billing has lost partitions in this life.
func rebalances(worker *sandbox.Process) (float64, error) {
	revoked, err := worker.Metric("onceledger_consumer_rebalances_total", `group="billing"`, `kind="revoked"`)
	if err != nil {
		return 0, err
	}
	lost, err := worker.Metric("onceledger_consumer_rebalances_total", `group="billing"`, `kind="lost"`)
	return revoked + lost, err
}

// relayIs waits until a relay says that it is in a state.
func relayIs(ctx context.Context, relay *sandbox.Process, state string) error {
	return until(ctx, relay.Name+" is "+state, func() (bool, error) {
		is, err := relay.Metric("onceledger_relay_state", `state="`+state+`"`)
		return is == 1, err
	})
}

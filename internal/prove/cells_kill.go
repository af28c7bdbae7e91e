package prove

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"

	"github.com/onceledger/onceledger/internal/crash"
	"github.com/onceledger/onceledger/internal/sandbox"
)

// killCells kill a process at each point of internal/crash: the first time that it
// is reached, and a later time, under load.
func killCells() []Cell {
	// at is a cell for a point that is reached by working. most is what the later
	// time may be; a point that is seldom reached has a small one.
	at := func(point, about string, most int, bites ...Bite) Cell {
		return Cell{
			Name: pointName(point), Groups: []string{"kill", "points"}, Bites: append(bites, BiteCrash),
			About: "SIGKILL " + about + ", the first time and a later one",
			Run: func(ctx context.Context, w *World) error {
				process := w.owner(point)
				return w.Burst(func() error {
					if err := w.CrashAt(process, point, 1); err != nil {
						return err
					}
					if err := process.WaitReady(); err != nil {
						return err
					}
					return w.CrashAt(process, point, 2+w.Rand.IntN(most-1))
				})
			},
		}
	}
	return []Cell{
		at(crash.APIReceivedNotBegun, "to the API with a request read and no statement sent", 12, BiteUnknown),
		at(crash.APIBeforeCommit, "to the API in its transaction", 12, BiteUnknown),
		at(crash.APICommitSentNotHeard, "to the API with COMMIT sent and no answer to it", 12, BiteUnknown, BiteDone),
		at(crash.APICommittedNotAnswered, "to the API after its commit, before it answers", 12, BiteUnknown, BiteDone),
		at(crash.RelayDecodedNotProduced, "to the relay with an event read and not sent", 20),
		at(crash.RelayProducedNotAcked, "to the relay with an event sent and not acknowledged", 20),
		at(crash.RelayAckedNotConfirmed, "to the relay with events acknowledged and not confirmed", 2, BiteDuplicates, BiteRedelivery),
		at(crash.WorkerPolledNotBegun, "to billing with a batch read and no statement sent", 5),
		at(crash.WorkerBeforeCommit, "to billing in its transaction", 5),
		at(crash.WorkerCommitSentNotHeard, "to billing with COMMIT sent and no answer to it", 5, BiteRedelivery),
		at(crash.WorkerCommittedNotStored, "to billing after its commit, before the offsets", 5, BiteRedelivery),
		{
			Name: pointName(crash.WorkerRevokedNotReleased), Groups: []string{"kill", "points", "group"},
			About: "SIGKILL to billing while partitions are taken from it",
			Bites: []Bite{BiteCrash, BiteRebalance},
			Run: func(ctx context.Context, w *World) error {
				return w.Burst(func() error {
					if err := w.arm(w.Billing, crash.WorkerRevokedNotReleased, 1); err != nil {
						return err
					}
					// Another member is what partitions are taken away for.
					err := w.extra("billing", func(*sandbox.Process) error {
						if err := w.Billing.WaitKilled(); err != nil {
							return err
						}
						w.Begun()
						return nil
					})
					return errors.Join(err, w.Billing.Start())
				})
			},
		},
		{
			Name: pointName(crash.WorkerEndingNotLeft), Groups: []string{"kill", "points", "group"},
			About: "SIGKILL to billing while it ends in order, before it leaves its group",
			Bites: []Bite{BiteCrash},
			Run: func(ctx context.Context, w *World) error {
				return w.Burst(func() error {
					for nth := 1; nth <= 2; nth++ { // billing and balances: both have a group to leave
						if err := w.arm(w.Billing, crash.WorkerEndingNotLeft, nth); err != nil {
							return err
						}
						if err := w.Advance(ctx, 1+w.Rand.IntN(10)); err != nil {
							return err
						}
						if err := w.Billing.Signal(syscall.SIGTERM); err != nil {
							return err
						}
						if err := w.Billing.WaitKilled(); err != nil {
							return err
						}
						w.Begun()
					}
					return w.Billing.Start()
				})
			},
		},
		at(crash.BalancesProducedNotCommitted, "to balances with its Kafka transaction open", 3),
		at(crash.BalancesCommittedNotPolled, "to balances right after a Kafka transaction", 3),
		{
			Name: pointName(crash.JanitorDetachedNotDropped), Groups: []string{"kill", "points"},
			About: "SIGKILL to the janitor with a partition detached and not dropped, the first time and a later one",
			Bites: []Bite{BiteCrash},
			Run: func(ctx context.Context, w *World) error {
				// Two days that are past their time, and near enough: the janitor fills in
				// what is missing between the oldest day and today.
				const old = `'outbox_events', (now() AT TIME ZONE 'UTC')::date - `
				left := func() (count int, err error) {
					err = w.Sandbox.Owner.QueryRow(ctx, `
						SELECT count(to_regclass('public.outbox_events_' || to_char((now() AT TIME ZONE 'UTC')::date - back, 'YYYYMMDD')))
						FROM unnest(ARRAY[5, 6]) AS back`).Scan(&count)
					return count, err
				}
				for nth := 1; nth <= 2; nth++ {
					if _, err := w.Sandbox.Owner.Exec(ctx, "SELECT make_day_partition("+old+"5), make_day_partition("+old+"6)"); err != nil {
						return fmt.Errorf("make partitions that are past their time: %w", err)
					}
					if err := w.CrashAt(w.Billing, crash.JanitorDetachedNotDropped, nth); err != nil {
						return err
					}
					if count, err := left(); err != nil || count == 0 {
						return fmt.Errorf("there is no partition half done (%d): %w", count, err)
					}
					if err := until(ctx, "what was half done is dropped", func() (bool, error) {
						count, err := left()
						return count == 0, err
					}); err != nil {
						return err
					}
				}
				return nil
			},
		},
	}
}

// pointName is the name of the cell of a point.
func pointName(point string) string { return "at-" + strings.ReplaceAll(point, ".", "-") }

// owner is the process that reaches a point.
func (w *World) owner(point string) *sandbox.Process {
	switch process, _, _ := strings.Cut(point, "."); process {
	case "api":
		return w.API
	case "relay":
		return w.Relay
	default:
		return w.Billing
	}
}

// arm starts a process anew so that it dies at a point, once it is ready.
func (w *World) arm(process *sandbox.Process, point string, nth int) error {
	w.Note("%s is to die at %s, the time number %d", process.Name, point, nth)
	if process.Alive() {
		if err := process.Stop(); err != nil {
			return err
		}
	}
	return process.StartReady(fmt.Sprintf("ONCELEDGER_CRASH=%s:%d", point, nth))
}

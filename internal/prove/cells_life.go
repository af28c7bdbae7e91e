package prove

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/faults"
	"github.com/onceledger/onceledger/internal/sandbox"
)

// lifeCells end processes in order, freeze them, run two where one belongs, and
// give them a wrong clock.
func lifeCells() []Cell {
	type victim struct {
		name string
		of   func(*World) *sandbox.Process
	}
	api := victim{"api", func(w *World) *sandbox.Process { return w.API }}
	relay := victim{"relay", func(w *World) *sandbox.Process { return w.Relay }}
	billing := victim{"billing", func(w *World) *sandbox.Process { return w.Billing }}

	var cells []Cell
	for _, v := range []victim{api, relay, billing} {
		cells = append(cells, Cell{
			Name: "term-" + v.name, Groups: []string{"process"},
			About: "SIGTERM to " + v.name + " under load, as a deploy does: it has to end in order",
			Run: func(ctx context.Context, w *World) error {
				return w.Burst(func() error {
					if err := w.Advance(ctx, 1+w.Rand.IntN(20)); err != nil {
						return err
					}
					w.Begun()
					return errors.Join(v.of(w).Stop(), v.of(w).Start())
				})
			},
		})
	}
	cells = append(cells,
		Cell{
			Name: "freeze-api", Groups: []string{"process"},
			About: "SIGSTOP to the API in its transactions until Postgres ends them, then CONT",
			Bites: []Bite{BiteServer},
			Run: func(ctx context.Context, w *World) error {
				// Idle for ten seconds in a transaction, or five in it at all, is what ends it.
				inTransaction, err := w.freezeInTransaction(ctx, w.API, "onceledger-api")
				if err != nil {
					return errors.Join(err, w.API.Signal(syscall.SIGCONT))
				}
				w.Begun()
				err = until(ctx, "Postgres has ended what the API had begun", func() (bool, error) {
					still, err := w.sessions(ctx, "onceledger-api", inTransaction)
					return still == 0, err
				})
				w.Bit(BiteServer, len(inTransaction))
				return errors.Join(err, w.API.Signal(syscall.SIGCONT))
			},
		},
		Cell{
			Name: "freeze-relay", Groups: []string{"process", "relay"}, Needs: []Need{NeedWAL},
			About: "SIGSTOP to the relay until Postgres takes its slot away, another relays, then CONT",
			Run: func(ctx context.Context, w *World) error {
				return w.extra("relay", func(second *sandbox.Process) error {
					err := frozen(w.Relay, func() error {
						w.Begun()
						return relayIs(ctx, second, "streaming")
					})
					if err == nil {
						err = relayIs(ctx, w.Relay, "standby")
					}
					return err
				})
			},
		},
		Cell{
			Name: "freeze-billing", Groups: []string{"process", "group"},
			About: "SIGSTOP to billing past its session, another takes its partitions, then CONT",
			Bites: []Bite{BiteRebalance},
			Run: func(ctx context.Context, w *World) error {
				return w.extra("billing", func(second *sandbox.Process) error {
					return w.overtaken(ctx, second, 0)
				})
			},
		},
		Cell{
			Name: "freeze-billing-past-poll", Groups: []string{"process", "group", "long"},
			About: "SIGSTOP to billing past max.poll.interval.ms (two minutes), another takes its partitions, then CONT",
			Bites: []Bite{BiteRebalance},
			Run: func(ctx context.Context, w *World) error {
				return w.extra("billing", func(second *sandbox.Process) error {
					return w.overtaken(ctx, second, maxPollInterval+5*time.Second)
				})
			},
		},
		Cell{
			Name: "two-relays", Groups: []string{"process", "relay"}, Needs: []Need{NeedWAL},
			About: "two relays at once, and the one that has the job is killed, there and back",
			Bites: []Bite{BiteCrash},
			Run: func(ctx context.Context, w *World) error {
				return w.extra("relay", func(second *sandbox.Process) error {
					if err := errors.Join(relayIs(ctx, w.Relay, "streaming"), relayIs(ctx, second, "standby")); err != nil {
						return err
					}
					if err := w.Advance(ctx, 5); err != nil {
						return err
					}
					w.Begun()
					if err := w.Relay.Kill(); err != nil {
						return err
					}
					if err := errors.Join(relayIs(ctx, second, "streaming"), w.Relay.Start()); err != nil {
						return err
					}
					if err := relayIs(ctx, w.Relay, "standby"); err != nil {
						return err
					}
					if err := w.Advance(ctx, 5); err != nil {
						return err
					}
					if err := second.Kill(); err != nil {
						return err
					}
					return relayIs(ctx, w.Relay, "streaming")
				})
			},
		},
		clockCell("clock-ahead", "ahead", time.Hour),
		clockCell("clock-behind", "behind", -time.Hour),
	)
	return cells
}

// freezeInTransaction freezes a process at a moment at which it has transactions
// open, and returns the sessions that have.
func (w *World) freezeInTransaction(ctx context.Context, process *sandbox.Process, application string) (pids []int32, err error) {
	err = w.Burst(func() error {
		return until(ctx, process.Name+" is frozen in a transaction", func() (bool, error) {
			if err := process.Signal(syscall.SIGSTOP); err != nil {
				return false, err
			}
			rows, err := w.Sandbox.Owner.Query(ctx, `
				SELECT pid FROM pg_stat_activity
				WHERE application_name = $1 AND backend_xid IS NOT NULL AND state LIKE 'idle in transaction%'`, application)
			if err != nil {
				return false, err
			}
			pids = nil
			for rows.Next() {
				var pid int32
				if err := rows.Scan(&pid); err != nil {
					return false, err
				}
				pids = append(pids, pid)
			}
			if len(pids) > 0 || rows.Err() != nil {
				return len(pids) > 0, rows.Err()
			}
			return false, process.Signal(syscall.SIGCONT)
		})
	})
	return pids, err
}

// sessions is how many of some sessions of a program there still are.
func (w *World) sessions(ctx context.Context, application string, pids []int32) (count int, err error) {
	err = w.Sandbox.Owner.QueryRow(ctx, `SELECT count(*) FROM pg_stat_activity WHERE application_name = $1 AND pid = ANY ($2)`,
		application, pids).Scan(&count)
	return count, err
}

// overtaken freezes billing until another member has all of its partitions, and
// for as long as least, and has it find that out.
func (w *World) overtaken(ctx context.Context, second *sandbox.Process, least time.Duration) error {
	before, err := rebalances(w.Billing)
	if err != nil {
		return err
	}
	began := time.Now()
	err = frozen(w.Billing, func() error {
		w.Begun()
		applied, err := second.Metric("onceledger_inbox_records_total")
		if err != nil {
			return err
		}
		if err := until(ctx, "another has billing's partitions", func() (bool, error) {
			all, err := w.groupOwns(ctx, 1)
			if err != nil || !all {
				return false, err
			}
			now, err := second.Metric("onceledger_inbox_records_total")
			return now > applied, err
		}); err != nil {
			return err
		}
		for left := least - time.Since(began); left > 0; left = least - time.Since(began) {
			select {
			case <-time.After(left):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return nil
	})
	w.Ended()
	if err != nil {
		return err
	}
	return until(ctx, "billing notices that it was away", func() (bool, error) {
		now, err := rebalances(w.Billing)
		return now > before, err
	})
}

// clockCell has the API run with a clock that is off.
func clockCell(name, how string, off time.Duration) Cell {
	return Cell{
		Name: name, Groups: []string{"process", "clock"}, Needs: []Need{NeedGo},
		About: "the API's clock is an hour " + how + ": its event ids and times are too",
		Run: func(ctx context.Context, w *World) error {
			program := filepath.Join(w.Sandbox.Dir, "api-"+name)
			if _, err := os.Stat(program); err != nil {
				if err := faults.BuildWithClock(ctx, off, ".", apiProgram, program); err != nil {
					return err
				}
			}
			if err := w.API.Stop(); err != nil {
				return err
			}
			w.Begun()
			path := w.API.SetPath(program)
			err := w.API.Start()
			if err == nil {
				// It is not ready, and says why; it works all the same.
				err = until(ctx, "events have ids of another hour", func() (bool, error) {
					var newest uuid.UUID
					var now time.Time
					err := w.Sandbox.Owner.QueryRow(ctx, `
						SELECT id, clock_timestamp() FROM outbox_events WHERE aggregate_type = 'order' ORDER BY tx_id DESC, id DESC LIMIT 1`).Scan(&newest, &now)
					if err != nil {
						return false, err
					}
					seconds, nanos := newest.Time().UnixTime()
					differs := time.Unix(seconds, nanos).Sub(now) - off
					return differs.Abs() < time.Minute, nil
				})
			}
			if err == nil {
				err = w.Advance(ctx, 30)
			}
			w.Ended()
			if w.API.Alive() {
				err = errors.Join(err, w.API.Stop())
			}
			w.API.SetPath(path)
			return errors.Join(err, w.API.Start())
		},
	}
}

// module is what the API's program is built from.
const (
	module     = "github.com/onceledger/onceledger"
	apiProgram = module + "/cmd/api"
)

// NeedGo is the Go tool, and this module's source in the current folder, to build
// a program anew.
const NeedGo Need = "go and the source"

// NeedRoot is to be root, and to be allowed to mount.
const NeedRoot Need = "root, to mount"

// maxPollInterval is billing's: how long it may be away from Kafka at most.
const maxPollInterval = 2 * time.Minute

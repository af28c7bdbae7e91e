package prove

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/onceledger/onceledger/internal/faults"
	"github.com/onceledger/onceledger/internal/sandbox"
)

// postgresCells have the database be away, refuse, and break connections.
func postgresCells() []Cell {
	endSessions := func(name, application string, of func(*World) *sandbox.Process, bites ...Bite) Cell {
		return Cell{
			Name: "postgres-end-sessions-" + name, Groups: []string{"sessions"},
			About: "pg_terminate_backend of every session of " + name + ", in the middle of its work, three times",
			Bites: append(bites, BiteServer),
			Run: func(ctx context.Context, w *World) error {
				return w.Burst(func() error {
					w.Begun()
					for range 3 {
						if err := until(ctx, "sessions of "+name+" were ended", func() (bool, error) {
							ended, err := faults.EndSessions(ctx, w.Sandbox.Owner, application, "")
							w.Bit(BiteServer, ended)
							return ended > 0, err
						}); err != nil {
							return err
						}
						if err := w.Advance(ctx, 5); err != nil {
							return err
						}
					}
					if !of(w).Alive() {
						return fmt.Errorf("%s has ended by itself", of(w).Name)
					}
					return nil
				})
			},
		}
	}
	api := func(w *World) *sandbox.Process { return w.API }
	relay := func(w *World) *sandbox.Process { return w.Relay }
	billing := func(w *World) *sandbox.Process { return w.Billing }

	return []Cell{
		endSessions("api", "onceledger-api", api),
		endSessions("relay", "onceledger-relay", relay),
		endSessions("billing", "onceledger-billing", billing),
		{
			Name: "postgres-kill", About: "SIGKILL to Postgres: sessions break, the log is recovered",
			Needs: []Need{NeedPostgres}, Bites: []Bite{BiteServer, BiteUnknown},
			Run: func(ctx context.Context, w *World) error {
				return w.outage(ctx, 1, func() error { w.Sandbox.Postgres.Kill(); return nil })
			},
		},
		{
			Name: "postgres-immediate", About: "immediate shutdown of Postgres, and a restart",
			Needs: []Need{NeedPostgres}, Bites: []Bite{BiteServer, BiteUnknown},
			Run: func(ctx context.Context, w *World) error {
				return w.outage(ctx, 1, func() error { return w.Sandbox.Postgres.StopImmediately(ctx) })
			},
		},
		{
			Name: "postgres-restart-loop", About: "Postgres is restarted again and again, before anybody has recovered",
			Needs: []Need{NeedPostgres}, Bites: []Bite{BiteServer},
			Run: func(ctx context.Context, w *World) error {
				return w.outage(ctx, 4, func() error { return w.Sandbox.Postgres.StopImmediately(ctx) })
			},
		},
		{
			Name: "postgres-max-connections", About: "somebody else holds all connections that Postgres has to give",
			Needs: []Need{NeedPostgres}, Bites: []Bite{BiteServer},
			Run: func(ctx context.Context, w *World) error {
				var connections faults.Connections
				defer connections.Release(context.WithoutCancel(ctx))
				w.Begun()
				err := until(ctx, "the API gets no connection", func() (bool, error) {
					for _, application := range []string{"onceledger-api", "onceledger-relay", "onceledger-billing", "onceledger-janitor"} {
						if _, err := faults.EndSessions(ctx, w.Sandbox.Owner, application, ""); err != nil {
							return false, err
						}
					}
					if err := connections.Fill(ctx, w.Sandbox.URL("api"), 1000); err != nil {
						return false, err
					}
					status, _, err := w.API.Get("/readyz")
					return status == 503, err
				})
				w.Note("%d connections held", connections.Held())
				w.Bit(BiteServer, 1)
				return err
			},
		},
		raiseCell("postgres-40001", "40001", "serialization failures"),
		raiseCell("postgres-40p01", "40P01", "deadlocks"),
		{
			Name: "postgres-deadlock", About: "a real deadlock: somebody takes billing's locks in the other order",
			Bites: []Bite{BiteRetry},
			Run:   deadlock,
		},
		{
			Name: "postgres-commit-unheard-api", About: "the API's connection is cut between COMMIT and its answer",
			Groups: []string{"commit"}, Bites: []Bite{BiteCommit, BiteUnknown, BiteDone},
			Run: func(ctx context.Context, w *World) error { return w.cutCommits(ctx, w.API, true) },
		},
		{
			Name: "postgres-commit-unheard-billing", About: "billing's connection is cut between COMMIT and its answer",
			Groups: []string{"commit"}, Bites: []Bite{BiteCommit, BiteRedelivery},
			Run: func(ctx context.Context, w *World) error { return w.cutCommits(ctx, w.Billing, true) },
		},
		{
			Name: "postgres-commit-lost-api", About: "the API's connection is cut right before its COMMIT arrives",
			Groups: []string{"commit"}, Bites: []Bite{BiteCommit, BiteUnknown},
			Run: func(ctx context.Context, w *World) error { return w.cutCommits(ctx, w.API, false) },
		},
		{
			Name: "postgres-commit-lost-billing", About: "billing's connection is cut right before its COMMIT arrives",
			Groups: []string{"commit"}, Bites: []Bite{BiteCommit},
			Run: func(ctx context.Context, w *World) error { return w.cutCommits(ctx, w.Billing, false) },
		},
		{
			Name: "postgres-disk-full", About: "the disk below orders, outbox and ledger is full, for as long as it takes to be noticed",
			Needs: []Need{NeedPostgres, NeedRoot}, Bites: []Bite{BiteServer},
			Run: diskFull,
		},
		{
			Name: "postgres-wal-disk-full", About: "the disk of the whole server is full, its log's too, until there is room again",
			Needs: []Need{NeedPostgres, NeedTmpfs}, Bites: []Bite{BiteServer},
			Run: walDiskFull,
		},
	}
}

// outage takes Postgres away a few times under load, each time until the API
// says that it is not ready, or as soon as it is back.
func (w *World) outage(ctx context.Context, times int, take func() error) error {
	return w.Burst(func() error {
		if err := w.Advance(ctx, 1+w.Rand.IntN(20)); err != nil {
			return err
		}
		w.Begun()
		for range times {
			if err := take(); err != nil {
				return err
			}
			var noticed error
			if times == 1 {
				noticed = until(ctx, "the API says that it is not ready", func() (bool, error) {
					status, _, err := w.API.Get("/readyz")
					return status == 503, err
				})
			}
			if err := errors.Join(noticed, w.Sandbox.Postgres.Restart(ctx)); err != nil {
				return err
			}
			w.Bit(BiteServer, 1)
		}
		w.Sandbox.Owner.Reset() // its connections are dead
		for _, process := range w.All() {
			if !process.Alive() {
				return fmt.Errorf("%s has ended with the database", process.Name)
			}
		}
		return nil
	})
}

// raiseCell has inserts fail as if the transaction had lost to another.
func raiseCell(name, code, what string) Cell {
	return Cell{
		Name: name, Groups: []string{"retry"}, Bites: []Bite{BiteRetry},
		About: "every third transaction of the API and of billing fails with " + code + " (" + what + ")",
		Run: func(ctx context.Context, w *World) error {
			raiser, err := faults.Raise(ctx, w.Sandbox.Owner, "outbox_events", code, 3)
			if err != nil {
				return err
			}
			w.Begun()
			struck := 0
			err = w.Burst(func() error {
				return until(ctx, "transactions were tried again", func() (_ bool, err error) {
					struck, err = raiser.Struck(ctx)
					return struck >= 30, err
				})
			})
			w.Bit(BiteRetry, struck)
			return errors.Join(err, raiser.Remove(context.WithoutCancel(ctx)))
		},
	}
}

// deadlock gets in billing's way until Postgres has had to choose a victim.
func deadlock(ctx context.Context, w *World) error {
	victims := func() (count int64, err error) {
		err = w.Sandbox.Owner.QueryRow(ctx, `SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`).Scan(&count)
		return count, err
	}
	before, err := victims()
	if err != nil {
		return err
	}
	w.Begun()
	var after int64
	err = w.Burst(func() error {
		return until(ctx, "Postgres has found a deadlock", func() (bool, error) {
			if err := w.crossLocks(ctx); err != nil {
				return false, err
			}
			after, err = victims()
			return after > before, err
		})
	})
	w.Bit(BiteRetry, int(after-before))
	return err
}

// crossLocks takes the locks of billing's transaction the other way round, what
// it takes last first. One of the two has to go, and it is the one that waits
// less patiently: billing.
func (w *World) crossLocks(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	tx, err := w.Sandbox.Owner.Begin(ctx)
	if err != nil {
		return err
	}
	defer tx.Rollback(context.WithoutCancel(ctx)) //nolint:errcheck // it may be the victim
	for _, statement := range []string{
		"SET LOCAL deadlock_timeout = '5s'",
		"LOCK TABLE document_numbers IN EXCLUSIVE MODE",
	} {
		if _, err := tx.Exec(ctx, statement); err != nil {
			return fmt.Errorf("lock what billing takes last: %w", err)
		}
	}
	// Until billing is in its transaction, and waits.
	err = sandbox.WaitAtMost(ctx, 5*time.Second, func() (waits bool, err error) {
		err = tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_stat_activity
			WHERE application_name = 'onceledger-billing' AND pg_backend_pid() = ANY (pg_blocking_pids(pid)))`).Scan(&waits)
		return waits, err
	})
	if err != nil {
		return nil //nolint:nilerr // it issues no document just now
	}
	_, _ = tx.Exec(ctx, "LOCK TABLE processed_events IN EXCLUSIVE MODE") // the one that billing takes first
	return nil
}

// postgresEnv are the variables with which a process reaches the database by way
// of a proxy.
func (w *World) postgresEnv(process *sandbox.Process, via string) []string {
	switch process {
	case w.API:
		return []string{"DATABASE_URL=" + w.Sandbox.URL("api", via)}
	case w.Relay:
		return []string{"RELAY_DATABASE_URL=" + w.Sandbox.URL("relay", via)}
	default:
		return []string{"DATABASE_URL=" + w.Sandbox.URL("worker", via), "JANITOR_DATABASE_URL=" + w.Sandbox.URL("janitor", via)}
	}
}

// cutCommits cuts some of a process's commits off: after the server has done
// them, or before it hears of them.
func (w *World) cutCommits(ctx context.Context, process *sandbox.Process, done bool) error {
	proxy, err := faults.StartPgProxy(ctx, w.Sandbox.PostgresAddr())
	if err != nil {
		return err
	}
	defer proxy.Close()
	times := 3 + w.Rand.IntN(4)
	cut := 0
	defer func() { w.Bit(BiteCommit, cut) }()
	return w.under(process, w.postgresEnv(process, proxy.Addr()), func() error {
		return w.Burst(func() error {
			if done {
				proxy.CutAfterCommit(times)
			} else {
				proxy.CutBeforeCommit(times)
			}
			return until(ctx, "commits are cut off", func() (bool, error) {
				before, after := proxy.Cut()
				cut = before + after
				return cut >= times, nil
			})
		})
	})
}

// diskFull fills the disk that a few tables lie on.
func diskFull(ctx context.Context, w *World) error {
	var outbox string
	err := w.Sandbox.Owner.QueryRow(ctx, `SELECT 'outbox_events_' || to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD')`).Scan(&outbox)
	if err != nil {
		return err
	}
	tables := []string{"orders", outbox, "ledger_entries"}
	var size int64
	err = w.Sandbox.Owner.QueryRow(ctx, `SELECT sum(pg_table_size(('public.' || quote_ident(name))::regclass)) FROM unnest($1::text[]) AS name`, tables).Scan(&size)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp(filepath.Dir(w.Sandbox.Postgres.LogFile()), "disk-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	disk, err := faults.MoveToSmallDisk(ctx, w.Sandbox.Owner, dir, size+16<<20, tables...)
	if err != nil {
		return err
	}
	said, err := w.logEnd()
	if err == nil {
		w.Begun()
		_, err = disk.Fill()
	}
	if err == nil {
		err = w.Burst(func() error {
			return until(ctx, "Postgres finds no room", func() (bool, error) {
				times, err := w.logSays("No space left on device", said)
				return times >= 5, err
			})
		})
		times, _ := w.logSays("No space left on device", said)
		w.Bit(BiteServer, times)
	}
	err = errors.Join(err, disk.Clear())
	w.Ended()
	return errors.Join(err, disk.MoveBack(context.WithoutCancel(ctx)))
}

// walDiskFull fills the disk that the whole server lies on.
func walDiskFull(ctx context.Context, w *World) error {
	said, err := w.logEnd()
	if err != nil {
		return err
	}
	disk := faults.DiskAt(filepath.Dir(w.Sandbox.Postgres.LogFile()))
	w.Begun()
	_, err = disk.Fill()
	if err == nil {
		err = w.Burst(func() error {
			return until(ctx, "Postgres finds no room", func() (bool, error) {
				times, err := w.logSays("No space left on device", said)
				select {
				case <-w.Sandbox.Postgres.Done(): // what it could not even write down
					return true, nil
				default:
					return times > 0, err
				}
			})
		})
		w.Bit(BiteServer, 1)
	}
	err = errors.Join(err, disk.Clear())
	w.Ended()
	select {
	case <-w.Sandbox.Postgres.Done():
		err = errors.Join(err, w.Sandbox.Postgres.Restart(ctx))
	default:
	}
	w.Sandbox.Owner.Reset()
	return err
}

// logEnd is how long Postgres' log is.
func (w *World) logEnd() (int64, error) {
	info, err := os.Stat(w.Sandbox.Postgres.LogFile())
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

// logSays is how often Postgres' log says something after a place.
func (w *World) logSays(what string, from int64) (int, error) {
	text, err := os.ReadFile(w.Sandbox.Postgres.LogFile())
	if err != nil {
		return 0, err
	}
	return strings.Count(string(text[min(from, int64(len(text))):]), what), nil
}

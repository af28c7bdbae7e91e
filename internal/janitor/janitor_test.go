package janitor_test

import (
	"bytes"
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/janitor"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
)

// midnight is a day that is far from today's partitions, so that none is there
// unless a test makes it.
var midnight = time.Now().UTC().Truncate(24*time.Hour).AddDate(0, 1, 0)

func day(after int) string { return midnight.AddDate(0, 0, after).Format("20060102") }

// put inserts an event with an id of a moment into each partitioned table.
func put(ctx context.Context, owner *pgxpool.Pool, at time.Time) error {
	id := factory.ID(at)
	_, err := owner.Exec(ctx, `
		INSERT INTO outbox_events (id, tenant_id, aggregate_type, aggregate_id, aggregate_version, event_type, payload, occurred_at)
		VALUES ($1, $2, 'order', $2, 1, 'OrderCreated', '{}', now())`, id, uuid.New())
	if err != nil {
		return err
	}
	_, err = owner.Exec(ctx, `
		INSERT INTO processed_events (consumer, event_id, tenant_id, fingerprint, topic, partition, "offset")
		VALUES ('test', $1, $1, sha256('x'), 'order.events', 0, 0)`, id)
	return err
}

// withLockTimeout makes waiting for a lock an error: the sign of a stall.
func withLockTimeout(limit string) func(*pgxpool.Config) {
	return func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["lock_timeout"] = limit }
}

// withoutPartitions is a database before its first day.
func withoutPartitions(t *testing.T) *pgtest.Database {
	t.Helper()
	database := pgtest.New(t)
	owner := database.Pool(t, "")
	for _, partition := range pgtest.Column[string](t, owner, "SELECT relname FROM pg_class WHERE relispartition AND relkind = 'r'") {
		_, err := owner.Exec(t.Context(), "DROP TABLE "+partition)
		require.NoError(t, err)
	}
	return database
}

func TestMakePartitions(t *testing.T) {
	t.Parallel()

	t.Run("MakesYesterdayTodayAndThreeDaysAhead", func(t *testing.T) {
		t.Parallel()

		database := withoutPartitions(t)
		janitors := database.Pool(t, "janitor")
		made, err := janitor.MakePartitions(t.Context(), janitors, midnight.Add(13*time.Hour))
		require.NoError(t, err)
		var want []string
		for _, table := range janitor.Tables {
			for _, after := range []int{-1, 0, 1, 2, 3} {
				want = append(want, table+"_"+day(after))
			}
		}
		require.Equal(t, want, made)

		made, err = janitor.MakePartitions(t.Context(), janitors, midnight.Add(14*time.Hour))
		require.NoError(t, err)
		require.Empty(t, made, "a second time there is nothing to make")
		made, err = janitor.MakePartitions(t.Context(), janitors, midnight.Add(24*time.Hour))
		require.NoError(t, err)
		require.Equal(t, []string{"outbox_events_" + day(4), "processed_events_" + day(4)}, made, "a day later, one more")
	})

	t.Run("MakesUpForTheDaysOnWhichNoneRan", func(t *testing.T) {
		t.Parallel()

		database := withoutPartitions(t)
		janitors := database.Pool(t, "janitor")
		_, err := janitor.MakePartitions(t.Context(), janitors, midnight)
		require.NoError(t, err)
		made, err := janitor.MakePartitions(t.Context(), janitors, midnight.AddDate(0, 0, 7))
		require.NoError(t, err)
		var want []string
		for _, table := range janitor.Tables {
			for _, after := range []int{4, 5, 6, 7, 8, 9, 10} {
				want = append(want, table+"_"+day(after))
			}
		}
		require.Equal(t, want, made, "an event of any day since then has a place")
	})

	t.Run("GivesThemToTheJanitorWhoeverMakesThem", func(t *testing.T) {
		t.Parallel()

		database := pgtest.New(t)
		owner := database.Pool(t, "")
		_, err := janitor.MakePartitions(t.Context(), database.Pool(t, "janitor"), midnight)
		require.NoError(t, err)
		_, err = janitor.MakePartitions(t.Context(), owner, midnight.AddDate(0, 0, 10))
		require.NoError(t, err)
		require.Equal(t, []string{"onceledger_janitor"}, pgtest.Column[string](t, owner,
			"SELECT DISTINCT relowner::regrole::text FROM pg_class WHERE relispartition AND relkind = 'r'"))
	})

	t.Run("MakesThemLikeTheirParent", func(t *testing.T) {
		t.Parallel()

		database := pgtest.New(t)
		owner := database.Pool(t, "")
		_, err := janitor.MakePartitions(t.Context(), database.Pool(t, "janitor"), midnight)
		require.NoError(t, err)
		for _, table := range janitor.Tables {
			shape := func(relation string) []string {
				return pgtest.Column[string](t, owner, `
					SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = $1::regclass AND contype <> 'n'
					UNION ALL
					SELECT regexp_replace(pg_get_indexdef(indexrelid), ' INDEX \S+ ON (ONLY )?\S+ ', ' ') FROM pg_index WHERE indrelid = $1::regclass
					ORDER BY 1`, relation)
			}
			require.Equal(t, shape(table), shape(table+"_"+day(0)))
		}
		require.Empty(t, pgtest.Column[string](t, owner,
			"SELECT relname FROM pg_class WHERE relispartition AND pg_get_expr(relpartbound, oid) = 'DEFAULT'"),
			"a default partition would hide a missing one, and then keep it from being made")
	})

	t.Run("LeavesNoGapBetweenDays", func(t *testing.T) {
		t.Parallel()

		database := withoutPartitions(t)
		owner := database.Pool(t, "")
		_, err := janitor.MakePartitions(t.Context(), database.Pool(t, "janitor"), midnight)
		require.NoError(t, err)

		first, end := midnight.AddDate(0, 0, -1), midnight.AddDate(0, 0, 4)
		for at := first; at.Before(end); at = at.Add(24 * time.Hour) {
			require.NoError(t, put(t.Context(), owner, at), "the first millisecond of a day")
			require.NoError(t, put(t.Context(), owner, at.Add(24*time.Hour-time.Millisecond)), "the last")
		}
		for _, at := range []time.Time{first.Add(-time.Millisecond), end} {
			err := put(t.Context(), owner, at)
			require.True(t, postgres.MissingPartition(err), "%v", err)
		}
		require.Equal(t, []int64{2, 2, 2, 2, 2}, pgtest.Column[int64](t, owner,
			"SELECT count(*) FROM outbox_events GROUP BY tableoid"), "each in its own day")
	})

	t.Run("RunsTwiceAtOnce", func(t *testing.T) {
		t.Parallel()

		database := withoutPartitions(t)
		pool := database.Pool(t, "janitor")
		const janitors = 4
		var finished sync.WaitGroup
		gate := make(chan struct{})
		made, errs := make([][]string, janitors), make([]error, janitors)
		for i := range janitors {
			finished.Go(func() {
				<-gate
				made[i], errs[i] = janitor.MakePartitions(t.Context(), pool, midnight)
			})
		}
		close(gate)
		finished.Wait()
		for _, err := range errs {
			require.NoError(t, err)
		}
		all := slices.Sorted(slices.Values(slices.Concat(made...)))
		require.Len(t, all, 10)
		require.Len(t, slices.Compact(all), 10, "each made by one of them")
	})

	t.Run("IsRefusedToOtherRoles", func(t *testing.T) {
		t.Parallel()

		database := pgtest.New(t)
		for _, role := range []string{"api", "relay", "worker", "verify"} {
			_, err := janitor.MakePartitions(t.Context(), database.Pool(t, role), midnight)
			require.Equal(t, "42501", postgres.Code(err), "%s: %v", role, err)
			require.ErrorContains(t, err, "make_day_partition")
		}
	})
}

// TestMakePartitionsStallsNobody makes partitions while a reader sits on the
// table and others insert without pause. A janitor that had to wait for the
// reader would make every insert wait behind itself: with a lock time-out on
// both, waiting is an error.
func TestMakePartitionsStallsNobody(t *testing.T) {
	t.Parallel()

	database := pgtest.New(t)
	owner := database.Pool(t, "")
	reader, err := owner.Begin(t.Context())
	require.NoError(t, err)
	defer reader.Rollback(context.WithoutCancel(t.Context())) //nolint:errcheck // ended below; this is for a failed test
	for _, table := range janitor.Tables {
		_, err := reader.Exec(t.Context(), "SELECT count(*) FROM "+table)
		require.NoError(t, err)
	}

	// That the set-up can show a stall: the obvious statement runs into it.
	impatient := database.Pool(t, "janitor", withLockTimeout("200ms"))
	_, err = database.Pool(t, "", withLockTimeout("200ms")).Exec(t.Context(), `CREATE TABLE obvious PARTITION OF outbox_events
		FOR VALUES FROM ('00000000-0000-7000-0000-000000000000') TO ('00000000-0001-7000-0000-000000000000')`)
	require.True(t, postgres.LockTimedOut(err), "%v", err)

	inserters := database.Pool(t, "", withLockTimeout("200ms"))
	stop := make(chan struct{})
	var inserting sync.WaitGroup
	var failed error
	inserted := 0
	started := make(chan struct{})
	inserting.Go(func() {
		for ; failed == nil; inserted++ {
			select {
			case <-stop:
				return
			default:
				failed = put(t.Context(), inserters, time.Now())
			}
			if inserted == 0 {
				close(started)
			}
		}
	})
	<-started
	made, err := janitor.MakePartitions(t.Context(), impatient, time.Now().AddDate(0, 0, 5))
	close(stop)
	inserting.Wait()
	require.NoError(t, err)
	require.Len(t, made, 10)
	require.NoError(t, failed)
	require.Positive(t, inserted)
	require.NoError(t, reader.Commit(t.Context()), "the reader was there all the time")
}

func TestCheckPartitions(t *testing.T) {
	t.Parallel()

	t.Run("PassesAcrossMidnightWithTheJanitorAway", func(t *testing.T) {
		t.Parallel()

		database := pgtest.New(t)
		owner, api := database.Pool(t, ""), database.Pool(t, "api")
		_, err := janitor.MakePartitions(t.Context(), database.Pool(t, "janitor"), midnight.Add(-time.Millisecond))
		require.NoError(t, err)

		// Made on the day before, it has the three days after that one.
		for _, after := range []time.Duration{-time.Millisecond, 0, 12 * time.Hour, 24 * time.Hour, 48*time.Hour - time.Millisecond} {
			require.NoError(t, janitor.CheckPartitions(t.Context(), api, midnight.Add(after)), "after %s", after)
			require.NoError(t, put(t.Context(), owner, midnight.Add(after)))
		}
		// It fails a day before an insert does.
		err = janitor.CheckPartitions(t.Context(), api, midnight.Add(48*time.Hour))
		require.ErrorContains(t, err, "has no partition for "+midnight.AddDate(0, 0, 3).Format(time.DateOnly))
		require.ErrorContains(t, err, "janitor")
		require.NoError(t, put(t.Context(), owner, midnight.Add(72*time.Hour-time.Millisecond)))
		require.True(t, postgres.MissingPartition(put(t.Context(), owner, midnight.Add(72*time.Hour))))
	})

	t.Run("LooksAtEachTable", func(t *testing.T) {
		t.Parallel()

		for _, table := range janitor.Tables {
			database := pgtest.New(t)
			owner := database.Pool(t, "")
			_, err := janitor.MakePartitions(t.Context(), owner, midnight)
			require.NoError(t, err)
			_, err = owner.Exec(t.Context(), "DROP TABLE "+table+"_"+day(0))
			require.NoError(t, err)
			require.ErrorContains(t, janitor.CheckPartitions(t.Context(), owner, midnight.Add(time.Hour)), table)
		}
	})

	t.Run("DoesNotCountADetachedPartition", func(t *testing.T) {
		t.Parallel()

		database := pgtest.New(t)
		janitors := database.Pool(t, "janitor")
		_, err := janitor.MakePartitions(t.Context(), janitors, midnight)
		require.NoError(t, err)
		_, err = janitors.Exec(t.Context(), "ALTER TABLE outbox_events DETACH PARTITION outbox_events_"+day(1))
		require.NoError(t, err)
		require.ErrorContains(t, janitor.CheckPartitions(t.Context(), janitors, midnight), "outbox_events has no partition for")
	})

	t.Run("IsNotFooledByAnotherRelationOfThatName", func(t *testing.T) {
		t.Parallel()

		database := pgtest.New(t)
		_, err := database.Pool(t, "").Exec(t.Context(), "CREATE VIEW processed_events_"+day(1)+" AS SELECT 1")
		require.NoError(t, err)
		janitors := database.Pool(t, "janitor")
		made, err := janitor.MakePartitions(t.Context(), janitors, midnight)
		require.NoError(t, err)
		require.NotContains(t, made, "processed_events_"+day(1))
		require.ErrorContains(t, janitor.CheckPartitions(t.Context(), janitors, midnight), "processed_events has no partition for")
	})

	t.Run("TellsADatabaseThatIsAwayFromAMissingPartition", func(t *testing.T) {
		t.Parallel()

		pool := pgtest.New(t).Pool(t, "api")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, janitor.CheckPartitions(ctx, pool, midnight), context.Canceled)
	})
}

func TestRun(t *testing.T) {
	t.Parallel()

	// start runs a janitor as a role, until stop, and gives what it logs.
	start := func(t *testing.T, database *pgtest.Database, role string) (log *safeBuffer, stop func() error) {
		log = &safeBuffer{}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		j := janitor.Janitor{
			Pool: database.Pool(t, role),
			Log:  slog.New(slog.NewTextHandler(log, nil)),
			Now:  func() time.Time { return midnight },
			Drop: janitor.DropPlan{
				Slot: database.Name, Outbox: 72 * time.Hour, Dedupe: 720 * time.Hour,
				Contract: func(context.Context) error { return nil },
			},
			KeepKey: 72 * time.Hour,
			Metrics: janitor.NewMetrics(prometheus.NewRegistry()),
		}
		go func() { ended <- j.Run(ctx) }()
		return log, func() error {
			require.Empty(t, ended, "it ended by itself")
			cancel()
			return <-ended
		}
	}

	t.Run("MakesPartitionsAtOnceAndEndsWhenTold", func(t *testing.T) {
		t.Parallel()

		database := pgtest.New(t)
		log, stop := start(t, database, "janitor")
		log.waitFor(t, "processed_events_"+day(3))
		require.NoError(t, stop())
		require.NoError(t, janitor.CheckPartitions(t.Context(), database.Pool(t, "api"), midnight))
	})

	t.Run("SaysWhatFailedAndGoesOn", func(t *testing.T) {
		t.Parallel()

		log, stop := start(t, pgtest.New(t), "api") // may not make partitions
		log.waitFor(t, "partitions not made")
		require.NoError(t, stop())
	})
}

// safeBuffer is a log that is read while it is written.
type safeBuffer struct {
	mutex  sync.Mutex
	buffer bytes.Buffer
}

func (b *safeBuffer) Write(p []byte) (int, error) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return b.buffer.Write(p)
}

func (b *safeBuffer) String() string {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return b.buffer.String()
}

func (b *safeBuffer) waitFor(t *testing.T, text string) {
	t.Helper()
	require.Eventually(t, func() bool { return strings.Contains(b.String(), text) }, 20*time.Second, 5*time.Millisecond)
}

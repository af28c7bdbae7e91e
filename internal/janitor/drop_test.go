package janitor_test

import (
	"context"
	"errors"
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

// old is a database with partitions from eight days before midnight on, an event
// in each of them, and a relay that has delivered all.
type old struct {
	*pgtest.Database
	t               *testing.T
	owner, janitors *pgxpool.Pool
}

func newOld(t *testing.T) *old {
	t.Helper()
	o := &old{Database: withoutPartitions(t), t: t}
	o.owner, o.janitors = o.Pool(t, ""), o.Pool(t, "janitor")
	_, err := janitor.MakePartitions(t.Context(), o.janitors, midnight.AddDate(0, 0, -7))
	require.NoError(t, err)
	_, err = janitor.MakePartitions(t.Context(), o.janitors, midnight)
	require.NoError(t, err)
	for after := -8; after <= 0; after++ {
		require.NoError(t, put(t.Context(), o.owner, midnight.AddDate(0, 0, after).Add(time.Hour)))
	}
	o.delivered()
	return o
}

func (o *old) exec(sql string, args ...any) {
	o.t.Helper()
	_, err := o.owner.Exec(o.t.Context(), sql, args...)
	require.NoError(o.t, err)
}

// delivered records that everything until now is.
func (o *old) delivered() {
	o.t.Helper()
	o.exec(`INSERT INTO relay_position (slot_name, system_id, timeline, publication_oid, lsn, snapshot_xmin)
		VALUES ($1, 'x', 1, 1, '0/1', pg_snapshot_xmax(pg_current_snapshot()))
		ON CONFLICT (slot_name) DO UPDATE SET snapshot_xmin = excluded.snapshot_xmin`, o.Name)
}

func (o *old) plan() janitor.DropPlan {
	return janitor.DropPlan{
		Slot: o.Name, Outbox: 4 * 24 * time.Hour, Dedupe: 6 * 24 * time.Hour,
		Contract: func(context.Context) error { return nil },
	}
}

func (o *old) drop() (dropped []string, kept []janitor.Kept) {
	o.t.Helper()
	dropped, kept, err := janitor.DropPartitions(o.t.Context(), o.janitors, midnight.Add(time.Minute), o.plan())
	require.NoError(o.t, err)
	return dropped, kept
}

// left are the days of a table, as they count from midnight.
func (o *old) left(table string) (days []string) {
	o.t.Helper()
	return pgtest.Column[string](o.t, o.owner, `
		SELECT right(inhrelid::regclass::text, 8) FROM pg_inherits
		WHERE inhparent = $1::regclass AND NOT inhdetachpending ORDER BY 1`, table)
}

func (o *old) tables(like string) []string {
	o.t.Helper()
	return pgtest.Column[string](o.t, o.owner, "SELECT relname::text FROM pg_class WHERE relkind = 'r' AND relname LIKE $1 ORDER BY 1", like)
}

// deadLetter stores an open one of an event of a day.
func (o *old) deadLetter(after int) {
	o.t.Helper()
	o.exec(`INSERT INTO dead_letters (id, consumer, topic, partition, "offset", class, detail, event_id, record_hash, record_headers, record_time)
		VALUES ($1, 'billing', 'order.events', 0, 0, 'parked', '', $2, sha256('x'), '[]', now())`,
		uuid.New(), factory.ID(midnight.AddDate(0, 0, after).Add(2*time.Hour)))
}

// between are the days from one to another, as partitions are named.
func between(first, last int) (days []string) {
	for after := first; after <= last; after++ {
		days = append(days, day(after))
	}
	return days
}

func TestDropPartitions(t *testing.T) {
	t.Parallel()

	t.Run("DropsTheDaysThatAreOverForSoLong", func(t *testing.T) {
		t.Parallel()
		o := newOld(t)

		dropped, kept := o.drop()
		require.Empty(t, kept)
		require.Equal(t, []string{
			"outbox_events_" + day(-8), "outbox_events_" + day(-7), "outbox_events_" + day(-6), "outbox_events_" + day(-5),
			"processed_events_" + day(-8), "processed_events_" + day(-7),
		}, dropped)
		require.Equal(t, between(-4, 3), o.left("outbox_events"))
		require.Equal(t, between(-6, 3), o.left("processed_events"))
		require.Len(t, o.tables("outbox_events_%"), 8, "and the tables are gone")

		dropped, kept = o.drop()
		require.Empty(t, dropped)
		require.Empty(t, kept)
		made, err := janitor.MakePartitions(t.Context(), o.janitors, midnight)
		require.NoError(t, err)
		require.Empty(t, made, "none is made again")
	})

	t.Run("KeepsADayWithAnEventThatIsNotDelivered", func(t *testing.T) {
		t.Parallel()
		o := newOld(t)

		require.NoError(t, put(t.Context(), o.owner, midnight.AddDate(0, 0, -6))) // as late as it may come
		dropped, kept := o.drop()
		require.Equal(t, []string{"outbox_events_" + day(-8), "outbox_events_" + day(-7), "processed_events_" + day(-8), "processed_events_" + day(-7)}, dropped)
		require.Len(t, kept, 1)
		require.Equal(t, "undelivered", kept[0].Reason)
		require.Equal(t, "outbox_events_"+day(-6), kept[0].Partition)
		require.Equal(t, 2, kept[0].Count, "it and the younger one")
		require.Contains(t, kept[0].Detail, "1 events")
		require.Equal(t, between(-6, 3), o.left("outbox_events"), "none behind it either")

		o.delivered()
		dropped, kept = o.drop()
		require.Equal(t, []string{"outbox_events_" + day(-6), "outbox_events_" + day(-5)}, dropped)
		require.Empty(t, kept)
	})

	t.Run("KeepsEveryEventAsLongAsNothingIsKnownOfTheRelay", func(t *testing.T) {
		t.Parallel()
		o := newOld(t)

		o.exec("DELETE FROM relay_position")
		o.exec("DELETE FROM outbox_events_" + day(-8))
		dropped, kept := o.drop()
		require.Contains(t, dropped, "outbox_events_"+day(-8), "an empty day needs no relay")
		require.NotContains(t, dropped, "outbox_events_"+day(-7))
		require.Equal(t, "undelivered", kept[0].Reason)
		require.Contains(t, kept[0].Detail, "no relay of slot "+o.Name)
	})

	t.Run("KeepsADayOfAnOpenDeadLetter", func(t *testing.T) {
		t.Parallel()
		o := newOld(t)

		o.deadLetter(-8)
		dropped, kept := o.drop()
		require.NotContains(t, strings.Join(dropped, " "), "processed_events")
		require.Equal(t, []janitor.Kept{{
			Table: "processed_events", Partition: "processed_events_" + day(-8),
			Reason: "open-dead-letter", Detail: "1 dead letters of that day are open", Count: 2,
		}}, kept)
		o.exec(pgtest.CloseLetters("resolved", "true"))
		dropped, kept = o.drop()
		require.Equal(t, []string{"processed_events_" + day(-8), "processed_events_" + day(-7)}, dropped)
		require.Empty(t, kept)
	})

	t.Run("KeepsTheMarksOfADayThatTheOutboxStillHolds", func(t *testing.T) {
		t.Parallel()
		o := newOld(t)

		require.NoError(t, put(t.Context(), o.owner, midnight.AddDate(0, 0, -8)))
		dropped, kept := o.drop()
		require.Empty(t, dropped)
		require.Len(t, kept, 2)
		require.Equal(t, janitor.Kept{
			Table: "processed_events", Partition: "processed_events_" + day(-8),
			Reason: "undelivered", Detail: "the outbox still holds that day or an older one", Count: 2,
		}, kept[1], "when it comes it is applied, and not too old")
		o.delivered()
		dropped, kept = o.drop()
		require.Len(t, dropped, 6)
		require.Empty(t, kept)
	})

	t.Run("AsksForTheContractBeforeEachDrop", func(t *testing.T) {
		t.Parallel()
		o := newOld(t)

		asked := 0
		plan := o.plan()
		plan.Contract = func(context.Context) error {
			if asked++; asked > 2 { // both looks at the first day
				return errors.New("DEDUPE_WINDOW is too short")
			}
			return nil
		}
		dropped, kept, err := janitor.DropPartitions(t.Context(), o.janitors, midnight.Add(time.Minute), plan)
		require.NoError(t, err)
		require.Equal(t, []string{"outbox_events_" + day(-8)}, dropped)
		require.Len(t, kept, 2)
		for _, k := range kept {
			require.Equal(t, "contract", k.Reason)
			require.Equal(t, "DEDUPE_WINDOW is too short", k.Detail)
		}
		require.Equal(t, between(-7, 3), o.left("outbox_events"))
	})

	t.Run("FinishesWhatAnEarlierRunLeft", func(t *testing.T) {
		t.Parallel()
		o := newOld(t)

		// Killed between DETACH and DROP; and in the middle of DETACH.
		o.exec("ALTER TABLE outbox_events DETACH PARTITION outbox_events_" + day(-8))
		reader, err := o.owner.Begin(t.Context())
		require.NoError(t, err)
		_, err = reader.Exec(t.Context(), "SELECT count(*) FROM outbox_events")
		require.NoError(t, err)
		_, err = o.Pool(t, "janitor", withLockTimeout("50ms")).Exec(t.Context(),
			"ALTER TABLE outbox_events DETACH PARTITION outbox_events_"+day(-7)+" CONCURRENTLY")
		require.True(t, postgres.LockTimedOut(err), "%v", err)
		require.NoError(t, reader.Rollback(t.Context()))
		require.Equal(t, []bool{true}, pgtest.Column[bool](t, o.owner, "SELECT inhdetachpending FROM pg_inherits WHERE inhdetachpending"))

		dropped, kept := o.drop()
		require.Empty(t, kept)
		require.Equal(t, []string{"outbox_events_" + day(-8), "outbox_events_" + day(-7), "outbox_events_" + day(-6), "outbox_events_" + day(-5)}, dropped[:4])
	})

	t.Run("PutsBackWhatIsNeededAfterAll", func(t *testing.T) {
		t.Parallel()
		o := newOld(t)

		// Written while the janitor waited for the inserts that were under way.
		require.NoError(t, put(t.Context(), o.owner, midnight.AddDate(0, 0, -8)))
		o.exec("ALTER TABLE outbox_events DETACH PARTITION outbox_events_" + day(-8))
		for range 2 {
			_, kept := o.drop()
			require.Equal(t, "outbox_events", kept[0].Table)
			require.Equal(t, "undelivered", kept[0].Reason)
			require.Equal(t, between(-8, 3), o.left("outbox_events"), "the relay's search for a hole finds it")
		}
		o.delivered()
		dropped, kept := o.drop()
		require.Empty(t, kept)
		require.Contains(t, dropped, "outbox_events_"+day(-8))
	})

	t.Run("LeavesAloneWhatSomebodyTookOutBeforeItsTime", func(t *testing.T) {
		t.Parallel()
		o := newOld(t)

		o.exec("ALTER TABLE outbox_events DETACH PARTITION outbox_events_" + day(-1))
		o.drop()
		require.Contains(t, o.tables("outbox_events_%"), "outbox_events_"+day(-1))
	})

	t.Run("RunsTwiceAtOnce", func(t *testing.T) {
		t.Parallel()
		o := newOld(t)

		var finished sync.WaitGroup
		gate, all, errs := make(chan struct{}), make([][]string, 4), make([]error, 4)
		for i := range all {
			finished.Go(func() {
				<-gate
				all[i], _, errs[i] = janitor.DropPartitions(t.Context(), o.janitors, midnight.Add(time.Minute), o.plan())
			})
		}
		close(gate)
		finished.Wait()
		require.NoError(t, errors.Join(errs...))
		dropped := slices.Sorted(slices.Values(slices.Concat(all...)))
		require.Len(t, dropped, 6)
		require.Len(t, slices.Compact(dropped), 6, "each by one of them")
	})

	t.Run("IsRefusedToOtherRoles", func(t *testing.T) {
		t.Parallel()
		o := newOld(t)

		for _, role := range []string{"api", "relay", "worker", "verify"} {
			_, _, err := janitor.DropPartitions(t.Context(), o.Pool(t, role), midnight, o.plan())
			require.Equal(t, "42501", postgres.Code(err), "%s: %v", role, err)
			_, err = janitor.DeleteKeys(t.Context(), o.Pool(t, role), 0)
			require.Equal(t, "42501", postgres.Code(err), "%s: %v", role, err)
		}
		for _, table := range []string{"dead_letters", "relay_position", "idempotency_keys", "orders"} {
			_, err := o.janitors.Exec(t.Context(), "SELECT FROM "+table)
			require.Equal(t, "42501", postgres.Code(err), "the janitor reads no row of %s", table)
		}
	})
}

// TestDropPartitionsStallsNobody makes and drops partitions behind a reader that
// stays, while others insert without pause. The reader keeps the janitor from
// getting done, and nobody else: no insert waits for the reader's end.
func TestDropPartitionsStallsNobody(t *testing.T) {
	t.Parallel()
	o := newOld(t)
	reader, err := o.owner.Begin(t.Context())
	require.NoError(t, err)
	defer reader.Rollback(context.WithoutCancel(t.Context())) //nolint:errcheck // ended below; this is for a failed test
	for _, table := range janitor.Tables {
		_, err := reader.Exec(t.Context(), "SELECT count(*) FROM "+table)
		require.NoError(t, err)
	}

	// That the set-up can show a stall: the plain statement runs into it.
	_, err = o.Pool(t, "", withLockTimeout("100ms")).Exec(t.Context(), "ALTER TABLE outbox_events DETACH PARTITION outbox_events_"+day(-8))
	require.True(t, postgres.LockTimedOut(err), "%v", err)

	inserters := o.Pool(t, "", withLockTimeout("1s")) // waiting for the reader is an error
	stop := make(chan struct{})
	var inserting sync.WaitGroup
	took, failed := make([][]time.Duration, 2), make([]error, 2)
	for i := range took {
		inserting.Go(func() {
			for failed[i] == nil {
				select {
				case <-stop:
					return
				default:
				}
				begin := time.Now()
				failed[i] = put(t.Context(), inserters, midnight.Add(time.Hour))
				took[i] = append(took[i], time.Since(begin))
			}
		})
	}

	made, makeErr := janitor.MakePartitions(t.Context(), o.janitors, midnight.AddDate(0, 0, 3))
	dropped, kept, dropErr := janitor.DropPartitions(t.Context(), o.janitors, midnight.Add(time.Minute), o.plan())
	close(stop)
	inserting.Wait()
	require.NoError(t, errors.Join(makeErr, dropErr, errors.Join(failed...)))
	require.Len(t, made, 6)
	require.Empty(t, dropped)
	require.Len(t, kept, 2, "one of each table waits for the reader")
	for _, k := range kept {
		require.Equal(t, "locked", k.Reason)
	}
	all := slices.Sorted(slices.Values(slices.Concat(took...)))
	require.Greater(t, len(all), 100)
	t.Logf("%d pairs of inserts behind an open reader: p50 %s, p99 %s, longest %s",
		len(all), all[len(all)/2], all[len(all)*99/100], all[len(all)-1])

	require.NoError(t, reader.Commit(t.Context()), "the reader was there all the time")
	o.delivered()
	dropped, kept = o.drop()
	require.Empty(t, kept)
	require.Len(t, dropped, 6, "and without it the janitor gets done")
}

func TestDeleteKeys(t *testing.T) {
	t.Parallel()
	o := newOld(t)
	tenant := uuid.New()
	o.exec("INSERT INTO tenants (id, name) VALUES ($1, 'acme')", tenant)
	o.exec(`INSERT INTO idempotency_keys (tenant_id, key_hash, fingerprint, created_at)
		SELECT $1, substr(sha256(n::text::bytea), 1, 16), sha256('x'), now() - make_interval(hours => n)
		FROM generate_series(0, 2500) AS n`, tenant)
	kept := func() int64 { return pgtest.Column[int64](t, o.owner, "SELECT count(*) FROM idempotency_keys")[0] }

	// One that a request holds is left, and nobody waits for it.
	holder, err := o.owner.Begin(t.Context())
	require.NoError(t, err)
	_, err = holder.Exec(t.Context(), "SELECT FROM idempotency_keys WHERE key_hash = substr(sha256('2500'), 1, 16) FOR UPDATE")
	require.NoError(t, err)
	deleted, err := janitor.DeleteKeys(t.Context(), o.janitors, 168*time.Hour)
	require.NoError(t, err)
	require.EqualValues(t, 2501-168-1, deleted)
	require.NoError(t, holder.Rollback(t.Context()))
	require.EqualValues(t, 168+1, kept())

	deleted, err = janitor.DeleteKeys(t.Context(), o.janitors, time.Minute)
	require.NoError(t, err)
	require.EqualValues(t, 168+1-24, deleted)
	require.EqualValues(t, 24, kept(), "a key lives for a day, however little is asked for")
}

func TestRunDropsAndSaysWhatItCannot(t *testing.T) {
	t.Parallel()
	o := newOld(t)
	o.deadLetter(-7)
	registry := prometheus.NewRegistry()
	log := &safeBuffer{}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	j := janitor.Janitor{
		Pool: o.janitors, Log: slog.New(slog.NewTextHandler(log, nil)), Now: func() time.Time { return midnight.Add(time.Minute) },
		Drop: o.plan(), KeepKey: 24 * time.Hour, Metrics: janitor.NewMetrics(registry),
	}
	go func() { ended <- j.Run(ctx) }()
	log.waitFor(t, "cannot be dropped")
	require.Eventually(t, func() bool {
		return metric(t, registry, "onceledger_janitor_kept_partitions", "open-dead-letter", "processed_events") == 1
	}, 20*time.Second, 5*time.Millisecond)
	cancel()
	require.NoError(t, <-ended)
	require.Contains(t, log.String(), "outbox_events_"+day(-8))
	require.EqualValues(t, 4, metric(t, registry, "onceledger_janitor_dropped_partitions_total", "outbox_events"))
	require.EqualValues(t, 1, metric(t, registry, "onceledger_janitor_dropped_partitions_total", "processed_events"))
	require.Zero(t, metric(t, registry, "onceledger_janitor_kept_partitions", "undelivered", "outbox_events"))
}

// metric is the value of the one series with these label values, in the order of
// the labels' names.
func metric(t *testing.T, registry *prometheus.Registry, name string, labels ...string) float64 {
	t.Helper()
	families, err := registry.Gather()
	require.NoError(t, err)
	for _, family := range families {
		for _, series := range family.GetMetric() {
			var values []string
			for _, label := range series.GetLabel() {
				values = append(values, label.GetValue())
			}
			if family.GetName() == name && slices.Equal(values, labels) {
				return series.GetGauge().GetValue() + series.GetCounter().GetValue()
			}
		}
	}
	return -1
}

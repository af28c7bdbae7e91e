package pressure_test

import (
	"context"
	"log/slog"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/pressure"
)

// flaky is a database that can be away.
type flaky struct {
	*pgxpool.Pool
	away  atomic.Bool
	asked atomic.Int64
}

func (f *flaky) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	f.asked.Add(1)
	if f.away.Load() {
		ended, cancel := context.WithCancel(ctx)
		cancel()
		return f.Pool.QueryRow(ended, sql, args...)
	}
	return f.Pool.QueryRow(ctx, sql, args...)
}

func (f *flaky) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return f.Pool.Query(ctx, sql, args...)
}

func (f *flaky) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return f.Pool.Exec(ctx, sql, args...)
}

// event writes an event that happened so long ago, and that no relay has
// delivered.
func event(t *testing.T, owner *pgxpool.Pool, age time.Duration) {
	t.Helper()
	_, err := owner.Exec(t.Context(), `
		INSERT INTO outbox_events (id, tenant_id, aggregate_type, aggregate_id, aggregate_version, event_type, payload, occurred_at)
		VALUES (uuidv7(), uuidv7(), 'order', uuidv7(), 1, 'OrderCreated', '{}', now() - make_interval(secs => $1))`, age.Seconds())
	require.NoError(t, err)
}

func TestWatcher(t *testing.T) {
	t.Parallel()
	database := pgtest.New(t)
	owner := database.Pool(t, "")
	conn := &flaky{Pool: database.Pool(t, "api")}
	registry := prometheus.NewRegistry()
	var ahead atomic.Int64
	watcher := pressure.NewWatcher(pressure.Config{
		DB: conn, Slot: database.Name, ReservePercent: 20, MaxAge: time.Hour, Log: slog.New(slog.DiscardHandler), Registry: registry,
		Now: func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) },
	})
	require.False(t, watcher.Shed(), "nothing is known yet")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- watcher.Run(ctx) }()
	becomes := func(shed bool) {
		t.Helper()
		require.Eventually(t, func() bool { return watcher.Shed() == shed }, 20*time.Second, 5*time.Millisecond)
	}
	more := func() { // readings that began from now on
		t.Helper()
		before := conn.asked.Load()
		require.Eventually(t, func() bool { return conn.asked.Load() >= before+2 }, 20*time.Second, 5*time.Millisecond)
	}

	event(t, owner, 59*time.Minute)
	more()
	require.False(t, watcher.Shed())
	event(t, owner, 61*time.Minute)
	more()
	require.False(t, watcher.Shed(), "the oldest is the one that was written first")
	_, err := owner.Exec(t.Context(), "DELETE FROM outbox_events WHERE occurred_at > now() - interval '1 hour'")
	require.NoError(t, err)
	becomes(true)
	require.EqualValues(t, 1, gauge(t, registry, "onceledger_http_shedding", "age"))
	require.Zero(t, gauge(t, registry, "onceledger_http_shedding", "wal"))

	// Without a database the last reading counts for a while, and then nothing.
	conn.away.Store(true)
	more()
	require.True(t, watcher.Shed())
	ahead.Store(int64(31 * time.Second))
	require.False(t, watcher.Shed())
	conn.away.Store(false)
	becomes(true)

	_, err = owner.Exec(t.Context(), "DELETE FROM outbox_events")
	require.NoError(t, err)
	becomes(false)
	require.Zero(t, gauge(t, registry, "onceledger_http_shedding", "age"))
	cancel()
	require.NoError(t, <-ended)
}

func TestSlots(t *testing.T) {
	t.Parallel()
	database := pgtest.New(t)
	owner := database.Pool(t, "")
	registry := prometheus.NewRegistry()
	slots := pressure.NewSlots(database.Pool(t, "janitor"), database.Name, slog.New(slog.DiscardHandler), registry, time.Now)
	require.NoError(t, slots.Read(t.Context()))
	require.EqualValues(t, absent, gauge(t, registry, "onceledger_slot_retained_bytes", database.Name))

	debezium := pgtest.Column[string](t, owner, "SELECT relay_debezium_slot($1)", database.Name)[0]
	for _, slot := range []string{database.Name, debezium} {
		_, err := owner.Exec(t.Context(), "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", slot)
		require.NoError(t, err)
	}
	_, err := owner.Exec(t.Context(), "SELECT pg_logical_emit_message(false, 'test', repeat('x', 100000))")
	require.NoError(t, err)
	event(t, owner, 90*time.Second)
	require.NoError(t, slots.Read(t.Context()))
	for _, slot := range []string{database.Name, debezium} {
		require.Greater(t, gauge(t, registry, "onceledger_slot_retained_bytes", slot), 100_000.0)
		limit := gauge(t, registry, "onceledger_slot_wal_limit_bytes")
		require.InDelta(t, limit, gauge(t, registry, "onceledger_slot_safe_wal_bytes", slot), limit/10)
		require.Zero(t, gauge(t, registry, "onceledger_slot_active", slot))
		require.EqualValues(t, 1, gauge(t, registry, "onceledger_slot_wal_status", slot, "reserved"))
		require.Zero(t, gauge(t, registry, "onceledger_slot_wal_status", slot, "lost"))
	}
	require.InDelta(t, 90, gauge(t, registry, "onceledger_outbox_oldest_undelivered_seconds"), 60)
	require.Positive(t, gauge(t, registry, "onceledger_slot_wal_limit_bytes"), "the server is set up as deploy/postgres says")
	require.InDelta(t, time.Now().Unix(), gauge(t, registry, "onceledger_slot_seen_timestamp_seconds"), 60)

	_, err = owner.Exec(t.Context(), "SELECT pg_drop_replication_slot($1)", debezium)
	require.NoError(t, err)
	require.NoError(t, slots.Read(t.Context()))
	require.EqualValues(t, absent, gauge(t, registry, "onceledger_slot_retained_bytes", debezium))
}

// TestSlotsOfALostSlot loses a slot by the limit, on a server of its own.
func TestSlotsOfALostSlot(t *testing.T) {
	t.Parallel()
	database := pgtest.Server(t).New(t)
	owner := database.Pool(t, "")
	exec := func(sql string, args ...any) {
		t.Helper()
		_, err := owner.Exec(t.Context(), sql, args...)
		require.NoError(t, err)
	}
	exec("SELECT pg_create_logical_replication_slot($1, 'pgoutput')", database.Name)
	registry := prometheus.NewRegistry()
	slots := pressure.NewSlots(database.Pool(t, "janitor"), database.Name, slog.New(slog.DiscardHandler), registry, time.Now)
	limit := func(setting string, bytes float64) {
		t.Helper()
		exec("ALTER SYSTEM SET max_slot_wal_keep_size = '" + setting + "'")
		exec("SELECT pg_reload_conf()")
		require.Eventually(t, func() bool {
			require.NoError(t, slots.Read(t.Context()))
			return gauge(t, registry, "onceledger_slot_wal_limit_bytes") == bytes
		}, 20*time.Second, 10*time.Millisecond)
	}
	limit("-1", -1<<20)
	require.EqualValues(t, -1, gauge(t, registry, "onceledger_slot_safe_wal_bytes", database.Name), "there is no limit")
	limit("48MB", 48<<20)
	require.Eventually(t, func() bool { // another connection may not have read the setting yet
		require.NoError(t, slots.Read(t.Context()))
		return gauge(t, registry, "onceledger_slot_safe_wal_bytes", database.Name) > 0
	}, 20*time.Second, 10*time.Millisecond)

	require.Eventually(t, func() bool {
		exec("SELECT pg_logical_emit_message(false, 'test', repeat('x', 8000000))")
		exec("CHECKPOINT")
		require.NoError(t, slots.Read(t.Context()))
		return gauge(t, registry, "onceledger_slot_wal_status", database.Name, "lost") == 1
	}, 60*time.Second, 10*time.Millisecond)
	require.EqualValues(t, 1, gauge(t, registry, "onceledger_slot_invalidated", database.Name, "wal_removed"))
	require.EqualValues(t, -1, gauge(t, registry, "onceledger_slot_safe_wal_bytes", database.Name))
}

const absent = -99

// gauge is the value of the series whose labels have these values, in any order.
func gauge(t *testing.T, registry *prometheus.Registry, name string, labels ...string) float64 {
	t.Helper()
	families, err := registry.Gather()
	require.NoError(t, err)
	for _, family := range families {
		for _, series := range family.GetMetric() {
			var values []string
			for _, label := range series.GetLabel() {
				values = append(values, label.GetValue())
			}
			if family.GetName() == name && slices.Equal(slices.Sorted(slices.Values(values)), slices.Sorted(slices.Values(labels))) {
				return series.GetGauge().GetValue()
			}
		}
	}
	return absent
}

package httpapi_test

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/pressure"
)

// watched is this world with an API that sheds load by a watcher of its own.
func (w *world) watched(reservePercent int, maxAge time.Duration) *world {
	w.t.Helper()
	watcher := pressure.NewWatcher(pressure.Config{
		DB: w.db.Pool(w.t, "api"), Slot: w.db.Name, ReservePercent: reservePercent, MaxAge: maxAge,
		Log: slog.New(slog.DiscardHandler), Registry: prometheus.NewRegistry(), Now: time.Now,
	})
	ctx, cancel := context.WithCancel(w.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- watcher.Run(ctx) }()
	w.t.Cleanup(func() {
		cancel()
		require.NoError(w.t, <-ended)
	})
	other := *w
	other.handler = handlerThatSheds(w.db.Pool(w.t, "api"), time.Now, w.db.Name, watcher.Shed)
	return &other
}

// requireShed wants every request that writes to be refused with nothing done,
// and every one that reads to be answered.
func (w *world) requireShed(order string) {
	w.t.Helper()
	before := w.written()
	for _, request := range [][2]string{
		{"/v1/orders", oneBook}, {order + "/pay", `{"payment_reference":"pi_1"}`},
		{order + "/refunds", `{"amount":1,"reason":"damaged"}`}, {order + "/cancel", ""},
	} {
		refused := w.post(request[0], request[1]).requireProblem(http.StatusServiceUnavailable, "load-shed")
		require.Equal(w.t, "15", refused.Header().Get("Retry-After"))
	}
	require.Equal(w.t, before, w.written(), "nothing was written")
	for _, path := range []string{order, "/v1/orders", order + "/receipt"} {
		require.Equal(w.t, http.StatusOK, w.get(path).Code, path)
	}
}

// TestShedLoad holds a slot back on a server that keeps little log for it. The API
// stops to write while the slot is still there, and goes on when it has caught up.
func TestShedLoad(t *testing.T) {
	t.Parallel()

	server := pgtest.Server(t)
	w := newWorldOn(t, server.New(t))
	w.exec("ALTER SYSTEM SET max_slot_wal_keep_size = '128MB'")
	w.exec("SELECT pg_reload_conf()")
	order := w.order()
	require.NoError(t, w.stream().Close(t.Context())) // a relay that made its slot and went
	w.exec(`INSERT INTO relay_position (slot_name, system_id, timeline, publication_oid, lsn, snapshot_xmin)
		VALUES (current_database(), 'x', 1, 1, '0/1', pg_snapshot_xmax(pg_current_snapshot()))`)
	w = w.watched(30, time.Hour)
	type slot struct {
		Status string
		Safe   int64
	}
	state := func() slot {
		return pgtest.Rows[slot](t, w.owner, "SELECT wal_status, coalesce(safe_wal_size, 0) FROM pg_replication_slots WHERE slot_name = $1", w.db.Name)[0]
	}
	shedding := func() bool {
		a := w.postKey("/v1/orders", `{}`, uuid.NewString()) // malformed: not done in any case
		return a.Code == http.StatusServiceUnavailable
	}

	require.Eventually(t, func() bool {
		return pgtest.Column[string](t, w.owner, "SHOW max_slot_wal_keep_size")[0] == "128MB"
	}, 20*time.Second, 10*time.Millisecond)
	require.Never(t, shedding, 1500*time.Millisecond, 100*time.Millisecond)
	for state().Safe > 30<<20 {
		w.exec("SELECT pg_logical_emit_message(false, 'test', repeat('x', 4000000))")
	}
	require.Eventually(t, shedding, 20*time.Second, 20*time.Millisecond)
	w.requireShed(order)
	now := state()
	require.NotEqual(t, "lost", now.Status)
	require.Positive(t, now.Safe, "before the limit and not after")
	w.exec("CHECKPOINT")
	require.NotEqual(t, "lost", state().Status, "what is kept is kept through a checkpoint")

	// The relay comes back and catches up.
	require.Eventually(t, func() bool {
		w.exec("SELECT pg_log_standby_snapshot()")
		_, err := w.owner.Exec(t.Context(), "SELECT pg_replication_slot_advance($1::text, pg_current_wal_lsn())", w.db.Name)
		require.False(t, err != nil && !strings.Contains(err.Error(), "is active"), "%v", err)
		return !shedding()
	}, 30*time.Second, 100*time.Millisecond)
	require.Equal(t, http.StatusCreated, w.post("/v1/orders", oneBook).Code)
	require.Equal(t, http.StatusOK, w.post(order+"/pay", `{"payment_reference":"pi_1"}`).Code)
}

// TestShedLoadByAge: the log is one limit, and how old an event may get in the
// outbox is the other.
func TestShedLoadByAge(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	order := w.order()
	w.exec("UPDATE outbox_events SET occurred_at = now() - interval '61 minutes'")
	w = w.watched(20, time.Hour)

	shedding := func() bool { return w.post("/v1/orders", `{}`).Code == http.StatusServiceUnavailable }
	require.Eventually(t, shedding, 20*time.Second, 20*time.Millisecond)
	w.requireShed(order)

	w.exec(`INSERT INTO relay_position (slot_name, system_id, timeline, publication_oid, lsn, snapshot_xmin)
		VALUES (current_database(), 'x', 1, 1, '0/1', pg_snapshot_xmax(pg_current_snapshot()))`)
	require.Eventually(t, func() bool { return !shedding() }, 20*time.Second, 20*time.Millisecond)
	require.Equal(t, http.StatusCreated, w.post("/v1/orders", oneBook).Code)
}

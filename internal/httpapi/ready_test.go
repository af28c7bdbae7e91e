package httpapi_test

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/pgtest"
)

// stream plays the relay: it makes the slot and reads from it.
func (w *world) stream() *pgconn.PgConn {
	w.t.Helper()
	conn, err := pgconn.Connect(w.t.Context(), w.db.URL("relay")+"&replication=database")
	require.NoError(w.t, err)
	w.t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(w.t.Context())) })
	_, err = pglogrepl.CreateReplicationSlot(w.t.Context(), conn, w.db.Name, "pgoutput", pglogrepl.CreateReplicationSlotOptions{})
	require.NoError(w.t, err)
	require.NoError(w.t, pglogrepl.StartReplication(w.t.Context(), conn, w.db.Name, 0, pglogrepl.StartReplicationOptions{
		PluginArgs: []string{"proto_version '1'", "publication_names 'onceledger_outbox'"},
	}))
	return conn
}

// relayIs writes down what the relay says of itself.
func (w *world) relayIs(state, detail string) {
	w.t.Helper()
	w.exec(`INSERT INTO relay_status (slot_name, state, detail) VALUES (current_database(), $1, $2)
		ON CONFLICT (slot_name) DO UPDATE SET state = excluded.state, detail = excluded.detail`, state, detail)
}

// exec runs a statement as owner.
func (w *world) exec(sql string, args ...any) {
	w.t.Helper()
	_, err := w.owner.Exec(w.t.Context(), sql, args...)
	require.NoError(w.t, err)
}

// detach takes a table's partitions away, those from today on.
func (w *world) detach(table string) {
	w.t.Helper()
	for _, leaf := range pgtest.Column[string](w.t, w.owner, `
		SELECT inhrelid::regclass::text FROM pg_inherits
		WHERE inhparent = $1::regclass AND right(inhrelid::regclass::text, 8) >= to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD')`, table) {
		w.exec("ALTER TABLE " + table + " DETACH PARTITION " + leaf)
		w.exec("DROP TABLE " + leaf)
	}
}

// checks is what /readyz says, and whether it says that all is well.
func (w *world) checks() (checks map[string]any, ready bool) {
	w.t.Helper()
	a := w.get("/readyz")
	body := a.json()
	ready = body["ready"].(bool)
	if ready {
		require.Equal(w.t, http.StatusOK, a.Code)
	} else {
		require.Equal(w.t, http.StatusServiceUnavailable, a.Code)
		require.NotEmpty(w.t, a.Header().Get("Retry-After"))
	}
	return body["checks"].(map[string]any), ready
}

func TestReady(t *testing.T) {
	t.Parallel()

	setup := func(t *testing.T) *world {
		t.Helper()
		w := newWorld(t)
		w.stream()
		w.relayIs("streaming", "")
		checks, ready := w.checks()
		require.True(t, ready, checks)
		require.Equal(t, map[string]any{"database": "ok", "partitions": "ok", "relay": "ok"}, checks)
		return w
	}
	// requireFault wants one check to say these words, and the others to be ok.
	requireFault := func(t *testing.T, w *world, check string, words ...string) {
		t.Helper()
		checks, ready := w.checks()
		require.False(t, ready)
		for name, says := range checks {
			if name != check {
				require.Equal(t, "ok", says, name)
			}
		}
		for _, word := range words {
			require.Contains(t, checks[check], word)
		}
	}

	for _, table := range []string{"outbox_events", "processed_events"} {
		t.Run("NotWithoutPartitionsOf"+table, func(t *testing.T) {
			t.Parallel()
			w := setup(t)

			w.detach(table)
			requireFault(t, w, "partitions", table, time.Now().UTC().Format(time.DateOnly), "janitor")
		})
	}

	t.Run("NotWithoutTomorrowsPartition", func(t *testing.T) {
		t.Parallel()
		w := setup(t)

		tomorrow := time.Now().UTC().AddDate(0, 0, 1)
		w.exec("DROP TABLE outbox_events_" + tomorrow.Format("20060102"))
		requireFault(t, w, "partitions", "outbox_events", tomorrow.Format(time.DateOnly))
	})

	t.Run("NotWithoutThePublication", func(t *testing.T) {
		t.Parallel()
		w := setup(t)

		w.exec("DROP PUBLICATION onceledger_outbox")
		requireFault(t, w, "relay", "publication onceledger_outbox", "migrate")
	})

	t.Run("NotWithoutTheSlot", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		w.relayIs("streaming", "")
		requireFault(t, w, "relay", "slot "+w.db.Name, "does not exist")
	})

	t.Run("NotWithASlotThatNobodyReads", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		conn := w.stream()
		w.relayIs("streaming", "")
		require.NoError(t, conn.Close(t.Context()))
		require.Eventually(t, func() bool {
			checks, ready := w.checks()
			return !ready && checks["relay"] == "replication slot "+w.db.Name+" is not in use: no relay is running"
		}, 10*time.Second, 20*time.Millisecond)
	})

	t.Run("NotWithARelayThatSaysNothing", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		w.stream()
		requireFault(t, w, "relay", "the relay is silent")
	})

	for _, state := range []string{"starting", "broker-away", "stuck", "stopped"} {
		t.Run("NotWithARelayThatIs"+state, func(t *testing.T) {
			t.Parallel()
			w := setup(t)

			w.relayIs(state, "message too large")
			requireFault(t, w, "relay", "the relay is "+state, "message too large")
			w.relayIs("streaming", "")
			_, ready := w.checks()
			require.True(t, ready, "and again when it goes on")
		})
	}

	for name, test := range map[string]struct {
		off   time.Duration
		ready bool
	}{
		"SixMinutesAhead": {6 * time.Minute, false}, "SixMinutesBehind": {-6 * time.Minute, false}, "AnHourAhead": {time.Hour, false},
		"FourMinutesAhead": {4 * time.Minute, true}, "FourMinutesBehind": {-4 * time.Minute, true},
	} {
		verb := "NotWithAClock"
		if test.ready {
			verb = "WithAClock"
		}
		t.Run(verb+name, func(t *testing.T) {
			t.Parallel()
			w := setup(t)

			w.handler = handler(w.db.Pool(t, "api"), func() time.Time { return time.Now().Add(test.off) }, w.db.Name)
			if test.ready {
				_, ready := w.checks()
				require.True(t, ready)
				return
			}
			checks, _ := w.checks()
			require.Contains(t, checks["database"], "clock")
		})
	}

	t.Run("NotWithoutTheDatabaseButAlive", func(t *testing.T) {
		t.Parallel()

		server := pgtest.Server(t)
		w := newWorldOn(t, server.New(t))
		w.kill(server)
		begin := time.Now()
		checks, ready := w.checks()
		require.False(t, ready)
		for _, name := range []string{"database", "partitions", "relay"} {
			require.NotEqual(t, "ok", checks[name])
		}
		require.Less(t, time.Since(begin), 10*time.Second)
		require.Equal(t, http.StatusOK, w.get("/healthz").Code)
	})
}

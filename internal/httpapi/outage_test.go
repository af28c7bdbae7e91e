package httpapi_test

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/janitor"
	"github.com/onceledger/onceledger/internal/pgtest"
)

// requireTryAgain wants the answer of an outage: it says when to come back, and
// keeps nothing that would be in the way then.
func requireTryAgain(t *testing.T, a answer) {
	t.Helper()
	a.requireProblem(http.StatusServiceUnavailable, "try-again")
	require.NotEmpty(t, a.Header().Get("Retry-After"))
	require.Contains(t, a.json()["title"], "Idempotency-Key")
	for _, word := range []string{"SQLSTATE", "partition", "outbox_events", "127.0.0.1", "onceledger_api"} {
		require.NotContains(t, a.Body.String(), word, "it tells nothing of the inside")
	}
}

func TestOutage(t *testing.T) {
	t.Parallel()

	t.Run("OfAPartitionKeepsNothingAndEndsWithIt", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		open, paid := w.order(), w.paidOrder()
		before, kept := w.written(), w.get(open).Body.String()
		w.detach("outbox_events")
		before.Events = 0 // gone with their partition
		requests := []struct{ path, body string }{
			{"/v1/orders", oneBook}, {open + "/pay", `{"payment_reference":"pi_1"}`}, {paid + "/refunds", `{"amount":1,"reason":"damaged"}`}, {open + "/cancel", ""},
		}
		for _, request := range requests {
			for range 2 {
				requireTryAgain(t, w.postKey(request.path, request.body, "k"+request.path))
			}
		}
		require.Equal(t, before, w.written())
		require.Equal(t, kept, w.get(open).Body.String(), "reading goes on")

		_, err := janitor.MakePartitions(t.Context(), w.db.Pool(t, "janitor"), time.Now())
		require.NoError(t, err)
		for _, request := range requests[:3] {
			a := w.postKey(request.path, request.body, "k"+request.path)
			require.Less(t, a.Code, 300, a.Body)
			require.Empty(t, a.Header().Get("Idempotency-Replayed"))
		}
		w.postKey(open+"/cancel", "", "k"+open+"/cancel").requireProblem(http.StatusConflict, "order-already-paid")
		require.Equal(t, before.Orders+1, w.written().Orders)
		require.Equal(t, 3, w.written().Events)
	})

	t.Run("OfTheDatabaseIsAnsweredAndOver", func(t *testing.T) {
		t.Parallel()

		server := pgtest.Server(t)
		w := newWorldOn(t, server.New(t))
		paid := w.paidOrder()
		before := w.written()

		w.kill(server)
		begin := time.Now()
		requireTryAgain(t, w.postKey("/v1/orders", oneBook, "k"))
		requireTryAgain(t, w.postKey(paid+"/refunds", `{"amount":1,"reason":"damaged"}`, "k2"))
		requireTryAgain(t, w.get(paid))
		require.Less(t, time.Since(begin), 15*time.Second)

		require.NoError(t, server.Restart(t.Context()))
		w.owner.Reset()
		require.Eventually(t, func() bool {
			a := w.postKey("/v1/orders", oneBook, "k")
			if a.Code != http.StatusCreated {
				requireTryAgain(t, a)
			}
			return a.Code == http.StatusCreated
		}, 20*time.Second, 50*time.Millisecond)
		require.Equal(t, "true", w.postKey("/v1/orders", oneBook, "k").Header().Get("Idempotency-Replayed"))
		require.Equal(t, http.StatusCreated, w.postKey(paid+"/refunds", `{"amount":1,"reason":"damaged"}`, "k2").Code)
		require.Equal(t, written{
			Orders: before.Orders + 1, Events: before.Events + 2, Keys: before.Keys + 2, Payments: 1, Refunds: 1,
		}, w.written())
	})

	t.Run("OfTheOrdersRowIsBoundedByTheLockTimeout", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		path := w.order()
		impatient := w.impatient(100 * time.Millisecond)
		holder := w.hold(path)
		before := w.written()

		const body = `{"payment_reference":"pi_1"}`
		begin := time.Now()
		requireTryAgain(t, impatient.postKey(path+"/pay", body, "k"))
		require.Less(t, time.Since(begin), 5*time.Second)
		require.GreaterOrEqual(t, time.Since(begin), 100*time.Millisecond)
		require.Equal(t, before, w.written())
		require.Equal(t, http.StatusOK, impatient.get(path).Code, "reading does not wait")

		require.NoError(t, holder.Rollback(t.Context()))
		paid := impatient.postKey(path+"/pay", body, "k")
		require.Equal(t, http.StatusOK, paid.Code, paid.Body)
		require.Empty(t, paid.Header().Get("Idempotency-Replayed"))
	})

	t.Run("OfTheKeyIsBoundedByTheLockTimeout", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		path := w.order()
		impatient := w.impatient(100 * time.Millisecond)
		holder := w.hold(path)

		// The first request has the key and waits for the order; the second
		// waits for the key, and no longer than it may.
		const body = `{"payment_reference":"pi_1"}`
		first := make(chan answer, 1)
		go func() { first <- w.postKey(path+"/pay", body, "k") }()
		w.awaitWaiting()
		a := impatient.postKey(path+"/pay", body, "k").requireProblem(http.StatusConflict, "request-in-progress")
		require.NotEmpty(t, a.Header().Get("Retry-After"))
		impatient.post(path+"/pay", body).requireProblem(http.StatusServiceUnavailable, "try-again") // another key has no answer to wait for

		require.NoError(t, holder.Rollback(t.Context()))
		done := <-first
		require.Equal(t, http.StatusOK, done.Code, done.Body)
		requireReplay(t, done, impatient.postKey(path+"/pay", body, "k"))
	})

	t.Run("OfAClientThatIsGoneLeavesNothing", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		path := w.order()
		before := w.written()
		holder := w.hold(path)
		const body = `{"payment_reference":"pi_1"}`
		ctx, hangUp := context.WithCancel(t.Context())
		first := make(chan answer, 1)
		go func() { first <- w.sendContext(ctx, http.MethodPost, path+"/pay", body, "Idempotency-Key", "k") }()
		w.awaitWaiting()
		hangUp()
		(<-first).requireProblem(http.StatusServiceUnavailable, "try-again")
		require.NoError(t, holder.Rollback(t.Context()))
		require.Equal(t, before, w.written())

		again := w.postKey(path+"/pay", body, "k")
		require.Equal(t, http.StatusOK, again.Code, again.Body)
		require.Empty(t, again.Header().Get("Idempotency-Replayed"))
	})
}

// kill ends the database server, and waits until none of its processes answers
// any more: one that has not noticed yet still commits.
func (w *world) kill(server *pgtest.Instance) {
	w.t.Helper()
	server.Kill()
	const connections = 8 // of the pool
	failed := 0
	require.Eventually(w.t, func() bool {
		if failed++; w.get("/v1/orders").Code != http.StatusServiceUnavailable {
			failed = 0
		}
		return failed > connections
	}, 30*time.Second, 5*time.Millisecond)
}

// hold locks an order's row until the transaction it returns is over.
func (w *world) hold(path string) pgx.Tx {
	w.t.Helper()
	holder, err := w.owner.Begin(w.t.Context())
	require.NoError(w.t, err)
	w.t.Cleanup(func() { _ = holder.Rollback(context.WithoutCancel(w.t.Context())) })
	_, err = holder.Exec(w.t.Context(), "SELECT FROM orders WHERE id = $1 FOR UPDATE", strings.TrimPrefix(path, "/v1/orders/"))
	require.NoError(w.t, err)
	return holder
}

// awaitWaiting waits until somebody waits for a lock.
func (w *world) awaitWaiting() {
	w.t.Helper()
	require.Eventually(w.t, func() bool {
		return pgtest.Column[int](w.t, w.owner, `
			SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`)[0] > 0
	}, 10*time.Second, 10*time.Millisecond)
}

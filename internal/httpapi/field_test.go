package httpapi_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// Field report R34: a limit that runs out behind somebody who holds the row is an
// outage to be tried again, with nothing written, and never a fault of the request.
func TestLimitsThatRunOut(t *testing.T) {
	t.Parallel()

	for setting, value := range map[string]string{"statement_timeout": "200ms", "lock_timeout": "100ms"} {
		t.Run(setting, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			path := w.order()
			before := w.written()
			holder := w.hold(path)
			hasty := *w
			hasty.handler = handler(w.db.Pool(t, "api", func(config *pgxpool.Config) {
				config.ConnConfig.RuntimeParams[setting] = value
			}), time.Now, w.db.Name)

			const body = `{"payment_reference":"pi_1"}`
			for range 2 {
				requireTryAgain(t, hasty.postKey(path+"/pay", body, "k"))
			}
			require.Equal(t, before, w.written())

			require.NoError(t, holder.Rollback(t.Context()))
			paid := hasty.postKey(path+"/pay", body, "k")
			require.Equal(t, http.StatusOK, paid.Code, paid.Body)
			require.Empty(t, paid.Header().Get("Idempotency-Replayed"), "nothing was kept of the tries before")
		})
	}
}

// Field report R33: what holds every connection does not hold the word that the
// process lives.
func TestHealthWhileEveryConnectionWaits(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	path := w.order()
	holder := w.hold(path)
	narrow := *w
	narrow.handler = handler(w.db.Pool(t, "api", func(config *pgxpool.Config) { config.MaxConns = 2 }), time.Now, w.db.Name)
	answers := make(chan answer, 10)
	for range cap(answers) {
		go func() { answers <- narrow.post(path+"/pay", `{"payment_reference":"pi_1"}`) }()
	}
	w.awaitWaiting()
	require.Equal(t, http.StatusOK, narrow.get("/healthz").Code)
	require.NoError(t, holder.Rollback(t.Context()))
	paid := 0
	for range cap(answers) {
		a := <-answers
		if a.Code == http.StatusOK {
			paid++
			continue
		}
		a.requireProblem(http.StatusConflict, "order-already-paid")
	}
	require.Equal(t, 1, paid)
}

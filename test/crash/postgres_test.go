package crash_test

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/test/stack"
)

// Goal: when Postgres crashes, every process stays, says that it is not ready,
// and goes on when Postgres is back; no request or event is lost or done twice.
// Method: under load, with the API and billing each inside a transaction, kill
// -9 the server; see both report it; start it again.
func TestPostgresIsKilled(t *testing.T) {
	t.Parallel()

	s := stack.New(t)
	api, worker := s.API(t), s.Worker(t, "worker", stack.AllRoles)
	stack.StartAll(t, api, worker)
	s.Run(t, api, 8, 20, 1)
	for round := range uint64(2 * *rounds) {
		releaseEvents := s.Hold(t, stack.ProcessedEvents)
		paying := s.StartLoad(t, api, 4, 2+round)
		s.WaitBlocked(t, stack.Billing, stack.Test)
		// Postgres keeps on disk how far the relay is only now and then, and sends
		// everything after that again. What billing has in hand is to be before it.
		waitForReply(t, s, worker)
		_, err := s.Owner.Exec(t.Context(), "CHECKPOINT")
		require.NoError(t, err)
		releasePayments := s.Hold(t, stack.Payments)
		toPay := s.StartLoad(t, api, 4, 2+round)
		s.WaitBlocked(t, stack.API, stack.Test)
		waitForReply(t, s, worker)
		waitForReply(t, s, worker)
		before, err := worker.Metric("onceledger_consumer_retries_total")
		require.NoError(t, err)

		s.Server.Kill()
		releaseEvents() // the locks went with the server
		releasePayments()
		for _, process := range []*stack.Process{api, worker} {
			require.NoError(t, process.WaitFor("say that it is not ready", func() (bool, error) {
				status, _, err := process.Get("/readyz")
				return status == http.StatusServiceUnavailable, err
			}))
			status, _, err := process.Get("/healthz")
			require.NoError(t, err)
			require.Equal(t, http.StatusOK, status)
		}
		require.NoError(t, worker.WaitFor("try again and again", func() (bool, error) {
			retries, err := worker.Metric("onceledger_consumer_retries_total")
			return retries >= before+3, err
		}))
		require.NoError(t, s.Server.Restart(t.Context()))
		s.Owner.Reset() // its connections are dead
		require.NoError(t, api.WaitReady())
		require.NoError(t, worker.WaitReady())
		require.NoError(t, paying.Finish(4))
		require.NoError(t, toPay.Finish(4))
	}
	counts := s.RequireBooks(t, api)
	require.Positive(t, counts.Unknown, "no request was under way when the server died")
}

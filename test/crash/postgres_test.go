package crash_test

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/test/stack"
)

// Goal: when Postgres crashes, every process stays, says that it is not ready,
// and goes on when Postgres is back; no request is lost or done twice.
// Method: under load, kill -9 the server and start it again, and once more.
func TestPostgresIsKilled(t *testing.T) {
	t.Parallel()

	s := stack.New(t)
	api, worker := s.API(t), s.Worker(t, "worker", stack.AllRoles)
	stack.StartAll(t, api, worker)
	load := s.StartLoad(t, api, 8, 1)
	for range 2 * *rounds {
		require.NoError(t, load.Advance(60))
		s.Server.Kill()
		for _, process := range []*stack.Process{api, worker} {
			require.NoError(t, process.WaitFor("say that it is not ready", func() (bool, error) {
				status, _, err := process.Get("/readyz")
				return status == http.StatusServiceUnavailable, err
			}))
			status, _, err := process.Get("/healthz")
			require.NoError(t, err)
			require.Equal(t, http.StatusOK, status)
		}
		require.NoError(t, s.Server.Restart(t.Context()))
		require.NoError(t, api.WaitReady())
		require.NoError(t, worker.WaitReady())
	}
	require.NoError(t, load.Finish(60))
	counts := s.RequireBooks(t, api)
	require.Positive(t, counts.Unknown, "no request was under way when the server died")
}

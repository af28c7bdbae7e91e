package e2e_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/test/stack"
)

// TestRetentionContract: a worker that would forget events that can still arrive
// does not start, says all the numbers, and has applied nothing.
func TestRetentionContract(t *testing.T) {
	t.Parallel()

	s := stack.New(t)
	api, relay := s.API(t), s.Worker(t, "relay", "relay")
	stack.StartAll(t, api, relay)
	load := s.StartLoad(t, api, 1, 1)

	for _, role := range []string{"billing", "janitor"} {
		worker := s.Worker(t, "forgetful-"+role, role, "DEDUPE_WINDOW=240h", "OUTBOX_RETENTION=96h", "REPLAY_WINDOW=24h")
		require.NoError(t, worker.Start())
		require.Eventually(t, func() bool { return !worker.Alive() }, 30*time.Second, 20*time.Millisecond)
		require.Contains(t, worker.Log(), "the worker refuses to start")
		for _, number := range []string{"DEDUPE_WINDOW 240h", "OUTBOX_RETENTION 96h", "REPLAY_WINDOW 24h", "order.events", "set DEDUPE_WINDOW above"} {
			require.Contains(t, worker.Log(), number)
		}
	}
	var applied int
	require.NoError(t, s.Owner.QueryRow(t.Context(), "SELECT count(*) FROM processed_events").Scan(&applied))
	require.Zero(t, applied)

	stack.StartAll(t, s.Worker(t, "billing", "billing"))
	require.NoError(t, load.Finish(3))
	s.RequireBooks(t, api)
}

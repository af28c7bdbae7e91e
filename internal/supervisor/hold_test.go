package supervisor

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestHoldWorker(t *testing.T) {
	t.Parallel()

	t.Run("StopsItInOrderAndKeepsItStopped", func(t *testing.T) {
		t.Parallel()

		config := newConfig(t)
		run := start(t, config)
		worker := see(t, run.workerURL(t))
		release, err := HoldWorker(t.Context(), config.Home)
		require.NoError(t, err)
		run.stderr.wait(t, "worker is held by another command")
		notes, err := os.ReadFile(run.notes)
		require.NoError(t, err)
		require.Equal(t, "worker stopped\n", string(notes), "by SIGTERM, as at the end")
		_, err = ask(run.workerURL(t))
		require.Error(t, err)

		release()
		require.Eventually(t, func() bool {
			again, err := ask(run.workerURL(t))
			return err == nil && again.Pid != worker.Pid
		}, 30*time.Second, 10*time.Millisecond)
	})

	t.Run("DoesNotKeepTheSupervisorFromStopping", func(t *testing.T) {
		t.Parallel()

		config := newConfig(t)
		run := start(t, config)
		release, err := HoldWorker(t.Context(), config.Home)
		require.NoError(t, err)
		defer release()
		run.stderr.wait(t, "worker is held by another command")
		require.NoError(t, run.end())
	})

	t.Run("IsRefusedWhereNothingRuns", func(t *testing.T) {
		t.Parallel()

		_, err := HoldWorker(t.Context(), t.TempDir())
		require.ErrorContains(t, err, "no 'onceledger up' runs on")
	})
}

package crash_test

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/test/stack"
)

// Goal: two workers with the same events do not both apply them. The second one
// waits for the first one's transaction and goes by its outcome, whichever.
// Method: stop a worker (SIGSTOP) inside its transaction until Kafka has given
// its partition to another; see the other wait; let the first one go on, or let
// Postgres end it.
func TestTwoWorkersWithOnePartition(t *testing.T) {
	t.Parallel()

	// stopInTransaction returns with the first worker stopped in its transaction
	// on an order's payment, and the second one waiting for it. Nothing but the
	// signal keeps the first one from committing.
	stopInTransaction := func(t *testing.T) (s *stack.Stack, api, first, second *stack.Process, load *stack.Load) {
		t.Helper()
		s = stack.New(t, 1)
		api = s.API(t)
		relay := s.Worker(t, "relay", "relay,janitor")
		first = s.Worker(t, "first", "billing")
		stack.StartAll(t, api, relay, first)
		s.Run(t, api, 4, 8, 1) // the partition is the first one's
		second = s.Worker(t, "second", "billing")
		require.NoError(t, second.StartReady(), "without a partition")

		release := s.Hold(t, stack.DocumentNumbers)
		load = s.StartLoad(t, api, 4, 2)
		s.WaitBlocked(t, stack.Billing, stack.Test)
		require.NoError(t, first.Signal(syscall.SIGSTOP))
		s.WaitBlocked(t, stack.Billing, stack.Billing)
		release()
		return s, api, first, second, load
	}

	// requireRejoined ends the test: both are members again, and the books right.
	requireRejoined := func(t *testing.T, s *stack.Stack, api, first *stack.Process, load *stack.Load) {
		t.Helper()
		require.NoError(t, load.Finish(8))
		_, err := s.Broker.WaitGroupStable(t.Context(), "billing", 2)
		require.NoError(t, err)
		require.NoError(t, first.WaitReady())
		s.Run(t, api, 4, 8, 3)
		s.RequireBooks(t, api)
	}

	t.Run("SecondFindsThatTheFirstHasCommitted", func(t *testing.T) {
		t.Parallel()

		s, api, first, second, load := stopInTransaction(t)
		require.NoError(t, first.Signal(syscall.SIGCONT))
		require.NoError(t, second.WaitFor("find that the events are applied", func() (bool, error) {
			count, err := duplicates(second)
			return count > 0, err
		}))
		requireRejoined(t, s, api, first, load)
	})

	t.Run("SecondAppliesWhatTheFirstCouldNotCommit", func(t *testing.T) {
		t.Parallel()

		s, api, first, second, load := stopInTransaction(t)
		require.NoError(t, load.Finish(8), "Postgres ends a transaction that does nothing")
		recognised, err := duplicates(second)
		require.NoError(t, err)
		require.Zero(t, recognised)
		require.NoError(t, first.Signal(syscall.SIGCONT)) // its late commit fails
		requireRejoined(t, s, api, first, load)
	})
}

// duplicates is how many events a worker has found, in this life, to have been
// applied before.
func duplicates(worker *stack.Process) (float64, error) {
	return worker.Metric("onceledger_inbox_records_total", `outcome="duplicate"`)
}

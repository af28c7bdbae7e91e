package stack

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

// Hold runs a statement that takes locks, and holds them until release. With
// them a test stops a process inside a transaction, at a place of its choice.
func (s *Stack) Hold(t testing.TB, sql string) (release func()) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), Patience)
	defer cancel()
	tx, err := s.Owner.Begin(ctx)
	require.NoError(t, err)
	_, err = tx.Exec(ctx, sql)
	require.NoError(t, err)
	end := func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) } // the server may be dead
	t.Cleanup(end)
	return end
}

// What to Hold: the first thing that billing writes in its transaction, the last,
// and the first that the API writes for a payment. None keeps anyone from reading.
const (
	ProcessedEvents = "LOCK TABLE processed_events IN EXCLUSIVE MODE"
	DocumentNumbers = "LOCK TABLE document_numbers IN EXCLUSIVE MODE"
	Payments        = "LOCK TABLE payments IN EXCLUSIVE MODE"
)

// The names by which processes are known to Postgres; the test's own is "".
const (
	API     = "onceledger-api"
	Billing = "onceledger-billing"
	Test    = ""
)

// WaitBlocked waits until one process waits in Postgres for a lock of another.
func (s *Stack) WaitBlocked(t testing.TB, waiting, holding string) {
	t.Helper()
	require.NoErrorf(t, Wait(t.Context(), func() (blocked bool, err error) {
		err = s.Owner.QueryRow(t.Context(), `
			SELECT EXISTS (
			  SELECT FROM pg_stat_activity AS waiting
			  JOIN pg_stat_activity AS holding ON holding.pid = ANY (pg_blocking_pids(waiting.pid))
			  WHERE waiting.application_name = $1 AND holding.application_name = $2)`, waiting, holding).Scan(&blocked)
		return blocked, err
	}), "%q does not wait for %q", waiting, holding)
}

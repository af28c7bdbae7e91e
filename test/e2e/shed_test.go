package e2e_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/test/stack"
)

// TestShedLoad: with no relay, the API stops to take orders once the oldest event
// is too old, and takes them again when a relay has come. Clients that send what
// was refused once more lose nothing by it.
func TestShedLoad(t *testing.T) {
	t.Parallel()

	s := stack.New(t)
	api, relay := s.API(t, "SHED_OUTBOX_AGE=2s"), s.Worker(t, "relay", "relay")
	stack.StartAll(t, api, relay)
	require.NoError(t, relay.Stop())
	accepted := s.StartLoad(t, api, 2, 1)
	metric := func(name string, labels ...string) float64 {
		value, err := api.Metric(name, labels...)
		require.NoError(t, err)
		return value
	}
	written := func() (n int) {
		require.NoError(t, s.Owner.QueryRow(t.Context(),
			"SELECT (SELECT count(*) FROM outbox_events) + (SELECT count(*) FROM orders) + (SELECT count(*) FROM idempotency_keys)").Scan(&n))
		return n
	}
	require.Eventually(t, func() bool { return metric("onceledger_http_shedding", `reason="age"`) == 1 }, 30*time.Second, 20*time.Millisecond)
	before := written()
	require.Positive(t, before)
	refused := s.StartLoad(t, api, 2, 2)
	require.Eventually(t, func() bool { return metric("onceledger_http_shed_total") >= 4 }, 30*time.Second, 20*time.Millisecond)
	require.Equal(t, before, written(), "what is refused writes nothing")

	require.NoError(t, relay.StartReady())
	stack.StartAll(t, s.Worker(t, "billing", "billing"))
	require.NoError(t, accepted.Finish(10))
	require.NoError(t, refused.Finish(10))
	s.RequireBooks(t, api)
	require.NoError(t, api.WaitFor("take orders again", func() (bool, error) {
		shedding, err := api.Metric("onceledger_http_shedding", `reason="age"`)
		return shedding == 0, err
	}))
}

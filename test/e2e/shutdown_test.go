package e2e_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/test/stack"
)

// TestStopInOrder stops each process (SIGTERM) with work in hand, again and
// again. It ends with exit code 0, finishes what it has begun, and nothing is
// lost. What the API has done it has answered.
func TestStopInOrder(t *testing.T) {
	t.Parallel()

	s := stack.New(t)
	api := s.API(t)
	relay, billing, janitor := s.Worker(t, "relay", "relay"), s.Worker(t, "billing", "billing"), s.Worker(t, "janitor", "janitor")
	stack.StartAll(t, api, relay, billing, janitor)
	load := s.StartLoad(t, api, 8, 1)
	for _, process := range []*stack.Process{api, relay, billing, janitor, billing, relay, api} {
		require.NoError(t, load.Advance(30))
		require.NoError(t, process.Stop())
		require.NoError(t, process.StartReady())
	}
	require.NoError(t, load.Finish(50))

	counts := s.RequireBooks(t, api)
	require.Zero(t, counts.Replayed, "the API did something and gave no answer")
	again, err := billing.Metric("onceledger_inbox_records_total", `outcome="duplicate"`)
	require.NoError(t, err)
	// The relay may stop between an event and the end of its transaction, and
	// then sends that again.
	require.LessOrEqual(t, again, float64(counts.Resent), "billing did not commit the offsets of what it had applied")
}

// TestStopIsBounded stops processes whose work does not end: billing waits for a
// lock in the database, the relay for a broker that is silent, the API for
// another transaction. Each gives up within its SHUTDOWN_TIMEOUT, and after the
// next start the work is done.
func TestStopIsBounded(t *testing.T) {
	t.Parallel()

	const soon = "SHUTDOWN_TIMEOUT=500ms"
	setup := func(t *testing.T) (s *stack.Stack, api, relay, billing *stack.Process) {
		t.Helper()
		s = stack.New(t)
		api, relay, billing = s.API(t, soon), s.Worker(t, "relay", "relay", soon), s.Worker(t, "billing", "billing", soon)
		stack.StartAll(t, api, relay, billing)
		s.Run(t, api, 4, 8, 1)
		return s, api, relay, billing
	}

	t.Run("Billing", func(t *testing.T) {
		t.Parallel()

		s, api, _, billing := setup(t)
		release := s.Hold(t, stack.DocumentNumbers)
		load := s.StartLoad(t, api, 4, 2)
		s.WaitBlocked(t, stack.Billing, stack.Test)
		require.NoError(t, billing.Stop())
		release()
		require.NoError(t, billing.StartReady())
		require.NoError(t, load.Finish(8))
		s.RequireBooks(t, api)
	})

	t.Run("Relay", func(t *testing.T) {
		t.Parallel()

		s, api, relay, _ := setup(t)
		s.Broker.Stall()
		load := s.StartLoad(t, api, 4, 2)
		require.NoError(t, relay.WaitFor("have events under way", func() (bool, error) {
			inFlight, err := relay.Metric("onceledger_relay_in_flight_events")
			return inFlight > 0, err
		}))
		require.NoError(t, relay.Stop())
		s.Broker.Resume()
		require.NoError(t, relay.StartReady())
		require.NoError(t, load.Finish(8))
		s.RequireBooks(t, api)
	})

	t.Run("API", func(t *testing.T) {
		t.Parallel()

		s, api, _, _ := setup(t)
		release := s.Hold(t, stack.Payments)
		load := s.StartLoad(t, api, 4, 2)
		s.WaitBlocked(t, stack.API, stack.Test)
		require.ErrorContains(t, api.Stop(), "exit status 1", "it says that requests were cut off")
		require.Contains(t, api.Log(), "requests were still in hand")
		release()
		require.NoError(t, api.StartReady())
		require.NoError(t, load.Finish(8))
		s.RequireBooks(t, api)
	})
}

// TestUp runs everything with `onceledger up`, on a Postgres and a broker that
// exist already: children that are killed are started again, SIGTERM ends all
// with exit code 0, and the next start goes on.
func TestUp(t *testing.T) {
	t.Parallel()

	s := stack.New(t)
	up := stack.NewProcess(t, "up", "onceledger",
		"DATABASE_URL="+s.Database.URL(""), "KAFKA_BROKERS="+s.Broker.Brokers(),
		"ONCELEDGER_ADDR=127.0.0.1:0", "ONCELEDGER_HOME="+t.TempDir())
	up.Args = []string{"up"}
	require.NoError(t, up.StartReady())
	load := s.StartLoad(t, up, 4, 1)
	for _, program := range []string{"worker", "api"} {
		require.NoError(t, load.Advance(20))
		require.NoError(t, up.KillChild(program))
	}
	require.NoError(t, load.Advance(40))
	require.NoError(t, up.Stop())
	require.NoError(t, up.StartReady())
	require.NoError(t, load.Advance(40))
	require.NoError(t, load.Finish(30))
	s.RequireBooks(t, up)
	require.Contains(t, up.Log(), "starting it again")
}

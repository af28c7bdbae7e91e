package crash_test

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/test/stack"
)

// Goal: one relay works at a time, and when it dies or hangs another goes on
// without a gap; a relay that wakes up late does no harm.
// Method: run two; under load, kill -9 or stop (SIGSTOP) the one that is
// streaming until the other one is, then bring the first one back.
func TestTwoRelays(t *testing.T) {
	t.Parallel()

	setup := func(t *testing.T) (s *stack.Stack, api, active, standby *stack.Process) {
		t.Helper()
		s = stack.New(t)
		api = s.API(t)
		active, standby = s.Worker(t, "relay-a", "relay"), s.Worker(t, "relay-b", "relay")
		stack.StartAll(t, api, s.Worker(t, "billing", "billing,janitor"), active)
		require.NoError(t, standby.StartReady())
		s.Run(t, api, 4, 8, 1)
		requireState(t, active, "streaming")
		requireState(t, standby, "standby")
		return s, api, active, standby
	}

	t.Run("OtherTakesOverFromOneThatIsKilled", func(t *testing.T) {
		t.Parallel()

		s, api, a, b := setup(t)
		load := s.StartLoad(t, api, 4, 2)
		for range 2 * *rounds { // there and back
			require.NoError(t, load.Advance(20))
			require.NoError(t, a.Kill())
			requireState(t, b, "streaming")
			require.NoError(t, a.StartReady())
			requireState(t, a, "standby")
			a, b = b, a
		}
		require.NoError(t, load.Finish(40))
		s.RequireBooks(t, api)
	})

	t.Run("OtherTakesOverFromOneThatHangs", func(t *testing.T) {
		t.Parallel()

		s, api, a, b := setup(t)
		load := s.StartLoad(t, api, 4, 2)
		require.NoError(t, load.Advance(20))
		require.NoError(t, a.Signal(syscall.SIGSTOP))
		requireState(t, b, "streaming")
		require.NoError(t, load.Advance(20))
		require.NoError(t, a.Signal(syscall.SIGCONT))
		requireState(t, a, "standby")
		require.NoError(t, load.Finish(40))
		requireState(t, b, "streaming")
		s.RequireBooks(t, api)
	})
}

// requireState waits until a relay says that it is in a state.
func requireState(t *testing.T, relay *stack.Process, state string) {
	t.Helper()
	require.NoError(t, relay.WaitFor("be "+state, func() (bool, error) {
		is, err := relay.Metric("onceledger_relay_state", `state="`+state+`"`)
		return is == 1, err
	}))
}

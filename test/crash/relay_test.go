package crash_test

import (
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/kafkatest"
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

// Goal: the relay never tells Postgres to forget what the broker has not
// acknowledged.
// Method: while the broker is silent or unreachable, wait until the relay has
// read events and has spoken to Postgres after that; kill it or stop it in
// order; bring both back.
func TestRelayEndsWhileTheBrokerIsAway(t *testing.T) {
	t.Parallel()

	outages := map[string]func(*kafkatest.Broker){"Silent": (*kafkatest.Broker).Stall, "Unreachable": (*kafkatest.Broker).Pause}
	ends := map[string]func(*stack.Process) error{"Killed": (*stack.Process).Kill, "Stopped": (*stack.Process).Stop}
	for outage, begin := range outages {
		for how, end := range ends {
			t.Run(outage+how, func(t *testing.T) {
				t.Parallel()

				s := stack.New(t)
				api, relay := s.API(t), s.Worker(t, "relay", "relay")
				stack.StartAll(t, api, relay, s.Worker(t, "billing", "billing,janitor"))
				s.Run(t, api, 4, 8, 1)
				begin(s.Broker)
				load := s.StartLoad(t, api, 4, 2)
				require.NoError(t, load.Advance(8))
				waitForReply(t, s, relay)
				waitForReply(t, s, relay)
				require.NoError(t, end(relay))
				s.Broker.Resume()
				require.NoError(t, relay.StartReady())
				require.NoError(t, load.Finish(8))
				s.RequireBooks(t, api)
			})
		}
	}
}

// Goal: a broker that refuses events stops the relay, with its reason shown by
// every process that waits for it; nothing is left out.
// Method: have the broker deny writing to the topic for a while, under load.
func TestBrokerRefuses(t *testing.T) {
	t.Parallel()

	s := stack.New(t)
	api, worker := s.API(t), s.Worker(t, "worker", stack.AllRoles)
	stack.StartAll(t, api, worker)
	s.Run(t, api, 4, 8, 1)
	denial := s.Broker.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Topic: event.OrderEvents, Err: kerr.TopicAuthorizationFailed, Count: -1})
	load := s.StartLoad(t, api, 4, 2)
	for _, process := range []*stack.Process{api, worker} {
		require.NoError(t, process.WaitFor("say that the relay is stuck", func() (bool, error) {
			status, text, err := process.Get("/readyz")
			return status == http.StatusServiceUnavailable && strings.Contains(text, "stuck") && strings.Contains(text, event.OrderEvents), err
		}))
	}
	denial.Remove()
	require.NoError(t, api.WaitReady())
	require.NoError(t, worker.WaitReady())
	require.NoError(t, load.Finish(8))
	s.RequireBooks(t, api)
}

// waitForReply waits until the relay has been sent everything that is committed
// now, and has said after that how far it is.
func waitForReply(t *testing.T, s *stack.Stack, relay *stack.Process) {
	t.Helper()
	var written string
	var now time.Time
	require.NoError(t, s.Owner.QueryRow(t.Context(), "SELECT pg_current_wal_flush_lsn()::text, clock_timestamp()").Scan(&written, &now))
	require.NoError(t, relay.WaitFor("reply to Postgres", func() (replied bool, err error) {
		err = s.Owner.QueryRow(t.Context(), `
			SELECT EXISTS (SELECT FROM pg_stat_replication WHERE sent_lsn >= $1::pg_lsn AND reply_time > $2)`, written, now).Scan(&replied)
		return replied, err
	}))
}

// requireState waits until a relay says that it is in a state.
func requireState(t *testing.T, relay *stack.Process, state string) {
	t.Helper()
	require.NoError(t, relay.WaitFor("be "+state, func() (bool, error) {
		is, err := relay.Metric("onceledger_relay_state", `state="`+state+`"`)
		return is == 1, err
	}))
}

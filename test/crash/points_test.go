package crash_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/crash"
	"github.com/onceledger/onceledger/test/stack"
)

// evidence is what a crash must have done, beyond killing a process: without
// it, the crash came at a moment when it did no harm, and proves nothing.
type evidence struct {
	undone     int     // requests without an answer that had not been done
	done       int     // requests without an answer that had been done
	resent     int     // events that came on the topics again
	recognised float64 // events that billing found it had applied before
}

// Goal: wherever a process dies, nothing is lost and nothing happens twice.
// Method: under load, kill -9 at each point, the first and the n-th time that it
// is reached and in the middle of a backlog; start the process again; check the
// books.
func TestEachPoint(t *testing.T) {
	t.Parallel()

	tests := []struct {
		point     string
		nth       int // under load
		inBacklog int // the API has none
		proves    func(t *testing.T, e evidence)
	}{
		{crash.APIBeforeCommit, 12, 0, func(t *testing.T, e evidence) {
			require.Positive(t, e.undone, "requests that were rolled back")
		}},
		{crash.APICommittedNotAnswered, 12, 0, func(t *testing.T, e evidence) {
			require.Positive(t, e.done, "requests that were answered only the second time, from store")
		}},
		{crash.RelayDecodedNotProduced, 20, 150, nil},
		{crash.RelayProducedNotAcked, 20, 150, nil}, // whether the broker got it is chance
		{crash.RelayAckedNotConfirmed, 2, 1, func(t *testing.T, e evidence) {
			require.Positive(t, e.resent, "events sent twice")
			require.Positive(t, e.recognised, "events that came twice")
		}},
		{crash.WorkerBeforeCommit, 5, 1, nil},
		{crash.WorkerCommittedNotStored, 5, 1, func(t *testing.T, e evidence) {
			require.Zero(t, e.resent, "events sent twice")
			require.Positive(t, e.recognised, "events that were read twice")
		}},
	}
	for _, test := range tests {
		t.Run(test.point, func(t *testing.T) {
			t.Parallel()

			s := stack.New(t)
			api := s.API(t)
			relay := s.Worker(t, "relay", "relay")
			billing := s.Worker(t, "billing", "billing,janitor")
			stack.StartAll(t, api, relay, billing)
			s.Run(t, api, 4, 8, 1)
			victim := map[byte]*stack.Process{'a': api, 'r': relay, 'w': billing}[test.point[0]]

			rounds := []struct {
				nth     int
				backlog bool
			}{{nth: 1}, {nth: test.nth}, {test.inBacklog, true}}
			if victim == api {
				rounds = rounds[:2]
			}
			before := s.RequireBooks(t, api)
			for i, round := range rounds {
				recognised, err := duplicates(billing)
				require.NoError(t, err)
				if victim == billing {
					recognised = 0 // it begins to count again
				}

				var load *stack.Load
				if round.backlog {
					require.NoError(t, victim.Stop())
					load = s.StartLoad(t, api, 200, uint64(i))
					require.NoError(t, load.Advance(400))
				} else {
					load = s.StartLoad(t, api, 4, uint64(i))
					require.NoError(t, victim.Stop())
				}
				require.NoError(t, victim.Start(fmt.Sprintf("ONCELEDGER_CRASH=%s:%d", test.point, round.nth)))
				require.NoError(t, victim.WaitKilled())
				require.NoError(t, victim.StartReady())
				require.NoError(t, load.Finish(8))

				after := s.RequireBooks(t, api)
				now, err := duplicates(billing)
				require.NoError(t, err)
				e := evidence{
					done:       after.Replayed - before.Replayed,
					undone:     (after.Unknown - after.Replayed) - (before.Unknown - before.Replayed),
					resent:     after.Resent - before.Resent,
					recognised: now - recognised,
				}
				t.Logf("%+v: %+v", round, e)
				if test.proves != nil {
					test.proves(t, e)
				}
				before = after
			}
		})
	}
}

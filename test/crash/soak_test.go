package crash_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/onceledger/onceledger/internal/crash"
	"github.com/onceledger/onceledger/test/stack"
)

// Goal: exactly once in effect, whatever dies whenever.
// Method: 20 clients take 500 orders through their lives while the API and the
// worker are killed with -9 twenty times, at random moments and at each crash
// point; then the books are checked. A seed decides what is bought and who dies
// when; the scheduler decides the rest.
func TestSoak(t *testing.T) {
	t.Parallel()

	chosen := seedOf()
	t.Logf("again with: go test ./test/crash -run TestSoak -seed %d -orders %d -kills %d", chosen, *orders, *kills)

	s := stack.New(t)
	api, worker := s.API(t), s.Worker(t, "worker", stack.AllRoles)
	stack.StartAll(t, api, worker)
	load := s.StartLoad(t, api, 20, chosen)

	var group errgroup.Group
	var recognised float64
	group.Go(func() error {
		return killAgainAndAgain(api, load, *kills/2, []death{
			{at: crash.APIBeforeCommit},
			{at: crash.APICommittedNotAnswered},
		})
	})
	group.Go(func() error {
		return killAgainAndAgain(worker, load, *kills-*kills/2, []death{
			{at: crash.RelayDecodedNotProduced},
			{at: crash.RelayProducedNotAcked},
			{at: crash.RelayAckedNotConfirmed},
			{at: crash.WorkerBeforeCommit},
			{at: crash.BalancesProducedNotCommitted},
			{at: crash.BalancesCommittedNotPolled},
			{at: crash.WorkerCommittedNotStored, then: func() error {
				return worker.WaitFor("recognise what it has applied before", func() (_ bool, err error) {
					recognised, err = duplicates(worker)
					return recognised > 0, err
				})
			}},
		})
	})
	require.NoError(t, group.Wait())
	require.NoError(t, load.Finish(*orders))

	counts := s.RequireBooks(t, api)
	s.RequireTopicBalances(t)
	require.Positive(t, counts.Unknown, "requests without an answer")
	require.Positive(t, counts.Replayed, "answers from store")
	require.Positive(t, counts.Resent, "events sent again")
	require.Positive(t, recognised, "duplicates recognised")
}

// death is one kill of a process: at a crash point, or at a random moment.
type death struct {
	at   string
	then func() error // once it is back
}

// killAgainAndAgain kills a process and starts it again, so many times, some of
// them at the points given, the others after some of the clients' steps. Before
// it is started with a point it is stopped in order: there are deploys too.
func killAgainAndAgain(process *stack.Process, load *stack.Load, times int, atPoints []death) error {
	random := rand.New(rand.NewPCG(load.Seed, uint64(len(atPoints))))
	deaths := append(atPoints, make([]death, max(0, times-len(atPoints)))...)
	random.Shuffle(len(deaths), func(i, j int) { deaths[i], deaths[j] = deaths[j], deaths[i] })

	for _, death := range deaths {
		steps, nth := random.IntN(60), 1+random.IntN(5)
		if death.at == "" {
			if err := errors.Join(load.Advance(steps), process.Kill(), process.Start()); err != nil {
				return err
			}
			continue
		}
		err := errors.Join(process.WaitReady(), process.Stop(),
			process.Start(fmt.Sprintf("ONCELEDGER_CRASH=%s:%d", death.at, nth)), process.WaitKilled(), process.StartReady())
		if err == nil && death.then != nil {
			err = death.then()
		}
		if err != nil {
			return fmt.Errorf("at %s:%d: %w", death.at, nth, err)
		}
	}
	return process.WaitReady()
}

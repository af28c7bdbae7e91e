package inbox_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/inbox"
)

// TestTwoWorkersOnOneBatch is what a rebalance can come to: a worker that was
// thought dead and the one that took over process the same records. The second
// waits at the marks of the first, and then sees what became of it.
func TestTwoWorkersOnOneBatch(t *testing.T) {
	t.Parallel()

	// race has the first worker at the end of its transaction, with its effects
	// written, when the second begins; it ends as the first handler's verdict says.
	race := func(t *testing.T, verdict error) (first, second *world, events []event.Event) {
		first = newWorld(t)
		second = first.another(t)
		second.Partition = first.Partition
		events = first.created(5)
		records := first.Partition.Append(events...)

		atTheEnd, finish := make(chan struct{}), make(chan struct{})
		first.handler.after = func(context.Context, pgx.Tx) error {
			close(atTheEnd)
			<-finish
			return verdict
		}
		var both sync.WaitGroup
		var firstErr, secondErr error
		both.Go(func() { firstErr = first.Process(t.Context(), records) })
		<-atTheEnd
		both.Go(func() { secondErr = second.Process(t.Context(), records) })
		second.Waiting(t)
		require.Zero(t, second.calls(), "it waits before it has an effect")
		close(finish)
		both.Wait()
		require.ErrorIs(t, firstErr, verdict)
		require.NoError(t, secondErr)
		return first, second, events
	}

	t.Run("TheSecondSeesTheConflictWhenTheFirstCommits", func(t *testing.T) {
		t.Parallel()
		first, second, events := race(t, nil)
		first.requireOnce(t, events...)
		require.Equal(t, 5, first.Counted(t, "applied"))
		require.Equal(t, 5, second.Counted(t, "duplicate"))
		require.Zero(t, second.calls())
	})

	t.Run("TheSecondAppliesItWhenTheFirstRollsBack", func(t *testing.T) {
		t.Parallel()
		first, second, events := race(t, errors.New("the first gives up"))
		first.requireOnce(t, events...)
		require.Zero(t, first.Counted(t, "applied"), "nothing that was rolled back is counted")
		require.Equal(t, 5, second.Counted(t, "applied"))
	})
}

// TestManyWorkersAtOnce has several workers process the same records over and
// over, cut into batches in different places, with bad ones among them.
func TestManyWorkersAtOnce(t *testing.T) {
	t.Parallel()

	w := newWorld(t)
	w.handler.refuse = refuseMarked
	events := w.created(60)
	events[10] = spoilt(events[10])
	events[20] = marked(events[20], inbox.ClassRule)
	records := w.Partition.Append(events...)
	records[30].Value = []byte("not JSON")

	const workers = 4
	var finished sync.WaitGroup
	gate := make(chan struct{})
	errs := make([]error, workers)
	for i := range workers {
		worker := w.another(t)
		worker.handler.refuse = refuseMarked
		finished.Go(func() {
			<-gate
			size := 7 + 6*i
			for at := 0; at < len(records) && errs[i] == nil; at += size {
				errs[i] = worker.Process(t.Context(), records[at:min(at+size, len(records))])
			}
		})
	}
	close(gate)
	finished.Wait()
	require.NoError(t, errors.Join(errs...))

	good := append(append(append(ids(events[:10]...), ids(events[11:20]...)...), ids(events[21:30]...)...), ids(events[31:]...)...)
	require.ElementsMatch(t, good, w.effects(t))
	require.ElementsMatch(t, good, w.Applied(t))
	require.Equal(t, map[string]int{"data": 1, "rule": 1, "undecodable": 1}, countClasses(w.DeadLetters(t)))
}

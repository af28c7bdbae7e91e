package deadletters_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/deadletters"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/inbox/inboxtest"
	"github.com/onceledger/onceledger/internal/pgtest"
)

// TestRetryAndDelivery is the moment at which an operator tries the letters of an
// order again while a worker has the order's next event in hand. Whoever comes
// first, the event ends applied, or parked behind a letter that is still open:
// never parked behind nothing.
func TestRetryAndDelivery(t *testing.T) {
	t.Parallel()

	// stopped is a handler that stops in the middle of its transaction, once.
	stopped := func() (handler *gate, reached, goOn chan struct{}) {
		reached, goOn = make(chan struct{}), make(chan struct{})
		var once sync.Once
		handler = &gate{Handler: billing.Handler{Now: time.Now}}
		handler.at = func(ctx context.Context, _ []event.Event) {
			once.Do(func() {
				close(reached)
				select {
				case <-goOn:
				case <-ctx.Done(): // the test has failed
				}
			})
		}
		return handler, reached, goOn
	}
	ordinary := billing.Handler{Now: time.Now}

	t.Run("TheWorkerFirst", func(t *testing.T) {
		t.Parallel()
		worker, reached, goOn := stopped()
		w := newWorldOf(t, ordinary, ordinary)
		busy := inboxtest.On(t, w.DB, worker)
		w.refuse(t)
		order := w.order()
		w.Deliver(t, bad(order.Paid()), order.Refunded(1))
		w.mend(t)

		// The worker has found the order held, and has not stored the event behind it yet.
		var both sync.WaitGroup
		var workerErr, operatorErr error
		var report deadletters.Report
		both.Go(func() {
			workerErr = busy.Process(t.Context(), w.Partition.Append(order.Refunded(2), w.order().Created()))
		})
		<-reached
		both.Go(func() { report, operatorErr = w.letters.Retry(t.Context(), of(order), deadletters.Act{By: "test"}) })
		w.Waiting(t)
		close(goOn)
		both.Wait()
		require.NoError(t, errors.Join(workerErr, operatorErr))
		require.Equal(t, []inbox.Outcome{"applied", "applied", "applied"}, outcomes(report), "the one that was stored meanwhile too")
		w.requireSettled(t, order, 2)
	})

	t.Run("TheOperatorFirst", func(t *testing.T) {
		t.Parallel()
		operator, reached, goOn := stopped()
		w := newWorldOf(t, ordinary, operator)
		w.refuse(t)
		order := w.order()
		w.Deliver(t, bad(order.Paid()), order.Refunded(1))
		w.mend(t)

		var both sync.WaitGroup
		var workerErr, operatorErr error
		both.Go(func() { _, operatorErr = w.letters.Retry(t.Context(), of(order), deadletters.Act{By: "test"}) })
		<-reached
		both.Go(func() { workerErr = w.Process(t.Context(), w.Partition.Append(order.Refunded(2))) })
		w.Waiting(t)
		close(goOn)
		both.Wait()
		require.NoError(t, errors.Join(workerErr, operatorErr))
		require.Len(t, w.states(t), 2, "the worker applied it, when the others were")
		w.requireSettled(t, order, 2)
	})

	t.Run("TheOperatorFirstAndInVain", func(t *testing.T) {
		t.Parallel()
		operator, reached, goOn := stopped()
		w := newWorldOf(t, ordinary, operator)
		w.refuse(t)
		w.Exec(t, "ALTER TABLE credit_notes ADD CONSTRAINT credit_notes_few CHECK (total_minor <> 7) NOT VALID")
		order := w.order()
		w.Deliver(t, bad(order.Paid()), order.Refunded(7))
		w.mend(t)

		var both sync.WaitGroup
		var workerErr, operatorErr error
		both.Go(func() { _, operatorErr = w.letters.Retry(t.Context(), of(order), deadletters.Act{By: "test"}) })
		<-reached // the payment alone, in a half of its own
		both.Go(func() { workerErr = w.Process(t.Context(), w.Partition.Append(order.Refunded(2))) })
		w.Waiting(t)
		close(goOn)
		both.Wait()
		require.NoError(t, errors.Join(workerErr, operatorErr))
		require.Equal(t, []string{"data resolved", "data open", "parked open"}, pgtest.Column[string](t, w.Owner,
			"SELECT class || ' ' || state FROM dead_letters ORDER BY id"))
		w.requireNothingBehindNothing(t)
	})

	t.Run("ADiscardFirst", func(t *testing.T) {
		t.Parallel()
		operator, reached, goOn := stopped()
		w := newWorldOf(t, ordinary, operator)
		order := w.order()
		wrong := factory.Altered(order.Created(), func(state *event.Order) { state.NetAmount++ })
		w.Deliver(t, wrong, order.Paid())

		var both sync.WaitGroup
		var workerErr, operatorErr error
		both.Go(func() {
			_, operatorErr = w.letters.Discard(t.Context(), of(order), deadletters.Act{By: "test", Reason: "preview", Preview: true})
		})
		both.Wait()
		require.NoError(t, operatorErr)
		filter := deadletters.Filter{EventID: wrong.ID}
		both.Go(func() {
			_, operatorErr = w.letters.Discard(t.Context(), filter, deadletters.Act{By: "test", Reason: "wrong"})
		})
		<-reached
		both.Go(func() { workerErr = w.Process(t.Context(), w.Partition.Append(order.Refunded(1))) })
		w.Waiting(t)
		close(goOn)
		both.Wait()
		require.NoError(t, errors.Join(workerErr, operatorErr))
		w.requireSettled(t, order, 1)
	})

	// The record itself comes again while its letter is closed.
	for name, act := range map[string]func(*world, deadletters.Filter) error{
		"TheDiscardedComesAgain": func(w *world, filter deadletters.Filter) error {
			_, err := w.letters.Discard(t.Context(), filter, deadletters.Act{By: "test", Reason: "wrong"})
			return err
		},
		"TheResolvedComesAgain": func(w *world, filter deadletters.Filter) error {
			_, err := w.letters.Retry(t.Context(), filter, deadletters.Act{By: "test"})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorldOf(t, ordinary, ordinary)
			w.refuse(t)
			order := w.order()
			payment := bad(order.Paid())
			records := w.Deliver(t, payment)
			w.mend(t)

			var both sync.WaitGroup
			var workerErr, operatorErr error
			tx, err := w.Owner.Begin(t.Context())
			require.NoError(t, err)
			_, err = tx.Exec(t.Context(), "LOCK TABLE dead_letter_decisions IN SHARE MODE") // the operator stops before it
			require.NoError(t, err)
			both.Go(func() { operatorErr = act(w, deadletters.Filter{EventID: payment.ID}) })
			w.Waiting(t)
			both.Go(func() { workerErr = w.Process(t.Context(), records) })
			require.Eventually(t, func() bool {
				return len(pgtest.Column[int32](t, w.Owner,
					"SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")) == 2
			}, 20*time.Second, time.Millisecond)
			require.NoError(t, tx.Rollback(t.Context()))
			both.Wait()
			require.NoError(t, errors.Join(workerErr, operatorErr))
			if name == "TheDiscardedComesAgain" {
				require.Empty(t, w.Applied(t))
				require.Equal(t, []string{"discarded"}, w.states(t))
				require.Equal(t, 1, w.Counted(t, "discarded"))
			} else {
				require.Len(t, w.Applied(t), 1)
				require.Equal(t, []string{"resolved"}, w.states(t))
				require.Equal(t, 1, w.Counted(t, "duplicate"))
			}
		})
	}

	t.Run("TwoOperators", func(t *testing.T) {
		t.Parallel()
		first, reached, goOn := stopped()
		w := newWorldOf(t, ordinary, first)
		second := w.operator(t, ordinary)
		w.refuse(t)
		order := w.order()
		w.Deliver(t, bad(order.Paid()), order.Refunded(1))
		w.mend(t)

		var both sync.WaitGroup
		reports := make([]deadletters.Report, 2)
		errs := make([]error, 2)
		both.Go(func() { reports[0], errs[0] = w.letters.Retry(t.Context(), of(order), deadletters.Act{By: "first"}) })
		<-reached
		both.Go(func() { reports[1], errs[1] = second.Retry(t.Context(), of(order), deadletters.Act{By: "second"}) })
		w.Waiting(t)
		close(goOn)
		both.Wait()
		require.NoError(t, errors.Join(errs...))
		require.Equal(t, []inbox.Outcome{"applied", "applied"}, outcomes(reports[0]))
		require.Equal(t, []inbox.Outcome{deadletters.OutcomeNothing, deadletters.OutcomeNothing}, outcomes(reports[1]))
		w.requireSettled(t, order, 1)
		require.Len(t, w.decisions(t), 2)
	})

	t.Run("AWaitThatIsTooLongIsSaid", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.refuse(t)
		order := w.order()
		w.Deliver(t, bad(order.Paid()))
		impatient := w.operator(t, ordinary, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["lock_timeout"] = "100ms" })
		tx, err := w.Owner.Begin(t.Context())
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), "SELECT FROM dead_letters FOR SHARE")
		require.NoError(t, err)
		_, err = impatient.Retry(t.Context(), of(order), deadletters.Act{By: "test"})
		require.ErrorIs(t, err, deadletters.ErrBusy)
		require.NoError(t, tx.Rollback(t.Context()))
	})
}

// TestUnderLiveWorkers has two workers go on with the events of some orders while
// two operators try, discard and preview what is open, all the time. In the end
// each order is settled, in its order, and nothing waits behind nothing at any time.
func TestUnderLiveWorkers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	w.refuse(t)

	const orders, refunds = 12, 12
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	all := make([]*factory.Order, orders)
	first := make([]event.Event, 0, orders)
	for i := range all {
		all[i] = w.order()
		first = append(first, bad(all[i].Paid()))
	}
	w.Deliver(t, first...)
	require.Len(t, w.DeadLetters(t), orders)

	var workers, operators sync.WaitGroup
	errs := make([]error, 4)
	for i := range 2 {
		worker := inboxtest.On(t, w.DB, billing.Handler{Now: time.Now})
		worker.Partition.Number = int32(1 + i)
		pause := time.Duration(1+rng.IntN(3)) * time.Millisecond
		workers.Go(func() {
			ticker := time.NewTicker(pause)
			defer ticker.Stop()
			for n := range refunds {
				for at := i; at < orders; at += 2 { // an order is of one partition
					records := worker.Partition.Append(all[at].Refunded(1 + int64(n)))
					errs[i] = errors.Join(errs[i], worker.Process(t.Context(), records))
					<-ticker.C
				}
			}
		})
	}
	for i := range 2 {
		service := w.operator(t, billing.Handler{Now: time.Now})
		choice := rand.New(rand.NewPCG(seed, uint64(i)))
		operators.Go(func() {
			for ctx.Err() == nil {
				act := deadletters.Act{By: "test", Preview: choice.IntN(3) == 0}
				_, err := service.Retry(t.Context(), deadletters.Filter{Consumer: inboxtest.Name}, act)
				errs[2+i] = errors.Join(errs[2+i], err)
			}
		})
	}
	require.Eventually(t, func() bool {
		w.requireNothingBehindNothing(t)
		return len(pgtest.Column[string](t, w.Owner, "SELECT class FROM dead_letters WHERE class = 'parked'")) > 20
	}, 20*time.Second, time.Millisecond)
	w.mend(t)
	workers.Wait()
	require.Eventually(t, func() bool {
		w.requireNothingBehindNothing(t)
		return len(pgtest.Column[string](t, w.Owner, "SELECT class FROM dead_letters WHERE state = 'open'")) == 0
	}, 20*time.Second, time.Millisecond)
	cancel()
	operators.Wait()
	require.NoError(t, errors.Join(errs...))
	for _, order := range all {
		w.requireSettled(t, order, refunds)
	}
}

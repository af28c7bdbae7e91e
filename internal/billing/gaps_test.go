package billing_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/pgtest"
)

// gaps are the versions of an order that billing has noted as missing.
func (w *world) gaps(t *testing.T, order *factory.Order) []int64 {
	t.Helper()
	return pgtest.Column[int64](t, w.Owner, `
		SELECT version FROM version_gaps WHERE tenant_id = $1 AND order_id = $2 ORDER BY 1`, order.TenantID, order.State.OrderID)
}

// missing are those that are missing for whoever asks.
func (w *world) missing(t *testing.T, order *factory.Order) []int64 {
	t.Helper()
	return pgtest.Column[int64](t, w.DB.Pool(t, "verify"), `
		SELECT version FROM missing_versions WHERE tenant_id = $1 AND order_id = $2 ORDER BY 1`, order.TenantID, order.State.OrderID)
}

// life is an order's events: created, paid, and refunds of a cent each.
func (w *world) life(refunds int) (*factory.Order, []event.Event) {
	order := w.order()
	events := []event.Event{order.Created(), order.Paid()}
	for range refunds {
		events = append(events, order.Refunded(1))
	}
	return order, events
}

// TestGaps is how billing notices what has not come, knowing an order by its
// events alone.
func TestGaps(t *testing.T) {
	t.Parallel()

	t.Run("AreNoneInAnOrdersOrdinaryLife", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order, events := w.life(4)
		w.Deliver(t, events[:3]...)
		w.Deliver(t, events[3])
		w.Deliver(t, events[4:]...)
		w.Deliver(t, events...)
		require.Empty(t, w.gaps(t, order))
		require.Empty(t, w.missing(t, order))
	})

	t.Run("AreNotedWithTheEventThatSkipsThem", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order, events := w.life(5)
		w.Deliver(t, events[1]) // paid, and never created
		require.Equal(t, []int64{1}, w.gaps(t, order))
		w.Deliver(t, events[4], events[6])
		require.Equal(t, []int64{1, 3, 4, 6}, w.gaps(t, order))
		require.Equal(t, []int64{1, 3, 4, 6}, w.missing(t, order))
		require.Empty(t, w.DeadLetters(t))
		require.Equal(t, 2, w.written(t).CreditNotes, "what came is applied all the same")
	})

	t.Run("EndWhenTheVersionComes", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order, events := w.life(5)
		w.Deliver(t, events[1], events[6])
		require.Equal(t, []int64{1, 3, 4, 5, 6}, w.gaps(t, order))
		w.Deliver(t, events[3])
		require.Equal(t, []int64{1, 3, 5, 6}, w.gaps(t, order))
		next := order.Refunded(1)
		w.Deliver(t, events[2], next, events[0], events[5]) // late ones and a new one in one batch
		require.Equal(t, []int64{5}, w.gaps(t, order))
		w.Deliver(t, events[4])
		require.Empty(t, w.gaps(t, order))
		require.Equal(t, 6, w.written(t).CreditNotes)
	})

	t.Run("AreNotedOnceWhateverComesTwice", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		_, events := w.life(3)
		records := w.Deliver(t, events[1], events[4])
		before := w.Contents(t)
		w.DeliverRecords(t, records...)
		w.Deliver(t, events[4], events[1])
		require.Equal(t, before, w.Contents(t))
	})

	t.Run("AreGoneWithABatchThatFails", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order, events := w.life(3)
		w.Exec(t, "ALTER TABLE outbox_events ADD CONSTRAINT nothing_more CHECK (false) NOT VALID")
		w.Deliver(t, events[1])
		require.Equal(t, inbox.ClassData, w.Classes(t)[events[1].ID])
		require.Empty(t, w.gaps(t, order))
	})

	t.Run("OfOneTenantAreNotAnothers", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order, events := w.life(1)
		w.Deliver(t, events[1])
		tx, err := w.DB.Pool(t, "api").Begin(t.Context())
		require.NoError(t, err)
		defer func() { _ = tx.Rollback(t.Context()) }()
		for _, tenant := range []uuid.UUID{order.TenantID, w.Tenant(t)} {
			_, err = tx.Exec(t.Context(), fmt.Sprintf("SET LOCAL onceledger.tenant_id = '%s'", tenant))
			require.NoError(t, err)
			require.Equal(t, tenant == order.TenantID, len(pgtest.Column[int64](t, tx, "SELECT version FROM version_gaps")) == 1)
			require.Equal(t, tenant == order.TenantID, len(pgtest.Column[int64](t, tx, "SELECT version FROM missing_versions")) == 1)
		}
	})

	t.Run("OfAnEventThatCannotDoWithoutThem", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		// A refund needs its payment, so it is a dead letter and not applied; what it
		// waits for is missing all the same.
		order, events := w.life(2)
		w.Deliver(t, events[0], events[3])
		require.Equal(t, inbox.ClassGap, w.Classes(t)[events[3].ID])
		require.Empty(t, w.gaps(t, order))
		require.Equal(t, []int64{2, 3}, w.missing(t, order))
		w.Deliver(t, events[1]) // parked
		require.Equal(t, []int64{3}, w.missing(t, order), "it has come")
	})

	t.Run("AreNotWhatIsADeadLetter", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order, events := w.life(1)
		bad := factory.Altered(events[1], func(state *event.Order) { state.NetAmount++ })
		w.Deliver(t, events[0], bad)
		require.Empty(t, w.missing(t, order))
		w.Exec(t, pgtest.CloseLetters("discarded", "true"))
		w.Deliver(t, events[2])
		require.Equal(t, inbox.ClassGap, w.Classes(t)[events[2].ID])
		require.Empty(t, w.missing(t, order), "it was decided not to apply it: it is not waited for")
		cancelled := factory.Altered(events[2], func(state *event.Order) { state.Refund = nil; state.RefundedAmount = 0 })
		cancelled.ID, cancelled.Type = factory.ID(events[2].OccurredAt), event.OrderCancelled
		w.Exec(t, pgtest.CloseLetters("discarded", "true"))
		w.Deliver(t, cancelled)
		require.Equal(t, int64(3), w.view(t, order).Version)
		require.Empty(t, w.gaps(t, order))
	})
}

// TestForgedLetterFillsNoGap is an event that was never the order's, and says that
// it is the version that is missing.
func TestForgedLetterFillsNoGap(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	order, events := w.life(2)
	forged := events[2]
	forged.ID = uuid.New()
	w.Deliver(t, events[0], events[1], forged, events[3])
	require.Equal(t, inbox.ClassBadID, w.Classes(t)[forged.ID])
	require.Equal(t, []int64{3}, w.gaps(t, order))
	require.Equal(t, []int64{3}, w.missing(t, order))
	w.Exec(t, pgtest.CloseLetters("discarded", "true"))
	require.Equal(t, []int64{3}, w.missing(t, order))

	order, events = w.life(2) // the same of what waits for it
	forged = events[1]
	forged.ID = uuid.New()
	w.Deliver(t, events[0], forged, events[2])
	require.Equal(t, inbox.ClassGap, w.Classes(t)[events[2].ID])
	require.Equal(t, []int64{2}, w.missing(t, order))
}

// TestFarAheadVersion is about an event that says a version which its order
// cannot have: the view would take it for the newest for ever, and wait for all
// that it skips.
func TestFarAheadVersion(t *testing.T) {
	t.Parallel()

	at := func(e event.Event, version int64) event.Event {
		e = factory.Altered(e, func(state *event.Order) { state.Version = version })
		e.AggregateVersion = version
		return e
	}

	for name, version := range map[string]int64{"JustTooFar": 2 + 102, "Absurd": 1<<63 - 1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)

			order, events := w.life(2)
			forged := at(events[2], version)
			w.Deliver(t, events[0], events[1], forged)
			letters := w.DeadLetters(t)
			require.Len(t, letters, 1)
			require.Equal(t, inbox.ClassGap, letters[0].Class)
			require.Contains(t, letters[0].Detail, "too far ahead")
			require.Equal(t, int64(2), w.view(t, order).Version)
			require.Empty(t, w.missing(t, order), "it fills nothing")
			w.Deliver(t, events[3])
			require.Equal(t, inbox.ClassParked, w.Classes(t)[events[3].ID])
		})
	}

	t.Run("TheFurthestIsTaken", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order, events := w.life(1)
		w.Deliver(t, events[0], events[1], at(events[2], 2+101))
		require.Empty(t, w.DeadLetters(t))
		require.Len(t, w.gaps(t, order), 100)
	})

	t.Run("OfAnOrderThatIsNotKnown", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order, events := w.life(0)
		w.Deliver(t, at(events[1], 102))
		require.Len(t, w.DeadLetters(t), 1)
		require.Nil(t, w.view(t, order))
	})
}

// TestGapsOfARandomOrder takes the events of orders in any order and any batches, some
// never: what is missing in the end is what is below the newest and did not come.
func TestGapsOfARandomOrder(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	var orders []*factory.Order
	var events []event.Event
	missing := make(map[*factory.Order][]int64)
	for range 30 {
		order, all := w.life(8)
		missing[order] = []int64{}
		orders = append(orders, order)
		newest := int64(0)
		came := make(map[int64]bool)
		for i, e := range all {
			if i != 1 && rng.IntN(3) == 0 { // the payment comes, or refunds are dead letters
				continue
			}
			events, came[e.AggregateVersion], newest = append(events, e), true, max(newest, e.AggregateVersion)
		}
		for version := int64(1); version < newest; version++ {
			if !came[version] {
				missing[order] = append(missing[order], version)
			}
		}
	}
	// Payments first, so that none of the refunds is a dead letter; all else in any order.
	rng.Shuffle(len(events), func(i, j int) { events[i], events[j] = events[j], events[i] })
	slices.SortStableFunc(events, func(a, b event.Event) int {
		first := func(e event.Event) int { return map[bool]int{true: 0, false: 1}[e.Type == event.OrderPaid] }
		return first(a) - first(b)
	})
	for at := 0; at < len(events); {
		end := min(len(events), at+1+rng.IntN(20))
		w.Deliver(t, events[at:end]...)
		at = end
	}
	require.Empty(t, w.DeadLetters(t))
	for _, order := range orders {
		require.Equal(t, missing[order], w.gaps(t, order))
	}
}

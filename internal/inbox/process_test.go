package inbox_test

import (
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/pgtest"
)

func TestProcess(t *testing.T) {
	t.Parallel()

	t.Run("AppliesNewEventsInTheirOrder", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order, other := w.order(), w.order()
		events := []event.Event{order.Created(), other.Created(), order.Paid(), order.Refunded(500), other.Cancelled()}
		w.Deliver(t, events...)
		require.Equal(t, ids(events...), w.effects(t))
		require.Equal(t, 1, w.calls(), "one batch, one call")
		require.Equal(t, 5, w.Counted(t, "applied"))

		type mark struct {
			Consumer    string
			EventID     uuid.UUID
			TenantID    uuid.UUID
			Fingerprint []byte
			Topic       string
			Partition   int32
			Offset      int64
		}
		var want []mark
		for i, e := range events {
			want = append(want, mark{"billing", e.ID, w.tenant, e.Fingerprint(), event.OrderEvents, 0, int64(i)})
		}
		require.ElementsMatch(t, want, pgtest.Rows[mark](t, w.Owner, `
			SELECT consumer, event_id, tenant_id, fingerprint, topic, partition, "offset" FROM processed_events`))
	})

	t.Run("AppliesNothingTwice", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		events := w.created(3)
		records := w.Deliver(t, events...)
		before := w.Contents(t)

		w.DeliverRecords(t, records...)                                       // the offsets were not committed
		w.Deliver(t, events...)                                               // the relay sent them again
		w.Deliver(t, events[2], events[2], events[0])                         // twice in one batch
		w.DeliverRecords(t, w.Partition.Append(events[1], events[1])[1:2]...) // from the middle of it
		require.Equal(t, before, w.Contents(t))
		require.Equal(t, 3, w.Counted(t, "applied"))
		require.Equal(t, 10, w.Counted(t, "duplicate"))
		require.Equal(t, 1, w.calls(), "a batch of duplicates is not given to the handler")
	})

	t.Run("AppliesOnceWhatIsTwiceInOneBatch", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		events := w.created(2)
		w.Deliver(t, events[0], events[1], events[0], events[0], events[1])
		require.Equal(t, ids(events...), w.effects(t))
		require.Equal(t, 2, w.Counted(t, "applied"))
		require.Equal(t, 3, w.Counted(t, "duplicate"))
		require.Empty(t, w.DeadLetters(t))
	})

	t.Run("AppliesWhatIsNewAmongDuplicates", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		old, fresh := w.created(2), w.created(2)
		w.Deliver(t, old...)
		w.Deliver(t, old[0], fresh[0], old[1], fresh[1], old[0])
		require.Equal(t, ids(append(old, fresh...)...), w.effects(t))
	})

	t.Run("DeduplicatesForEachConsumerByItself", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		other := w.another(t, func(config *inbox.Config) { config.Consumer = "other" })

		events := w.created(2)
		records := w.Deliver(t, events...)
		other.DeliverRecords(t, records...)
		other.DeliverRecords(t, records...)
		require.Equal(t, append(ids(events...), ids(events...)...), w.effects(t))
		require.Equal(t, 2, other.Counted(t, "applied"))
	})

	t.Run("DoesNotLookAtTopicPartitionOrOffset", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		e := w.order().Created()
		w.Deliver(t, e)
		w.Partition = factory.Partition{Number: 7, Next: 1_000_000}
		w.Deliver(t, e)
		require.Equal(t, ids(e), w.effects(t))
		require.Equal(t, 1, w.Counted(t, "duplicate"))
	})

	t.Run("TakesABatchOfNothing", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		before := w.Contents(t)
		w.Deliver(t)
		require.Equal(t, before, w.Contents(t))
		require.Zero(t, w.calls())
	})

	t.Run("TakesAThousandEvents", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		events := w.created(1000)
		w.Deliver(t, events...)
		require.Equal(t, ids(events...), w.effects(t))
	})
}

// TestIDReuse is field report R18: dedupe by id alone would throw away a second,
// different event in silence.
func TestIDReuse(t *testing.T) {
	t.Parallel()

	// reused is e with another amount under the same id.
	reused := func(e event.Event) event.Event {
		return factory.Altered(e, func(state *event.Order) { state.TotalAmount = 9999 })
	}
	ofOther := func(w *world, e event.Event) event.Event {
		other := w.order().Created()
		other.ID = e.ID
		return other
	}

	t.Run("KeepsTheFirstAndReportsTheOthers", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order := w.order()
		first := order.Created()
		w.Deliver(t, first)
		before := w.Applied(t)

		other := ofOther(w, first)
		retyped := first
		retyped.Type = event.OrderPaid
		w.Deliver(t, reused(first), other, retyped)
		require.Equal(t, before, w.Applied(t))
		require.Equal(t, ids(first), w.effects(t))
		letters := w.DeadLetters(t)
		require.Len(t, letters, 3)
		for _, letter := range letters {
			require.Equal(t, inbox.ClassIDReused, letter.Class)
			require.Equal(t, first.ID, letter.EventID)
			require.Contains(t, letter.Detail, "another type or content")
		}
		require.Equal(t, 3, w.Counted(t, "id-reused"), "a metric of its own")
		require.Zero(t, w.Counted(t, "duplicate"))

		w.Deliver(t, first)
		require.Equal(t, 1, w.Counted(t, "duplicate"), "a true duplicate stays one")

		next, otherNext := order.Paid(), w.order().Created()
		otherNext.AggregateID = other.AggregateID
		w.Deliver(t, next, otherNext)
		require.Equal(t, ids(first, next, otherNext), w.effects(t), "neither aggregate is held back")
	})

	t.Run("WithinOneBatch", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		first := w.order().Created()
		w.Deliver(t, first, reused(first), ofOther(w, first), first)
		require.Equal(t, ids(first), w.effects(t))
		require.Equal(t, 2, w.Counted(t, "id-reused"))
		require.Equal(t, 1, w.Counted(t, "duplicate"))
	})

	t.Run("WithOneThatWasRefused", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.handler.refuse = refuseMarked

		// What was refused is not applied, so its id is free, and an event of
		// another aggregate is judged by itself; however they are cut into batches.
		for range 2 {
			bad := marked(w.order().Created(), inbox.ClassRule)
			other := ofOther(w, bad)
			if len(w.Applied(t)) == 0 {
				w.Deliver(t, bad, other)
			} else {
				w.Deliver(t, bad)
				w.Deliver(t, other)
			}
			effects := w.effects(t)
			require.Equal(t, other.ID, effects[len(effects)-1])
		}
		require.Len(t, w.effects(t), 2)
		require.Len(t, w.DeadLetters(t), 2)
		require.Equal(t, 2, w.Counted(t, "rule"))
	})
}

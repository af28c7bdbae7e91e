package inbox_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/inbox"
)

func withWriters(n int) func(*inbox.Config) {
	return func(config *inbox.Config) { config.Writers = n }
}

// partitions lays events out over partitions, event i on i modulo their number,
// and returns the records in the order in which a consumer might be given them.
func partitions(number int, events []event.Event) []event.Record {
	all := make([]factory.Partition, number)
	var records []event.Record
	for i, e := range events {
		p := &all[i%number]
		p.Number = int32(i % number)
		records = append(records, p.Append(e)...)
	}
	return records
}

// TestWriters is about a batch that is shared out over several transactions.
func TestWriters(t *testing.T) {
	t.Parallel()

	t.Run("WriteSideBySide", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, withWriters(2))

		var both sync.WaitGroup
		both.Add(2)
		w.handler.before = func(context.Context, pgx.Tx) error {
			both.Done()
			both.Wait() // for ever, if one came after the other
			return nil
		}
		events := w.created(200)
		w.DeliverRecords(t, partitions(2, events)...)
		require.Equal(t, 2, w.calls())
		require.ElementsMatch(t, ids(events...), w.effects(t))
	})

	t.Run("KeepTheOrderOfAPartition", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, withWriters(3))

		events := w.created(600)
		w.DeliverRecords(t, partitions(5, events)...)
		effects := w.effects(t)
		require.Len(t, effects, len(events))
		for p := range 5 {
			var want []uuid.UUID
			for i := p; i < len(events); i += 5 {
				want = append(want, events[i].ID)
			}
			got := slices.DeleteFunc(slices.Clone(effects), func(id uuid.UUID) bool { return !slices.Contains(want, id) })
			require.Equal(t, want, got, "partition %d", p)
		}
	})

	t.Run("LeaveASmallBatchToOne", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, withWriters(4))

		w.DeliverRecords(t, partitions(4, w.created(199))...)
		require.Equal(t, 1, w.calls())
	})

	t.Run("FailAloneAndLeaveNothingTwice", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, withWriters(2))

		// The share that is second to write fails, after the first has committed.
		events := w.created(200)
		records := partitions(2, events)
		failed := errors.New("this share fails")
		var first sync.Mutex
		isFirst := true
		w.handler.after = func(ctx context.Context, _ pgx.Tx) error {
			first.Lock()
			defer first.Unlock()
			if isFirst {
				isFirst = false
				return nil
			}
			for committed := 0; committed == 0; {
				if err := w.Owner.QueryRow(ctx, "SELECT count(*) FROM effects").Scan(&committed); err != nil {
					return err
				}
			}
			return failed
		}
		require.ErrorIs(t, w.Process(t.Context(), records), failed)
		require.Len(t, w.effects(t), 100)
		require.Empty(t, w.DeadLetters(t))

		w.handler.after = nil
		w.DeliverRecords(t, records...)
		require.ElementsMatch(t, ids(events...), w.effects(t))
		require.Equal(t, 100, w.Counted(t, "duplicate"))
		require.Equal(t, 200, w.Counted(t, "applied"))
	})

	t.Run("FindTheirOwnCulprits", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, withWriters(2))
		w.handler.refuse = refuseMarked

		events := w.created(200)
		events[7] = spoilt(events[7])
		events[8] = spoilt(events[8])
		events[100] = marked(events[100], inbox.ClassRule)
		events[101] = marked(events[101], inbox.ClassGap)
		w.DeliverRecords(t, partitions(2, events)...)
		require.Equal(t, map[uuid.UUID]inbox.Class{
			events[7].ID: inbox.ClassData, events[8].ID: inbox.ClassData,
			events[100].ID: inbox.ClassRule, events[101].ID: inbox.ClassGap,
		}, w.Classes(t))
		require.Len(t, w.effects(t), 196)
	})
}

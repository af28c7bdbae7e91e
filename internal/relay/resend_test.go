package relay_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/relay"
)

func TestResend(t *testing.T) {
	t.Parallel()

	resend := func(ctx context.Context, t *testing.T, b *bench, ids []uuid.UUID) (sent []uuid.UUID, err error) {
		t.Helper()
		conn := b.database.Pool(t, "relay")
		err = relay.Resend(ctx, conn, newPublisher(b.broker.Brokers()), ids, func(e event.Event) { sent = append(sent, e.ID) })
		return sent, err
	}

	t.Run("BringsWhatTheRelayBroughtOnceMore", func(t *testing.T) {
		t.Parallel()

		b := setup(t)
		events := newOrders(t, 7).events(t, 250) // several pages
		ids := b.commit(t, events...)
		b.start(t)
		b.receive(t, len(ids))
		sent, err := resend(t.Context(), t, b, ids)
		require.NoError(t, err)
		require.ElementsMatch(t, ids, sent)
		for len(b.records) < 2*len(ids) {
			b.poll(t)
		}
		b.firstOccurrences(t) // the same content each time
		for id, n := range b.counts(t) {
			require.Equal(t, 2, n, "event %s", id)
		}
		// Behind the first round the versions of each order go in order once more.
		again := make(map[uuid.UUID]int64)
		seen := make(map[uuid.UUID]bool)
		for _, e := range b.decode(t) {
			if seen[e.ID] {
				require.Equal(t, again[e.AggregateID]+1, e.AggregateVersion)
				again[e.AggregateID] = e.AggregateVersion
			}
			seen[e.ID] = true
		}
	})

	t.Run("TakesNoTurnAndMovesNothing", func(t *testing.T) {
		t.Parallel()

		b := setup(t)
		ids := b.commit(t, newOrders(t, 1).events(t, 3)...)
		sent, err := resend(t.Context(), t, b, ids[:1])
		require.NoError(t, err)
		require.Equal(t, ids[:1], sent)
		var positions int
		require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT count(*) FROM relay_position").Scan(&positions))
		require.Zero(t, positions)
		b.start(t)
		require.Equal(t, ids, b.receive(t, 3), "the relay brings all of it: nothing is taken for delivered")
	})

	t.Run("TellsWhoAskedThatNoBrokerAnswers", func(t *testing.T) {
		t.Parallel()

		b := setup(t)
		ids := b.commit(t, newOrders(t, 1).events(t, 3)...)
		b.broker.Pause()
		sent, err := resend(t.Context(), t, b, ids)
		require.ErrorContains(t, err, "no broker of")
		require.Empty(t, sent)
		b.broker.Resume()
		sent, err = resend(t.Context(), t, b, ids)
		require.NoError(t, err)
		require.Equal(t, ids, sent)
	})

	t.Run("TellsWhoAskedThatItIsRefused", func(t *testing.T) {
		t.Parallel()

		b := setup(t)
		ids := b.commit(t, newOrders(t, 1).events(t, 1)...)
		require.NoError(t, b.broker.DeleteTopic(event.OrderEvents))
		sent, err := resend(t.Context(), t, b, ids)
		require.ErrorContains(t, err, "the broker refuses a record for topic order.events")
		require.Empty(t, sent)
	})

	t.Run("EndsWhenItIsTold", func(t *testing.T) {
		t.Parallel()

		b := setup(t)
		ids := b.commit(t, newOrders(t, 1).events(t, 1)...)
		b.broker.Stall()
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		_, err := resend(ctx, t, b, ids)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		b.broker.Resume()
	})

	t.Run("SaysThatRowsAreGone", func(t *testing.T) {
		t.Parallel()

		_, err := resend(t.Context(), t, setup(t), []uuid.UUID{uuid.New()})
		require.ErrorContains(t, err, "rows are gone")
	})
}

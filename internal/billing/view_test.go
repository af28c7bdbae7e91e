package billing_test

import (
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/postgres"
)

// TestVersionGuard is the pattern itself: INSERT … ON CONFLICT DO UPDATE … WHERE
// known.version < excluded.version. The number of rows tells what it did.
func TestVersionGuard(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	worker := w.DB.Pool(t, "worker")

	order, other := uuid.New(), uuid.New()
	upsert := func(versions map[uuid.UUID]int64) (rows int64) {
		require.NoError(t, postgres.InTx(t.Context(), worker, func(tx pgx.Tx) error {
			var params db.OrderBillingUpsertManyParams
			for id, version := range versions {
				params.TenantIds = append(params.TenantIds, w.tenant)
				params.OrderIds = append(params.OrderIds, id)
				params.Versions = append(params.Versions, version)
				params.LowestVersions = append(params.LowestVersions, version)
				params.Statuses = append(params.Statuses, "paid")
				params.Currencies = append(params.Currencies, "EUR")
				params.TotalMinors = append(params.TotalMinors, 100*version)
				params.RefundedMinors = append(params.RefundedMinors, version)
			}
			uneven, err := db.New().OrderBillingUpsertMany(t.Context(), tx, params)
			rows = int64(len(versions))
			for _, row := range uneven {
				if row.CameAfter == nil { // left as it is
					rows--
				}
			}
			return err
		}))
		return rows
	}
	read := func(id uuid.UUID) view {
		return *w.view(t, &factory.Order{TenantID: w.tenant, State: event.Order{OrderID: id}})
	}

	for _, step := range []struct {
		version, rows int64
		say           string
	}{
		{5, 1, "INSERT 0 1: new"},
		{3, 0, "INSERT 0 0: late"},
		{5, 0, "INSERT 0 0: again"},
		{6, 1, "INSERT 0 1: newer"},
		{5, 0, "INSERT 0 0: late"},
	} {
		require.Equal(t, step.rows, upsert(map[uuid.UUID]int64{order: step.version}), step.say)
	}
	require.Equal(t, view{6, "paid", "EUR", 600, 6}, read(order))

	require.EqualValues(t, 1, upsert(map[uuid.UUID]int64{order: 2, other: 1}), "each by itself")
	require.Equal(t, view{6, "paid", "EUR", 600, 6}, read(order))
	require.Equal(t, view{1, "paid", "EUR", 100, 1}, read(other))
}

func TestView(t *testing.T) {
	t.Parallel()

	t.Run("TakesTheHighestOfSeveralVersionsInOneBatch", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order := w.order()
		created, paid, first, second := order.Created(), order.Paid(), order.Refunded(500), order.Refunded(100)
		w.Deliver(t, paid, first, second, created)
		require.Empty(t, w.DeadLetters(t))
		require.Equal(t, &view{4, "paid", "EUR", 2975, 600}, w.view(t, order))
	})

	t.Run("NeverGoesBack", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order := w.order()
		events := []event.Event{order.Created(), order.Paid(), order.Refunded(500), order.Refunded(100)}
		for _, i := range []int{1, 3, 2, 0} {
			w.Deliver(t, events[i])
		}
		require.Empty(t, w.DeadLetters(t))
		require.Equal(t, &view{4, "paid", "EUR", 2975, 600}, w.view(t, order))
		require.Equal(t, 2, w.written(t).CreditNotes, "dedupe decides whether a document is made, not the version")
	})

	t.Run("KnowsACancelledOrder", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order := w.order()
		w.Deliver(t, order.Created(), order.Cancelled())
		require.Equal(t, &view{2, "cancelled", "EUR", 2975, 0}, w.view(t, order))
		require.Equal(t, written{}, w.written(t))
	})
}

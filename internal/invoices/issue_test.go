package invoices_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/invoices"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
)

func TestIssueTx(t *testing.T) {
	t.Parallel()

	t.Run("NumbersInTheOrderOfTheDraftsPerTenant", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		mine, theirs := w.drafts(t, w.tenant, 3), w.drafts(t, w.other, 2)
		issued, err := w.issue(t.Context(), at, mine[0], theirs[0], mine[1], theirs[1], mine[2])
		require.NoError(t, err)
		var numbers []string
		for _, invoice := range issued {
			numbers = append(numbers, invoice.FullNumber())
			require.Equal(t, at, invoice.IssuedAt)
		}
		require.Equal(t, []string{"INV-2026-000001", "INV-2026-000001", "INV-2026-000002", "INV-2026-000002", "INV-2026-000003"}, numbers)
		require.Zero(t, mine[0].Number, "the caller's drafts are left alone")

		more, err := w.issue(t.Context(), at, w.drafts(t, w.tenant, 1)...)
		require.NoError(t, err)
		require.EqualValues(t, 4, more[0].Number)
	})

	t.Run("WritesWhatCanBeReadBack", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		issued, err := w.issue(t.Context(), at, w.drafts(t, w.tenant, 2)...)
		require.NoError(t, err)
		w.read(t, func(tx pgx.Tx) {
			for _, want := range issued {
				got, err := invoices.GetTx(t.Context(), tx, w.tenant, want.ID)
				require.NoError(t, err)
				require.Equal(t, want, got)
				got, err = invoices.GetByOrderTx(t.Context(), tx, w.tenant, want.OrderID)
				require.NoError(t, err)
				require.Equal(t, want, got)
			}
		})
	})

	t.Run("WritesAllOrNoneAndGivesNumbersBack", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		drafts := w.drafts(t, w.tenant, 3)
		bad := drafts[2]
		bad.TotalAmount++
		_, err := w.issue(t.Context(), at, drafts[0], drafts[1], bad)
		requireRefused(t, err, "23514", "invoices_amounts_sum")
		require.Empty(t, w.numbers(t, w.tenant, 2026))

		issued, err := w.issue(t.Context(), at, drafts[0])
		require.NoError(t, err)
		require.EqualValues(t, 1, issued[0].Number)
	})

	t.Run("TakesNoNumberForNoInvoice", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		issued, err := w.issue(t.Context(), at)
		require.NoError(t, err)
		require.Empty(t, issued)
		require.Empty(t, pgtest.Column[int64](t, w.owner, "SELECT last_number FROM document_numbers"))
	})

	t.Run("RefusesASecondInvoiceOfAnOrder", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		first := w.drafts(t, w.tenant, 1)[0]
		_, err := w.issue(t.Context(), at, first)
		require.NoError(t, err)
		second := first
		second.ID = newID()
		_, err = w.issue(t.Context(), at, second)
		requireRefused(t, err, "23505", "invoices_order_key")
		_, err = w.issue(t.Context(), at, first)
		requireRefused(t, err, "23505", "invoices_pkey")
		require.Equal(t, upTo(1), w.numbers(t, w.tenant, 2026))
	})

	t.Run("RefusesAnOrderThatBillingDoesNotKnow", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		draft := w.drafts(t, w.tenant, 1)[0]
		draft.TenantID = w.other
		_, err := w.issue(t.Context(), at, draft)
		requireRefused(t, err, "23503", "invoices_order_fkey")
	})
}

// TestYear is about 31 December: the year of a number is the year in which the
// document is recorded, in UTC, wherever the customer or the server is.
func TestYear(t *testing.T) {
	t.Parallel()

	tokyo, newYork := time.FixedZone("UTC+9", 9*3600), time.FixedZone("UTC-5", -5*3600)
	for name, test := range map[string]struct {
		issuedAt time.Time
		number   string
	}{
		"LastMicrosecondOfTheYear":      {time.Date(2026, 12, 31, 23, 59, 59, 999_999_000, time.UTC), "2026-000001"},
		"FirstMomentOfTheYear":          {time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC), "2027-000001"},
		"NewYearsEveInTokyo":            {time.Date(2026, 12, 31, 23, 30, 0, 0, tokyo), "2026-000001"},
		"NewYearInTokyoIsStillOldHere":  {time.Date(2027, 1, 1, 0, 30, 0, 0, tokyo), "2026-000001"},
		"NewYearInTokyoAtNineIsNewHere": {time.Date(2027, 1, 1, 9, 0, 0, 0, tokyo), "2027-000001"},
		"NewYearsEveInNewYorkIsNewHere": {time.Date(2026, 12, 31, 23, 30, 0, 0, newYork), "2027-000001"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)

			issued, err := w.issue(t.Context(), test.issuedAt, w.drafts(t, w.tenant, 1)...)
			require.NoError(t, err)
			require.Equal(t, "INV-"+test.number, issued[0].FullNumber())
			credited, err := w.credit(t.Context(), test.issuedAt, creditNote(issued[0], 1))
			require.NoError(t, err)
			require.Equal(t, "CN-"+test.number, credited[0].FullNumber())
		})
	}

	t.Run("EachYearCountsFromOneAndTheOldOneGoesOn", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		newYear := time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC)
		for _, step := range []struct {
			issuedAt time.Time
			number   string
		}{
			{newYear.Add(-time.Hour), "INV-2026-000001"},
			{newYear, "INV-2027-000001"},
			{newYear.Add(-time.Second), "INV-2026-000002"}, // a worker whose clock is behind
			{newYear.Add(time.Second), "INV-2027-000002"},
		} {
			issued, err := w.issue(t.Context(), step.issuedAt, w.drafts(t, w.tenant, 1)...)
			require.NoError(t, err)
			require.Equal(t, step.number, issued[0].FullNumber())
		}
	})
}

// TestNumbersHaveNoGaps issues from many transactions at once, of which a third
// fail after they took their numbers, for two tenants in one transaction and in
// no particular order. What is left is 1 to n for each.
func TestNumbersHaveNoGaps(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	const batches, each = 24, 3
	errRolledBack := errors.New("the rest of the batch failed")
	var committed atomic.Int64
	var finished sync.WaitGroup
	gate := make(chan struct{})
	errs := make([]error, batches)
	for i := range batches {
		drafts := append(w.drafts(t, w.tenant, each), w.drafts(t, w.other, each)...)
		rand.Shuffle(len(drafts), func(a, b int) { drafts[a], drafts[b] = drafts[b], drafts[a] })
		finished.Go(func() {
			<-gate
			errs[i] = postgres.InTx(t.Context(), w.worker, func(tx pgx.Tx) error {
				issued, err := invoices.IssueTx(t.Context(), tx, drafts, at)
				if err != nil {
					return err
				}
				if i%3 == 0 {
					return errRolledBack
				}
				_, err = invoices.CreditTx(t.Context(), tx, []invoices.CreditNote{creditNote(issued[0], 1)}, at)
				return err
			})
			if errs[i] == nil {
				committed.Add(1)
			}
		})
	}
	close(gate)
	finished.Wait()
	for i, err := range errs {
		if i%3 == 0 {
			require.ErrorIs(t, err, errRolledBack)
		} else {
			require.NoError(t, err)
		}
	}

	require.EqualValues(t, batches*2/3, committed.Load())
	for _, tenant := range []uuid.UUID{w.tenant, w.other} {
		require.Equal(t, upTo(batches*2/3*each), w.numbers(t, tenant, 2026))
	}
	require.Empty(t, pgtest.Column[int64](t, w.owner, `
		SELECT max(number) - count(*) FROM credit_notes GROUP BY tenant_id HAVING max(number) <> count(*)`),
		"credit notes have a series of their own")
}

// TestANumberIsHeldToTheEnd shows why there are no gaps: a second transaction of
// the tenant waits for the first, and gets the number that it gives back.
func TestANumberIsHeldToTheEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	first, err := w.worker.Begin(t.Context())
	require.NoError(t, err)
	defer first.Rollback(context.WithoutCancel(t.Context())) //nolint:errcheck // rolled back below; this is for a failed test
	issued, err := invoices.IssueTx(t.Context(), first, w.drafts(t, w.tenant, 1), at)
	require.NoError(t, err)
	require.EqualValues(t, 1, issued[0].Number)

	other, err := w.issue(t.Context(), at, w.drafts(t, w.other, 1)...)
	require.NoError(t, err, "another tenant does not wait")
	require.EqualValues(t, 1, other[0].Number)

	second := make(chan []invoices.Invoice)
	draft := w.drafts(t, w.tenant, 1)
	go func() {
		issued, _ := w.issue(t.Context(), at, draft...)
		second <- issued
	}()
	require.Eventually(t, func() bool {
		return pgtest.Column[int64](t, w.owner, `
			SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`)[0] == 1
	}, 20*time.Second, 5*time.Millisecond)
	require.NoError(t, first.Rollback(t.Context()))
	issued = <-second
	require.Len(t, issued, 1)
	require.EqualValues(t, 1, issued[0].Number, "the number that was given back")
}

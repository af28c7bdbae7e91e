package ledger_test

import (
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/ledger"
)

func TestRead(t *testing.T) {
	t.Parallel()

	t.Run("PagesAnAccountsEntriesNewestFirst", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		var want []uuid.UUID
		for range 5 {
			entry := w.payment()
			require.NoError(t, w.post(t.Context(), entry))
			want = append([]uuid.UUID{entry.EventID}, want...)
		}
		require.NoError(t, w.post(t.Context(), ledger.Payment(w.tenant, newID(), newID(), "EUR", 5, 0, at)), "touches no tax")

		w.read(t, func(tx pgx.Tx) {
			var got []uuid.UUID
			before := uuid.Max
			for range 3 {
				page, err := ledger.EntriesByAccountTx(t.Context(), tx, w.tenant, ledger.TaxPayable, before, 2)
				require.NoError(t, err)
				for _, entry := range page {
					require.Len(t, entry.Lines, 2, "the whole entry, not the account's line alone")
					got = append(got, entry.EventID)
				}
				before = got[len(got)-1]
			}
			require.Equal(t, want, got)

			page, err := ledger.EntriesByAccountTx(t.Context(), tx, w.tenant, ledger.TaxPayable, before, 2)
			require.NoError(t, err)
			require.Empty(t, page)
		})
	})

	t.Run("SumsAnAccountOnTheSideOnWhichItGrows", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		payment := w.payment()
		require.NoError(t, w.post(t.Context(), payment,
			ledger.Refund(w.tenant, newID(), payment.OrderID, payment.EventID, "EUR", 420, 80, at),
			ledger.Payment(w.tenant, newID(), newID(), "KWD", 35_200, 1_760, at)))

		w.read(t, func(tx pgx.Tx) {
			for account, want := range map[string]string{
				ledger.Cash:       "cash asset EUR 2975 500 2475",
				ledger.Revenue:    "revenue income EUR 420 2500 2080",
				ledger.TaxPayable: "tax-payable liability EUR 80 475 395",
			} {
				b, err := ledger.BalanceTx(t.Context(), tx, w.tenant, account, "EUR")
				require.NoError(t, err)
				got := fmt.Sprintf("%s %s %s %s %s %s", b.Account, b.Kind, b.Currency, b.Debit, b.Credit, b.Minor)
				require.Equal(t, want, got, "euros alone")
			}
		})
	})

	t.Run("KnowsNoAccountThatNothingWasPostedTo", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		require.NoError(t, w.post(t.Context(), w.payment()))
		w.read(t, func(tx pgx.Tx) {
			_, err := ledger.BalanceTx(t.Context(), tx, w.tenant, ledger.Cash, "USD")
			require.ErrorIs(t, err, ledger.ErrAccountNotFound)
			_, err = ledger.BalanceTx(t.Context(), tx, w.other, ledger.Cash, "EUR")
			require.ErrorIs(t, err, ledger.ErrAccountNotFound, "another tenant's account")
		})
	})

	t.Run("ShowsNothingOfAnotherTenant", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		entry := w.payment()
		require.NoError(t, w.post(t.Context(), entry))
		w.read(t, func(tx pgx.Tx) {
			entries, err := ledger.EntriesByOrderTx(t.Context(), tx, w.other, entry.OrderID)
			require.NoError(t, err)
			require.Empty(t, entries)
			entries, err = ledger.EntriesByAccountTx(t.Context(), tx, w.other, ledger.Cash, uuid.Max, 10)
			require.NoError(t, err)
			require.Empty(t, entries)
			trial, err := ledger.TrialBalanceTx(t.Context(), tx, w.other)
			require.NoError(t, err)
			require.Empty(t, trial)
		})
	})
}

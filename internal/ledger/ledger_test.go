package ledger_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/ledger"
	"github.com/onceledger/onceledger/internal/money"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
)

func TestEntries(t *testing.T) {
	t.Parallel()

	tenant, event, order, payment := newID(), newID(), newID(), newID()
	for name, test := range map[string]struct {
		entry ledger.Entry
		lines []ledger.Line
	}{
		"PaymentMovesNetAndTaxToCash": {
			ledger.Payment(tenant, event, order, "EUR", 2500, 475, at),
			[]ledger.Line{{Debit: ledger.Cash, Credit: ledger.Revenue, Amount: 2500}, {Debit: ledger.Cash, Credit: ledger.TaxPayable, Amount: 475}},
		},
		"PaymentWithoutTaxHasNoTaxLine": {
			ledger.Payment(tenant, event, order, "JPY", 80, 0, at),
			[]ledger.Line{{Debit: ledger.Cash, Credit: ledger.Revenue, Amount: 80}},
		},
		"RefundMovesThemBack": {
			ledger.Refund(tenant, event, order, payment, "EUR", 420, 80, at),
			[]ledger.Line{{Debit: ledger.Revenue, Credit: ledger.Cash, Amount: 420}, {Debit: ledger.TaxPayable, Credit: ledger.Cash, Amount: 80}},
		},
		"RefundOfTaxAloneHasNoNetLine": {
			ledger.Refund(tenant, event, order, payment, "KWD", 0, 1, at),
			[]ledger.Line{{Debit: ledger.TaxPayable, Credit: ledger.Cash, Amount: 1}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			require.Equal(t, test.lines, test.entry.Lines)
			require.Equal(t, []uuid.UUID{tenant, event, order}, []uuid.UUID{test.entry.TenantID, test.entry.EventID, test.entry.OrderID})
			if test.entry.Kind == ledger.KindRefund {
				require.Equal(t, &payment, test.entry.Reverses)
			} else {
				require.Nil(t, test.entry.Reverses)
			}
		})
	}
}

func TestPostTx(t *testing.T) {
	t.Parallel()

	t.Run("WritesPaymentsAndTheRefundsThatReverseThem", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		payment := w.payment()
		refund := ledger.Refund(w.tenant, newID(), payment.OrderID, payment.EventID, "EUR", 420, 80, at.AddDate(0, 0, 1))
		require.NoError(t, w.post(t.Context(), payment, refund), "in one batch")
		rest := ledger.Refund(w.tenant, newID(), payment.OrderID, payment.EventID, "EUR", 2080, 395, at.AddDate(0, 0, 2))
		require.NoError(t, w.post(t.Context(), rest), "in a later one")

		w.read(t, func(tx pgx.Tx) {
			entries, err := ledger.EntriesByOrderTx(t.Context(), tx, w.tenant, payment.OrderID)
			require.NoError(t, err)
			require.Len(t, entries, 3)
			for i, want := range []ledger.Entry{payment, refund, rest} {
				require.NotZero(t, entries[i].RecordedAt, "set by the database")
				want.RecordedAt = entries[i].RecordedAt
				require.Equal(t, want, entries[i])
			}

			trial, err := ledger.TrialBalanceTx(t.Context(), tx, w.tenant)
			require.NoError(t, err)
			var lines []string
			for _, b := range trial {
				lines = append(lines, fmt.Sprintf("%s %s %s %s %s %s", b.Currency, b.Account, b.Kind, b.Debit, b.Credit, b.Minor))
			}
			require.Equal(t, []string{
				"EUR cash asset 2975 2975 0", "EUR revenue income 2500 2500 0", "EUR tax-payable liability 475 475 0",
			}, lines)
		})
	})

	t.Run("OpensOnlyTheAccountsThatItTouches", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		require.NoError(t, w.post(t.Context(), ledger.Payment(w.tenant, newID(), newID(), "JPY", 80, 0, at)))
		entries, lines, accounts := w.written(t)
		require.Equal(t, []int{1, 1, 2}, []int{entries, lines, accounts}, "zero tax makes no line and no account")

		require.NoError(t, w.post(t.Context(),
			ledger.Payment(w.tenant, newID(), newID(), "JPY", 80, 8, at),
			ledger.Payment(w.tenant, newID(), newID(), "KWD", 35_200, 0, at),
			ledger.Payment(w.other, newID(), newID(), "JPY", 80, 8, at)))
		entries, lines, accounts = w.written(t)
		require.Equal(t, []int{4, 6, 8}, []int{entries, lines, accounts}, "once per tenant, code and currency")
	})

	t.Run("WritesAllOrNone", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		first := w.payment()
		require.NoError(t, w.post(t.Context(), first))
		err := w.post(t.Context(), w.payment(), first)
		requireRefused(t, err, "23505", "ledger_entries_pkey")
		require.True(t, postgres.DataFault(err), "an event that has an entry is an error, not passed over")
		entries, lines, accounts := w.written(t)
		require.Equal(t, []int{1, 2, 3}, []int{entries, lines, accounts})
	})

	t.Run("WritesNothingForNoEntries", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		require.NoError(t, w.post(t.Context()))
		entries, lines, accounts := w.written(t)
		require.Zero(t, entries+lines+accounts)
	})

	t.Run("HoldsTheLargestAmounts", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		// One more than 1,024 of them is more than an int64.
		const payments = 1_025
		entries := make([]ledger.Entry, payments)
		for i := range entries {
			entries[i] = ledger.Payment(w.tenant, newID(), newID(), "CLF", money.MaxMinor, 0, at)
		}
		require.NoError(t, w.post(t.Context(), entries...))
		w.read(t, func(tx pgx.Tx) {
			cash, err := ledger.BalanceTx(t.Context(), tx, w.tenant, ledger.Cash, "CLF")
			require.NoError(t, err)
			require.Equal(t, "9232379236109515775", cash.Minor.String(), "1,025 times 2^53-1")
			trial, err := ledger.TrialBalanceTx(t.Context(), tx, w.tenant)
			require.NoError(t, err)
			require.Equal(t, cash.Minor, trial[0].Minor)
		})
	})

	t.Run("RefusesAnUnknownAccount", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		entry := w.payment()
		entry.Lines[0].Credit = "petty-cash"
		requireRefused(t, w.post(t.Context(), entry), "23514", "ledger_accounts_kind_known")
	})

	t.Run("RefusesAnUnknownTenant", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		err := w.post(t.Context(), ledger.Payment(newID(), newID(), newID(), "EUR", 1, 0, at))
		requireRefused(t, err, "23503", "ledger_accounts_tenant_id_fkey")
	})
}

// TestPostTxInParallel is field report R33: it has two hundred writers move money in opposite directions
// between the same accounts, some of which the first of them has to open, through
// few connections. Every one must come through, once.
func TestPostTxInParallel(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.worker = w.db.Pool(t, "worker", func(config *pgxpool.Config) { config.MaxConns = 10 })

	const pairs = 100
	paid := make([]ledger.Entry, pairs)
	for i := range paid {
		paid[i] = w.payment()
	}
	require.NoError(t, w.post(t.Context(), paid...))

	var postings [][]ledger.Entry
	for _, payment := range paid {
		dollars := ledger.Payment(w.tenant, newID(), newID(), "USD", 100, 7, at)
		back := dollars
		back.EventID, back.Lines = newID(), []ledger.Line{{Debit: ledger.TaxPayable, Credit: ledger.Cash, Amount: 7}, {Debit: ledger.Revenue, Credit: ledger.Cash, Amount: 100}}
		refund := ledger.Refund(w.tenant, newID(), payment.OrderID, payment.EventID, "EUR", 2500, 475, at)
		postings = append(postings, []ledger.Entry{refund, dollars}, []ledger.Entry{w.payment(), back})
	}
	var finished sync.WaitGroup
	gate := make(chan struct{})
	errs := make([]error, len(postings))
	for i, entries := range postings {
		finished.Go(func() {
			<-gate
			errs[i] = w.post(t.Context(), entries...)
		})
	}
	close(gate)
	finished.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}

	entries, _, accounts := w.written(t)
	require.Equal(t, []int{5 * pairs, 6}, []int{entries, accounts})
	w.read(t, func(tx pgx.Tx) {
		trial, err := ledger.TrialBalanceTx(t.Context(), tx, w.tenant)
		require.NoError(t, err)
		sums := make(map[money.Currency]int64)
		for _, balance := range trial {
			sums[balance.Currency] += balance.Debit.Int64() - balance.Credit.Int64()
		}
		require.Equal(t, map[money.Currency]int64{"EUR": 0, "USD": 0}, sums)
		require.EqualValues(t, pairs*2975, trial[0].Minor.Int64(), "EUR cash: what was paid twice and refunded once")
		require.Zero(t, trial[3].Minor.Sign(), "USD cash")
	})
}

// TestAccountsAreOpenedInOneOrder has two transactions open the same accounts,
// named in different orders, behind a third that holds one of them. Without a
// common order each would get one and wait for the other's.
func TestAccountsAreOpenedInOneOrder(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	holder, err := w.owner.Begin(t.Context())
	require.NoError(t, err)
	defer holder.Rollback(context.WithoutCancel(t.Context())) //nolint:errcheck // rolled back below; this is for a failed test
	_, err = holder.Exec(t.Context(), "INSERT INTO ledger_accounts (tenant_id, code, currency, kind) VALUES ($1, 'cash', 'EUR', 'asset')", w.tenant)
	require.NoError(t, err)

	var finished sync.WaitGroup
	errs := make([]error, 2)
	for i, lines := range [][]ledger.Line{
		{{Debit: ledger.TaxPayable, Credit: ledger.Cash, Amount: 1}, {Debit: ledger.TaxPayable, Credit: ledger.Revenue, Amount: 1}},
		{{Debit: ledger.Revenue, Credit: ledger.TaxPayable, Amount: 1}, {Debit: ledger.Cash, Credit: ledger.TaxPayable, Amount: 1}},
	} {
		entry := w.payment()
		entry.Lines = lines
		finished.Go(func() {
			// Not postgres.InTx, which would run a deadlocked transaction again.
			errs[i] = pgx.BeginFunc(t.Context(), w.worker, func(tx pgx.Tx) error { return ledger.PostTx(t.Context(), tx, []ledger.Entry{entry}) })
		})
		require.Eventually(t, func() bool {
			return pgtest.Column[int](t, w.owner, `
				SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`)[0] == i+1
		}, 20*time.Second, 5*time.Millisecond)
	}
	require.NoError(t, holder.Rollback(t.Context()))
	finished.Wait()
	require.NoError(t, errors.Join(errs...))
}

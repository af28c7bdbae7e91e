package ledger

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/failure"
	"github.com/onceledger/onceledger/internal/money"
)

// ErrAccountNotFound says that nothing was ever posted to the account.
var ErrAccountNotFound = failure.New(failure.NotFound, "account-not-found", "There is no such ledger account in this currency.")

// Balance is the sum of an account's lines in one currency. Minor is on the
// side on which the account grows: debit less credit for an asset, credit less
// debit for income and liabilities.
type Balance struct {
	Account  string
	Kind     string
	Currency money.Currency
	Debit    int64
	Credit   int64
	Minor    int64
}

// EntriesByOrderTx lists an order's entries, oldest first.
func EntriesByOrderTx(ctx context.Context, tx pgx.Tx, tenantID, orderID uuid.UUID) ([]Entry, error) {
	rows, err := db.New().LedgerEntryListByOrder(ctx, tx, tenantID, orderID)
	if err != nil {
		return nil, fmt.Errorf("list ledger entries: %w", err)
	}
	return withLines(ctx, tx, tenantID, rows)
}

// EntriesByAccountTx lists one page of the entries that touch an account in any
// currency, newest first: those with an event id below before.
func EntriesByAccountTx(ctx context.Context, tx pgx.Tx, tenantID uuid.UUID, account string, before uuid.UUID, limit int) ([]Entry, error) {
	rows, err := db.New().LedgerEntryListByAccount(ctx, tx, db.LedgerEntryListByAccountParams{
		TenantID: tenantID, Account: account, Before: before, PageSize: int32(limit),
	})
	if err != nil {
		return nil, fmt.Errorf("list ledger entries: %w", err)
	}
	return withLines(ctx, tx, tenantID, rows)
}

func withLines(ctx context.Context, tx pgx.Tx, tenantID uuid.UUID, rows []db.LedgerEntry) ([]Entry, error) {
	entries := make([]Entry, len(rows))
	ids := make([]uuid.UUID, len(rows))
	for i, row := range rows {
		ids[i] = row.EventID
		entries[i] = Entry{
			TenantID:    row.TenantID,
			EventID:     row.EventID,
			Kind:        Kind(row.Kind),
			OrderID:     row.OrderID,
			Currency:    money.Currency(row.Currency),
			Reverses:    row.Reverses,
			EffectiveAt: row.EffectiveAt.UTC(),
			RecordedAt:  row.RecordedAt.UTC(),
		}
	}
	lines, err := db.New().LedgerLineList(ctx, tx, tenantID, ids)
	if err != nil {
		return nil, fmt.Errorf("list ledger lines: %w", err)
	}
	for _, line := range lines {
		entry := &entries[slices.Index(ids, line.EventID)]
		entry.Lines = append(entry.Lines, Line{line.DebitAccount, line.CreditAccount, line.AmountMinor})
	}
	return entries, nil
}

// BalanceTx sums one account.
func BalanceTx(ctx context.Context, tx pgx.Tx, tenantID uuid.UUID, account string, currency money.Currency) (Balance, error) {
	row, err := db.New().LedgerAccountBalance(ctx, tx, tenantID, account, string(currency))
	if errors.Is(err, pgx.ErrNoRows) {
		return Balance{}, ErrAccountNotFound.Withf("Nothing was posted to %s in %s.", account, currency)
	}
	if err != nil {
		return Balance{}, fmt.Errorf("sum account: %w", err)
	}
	return balance(row.Code, row.Kind, row.Currency, row.DebitMinor, row.CreditMinor), nil
}

// TrialBalanceTx sums every account of a tenant. Debits and credits of one
// currency come to the same.
func TrialBalanceTx(ctx context.Context, tx pgx.Tx, tenantID uuid.UUID) ([]Balance, error) {
	rows, err := db.New().LedgerTrialBalance(ctx, tx, tenantID)
	if err != nil {
		return nil, fmt.Errorf("sum accounts: %w", err)
	}
	balances := make([]Balance, len(rows))
	for i, row := range rows {
		balances[i] = balance(row.Code, row.Kind, row.Currency, row.DebitMinor, row.CreditMinor)
	}
	return balances, nil
}

func balance(code, kind, currency string, debit, credit int64) Balance {
	minor := credit - debit
	if kind == "asset" {
		minor = debit - credit
	}
	return Balance{
		Account: code, Kind: kind, Currency: money.Currency(currency),
		Debit: debit, Credit: credit, Minor: minor,
	}
}

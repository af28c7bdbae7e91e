package ledger

import (
	"context"
	"errors"
	"fmt"
	"math/big"
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
// debit for income and liabilities. A sum has no largest number, unlike an amount.
type Balance struct {
	Account  string
	Kind     string
	Currency money.Currency
	Debit    *big.Int
	Credit   *big.Int
	Minor    *big.Int
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
	return balance(row.Code, row.Kind, row.Currency, row.DebitMinor, row.CreditMinor)
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
		balances[i], err = balance(row.Code, row.Kind, row.Currency, row.DebitMinor, row.CreditMinor)
		if err != nil {
			return nil, err
		}
	}
	return balances, nil
}

func balance(code, kind, currency, debitText, creditText string) (Balance, error) {
	debit, isDebit := new(big.Int).SetString(debitText, 10)
	credit, isCredit := new(big.Int).SetString(creditText, 10)
	if !isDebit || !isCredit {
		return Balance{}, fmt.Errorf("sums of account %s are %q and %q", code, debitText, creditText)
	}
	minor := new(big.Int).Sub(credit, debit)
	if kind == "asset" {
		minor.Neg(minor)
	}
	return Balance{
		Account: code, Kind: kind, Currency: money.Currency(currency),
		Debit: debit, Credit: credit, Minor: minor,
	}, nil
}

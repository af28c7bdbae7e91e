// Package ledger is insert-only double entry bookkeeping.
//
// An entry is what one event did. Its lines each move one positive amount of
// minor units from a credit account to a debit account of the same currency, so
// an entry cannot be out of balance and its lines cannot mix currencies. The
// database refuses whatever else is tried: README.md beside this file lists the
// invariants and where each is held.
package ledger

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/money"
)

// Account codes. Each tenant has each of them once per currency it uses.
const (
	Cash       = "cash"        // asset: what customers paid
	Revenue    = "revenue"     // income: what was sold, net of tax
	TaxPayable = "tax-payable" // liability: tax collected for the state
)

// kinds says on which side an account grows: assets on the debit side, the
// others on the credit side.
var kinds = map[string]string{Cash: "asset", Revenue: "income", TaxPayable: "liability"}

// Kind says what an entry records.
type Kind string

// The kinds of entries.
const (
	KindPayment Kind = "payment"
	KindRefund  Kind = "refund"
)

// Entry is what one event did to the books.
type Entry struct {
	TenantID    uuid.UUID
	EventID     uuid.UUID
	Kind        Kind
	OrderID     uuid.UUID
	Currency    money.Currency
	Reverses    *uuid.UUID // the entry that this one takes back, in part or whole
	EffectiveAt time.Time  // when it happened
	RecordedAt  time.Time  // when the ledger learned of it; set by the database
	Lines       []Line
}

// Line moves Amount minor units from the Credit to the Debit account.
type Line struct {
	Debit  string
	Credit string
	Amount int64
}

// Payment is the entry for a customer's payment of net and tax.
func Payment(tenantID, eventID, orderID uuid.UUID, currency money.Currency, net, tax int64, at time.Time) Entry {
	return Entry{
		TenantID: tenantID, EventID: eventID, Kind: KindPayment, OrderID: orderID, Currency: currency, EffectiveAt: at,
		Lines: nonZero(Line{Cash, Revenue, net}, Line{Cash, TaxPayable, tax}),
	}
}

// Refund is the entry for money given back, which reverses a payment's in part
// or whole.
func Refund(tenantID, eventID, orderID, payment uuid.UUID, currency money.Currency, net, tax int64, at time.Time) Entry {
	return Entry{
		TenantID: tenantID, EventID: eventID, Kind: KindRefund, OrderID: orderID, Currency: currency, EffectiveAt: at,
		Reverses: &payment,
		Lines:    nonZero(Line{Revenue, Cash, net}, Line{TaxPayable, Cash, tax}),
	}
}

func nonZero(lines ...Line) []Line {
	return slices.DeleteFunc(lines, func(line Line) bool { return line.Amount == 0 })
}

// PostTx writes entries with their lines, all or none. The caller's transaction
// is also the only one in which lines can be written for them. An event that has
// an entry already is an error, never passed over.
func PostTx(ctx context.Context, tx pgx.Tx, entries []Entry) error {
	if len(entries) == 0 {
		return nil
	}
	if err := openAccounts(ctx, tx, entries); err != nil {
		return err
	}

	var heads db.LedgerEntryInsertManyParams
	var lines db.LedgerLineInsertManyParams
	for _, entry := range entries {
		var reverses uuid.UUID
		if entry.Reverses != nil {
			reverses = *entry.Reverses
		}
		heads.TenantIds = append(heads.TenantIds, entry.TenantID)
		heads.EventIds = append(heads.EventIds, entry.EventID)
		heads.Kinds = append(heads.Kinds, string(entry.Kind))
		heads.OrderIds = append(heads.OrderIds, entry.OrderID)
		heads.Currencies = append(heads.Currencies, string(entry.Currency))
		heads.Reverses = append(heads.Reverses, reverses)
		heads.EffectiveAts = append(heads.EffectiveAts, entry.EffectiveAt)
		for i, line := range entry.Lines {
			lines.TenantIds = append(lines.TenantIds, entry.TenantID)
			lines.EventIds = append(lines.EventIds, entry.EventID)
			lines.LineNos = append(lines.LineNos, int32(i+1))
			lines.DebitAccounts = append(lines.DebitAccounts, line.Debit)
			lines.CreditAccounts = append(lines.CreditAccounts, line.Credit)
			lines.Currencies = append(lines.Currencies, string(entry.Currency))
			lines.AmountMinors = append(lines.AmountMinors, line.Amount)
		}
	}
	if err := db.New().LedgerEntryInsertMany(ctx, tx, heads); err != nil {
		return fmt.Errorf("insert ledger entries: %w", err)
	}
	if err := db.New().LedgerLineInsertMany(ctx, tx, lines); err != nil {
		return fmt.Errorf("insert ledger lines: %w", err)
	}
	return nil
}

// openAccounts makes the accounts that entries touch, unless they are there.
func openAccounts(ctx context.Context, tx pgx.Tx, entries []Entry) error {
	type account struct {
		tenantID uuid.UUID
		code     string
		currency money.Currency
	}
	seen := make(map[account]bool)
	var params db.LedgerAccountInsertManyParams
	for _, entry := range entries {
		for _, line := range entry.Lines {
			for _, code := range []string{line.Debit, line.Credit} {
				touched := account{entry.TenantID, code, entry.Currency}
				if seen[touched] {
					continue
				}
				seen[touched] = true
				params.TenantIds = append(params.TenantIds, touched.tenantID)
				params.Codes = append(params.Codes, touched.code)
				params.Currencies = append(params.Currencies, string(touched.currency))
				params.Kinds = append(params.Kinds, kinds[touched.code])
			}
		}
	}
	if err := db.New().LedgerAccountInsertMany(ctx, tx, params); err != nil {
		return fmt.Errorf("open ledger accounts: %w", err)
	}
	return nil
}

package invoices

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/db"
)

const (
	seriesInvoice    = "invoice"
	seriesCreditNote = "credit-note"
)

// IssueTx numbers and writes invoices, all or none, and returns them as issued.
// The caller holds the orders' billing rows and has left out orders that are
// invoiced already. It gives numbers in the order of drafts.
func IssueTx(ctx context.Context, tx pgx.Tx, drafts []Invoice, issuedAt time.Time) ([]Invoice, error) {
	if len(drafts) == 0 {
		return nil, nil
	}
	issued := slices.Clone(drafts)
	year := issuedAt.UTC().Year()
	next, err := takeNumbers(ctx, tx, seriesInvoice, year, len(issued), func(i int) uuid.UUID { return issued[i].TenantID })
	if err != nil {
		return nil, err
	}

	heads := db.InvoiceInsertManyParams{Year: int32(year), IssuedAt: issuedAt}
	var lines db.InvoiceLineInsertManyParams
	for i := range issued {
		invoice := &issued[i]
		invoice.Year, invoice.Number, invoice.IssuedAt = year, next(invoice.TenantID), issuedAt

		taxes, err := json.Marshal(invoice.Taxes)
		if err != nil {
			return nil, fmt.Errorf("encode taxes of invoice %s: %w", invoice.ID, err)
		}
		heads.TenantIds = append(heads.TenantIds, invoice.TenantID)
		heads.Ids = append(heads.Ids, invoice.ID)
		heads.OrderIds = append(heads.OrderIds, invoice.OrderID)
		heads.Numbers = append(heads.Numbers, invoice.Number)
		heads.CustomerIds = append(heads.CustomerIds, invoice.CustomerID)
		heads.CustomerEmails = append(heads.CustomerEmails, invoice.CustomerEmail)
		heads.Currencies = append(heads.Currencies, string(invoice.Currency))
		heads.NetMinors = append(heads.NetMinors, invoice.NetAmount)
		heads.TaxMinors = append(heads.TaxMinors, invoice.TaxAmount)
		heads.TotalMinors = append(heads.TotalMinors, invoice.TotalAmount)
		heads.Taxes = append(heads.Taxes, string(taxes))
		heads.PaidAts = append(heads.PaidAts, invoice.PaidAt)
		for no, line := range invoice.Lines {
			lines.TenantIds = append(lines.TenantIds, invoice.TenantID)
			lines.InvoiceIds = append(lines.InvoiceIds, invoice.ID)
			lines.LineNos = append(lines.LineNos, int32(no+1))
			lines.Skus = append(lines.Skus, line.SKU)
			lines.Descriptions = append(lines.Descriptions, line.Description)
			lines.Quantities = append(lines.Quantities, line.Quantity)
			lines.UnitMinors = append(lines.UnitMinors, line.UnitAmount)
			lines.NetMinors = append(lines.NetMinors, line.NetAmount)
			lines.TaxRatesPpm = append(lines.TaxRatesPpm, int32(line.TaxRate))
		}
	}
	if err := db.New().InvoiceInsertMany(ctx, tx, heads); err != nil {
		return nil, fmt.Errorf("insert invoices: %w", err)
	}
	if err := db.New().InvoiceLineInsertMany(ctx, tx, lines); err != nil {
		return nil, fmt.Errorf("insert invoice lines: %w", err)
	}
	return issued, nil
}

// CreditTx numbers and writes credit notes, all or none, and returns them as
// issued. Their invoices are there and the caller holds the orders' billing
// rows, so the ordinals it gave them hold.
func CreditTx(ctx context.Context, tx pgx.Tx, drafts []CreditNote, issuedAt time.Time) ([]CreditNote, error) {
	if len(drafts) == 0 {
		return nil, nil
	}
	issued := slices.Clone(drafts)
	year := issuedAt.UTC().Year()
	next, err := takeNumbers(ctx, tx, seriesCreditNote, year, len(issued), func(i int) uuid.UUID { return issued[i].TenantID })
	if err != nil {
		return nil, err
	}

	params := db.CreditNoteInsertManyParams{Year: int32(year), IssuedAt: issuedAt}
	for i := range issued {
		note := &issued[i]
		note.Year, note.Number, note.IssuedAt = year, next(note.TenantID), issuedAt

		taxes, err := json.Marshal(note.Taxes)
		if err != nil {
			return nil, fmt.Errorf("encode taxes of credit note %s: %w", note.ID, err)
		}
		params.TenantIds = append(params.TenantIds, note.TenantID)
		params.Ids = append(params.Ids, note.ID)
		params.InvoiceIds = append(params.InvoiceIds, note.InvoiceID)
		params.OrderIds = append(params.OrderIds, note.OrderID)
		params.RefundIds = append(params.RefundIds, note.RefundID)
		params.Ordinals = append(params.Ordinals, int32(note.Ordinal))
		params.Numbers = append(params.Numbers, note.Number)
		params.Currencies = append(params.Currencies, string(note.Currency))
		params.NetMinors = append(params.NetMinors, note.NetAmount)
		params.TaxMinors = append(params.TaxMinors, note.TaxAmount)
		params.TotalMinors = append(params.TotalMinors, note.TotalAmount)
		params.Taxes = append(params.Taxes, string(taxes))
		params.Reasons = append(params.Reasons, note.Reason)
		params.RefundedAts = append(params.RefundedAts, note.RefundedAt)
	}
	if err := db.New().CreditNoteInsertMany(ctx, tx, params); err != nil {
		return nil, fmt.Errorf("insert credit notes: %w", err)
	}
	return issued, nil
}

// takeNumbers reserves a number for each of n documents and returns what hands
// them out. Numbers that are taken and not used go back with the transaction.
func takeNumbers(ctx context.Context, tx pgx.Tx, kind string, year, n int, tenant func(i int) uuid.UUID) (next func(uuid.UUID) int64, err error) {
	counts := make(map[uuid.UUID]int64)
	for i := range n {
		counts[tenant(i)]++
	}
	params := db.DocumentNumbersTakeParams{Kind: kind, Year: int32(year)}
	for tenantID, count := range counts {
		params.TenantIds = append(params.TenantIds, tenantID)
		params.Counts = append(params.Counts, count)
	}
	rows, err := db.New().DocumentNumbersTake(ctx, tx, params)
	if err != nil {
		return nil, fmt.Errorf("take %s numbers: %w", kind, err)
	}
	last := make(map[uuid.UUID]int64)
	for _, row := range rows {
		last[row.TenantID] = row.LastNumber - counts[row.TenantID]
	}
	return func(tenantID uuid.UUID) int64 {
		last[tenantID]++
		return last[tenantID]
	}, nil
}

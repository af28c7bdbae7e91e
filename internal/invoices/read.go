package invoices

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/money"
)

// Issued is what is known of an order's invoice without reading all of it.
type Issued struct {
	ID            uuid.UUID
	CustomerID    string
	CustomerEmail string
	Currency      money.Currency
	CreditNotes   int   // how many it has
	Left          int64 // what they leave of its total
}

// OrderKey names an order of a tenant.
type OrderKey struct{ TenantID, OrderID uuid.UUID }

// FindTx finds which of the orders are invoiced.
func FindTx(ctx context.Context, tx pgx.Tx, orders []OrderKey) (map[OrderKey]Issued, error) {
	tenantIDs, orderIDs := make([]uuid.UUID, len(orders)), make([]uuid.UUID, len(orders))
	for i, order := range orders {
		tenantIDs[i], orderIDs[i] = order.TenantID, order.OrderID
	}
	rows, err := db.New().InvoiceListByOrders(ctx, tx, tenantIDs, orderIDs)
	if err != nil {
		return nil, fmt.Errorf("find invoices: %w", err)
	}
	found := make(map[OrderKey]Issued, len(rows))
	for _, row := range rows {
		found[OrderKey{row.TenantID, row.OrderID}] = Issued{
			ID: row.ID, CustomerID: row.CustomerID, CustomerEmail: row.CustomerEmail, Currency: money.Currency(row.Currency),
			CreditNotes: int(row.CreditNotes), Left: row.TotalMinor - row.CreditedMinor,
		}
	}
	return found, nil
}

// GetTx reads one invoice.
func GetTx(ctx context.Context, tx pgx.Tx, tenantID, id uuid.UUID) (Invoice, error) {
	row, err := db.New().InvoiceGet(ctx, tx, tenantID, id)
	return whole(ctx, tx, row, err)
}

// GetByOrderTx reads the invoice of an order.
func GetByOrderTx(ctx context.Context, tx pgx.Tx, tenantID, orderID uuid.UUID) (Invoice, error) {
	row, err := db.New().InvoiceGetByOrder(ctx, tx, tenantID, orderID)
	return whole(ctx, tx, row, err)
}

func whole(ctx context.Context, tx pgx.Tx, row db.Invoice, err error) (Invoice, error) {
	if errors.Is(err, pgx.ErrNoRows) {
		return Invoice{}, ErrNotFound
	}
	if err != nil {
		return Invoice{}, fmt.Errorf("read invoice: %w", err)
	}
	invoice := Invoice{
		TenantID:      row.TenantID,
		ID:            row.ID,
		OrderID:       row.OrderID,
		Year:          int(row.Year),
		Number:        row.Number,
		CustomerID:    row.CustomerID,
		CustomerEmail: row.CustomerEmail,
		Currency:      money.Currency(row.Currency),
		NetAmount:     row.NetMinor,
		TaxAmount:     row.TaxMinor,
		TotalAmount:   row.TotalMinor,
		PaidAt:        row.PaidAt.UTC(),
		IssuedAt:      row.IssuedAt.UTC(),
	}
	if err := json.Unmarshal(row.Taxes, &invoice.Taxes); err != nil {
		return Invoice{}, fmt.Errorf("read taxes of invoice %s: %w", row.ID, err)
	}
	lines, err := db.New().InvoiceLineList(ctx, tx, row.TenantID, row.ID)
	if err != nil {
		return Invoice{}, fmt.Errorf("read invoice lines: %w", err)
	}
	for _, line := range lines {
		invoice.Lines = append(invoice.Lines, event.Line{
			SKU: line.Sku, Description: line.Description,
			Quantity: line.Quantity, UnitAmount: line.UnitMinor, NetAmount: line.NetMinor,
			TaxRate: money.Rate(line.TaxRatePpm),
		})
	}
	return invoice, nil
}

// CreditNotesByOrderTx lists an order's credit notes in the order of issue.
func CreditNotesByOrderTx(ctx context.Context, tx pgx.Tx, tenantID, orderID uuid.UUID) ([]CreditNote, error) {
	rows, err := db.New().CreditNoteListByOrder(ctx, tx, tenantID, orderID)
	if err != nil {
		return nil, fmt.Errorf("list credit notes: %w", err)
	}
	notes := make([]CreditNote, len(rows))
	for i, row := range rows {
		notes[i] = CreditNote{
			TenantID:    row.TenantID,
			ID:          row.ID,
			InvoiceID:   row.InvoiceID,
			OrderID:     row.OrderID,
			RefundID:    row.RefundID,
			Ordinal:     int(row.Ordinal),
			Year:        int(row.Year),
			Number:      row.Number,
			Currency:    money.Currency(row.Currency),
			NetAmount:   row.NetMinor,
			TaxAmount:   row.TaxMinor,
			TotalAmount: row.TotalMinor,
			Reason:      row.Reason,
			RefundedAt:  row.RefundedAt.UTC(),
			IssuedAt:    row.IssuedAt.UTC(),
		}
		if err := json.Unmarshal(row.Taxes, &notes[i].Taxes); err != nil {
			return nil, fmt.Errorf("read taxes of credit note %s: %w", row.ID, err)
		}
	}
	return notes, nil
}

package orders

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/money"
)

// GetTx reads one order.
func GetTx(ctx context.Context, tx pgx.Tx, tenantID, id uuid.UUID) (Order, error) {
	row, err := db.New().OrderGet(ctx, tx, tenantID, id)
	return one(ctx, tx, row, err)
}

// ListTx reads one page of a tenant's orders, newest first: those with an id
// below before. uuid.Max starts at the newest.
func ListTx(ctx context.Context, tx pgx.Tx, tenantID, before uuid.UUID, limit int) ([]Order, error) {
	rows, err := db.New().OrderList(ctx, tx, tenantID, before, int32(limit))
	if err != nil {
		return nil, fmt.Errorf("list orders: %w", err)
	}
	return complete(ctx, tx, tenantID, rows)
}

// lock reads an order and holds it to the end of the transaction.
func lock(ctx context.Context, tx pgx.Tx, tenantID, id uuid.UUID) (Order, error) {
	row, err := db.New().OrderLock(ctx, tx, tenantID, id)
	return one(ctx, tx, row, err)
}

func one(ctx context.Context, tx pgx.Tx, row db.Order, err error) (Order, error) {
	if errors.Is(err, pgx.ErrNoRows) {
		return Order{}, ErrNotFound
	}
	if err != nil {
		return Order{}, fmt.Errorf("read order: %w", err)
	}
	whole, err := complete(ctx, tx, row.TenantID, []db.Order{row})
	if err != nil {
		return Order{}, err
	}
	return whole[0], nil
}

// complete adds lines, taxes and payments to orders, with one query for each
// kind however many orders there are.
func complete(ctx context.Context, tx pgx.Tx, tenantID uuid.UUID, rows []db.Order) ([]Order, error) {
	orders := make([]Order, len(rows))
	ids := make([]uuid.UUID, len(rows))
	for i, row := range rows {
		orders[i], ids[i] = fromRow(row), row.ID
	}
	find := func(id uuid.UUID) *Order { return &orders[slices.Index(ids, id)] }

	queries := db.New()
	lines, err := queries.OrderLineList(ctx, tx, tenantID, ids)
	if err != nil {
		return nil, fmt.Errorf("read order lines: %w", err)
	}
	for _, line := range lines {
		order := find(line.OrderID)
		order.Lines = append(order.Lines, Line{
			SKU: line.Sku, Description: line.Description,
			Quantity: line.Quantity, UnitAmount: line.UnitMinor, NetAmount: line.NetMinor,
			TaxRate: money.Rate(line.TaxRatePpm),
		})
	}
	taxes, err := queries.OrderTaxList(ctx, tx, tenantID, ids)
	if err != nil {
		return nil, fmt.Errorf("read order taxes: %w", err)
	}
	for _, tax := range taxes {
		order, rate := find(tax.OrderID), money.Rate(tax.TaxRatePpm)
		order.Taxes = append(order.Taxes, Tax{rate, tax.NetMinor, tax.TaxMinor})
		order.refunded = append(order.refunded, Tax{rate, tax.RefundedNetMinor, tax.RefundedTaxMinor})
	}
	payments, err := queries.PaymentList(ctx, tx, tenantID, ids)
	if err != nil {
		return nil, fmt.Errorf("read payments: %w", err)
	}
	for _, payment := range payments {
		find(payment.OrderID).Payment = &Payment{
			Reference: payment.Reference, Amount: payment.AmountMinor, PaidAt: payment.PaidAt.UTC(),
		}
	}
	return orders, nil
}

func fromRow(row db.Order) Order {
	return Order{
		TenantID:       row.TenantID,
		ID:             row.ID,
		Version:        row.Version,
		Status:         Status(row.Status),
		CustomerID:     row.CustomerID,
		CustomerEmail:  row.CustomerEmail,
		Currency:       money.Currency(row.Currency),
		NetAmount:      row.NetMinor,
		TaxAmount:      row.TaxMinor,
		TotalAmount:    row.TotalMinor,
		RefundedAmount: row.RefundedMinor,
		Metadata:       row.Metadata,
		CreatedAt:      row.CreatedAt.UTC(),
		UpdatedAt:      row.UpdatedAt.UTC(),
	}
}

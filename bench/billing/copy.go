package main

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/postgres"
)

// copier writes with COPY what the billing worker writes, a transaction per
// batch, and leaves out what makes it safe: no dedupe, no look-up of what is
// there, numbers counted in memory.
type copier struct {
	pool   *pgxpool.Pool
	number int64
	opened bool
}

func (c *copier) apply(ctx context.Context, batch []event.Record) error {
	now := time.Now().UTC()
	var billing, invoices, lines, entries, moves, outbox [][]any
	for _, record := range batch {
		e, err := event.Decode(record)
		if err != nil {
			return err
		}
		var o event.Order
		if err := json.Unmarshal(e.Payload, &o); err != nil {
			return err
		}
		c.number++
		taxes, err := json.Marshal(o.Taxes)
		if err != nil {
			return err
		}
		issued, err := event.Encode(event.Invoice{
			InvoiceID: e.ID, Number: fmt.Sprintf("INV-%d-%06d", now.Year(), c.number), OrderID: o.OrderID,
			CustomerID: o.CustomerID, CustomerEmail: o.CustomerEmail, Currency: o.Currency, Lines: o.Lines, Taxes: o.Taxes,
			NetAmount: o.NetAmount, TaxAmount: o.TaxAmount, TotalAmount: o.TotalAmount, PaidAt: o.Payment.PaidAt, IssuedAt: now,
		})
		if err != nil {
			return err
		}
		billing = append(billing, []any{e.TenantID, o.OrderID, o.Version, o.Status, string(o.Currency), o.TotalAmount, o.RefundedAmount})
		invoices = append(invoices, []any{
			e.TenantID, e.ID, o.OrderID, int32(now.Year()), c.number, o.CustomerID, o.CustomerEmail, string(o.Currency),
			o.NetAmount, o.TaxAmount, o.TotalAmount, taxes, o.Payment.PaidAt, now,
		})
		for i, line := range o.Lines {
			lines = append(lines, []any{
				e.TenantID, e.ID, int32(i + 1), line.SKU, line.Description, line.Quantity, line.UnitAmount, line.NetAmount, int32(line.TaxRate),
			})
		}
		entries = append(entries, []any{e.TenantID, e.ID, "payment", o.OrderID, string(o.Currency), o.Payment.PaidAt})
		moves = append(moves,
			[]any{e.TenantID, e.ID, int32(1), "cash", "revenue", string(o.Currency), o.NetAmount},
			[]any{e.TenantID, e.ID, int32(2), "cash", "tax-payable", string(o.Currency), o.TaxAmount})
		outbox = append(outbox, []any{
			uuid.Must(uuid.NewV7()), e.TenantID, "billing", o.OrderID, int64(1), "InvoiceIssued", int32(1), []byte(issued), now,
		})
	}

	return postgres.InTx(ctx, c.pool, func(tx pgx.Tx) error {
		if !c.opened {
			for code, kind := range map[string]string{"cash": "asset", "revenue": "income", "tax-payable": "liability"} {
				_, err := tx.Exec(ctx, "INSERT INTO ledger_accounts (tenant_id, code, currency, kind) VALUES ($1, $2, 'EUR', $3)",
					billing[0][0], code, kind)
				if err != nil {
					return err
				}
			}
			c.opened = true
		}
		for _, table := range []struct {
			name    string
			columns []string
			rows    [][]any
		}{
			{"order_billing", []string{"tenant_id", "order_id", "version", "status", "currency", "total_minor", "refunded_minor"}, billing},
			{"invoices", []string{
				"tenant_id", "id", "order_id", "year", "number", "customer_id", "customer_email", "currency",
				"net_minor", "tax_minor", "total_minor", "taxes", "paid_at", "issued_at",
			}, invoices},
			{"invoice_lines", []string{
				"tenant_id", "invoice_id", "line_no", "sku", "description", "quantity", "unit_minor", "net_minor", "tax_rate_ppm",
			}, lines},
			{"ledger_entries", []string{"tenant_id", "event_id", "kind", "order_id", "currency", "effective_at"}, entries},
			{"ledger_lines", []string{"tenant_id", "event_id", "line_no", "debit_account", "credit_account", "currency", "amount_minor"}, moves},
			{"outbox_events", []string{
				"id", "tenant_id", "aggregate_type", "aggregate_id", "aggregate_version", "event_type", "schema_version", "payload", "occurred_at",
			}, outbox},
		} {
			if _, err := tx.CopyFrom(ctx, pgx.Identifier{table.name}, table.columns, pgx.CopyFromRows(table.rows)); err != nil {
				return fmt.Errorf("copy into %s: %w", table.name, err)
			}
		}
		return nil
	})
}

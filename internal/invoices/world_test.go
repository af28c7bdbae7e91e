package invoices_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/invoices"
	"github.com/onceledger/onceledger/internal/money"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
)

// world is the documents' tables on a database of its own, with two tenants.
type world struct {
	db            *pgtest.Database
	owner, worker *pgxpool.Pool
	tenant, other uuid.UUID
}

func newWorld(t *testing.T) *world {
	t.Helper()
	database := pgtest.New(t)
	w := &world{
		db: database, owner: database.Pool(t, ""), worker: database.Pool(t, "worker"),
		tenant: uuid.New(), other: uuid.New(),
	}
	_, err := w.owner.Exec(t.Context(), "INSERT INTO tenants (id, name) VALUES ($1, 'acme'), ($2, 'other')", w.tenant, w.other)
	require.NoError(t, err)
	return w
}

func newID() uuid.UUID { return uuid.Must(uuid.NewV7()) }

// at is when documents are issued in these tests, unless time is the subject.
var at = time.Date(2026, time.March, 1, 12, 0, 0, 123_456_000, time.UTC)

// drafts are n invoices of a tenant that have no number yet, for orders that
// billing knows.
func (w *world) drafts(t *testing.T, tenant uuid.UUID, n int) []invoices.Invoice {
	t.Helper()
	drafts := make([]invoices.Invoice, n)
	for i := range drafts {
		drafts[i] = invoices.Invoice{
			TenantID: tenant, ID: newID(), OrderID: newID(),
			CustomerID: "c-42", CustomerEmail: "a@example.com", Currency: "EUR",
			Lines: []event.Line{
				{SKU: "book", Description: "A book", Quantity: 2, UnitAmount: 1250, NetAmount: 2500, TaxRate: 190_000},
				{SKU: "gift", Description: "", Quantity: 1, UnitAmount: 0, NetAmount: 0, TaxRate: 0},
			},
			Taxes:     []event.Tax{{Rate: 0}, {Rate: 190_000, NetAmount: 2500, TaxAmount: 475}},
			NetAmount: 2500, TaxAmount: 475, TotalAmount: 2975,
			PaidAt: at.Add(-time.Minute),
		}
		_, err := w.owner.Exec(t.Context(), `
			INSERT INTO order_billing (tenant_id, order_id, version, status, currency, total_minor, refunded_minor)
			VALUES ($1, $2, 2, 'paid', 'EUR', 2975, 0)`, tenant, drafts[i].OrderID)
		require.NoError(t, err)
	}
	return drafts
}

// creditNote is the ordinal-th credit note of an invoice, without a number.
func creditNote(invoice invoices.Invoice, ordinal int) invoices.CreditNote {
	return invoices.CreditNote{
		TenantID: invoice.TenantID, ID: newID(), InvoiceID: invoice.ID, OrderID: invoice.OrderID, RefundID: newID(),
		Ordinal: ordinal, Currency: money.Currency("EUR"),
		Taxes:     []event.Tax{{Rate: 190_000, NetAmount: 420, TaxAmount: 80}},
		NetAmount: 420, TaxAmount: 80, TotalAmount: 500, Reason: "damaged", RefundedAt: at,
	}
}

// issue issues invoices as the worker does, in a transaction of their own.
func (w *world) issue(ctx context.Context, issuedAt time.Time, drafts ...invoices.Invoice) ([]invoices.Invoice, error) {
	var issued []invoices.Invoice
	err := postgres.InTx(ctx, w.worker, func(tx pgx.Tx) (err error) {
		issued, err = invoices.IssueTx(ctx, tx, drafts, issuedAt)
		return err
	})
	return issued, err
}

func (w *world) credit(ctx context.Context, issuedAt time.Time, drafts ...invoices.CreditNote) ([]invoices.CreditNote, error) {
	var issued []invoices.CreditNote
	err := postgres.InTx(ctx, w.worker, func(tx pgx.Tx) (err error) {
		issued, err = invoices.CreditTx(ctx, tx, drafts, issuedAt)
		return err
	})
	return issued, err
}

// read runs fn as the worker.
func (w *world) read(t *testing.T, fn func(tx pgx.Tx)) {
	t.Helper()
	require.NoError(t, postgres.InTx(t.Context(), w.worker, func(tx pgx.Tx) error {
		fn(tx)
		return nil
	}))
}

// numbers are the numbers of a tenant's invoices of a year, ascending.
func (w *world) numbers(t *testing.T, tenant uuid.UUID, year int) []int64 {
	t.Helper()
	return pgtest.Column[int64](t, w.owner,
		"SELECT number FROM invoices WHERE tenant_id = $1 AND year = $2 ORDER BY 1", tenant, year)
}

func upTo(n int) []int64 {
	var numbers []int64
	for i := range n {
		numbers = append(numbers, int64(i+1))
	}
	return numbers
}

// requireRefused checks by which SQLSTATE and constraint the database refused.
func requireRefused(t *testing.T, err error, code, constraint string) {
	t.Helper()
	var refusal *pgconn.PgError
	require.ErrorAs(t, err, &refusal)
	require.Equal(t, code, refusal.Code, refusal.Message)
	require.Equal(t, constraint, refusal.ConstraintName, refusal.Message)
}

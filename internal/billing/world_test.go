package billing_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/inbox/inboxtest"
	"github.com/onceledger/onceledger/internal/invoices"
	"github.com/onceledger/onceledger/internal/ledger"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
)

// world is billing behind its inbox, on a database of its own, with a tenant.
type world struct {
	*inboxtest.Consumer
	tenant uuid.UUID
	clock  *clock
}

// clock is the worker's; it is the real one unless a test sets it.
type clock struct{ at atomic.Pointer[time.Time] }

func (c *clock) set(at time.Time) { c.at.Store(&at) }

func (c *clock) now() time.Time {
	if at := c.at.Load(); at != nil {
		return *at
	}
	return time.Now()
}

func newWorld(t *testing.T) *world {
	t.Helper()
	clock := &clock{}
	w := &world{
		Consumer: inboxtest.New(t, billing.Handler{Now: clock.now}, func(config *inbox.Config) { config.Now = clock.now }),
		clock:    clock,
	}
	w.tenant = w.Tenant(t)
	return w
}

// order is a new order of the world's tenant: two books for 29.75 EUR.
func (w *world) order() *factory.Order {
	return &factory.Order{TenantID: w.tenant, Now: w.clock.now}
}

// written is how many rows billing has written.
type written struct{ Invoices, InvoiceLines, CreditNotes, Entries, LedgerLines, Facts int }

func (w *world) written(t *testing.T) written {
	t.Helper()
	return pgtest.Rows[written](t, w.Owner, `
		SELECT (SELECT count(*) FROM invoices), (SELECT count(*) FROM invoice_lines), (SELECT count(*) FROM credit_notes),
			(SELECT count(*) FROM ledger_entries), (SELECT count(*) FROM ledger_lines), (SELECT count(*) FROM outbox_events)`)[0]
}

// view is what billing knows of an order.
type view struct {
	Version  int64
	Status   string
	Currency string
	Total    int64
	Refunded int64
}

// view reads what billing knows of an order, nil if nothing.
func (w *world) view(t *testing.T, order *factory.Order) *view {
	t.Helper()
	views := pgtest.Rows[view](t, w.Owner, `
		SELECT version, status, currency, total_minor, refunded_minor FROM order_billing
		WHERE tenant_id = $1 AND order_id = $2`, order.TenantID, order.State.OrderID)
	if len(views) == 0 {
		return nil
	}
	return &views[0]
}

// documents are an order's documents and entries as the API reads them.
type documents struct {
	invoice     invoices.Invoice
	creditNotes []invoices.CreditNote
	entries     []ledger.Entry
}

func (w *world) documents(t *testing.T, order *factory.Order) documents {
	t.Helper()
	var d documents
	require.NoError(t, postgres.InTx(t.Context(), w.Owner, func(tx pgx.Tx) (err error) {
		if d.invoice, err = invoices.GetByOrderTx(t.Context(), tx, order.TenantID, order.State.OrderID); err != nil {
			return err
		}
		if d.creditNotes, err = invoices.CreditNotesByOrderTx(t.Context(), tx, order.TenantID, order.State.OrderID); err != nil {
			return err
		}
		d.entries, err = ledger.EntriesByOrderTx(t.Context(), tx, order.TenantID, order.State.OrderID)
		return err
	}))
	return d
}

// facts are the events that billing wrote about an order, by version, as the
// relay will send them.
func (w *world) facts(t *testing.T, order *factory.Order) []event.Event {
	t.Helper()
	rows, err := w.Owner.Query(t.Context(), `
		SELECT id, tenant_id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version,
			occurred_at, coalesce(traceparent, ''), payload
		FROM outbox_events WHERE aggregate_id = $1 ORDER BY aggregate_version`, order.State.OrderID)
	require.NoError(t, err)
	facts, err := pgx.CollectRows(rows, pgx.RowToStructByPos[event.Event])
	require.NoError(t, err)
	return facts
}

// requireNothing checks that billing has written nothing about an order.
func (w *world) requireNothing(t *testing.T, order *factory.Order) {
	t.Helper()
	require.Equal(t, []int64{0, 0, 0, 0, 0}, pgtest.Column[int64](t, w.Owner, `
		SELECT count(*) FROM order_billing WHERE order_id = $1
		UNION ALL SELECT count(*) FROM invoices WHERE order_id = $1
		UNION ALL SELECT count(*) FROM credit_notes WHERE order_id = $1
		UNION ALL SELECT count(*) FROM ledger_entries WHERE order_id = $1
		UNION ALL SELECT count(*) FROM outbox_events WHERE aggregate_id = $1`, order.State.OrderID))
}

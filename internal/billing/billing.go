// Package billing is what the billing worker does with order events: an
// OrderPaid becomes one invoice and one ledger entry, an OrderRefunded one
// credit note and one entry, and every event brings the billing side's view of
// its order up to date.
//
// It knows orders by their events alone. It may be given an event once only: the
// inbox sees to that, and makes what is written here commit together with the
// mark that says so.
package billing

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/invoices"
	"github.com/onceledger/onceledger/internal/ledger"
	"github.com/onceledger/onceledger/internal/outbox"
)

// Consumer is the name under which billing marks events as applied, and its
// consumer group.
const Consumer = "billing"

// Handler applies order events. It is an inbox.Handler.
type Handler struct {
	Now func() time.Time // when documents are issued
}

// Apply writes everything that the events cause, in tx. Each step is one or two
// statements however many events there are.
func (h Handler) Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	orders, err := decode(events, h.Now())
	if err != nil {
		return err
	}
	if err := updateViewTx(ctx, tx, orders); err != nil { // locks the orders' rows
		return err
	}
	drafts, err := draftTx(ctx, tx, orders)
	if err != nil {
		return err
	}
	if err := ledger.PostTx(ctx, tx, drafts.entries); err != nil {
		return err
	}

	// Numbers last: from here on nothing should wait or fail.
	now := h.Now().UTC().Truncate(time.Microsecond)
	issued, err := invoices.IssueTx(ctx, tx, drafts.invoices, now)
	if err != nil {
		return err
	}
	credited, err := invoices.CreditTx(ctx, tx, drafts.creditNotes, now)
	if err != nil {
		return err
	}
	facts, err := documentEvents(issued, credited, drafts.traces)
	if err != nil {
		return err
	}
	return outbox.AppendMany(ctx, tx, facts)
}

// updateViewTx brings order_billing up to the highest version of each order.
// Late and repeated versions lose to the version guard in the statement; which
// rows it changes has no say in whether a document is made.
func updateViewTx(ctx context.Context, tx pgx.Tx, orders []orderEvent) error {
	newest := make(map[invoices.OrderKey]event.Order, len(orders))
	lowest := make(map[invoices.OrderKey]int64, len(orders))
	for _, o := range orders {
		key := o.key()
		if o.state.Version > newest[key].Version {
			newest[key] = o.state
		}
		if known, is := lowest[key]; !is || o.state.Version < known {
			lowest[key] = o.state.Version
		}
	}
	var params db.OrderBillingUpsertManyParams
	for key, state := range newest {
		params.TenantIds = append(params.TenantIds, key.TenantID)
		params.OrderIds = append(params.OrderIds, key.OrderID)
		params.Versions = append(params.Versions, state.Version)
		params.LowestVersions = append(params.LowestVersions, lowest[key])
		params.Statuses = append(params.Statuses, state.Status)
		params.Currencies = append(params.Currencies, string(state.Currency))
		params.TotalMinors = append(params.TotalMinors, state.TotalAmount)
		params.RefundedMinors = append(params.RefundedMinors, state.RefundedAmount)
	}
	uneven, err := db.New().OrderBillingUpsertMany(ctx, tx, params)
	if err != nil {
		return fmt.Errorf("update billing's view of orders: %w", err)
	}
	if len(uneven) == 0 {
		return nil
	}
	return noteGapsTx(ctx, tx, orders, uneven)
}

// drafts is what a batch of events comes to, before it has numbers.
type drafts struct {
	invoices    []invoices.Invoice
	creditNotes []invoices.CreditNote
	entries     []ledger.Entry
	traces      map[uuid.UUID]string // document id to the trace of its event
}

// draftTx turns events into documents and entries. It refuses a second payment
// of an order that is invoiced, and a refund of one that is not, or of more than
// is left of the invoice.
func draftTx(ctx context.Context, tx pgx.Tx, orders []orderEvent) (drafts, error) {
	var asked []invoices.OrderKey
	for _, o := range orders {
		if o.Type == event.OrderPaid || o.Type == event.OrderRefunded {
			asked = append(asked, o.key())
		}
	}
	if len(asked) == 0 {
		return drafts{}, nil
	}
	invoiced, err := invoices.FindTx(ctx, tx, asked)
	if err != nil {
		return drafts{}, err
	}

	made := drafts{traces: make(map[uuid.UUID]string)}
	var refused inbox.Rejections
	for _, o := range orders {
		invoice, isInvoiced := invoiced[o.key()]
		switch {
		case o.Type == event.OrderPaid && isInvoiced:
			refused = append(refused, o.refuse(inbox.ClassRule, "order has invoice %s already, made by another event", invoice.ID))
		case o.Type == event.OrderPaid:
			made.invoices = append(made.invoices, o.invoice())
			made.entries = append(made.entries, ledger.Payment(o.TenantID, o.ID, o.state.OrderID, o.state.Currency,
				o.state.NetAmount, o.state.TaxAmount, o.state.Payment.PaidAt))
			invoiced[o.key()] = invoices.Issued{
				ID: o.ID, CustomerID: o.state.CustomerID, CustomerEmail: o.state.CustomerEmail,
				Currency: o.state.Currency, Left: o.state.TotalAmount,
			}
		case o.Type == event.OrderRefunded && !isInvoiced:
			refused = append(refused, o.refuse(inbox.ClassGap, "order is refunded and its payment has not been seen"))
		case o.Type == event.OrderRefunded && (o.state.Currency != invoice.Currency || o.state.Refund.Amount > invoice.Left):
			refused = append(refused, o.refuse(inbox.ClassRule, "refund of %d %s, of which invoice %s has %d %s left",
				o.state.Refund.Amount, o.state.Currency, invoice.ID, invoice.Left, invoice.Currency))
		case o.Type == event.OrderRefunded:
			refund := o.state.Refund
			invoice.CreditNotes++
			invoice.Left -= refund.Amount
			invoiced[o.key()] = invoice
			made.creditNotes = append(made.creditNotes, o.creditNote(invoice))
			made.entries = append(made.entries, ledger.Refund(o.TenantID, o.ID, o.state.OrderID, invoice.ID, o.state.Currency,
				refund.NetAmount, refund.TaxAmount, refund.RefundedAt))
		}
		made.traces[o.ID] = o.Traceparent
	}
	if len(refused) > 0 {
		return drafts{}, refused
	}
	return made, nil
}

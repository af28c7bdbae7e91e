package balances

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/ledger"
	"github.com/onceledger/onceledger/internal/money"
)

// document is an event with what it does to the books.
type document struct {
	event.Event
	happened time.Time // when the event's id was made
	paid     time.Time // when that of the order's payment was
	entry    ledger.Entry
}

func (d document) order() orderKey { return orderKey{d.TenantID, d.AggregateID} }

// decode reads a record of billing.events. The entry is the one that billing
// posted for the document: the mapping is the ledger's own.
func decode(record event.Record) (document, error) {
	e, err := event.Decode(record)
	if err != nil {
		return document{}, err
	}
	d := document{Event: e}
	if d.happened, err = madeAt(e.ID); err != nil {
		return document{}, err
	}
	if e.SchemaVersion != event.SchemaVersion {
		return document{}, fmt.Errorf("%s has schema version %d, which this build does not know", e.Type, e.SchemaVersion)
	}
	var orderID, invoiceID uuid.UUID
	var net, tax, total int64
	var currency money.Currency
	switch e.Type {
	case event.InvoiceIssued:
		var i event.Invoice
		if err := json.Unmarshal(e.Payload, &i); err != nil {
			return document{}, fmt.Errorf("payload: %w", err)
		}
		if e.AggregateVersion != 1 {
			return document{}, fmt.Errorf("an invoice is version 1 of its order's billing, not %d", e.AggregateVersion)
		}
		orderID, invoiceID, currency, net, tax, total = i.OrderID, i.InvoiceID, i.Currency, i.NetAmount, i.TaxAmount, i.TotalAmount
		d.entry = ledger.Payment(e.TenantID, i.InvoiceID, i.OrderID, currency, net, tax, i.PaidAt)
	case event.CreditNoteIssued:
		var n event.CreditNote
		if err := json.Unmarshal(e.Payload, &n); err != nil {
			return document{}, fmt.Errorf("payload: %w", err)
		}
		if e.AggregateVersion == 1 {
			return document{}, errors.New("a credit note is not version 1 of its order's billing")
		}
		orderID, invoiceID, currency, net, tax, total = n.OrderID, n.InvoiceID, n.Currency, n.NetAmount, n.TaxAmount, n.TotalAmount
		d.entry = ledger.Refund(e.TenantID, n.CreditNoteID, n.OrderID, n.InvoiceID, currency, net, tax, n.RefundedAt)
	default:
		return document{}, fmt.Errorf("%s is not a billing event that this build knows", e.Type)
	}
	if d.paid, err = madeAt(invoiceID); err != nil {
		return document{}, fmt.Errorf("invoice_id: %w", err)
	}
	if orderID != e.AggregateID {
		return document{}, fmt.Errorf("payload is of order %s, not %s", orderID, e.AggregateID)
	}
	if _, err := money.ParseCurrency(string(currency)); err != nil {
		return document{}, err
	}
	if net < 0 || tax < 0 || net > money.MaxMinor || tax > money.MaxMinor || total < 1 || net+tax != total {
		return document{}, fmt.Errorf("net %d and tax %d do not make a total %d above zero", net, tax, total)
	}
	return d, nil
}

// madeAt is when a UUIDv7 was made.
func madeAt(id uuid.UUID) (time.Time, error) {
	if id.Version() != 7 {
		return time.Time{}, fmt.Errorf("id %s is not a UUIDv7", id)
	}
	var milliseconds int64
	for _, b := range id[:6] {
		milliseconds = milliseconds<<8 | int64(b)
	}
	return time.UnixMilli(milliseconds).UTC(), nil
}

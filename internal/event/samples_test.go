package event_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
)

var (
	tenantID = uuid.MustParse("01976f00-0000-7000-8000-00000000000a")
	orderID  = uuid.MustParse("01976f00-1111-7000-8000-00000000000b")
	at       = time.Date(2026, time.March, 4, 5, 6, 7, 89_000, time.UTC)
)

const traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

var allTypes = []event.Type{
	event.OrderCreated, event.OrderPaid, event.OrderCancelled, event.OrderRefunded,
	event.InvoiceIssued, event.CreditNoteIssued,
}

// sample is an event of a type, the same each time, with all that the type can
// have: two tax rates, text that wants escaping, and half of them in a trace.
func sample(t *testing.T, typ event.Type) event.Event {
	t.Helper()
	e := event.Event{
		TenantID: tenantID, AggregateType: event.AggregateOrder, AggregateID: orderID,
		Type: typ, SchemaVersion: event.SchemaVersion, OccurredAt: at,
	}
	order := event.Order{
		OrderID: orderID, Status: "created",
		CustomerID: "c-42", CustomerEmail: "zoë+<books>@example.com", Currency: "EUR",
		Lines: []event.Line{
			{SKU: "book", Description: `A "book" & more`, Quantity: 2, UnitAmount: 1250, NetAmount: 2500, TaxRate: 70_000},
			{SKU: "lamp", Description: "Lampe für 木の机", Quantity: 1, UnitAmount: 999, NetAmount: 999, TaxRate: 190_000},
		},
		Taxes: []event.Tax{
			{Rate: 70_000, NetAmount: 2500, TaxAmount: 175},
			{Rate: 190_000, NetAmount: 999, TaxAmount: 190},
		},
		NetAmount: 3499, TaxAmount: 365, TotalAmount: 3864,
		Metadata:  json.RawMessage(`{"b":1,"a":[1.0,"\u00e9"]}`),
		CreatedAt: at.Add(-time.Hour),
	}
	payment := &event.Payment{Reference: "pi_1", Amount: 3864, PaidAt: at}
	refundTaxes := []event.Tax{{Rate: 70_000, NetAmount: 322, TaxAmount: 23}, {Rate: 190_000, NetAmount: 130, TaxAmount: 25}}

	var payload any
	switch typ {
	case event.OrderCreated:
		e.ID, e.AggregateVersion = uuid.MustParse("01976f00-2222-7000-8000-000000000001"), 1
		payload = &order
	case event.OrderPaid:
		e.ID, e.AggregateVersion = uuid.MustParse("01976f00-2222-7000-8000-000000000002"), 2
		e.Traceparent = traceparent
		order.Status, order.Payment = "paid", payment
		payload = &order
	case event.OrderCancelled:
		e.ID, e.AggregateVersion = uuid.MustParse("01976f00-2222-7000-8000-000000000003"), 2
		order.Status = "cancelled"
		payload = &order
	case event.OrderRefunded:
		e.ID, e.AggregateVersion = uuid.MustParse("01976f00-2222-7000-8000-000000000004"), 3
		e.Traceparent = traceparent
		order.Status, order.Payment, order.RefundedAmount = "paid", payment, 500
		order.Refund = &event.Refund{
			RefundID: uuid.MustParse("01976f00-3333-7000-8000-000000000001"),
			Amount:   500, NetAmount: 452, TaxAmount: 48, Taxes: refundTaxes,
			Reason: "damaged", RefundedAt: at,
		}
		payload = &order
	case event.InvoiceIssued:
		e.ID, e.AggregateVersion = uuid.MustParse("01976f00-2222-7000-8000-000000000005"), 1
		e.AggregateType, e.Traceparent = event.AggregateBilling, traceparent
		payload = event.Invoice{
			InvoiceID: uuid.MustParse("01976f00-2222-7000-8000-000000000002"), Number: "INV-2026-000042", OrderID: orderID,
			CustomerID: order.CustomerID, CustomerEmail: order.CustomerEmail, Currency: "EUR",
			Lines: order.Lines, Taxes: order.Taxes, NetAmount: 3499, TaxAmount: 365, TotalAmount: 3864,
			PaidAt: at, IssuedAt: at.Add(time.Second),
		}
	case event.CreditNoteIssued:
		e.ID, e.AggregateVersion = uuid.MustParse("01976f00-2222-7000-8000-000000000006"), 2
		e.AggregateType = event.AggregateBilling
		payload = event.CreditNote{
			CreditNoteID: uuid.MustParse("01976f00-2222-7000-8000-000000000004"), Number: "CN-2026-000007",
			InvoiceID: uuid.MustParse("01976f00-2222-7000-8000-000000000002"), OrderID: orderID,
			RefundID:   uuid.MustParse("01976f00-3333-7000-8000-000000000001"),
			CustomerID: order.CustomerID, CustomerEmail: order.CustomerEmail, Currency: "EUR",
			Taxes: refundTaxes, NetAmount: 452, TaxAmount: 48, TotalAmount: 500,
			Reason: "damaged", RefundedAt: at, IssuedAt: at.Add(time.Second),
		}
	}
	order.Version = e.AggregateVersion

	encoded, err := event.Encode(payload)
	require.NoError(t, err)
	e.Payload = encoded
	return e
}

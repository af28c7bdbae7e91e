package billing

import (
	"fmt"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/invoices"
)

func (o orderEvent) invoice() invoices.Invoice {
	return invoices.Invoice{
		TenantID:      o.TenantID,
		ID:            o.ID,
		OrderID:       o.state.OrderID,
		CustomerID:    o.state.CustomerID,
		CustomerEmail: o.state.CustomerEmail,
		Currency:      o.state.Currency,
		Lines:         o.state.Lines,
		Taxes:         o.state.Taxes,
		NetAmount:     o.state.NetAmount,
		TaxAmount:     o.state.TaxAmount,
		TotalAmount:   o.state.TotalAmount,
		PaidAt:        o.state.Payment.PaidAt,
	}
}

func (o orderEvent) creditNote(invoice invoices.Issued) invoices.CreditNote {
	refund := o.state.Refund
	return invoices.CreditNote{
		TenantID:      o.TenantID,
		ID:            o.ID,
		InvoiceID:     invoice.ID,
		OrderID:       o.state.OrderID,
		RefundID:      refund.RefundID,
		Ordinal:       invoice.CreditNotes,
		CustomerID:    invoice.CustomerID,
		CustomerEmail: invoice.CustomerEmail,
		Currency:      o.state.Currency,
		Taxes:         refund.Taxes,
		NetAmount:     refund.NetAmount,
		TaxAmount:     refund.TaxAmount,
		TotalAmount:   refund.Amount,
		Reason:        refund.Reason,
		RefundedAt:    refund.RefundedAt,
	}
}

// documentEvents are the events that say that documents were issued. An order's
// invoice is version 1 of its billing aggregate, its n-th credit note version
// 1 + n. An event whose document would be too large to be sent is refused: were
// it an error, its partition would stand still for ever.
func documentEvents(issued []invoices.Invoice, credited []invoices.CreditNote, traces map[uuid.UUID]string) ([]event.Event, error) {
	facts := make([]event.Event, 0, len(issued)+len(credited))
	var refused inbox.Rejections
	add := func(documentID uuid.UUID, e event.Event, payload any) error {
		encoded, err := event.Encode(payload)
		if err != nil {
			return fmt.Errorf("encode %s: %w", e.Type, err)
		}
		if len(encoded) > event.MaxPayload {
			refused = append(refused, inbox.Rejection{EventID: documentID, Fault: inbox.Fault{
				Class:  inbox.ClassRule,
				Detail: fmt.Sprintf("its %s would have %d bytes; %d are allowed", e.Type, len(encoded), event.MaxPayload),
			}})
		}
		e.ID = uuid.Must(uuid.NewV7())
		e.AggregateType = event.AggregateBilling
		e.SchemaVersion = event.SchemaVersion
		e.Payload = encoded
		facts = append(facts, e)
		return nil
	}
	for _, i := range issued {
		err := add(i.ID, event.Event{
			Type: event.InvoiceIssued, TenantID: i.TenantID, AggregateID: i.OrderID, AggregateVersion: 1,
			OccurredAt: i.IssuedAt, Traceparent: traces[i.ID],
		}, event.Invoice{
			InvoiceID: i.ID, Number: i.FullNumber(), OrderID: i.OrderID,
			CustomerID: i.CustomerID, CustomerEmail: i.CustomerEmail, Currency: i.Currency,
			Lines: i.Lines, Taxes: i.Taxes,
			NetAmount: i.NetAmount, TaxAmount: i.TaxAmount, TotalAmount: i.TotalAmount,
			PaidAt: i.PaidAt, IssuedAt: i.IssuedAt,
		})
		if err != nil {
			return nil, err
		}
	}
	for _, n := range credited {
		err := add(n.ID, event.Event{
			Type: event.CreditNoteIssued, TenantID: n.TenantID, AggregateID: n.OrderID, AggregateVersion: 1 + int64(n.Ordinal),
			OccurredAt: n.IssuedAt, Traceparent: traces[n.ID],
		}, event.CreditNote{
			CreditNoteID: n.ID, Number: n.FullNumber(), InvoiceID: n.InvoiceID, OrderID: n.OrderID, RefundID: n.RefundID,
			CustomerID: n.CustomerID, CustomerEmail: n.CustomerEmail, Currency: n.Currency, Taxes: n.Taxes,
			NetAmount: n.NetAmount, TaxAmount: n.TaxAmount, TotalAmount: n.TotalAmount,
			Reason: n.Reason, RefundedAt: n.RefundedAt, IssuedAt: n.IssuedAt,
		})
		if err != nil {
			return nil, err
		}
	}
	if len(refused) > 0 {
		return nil, refused
	}
	return facts, nil
}

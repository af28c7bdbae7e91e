package orders

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/outbox"
)

// appendEvent writes what happened to an order into the outbox, with the
// order's whole state after it.
func appendEvent(ctx context.Context, tx pgx.Tx, order Order, fact event.Type, refund *Refund, stamp Stamp) error {
	payload, err := payload(order, refund)
	if err != nil {
		return fmt.Errorf("encode %s: %w", fact, err)
	}
	return outbox.Append(ctx, tx, event.Event{
		ID:               uuid.Must(uuid.NewV7()),
		TenantID:         order.TenantID,
		AggregateType:    event.AggregateOrder,
		AggregateID:      order.ID,
		AggregateVersion: order.Version,
		Type:             fact,
		SchemaVersion:    event.SchemaVersion,
		OccurredAt:       stamp.At,
		Traceparent:      stamp.Traceparent,
		Payload:          payload,
	})
}

func payload(order Order, refund *Refund) (json.RawMessage, error) {
	state := event.Order{
		OrderID:        order.ID,
		Version:        order.Version,
		Status:         string(order.Status),
		CustomerID:     order.CustomerID,
		CustomerEmail:  order.CustomerEmail,
		Currency:       order.Currency,
		Taxes:          eventTaxes(order.Taxes),
		NetAmount:      order.NetAmount,
		TaxAmount:      order.TaxAmount,
		TotalAmount:    order.TotalAmount,
		RefundedAmount: order.RefundedAmount,
		Metadata:       order.Metadata,
		CreatedAt:      order.CreatedAt,
	}
	for _, line := range order.Lines {
		state.Lines = append(state.Lines, event.Line(line))
	}
	if order.Payment != nil {
		payment := event.Payment(*order.Payment)
		state.Payment = &payment
	}
	if refund != nil {
		state.Refund = &event.Refund{
			RefundID:   refund.ID,
			Amount:     refund.Amount,
			NetAmount:  refund.NetAmount,
			TaxAmount:  refund.TaxAmount,
			Taxes:      eventTaxes(refund.Taxes),
			Reason:     refund.Reason,
			RefundedAt: refund.RefundedAt,
		}
	}
	return event.Encode(state)
}

func eventTaxes(taxes []Tax) []event.Tax {
	converted := make([]event.Tax, len(taxes))
	for i, tax := range taxes {
		converted[i] = event.Tax(tax)
	}
	return converted
}

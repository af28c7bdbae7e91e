package orders

import (
	"context"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/failure"
	"github.com/onceledger/onceledger/internal/money"
)

// PayParams says by which payment an order is paid.
type PayParams struct {
	Reference string // the payment provider's, pays one order of a tenant
}

// Validate names what is malformed.
func (p PayParams) Validate() error {
	if fault := textFault(p.Reference, maxText); fault != "" {
		return ErrInvalid.WithFields(failure.Field{Field: "payment_reference", Detail: fault})
	}
	return nil
}

// PayTx marks an order as paid in full and writes its OrderPaid event, both or
// neither. An order is paid at most once, a reference pays at most one order.
func PayTx(ctx context.Context, tx pgx.Tx, tenantID, id uuid.UUID, params PayParams, stamp Stamp) (Order, error) {
	order, err := lock(ctx, tx, tenantID, id)
	if err != nil {
		return Order{}, err
	}
	stamp = stamp.after(order)
	switch order.Status {
	case StatusPaid:
		return Order{}, ErrAlreadyPaid.Withf("Payment %s has paid it.", order.Payment.Reference)
	case StatusCancelled:
		return Order{}, ErrCancelled
	case StatusCreated:
	}

	taken, err := db.New().PaymentInsert(ctx, tx, db.PaymentInsertParams{
		TenantID:    tenantID,
		OrderID:     id,
		Reference:   params.Reference,
		AmountMinor: order.TotalAmount,
		Currency:    string(order.Currency),
		PaidAt:      stamp.At,
	})
	if err != nil {
		return Order{}, fmt.Errorf("insert payment: %w", err)
	}
	if taken == 0 {
		return Order{}, ErrPaymentReferenceUsed
	}

	order.Status = StatusPaid
	order.Payment = &Payment{Reference: params.Reference, Amount: order.TotalAmount, PaidAt: stamp.At}
	return advance(ctx, tx, order, event.OrderPaid, nil, stamp)
}

// CancelTx cancels an order that is not paid and writes its OrderCancelled
// event, both or neither.
func CancelTx(ctx context.Context, tx pgx.Tx, tenantID, id uuid.UUID, stamp Stamp) (Order, error) {
	order, err := lock(ctx, tx, tenantID, id)
	if err != nil {
		return Order{}, err
	}
	stamp = stamp.after(order)
	switch order.Status {
	case StatusPaid:
		return Order{}, ErrAlreadyPaid.Withf("A paid order is refunded, not cancelled.")
	case StatusCancelled:
		return Order{}, ErrCancelled
	case StatusCreated:
	}
	order.Status = StatusCancelled
	return advance(ctx, tx, order, event.OrderCancelled, nil, stamp)
}

// RefundParams says how much is given back, in minor units, and why.
type RefundParams struct {
	Amount int64
	Reason string
}

// Validate names what is malformed.
func (p RefundParams) Validate() error {
	var faults []failure.Field
	if fault := rangeFault(p.Amount, 1); fault != "" {
		faults = append(faults, failure.Field{Field: "amount", Detail: fault})
	}
	if fault := textFault(p.Reason, maxDescription); fault != "" {
		faults = append(faults, failure.Field{Field: "reason", Detail: fault})
	}
	if len(faults) > 0 {
		return ErrInvalid.WithFields(faults...)
	}
	return nil
}

// RefundTx gives back part or all of what is left of an order's payment and
// writes its OrderRefunded event, all or nothing. The order's row lock makes
// refunds queue up, so together they never pass the payment.
func RefundTx(ctx context.Context, tx pgx.Tx, tenantID, id uuid.UUID, params RefundParams, stamp Stamp) (Refund, error) {
	order, err := lock(ctx, tx, tenantID, id)
	if err != nil {
		return Refund{}, err
	}
	stamp = stamp.after(order)
	left := order.TotalAmount - order.RefundedAmount
	switch {
	case order.Status != StatusPaid:
		return Refund{}, ErrNotPaid
	case params.Amount > left:
		return Refund{}, ErrRefundTooLarge.Withf("%d of %d minor units are left, not %d.", left, order.TotalAmount, params.Amount)
	}

	refund := Refund{
		ID:         uuid.Must(uuid.NewV7()),
		OrderID:    id,
		Amount:     params.Amount,
		Taxes:      splitRefund(params.Amount, order.Taxes, order.refunded),
		Reason:     params.Reason,
		RefundedAt: stamp.At,
	}
	rates := db.RefundTaxInsertManyParams{TenantID: tenantID, RefundID: refund.ID}
	for _, tax := range refund.Taxes {
		refund.NetAmount += tax.NetAmount
		refund.TaxAmount += tax.TaxAmount
		rates.TaxRatesPpm = append(rates.TaxRatesPpm, int32(tax.Rate))
		rates.NetMinors = append(rates.NetMinors, tax.NetAmount)
		rates.TaxMinors = append(rates.TaxMinors, tax.TaxAmount)
	}
	err = db.New().RefundInsert(ctx, tx, db.RefundInsertParams{
		TenantID:    tenantID,
		ID:          refund.ID,
		OrderID:     id,
		AmountMinor: refund.Amount,
		NetMinor:    refund.NetAmount,
		TaxMinor:    refund.TaxAmount,
		Reason:      refund.Reason,
		RefundedAt:  refund.RefundedAt,
	})
	if err != nil {
		return Refund{}, fmt.Errorf("insert refund: %w", err)
	}
	if err := db.New().RefundTaxInsertMany(ctx, tx, rates); err != nil {
		return Refund{}, fmt.Errorf("insert refund taxes: %w", err)
	}

	order.RefundedAmount += refund.Amount
	_, err = advance(ctx, tx, order, event.OrderRefunded, &refund, stamp)
	return refund, err
}

// splitRefund says what of a refund is net and tax for each rate.
//
// The amount goes to the rates in proportion to what is left of each, the
// remainder to the largest fractions. Within a rate the tax given back in total
// is the rate's tax times the share given back in total, rounded half up; this
// refund's tax is what that adds to the ones before. So no part is ever
// negative, and the last refund clears net and tax to zero.
func splitRefund(amount int64, taxes, refunded []Tax) []Tax {
	left := make([]int64, len(taxes))
	for i, tax := range taxes {
		left[i] = tax.NetAmount + tax.TaxAmount - refunded[i].NetAmount - refunded[i].TaxAmount
	}

	var parts []Tax
	for i, share := range money.Allocate(amount, left) {
		if share == 0 {
			continue
		}
		gross := taxes[i].NetAmount + taxes[i].TaxAmount
		given := refunded[i].NetAmount + refunded[i].TaxAmount + share
		tax := money.Share(given, taxes[i].TaxAmount, gross) - refunded[i].TaxAmount
		parts = append(parts, Tax{Rate: taxes[i].Rate, NetAmount: share - tax, TaxAmount: tax})
	}
	return parts
}

// advance writes an order's next version and the event that says so.
func advance(ctx context.Context, tx pgx.Tx, order Order, fact event.Type, refund *Refund, stamp Stamp) (Order, error) {
	moved, err := db.New().OrderAdvance(ctx, tx, db.OrderAdvanceParams{
		TenantID:      order.TenantID,
		ID:            order.ID,
		Version:       order.Version,
		Status:        string(order.Status),
		RefundedMinor: order.RefundedAmount,
		UpdatedAt:     stamp.At,
	})
	if err != nil {
		return Order{}, fmt.Errorf("advance order: %w", err)
	}
	if moved != 1 {
		return Order{}, fmt.Errorf("advance order %s: version %d is not its present one, although it is locked", order.ID, order.Version)
	}
	order.Version++
	order.UpdatedAt = stamp.At
	return order, appendEvent(ctx, tx, order, fact, refund, stamp)
}

// Package orders is what a customer does with an order: place it, pay it, cancel
// it, get money back. Each change is a function that joins the caller's
// transaction and writes the new state and its event in it, both or neither.
//
// An order's changes queue up behind its row lock, so its versions count from 1
// without gaps and the sum of refunds never passes what was paid. The functions
// refuse before they write.
package orders

import (
	"encoding/json"
	"time"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/failure"
	"github.com/onceledger/onceledger/internal/money"
)

// What a caller can do about a refusal.
var (
	ErrInvalid              = failure.New(failure.Invalid, "order-invalid", "The order is not well-formed.")
	ErrWithoutAmount        = failure.New(failure.RuleViolated, "order-without-amount", "An order needs a total above zero.")
	ErrNotFound             = failure.New(failure.NotFound, "order-not-found", "There is no such order.")
	ErrAlreadyPaid          = failure.New(failure.Conflict, "order-already-paid", "The order is paid already.")
	ErrCancelled            = failure.New(failure.Conflict, "order-cancelled", "The order is cancelled.")
	ErrNotPaid              = failure.New(failure.Conflict, "order-not-paid", "The order is not paid.")
	ErrPaymentReferenceUsed = failure.New(failure.Conflict, "payment-reference-used", "The payment reference has paid another order.")
	ErrRefundTooLarge       = failure.New(failure.RuleViolated, "refund-too-large", "The refund is more than what is left of the payment.")
)

// Status is where an order stands.
type Status string

// The states of an order. A paid order stays paid, whatever of it is refunded.
const (
	StatusCreated   Status = "created"
	StatusPaid      Status = "paid"
	StatusCancelled Status = "cancelled"
)

// Order is an order's whole state. Amounts are minor units of Currency.
type Order struct {
	TenantID       uuid.UUID
	ID             uuid.UUID
	Version        int64
	Status         Status
	CustomerID     string
	CustomerEmail  string
	Currency       money.Currency
	Lines          []Line
	Taxes          []Tax // ascending by rate
	NetAmount      int64
	TaxAmount      int64
	TotalAmount    int64
	RefundedAmount int64
	Metadata       json.RawMessage
	CreatedAt      time.Time
	UpdatedAt      time.Time
	Payment        *Payment

	refunded []Tax // what of each of Taxes was given back
}

// Line is so many of one thing. NetAmount is Quantity times UnitAmount.
type Line struct {
	SKU         string
	Description string
	Quantity    int64
	UnitAmount  int64
	NetAmount   int64
	TaxRate     money.Rate
}

// Tax is what one tax rate comes to: rounded half up, once for the whole
// document, on the sum of the rate's net amounts.
type Tax struct {
	Rate      money.Rate
	NetAmount int64
	TaxAmount int64
}

// Payment is the one payment of an order, always of its total.
type Payment struct {
	Reference string
	Amount    int64
	PaidAt    time.Time
}

// Refund is money given back, with what of it is net and tax for each rate.
type Refund struct {
	ID         uuid.UUID
	OrderID    uuid.UUID
	Amount     int64
	NetAmount  int64
	TaxAmount  int64
	Taxes      []Tax
	Reason     string
	RefundedAt time.Time
}

// Stamp is when something happens, and in which trace.
type Stamp struct {
	At          time.Time
	Traceparent string
}

// after is the stamp, moved on to the order's last change if that was later: a
// request that waited for the order's lock was stamped before the one it waited
// for was done, and an order's times must not run backwards.
func (s Stamp) after(order Order) Stamp {
	if order.UpdatedAt.After(s.At) {
		s.At = order.UpdatedAt
	}
	return s
}

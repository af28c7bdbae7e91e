package event

import (
	"bytes"
	"encoding/json"
	"time"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/money"
)

// Order is the payload of every order event: the order's whole state after the
// fact, so that a consumer never reads the producer's tables. Amounts are minor
// units of Currency. Payment is there from OrderPaid on, Refund in OrderRefunded
// alone.
type Order struct {
	OrderID        uuid.UUID       `json:"order_id"`
	Version        int64           `json:"version"`
	Status         string          `json:"status"`
	CustomerID     string          `json:"customer_id"`
	CustomerEmail  string          `json:"customer_email"`
	Currency       money.Currency  `json:"currency"`
	Lines          []Line          `json:"lines"`
	Taxes          []Tax           `json:"taxes"`
	NetAmount      int64           `json:"net_amount"`
	TaxAmount      int64           `json:"tax_amount"`
	TotalAmount    int64           `json:"total_amount"`
	RefundedAmount int64           `json:"refunded_amount"`
	Metadata       json.RawMessage `json:"metadata"`
	CreatedAt      time.Time       `json:"created_at"`
	Payment        *Payment        `json:"payment,omitempty"`
	Refund         *Refund         `json:"refund,omitempty"`
}

// Line is one line of an order or invoice.
type Line struct {
	SKU         string     `json:"sku"`
	Description string     `json:"description"`
	Quantity    int64      `json:"quantity"`
	UnitAmount  int64      `json:"unit_amount"`
	NetAmount   int64      `json:"net_amount"`
	TaxRate     money.Rate `json:"tax_rate"`
}

// Tax is what one tax rate comes to in one document.
type Tax struct {
	Rate      money.Rate `json:"rate"`
	NetAmount int64      `json:"net_amount"`
	TaxAmount int64      `json:"tax_amount"`
}

// Payment is the one payment of an order.
type Payment struct {
	Reference string    `json:"reference"`
	Amount    int64     `json:"amount"`
	PaidAt    time.Time `json:"paid_at"`
}

// Refund is money given back. Net and tax per rate were fixed by the API under
// the order's lock; whoever processes them does no rounding.
type Refund struct {
	RefundID   uuid.UUID `json:"refund_id"`
	Amount     int64     `json:"amount"`
	NetAmount  int64     `json:"net_amount"`
	TaxAmount  int64     `json:"tax_amount"`
	Taxes      []Tax     `json:"taxes"`
	Reason     string    `json:"reason"`
	RefundedAt time.Time `json:"refunded_at"`
}

// Invoice is the payload of InvoiceIssued.
type Invoice struct {
	InvoiceID     uuid.UUID      `json:"invoice_id"`
	Number        string         `json:"number"`
	OrderID       uuid.UUID      `json:"order_id"`
	CustomerID    string         `json:"customer_id"`
	CustomerEmail string         `json:"customer_email"`
	Currency      money.Currency `json:"currency"`
	Lines         []Line         `json:"lines"`
	Taxes         []Tax          `json:"taxes"`
	NetAmount     int64          `json:"net_amount"`
	TaxAmount     int64          `json:"tax_amount"`
	TotalAmount   int64          `json:"total_amount"`
	PaidAt        time.Time      `json:"paid_at"`
	IssuedAt      time.Time      `json:"issued_at"`
}

// CreditNote is the payload of CreditNoteIssued.
type CreditNote struct {
	CreditNoteID  uuid.UUID      `json:"credit_note_id"`
	Number        string         `json:"number"`
	InvoiceID     uuid.UUID      `json:"invoice_id"`
	OrderID       uuid.UUID      `json:"order_id"`
	RefundID      uuid.UUID      `json:"refund_id"`
	CustomerID    string         `json:"customer_id"`
	CustomerEmail string         `json:"customer_email"`
	Currency      money.Currency `json:"currency"`
	Taxes         []Tax          `json:"taxes"`
	NetAmount     int64          `json:"net_amount"`
	TaxAmount     int64          `json:"tax_amount"`
	TotalAmount   int64          `json:"total_amount"`
	Reason        string         `json:"reason"`
	RefundedAt    time.Time      `json:"refunded_at"`
	IssuedAt      time.Time      `json:"issued_at"`
}

// Encode writes a payload as JSON, with no characters escaped that need not be.
func Encode(payload any) (json.RawMessage, error) {
	var buffer bytes.Buffer
	encoder := json.NewEncoder(&buffer)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(payload); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(buffer.Bytes(), []byte("\n")), nil
}

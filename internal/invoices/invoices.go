// Package invoices issues the documents of the billing side: one invoice for an
// order's payment, one credit note for each refund.
//
// A document's id is the id of the event that caused it. Its number is the next
// of its tenant's series for the year (UTC) in which it is recorded, without
// gaps: the series is locked from the moment a number is taken to the end of the
// transaction, which makes the billing of one tenant serial. Documents are never
// changed.
package invoices

import (
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/failure"
	"github.com/onceledger/onceledger/internal/money"
)

// ErrNotFound says that there is no such invoice, or not yet.
var ErrNotFound = failure.New(failure.NotFound, "invoice-not-found", "There is no such invoice.")

// Invoice says what a customer paid for. Amounts are minor units of Currency.
type Invoice struct {
	TenantID      uuid.UUID
	ID            uuid.UUID
	OrderID       uuid.UUID
	Year          int
	Number        int64 // counts from 1 within tenant and year
	CustomerID    string
	CustomerEmail string
	Currency      money.Currency
	Lines         []event.Line
	Taxes         []event.Tax
	NetAmount     int64
	TaxAmount     int64
	TotalAmount   int64
	PaidAt        time.Time
	IssuedAt      time.Time
}

// CreditNote says what of an invoice was taken back.
type CreditNote struct {
	TenantID      uuid.UUID
	ID            uuid.UUID
	InvoiceID     uuid.UUID
	OrderID       uuid.UUID
	RefundID      uuid.UUID
	Ordinal       int // counts the invoice's credit notes from 1
	Year          int
	Number        int64
	CustomerID    string // the invoice's; not stored again
	CustomerEmail string
	Currency      money.Currency
	Taxes         []event.Tax
	NetAmount     int64
	TaxAmount     int64
	TotalAmount   int64
	Reason        string
	RefundedAt    time.Time
	IssuedAt      time.Time
}

// FullNumber is the number as it is printed: INV-2026-000042.
func (i Invoice) FullNumber() string { return fmt.Sprintf("INV-%d-%06d", i.Year, i.Number) }

// FullNumber is the number as it is printed: CN-2026-000007.
func (n CreditNote) FullNumber() string { return fmt.Sprintf("CN-%d-%06d", n.Year, n.Number) }

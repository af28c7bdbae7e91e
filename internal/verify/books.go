package verify

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/ledger"
	"github.com/onceledger/onceledger/internal/money"
)

// books is everything that is written about one order, on either side of the
// pipeline, at one moment: what db/queries/verify.sql makes of it. Order is nil
// when other tables name an order that is not there.
type books struct {
	TenantID uuid.UUID `json:"-"`
	OrderID  uuid.UUID `json:"-"`

	Order   *order
	Lines   []event.Line
	Taxes   []event.Tax
	Payment *payment
	Refunds []refund
	Events  []outboxEvent

	Known       *known
	Invoices    []document
	CreditNotes []document `json:"credit_notes"`
	Entries     []entry
	DeadLetters []deadLetter `json:"dead_letters"`
}

type amounts struct{ Net, Tax, Total int64 }

func (a amounts) plus(b amounts) amounts {
	return amounts{a.Net + b.Net, a.Tax + b.Tax, a.Total + b.Total}
}

type order struct {
	amounts
	Version          int64
	Status, Currency string
	Refunded         int64
	Created, Updated time.Time
}

type payment struct {
	Amount   int64
	Currency string
	At       time.Time
}

type refund struct {
	amounts
	ID    uuid.UUID
	At    time.Time
	Taxes []event.Tax
}

// outboxEvent is an event that the outbox still holds. Applied counts the
// consumer's marks for it.
type outboxEvent struct {
	ID      uuid.UUID
	Version int64
	Type    event.Type
	Refund  uuid.UUID
	Applied int64
}

// known is what the billing side knows of the order.
type known struct {
	Version          int64
	Status, Currency string
	Total, Refunded  int64
}

// document is an invoice or a credit note; an invoice has lines, a credit note
// the three fields above them.
type document struct {
	amounts
	ID       uuid.UUID
	Currency string
	Taxes    []event.Tax
	Issued   time.Time

	Invoice, Refund uuid.UUID
	Ordinal         int64
	Lines           []event.Line
}

type entry struct {
	Event    uuid.UUID
	Kind     ledger.Kind
	Currency string
	Reverses uuid.UUID
	Lines    []entryLine
}

type entryLine struct {
	Debit, Credit, Currency string
	Amount                  int64
}

type deadLetter struct {
	Event *uuid.UUID
	Type  *event.Type
}

func fromRow(row db.VerifyBooksRow) (*books, error) {
	b := &books{TenantID: row.TenantID, OrderID: row.OrderID}
	if err := json.Unmarshal(row.Books, b); err != nil {
		return nil, fmt.Errorf("read the books of order %s: %w", row.OrderID, err)
	}
	return b, nil
}

// byRate is net and tax by tax rate. A rate that comes to nothing is left out:
// a document may name it or not.
type byRate map[money.Rate]amounts

func ofTaxes(taxes []event.Tax) byRate {
	rates := make(byRate)
	rates.add(taxes...)
	return rates
}

func (r byRate) add(taxes ...event.Tax) {
	for _, tax := range taxes {
		if tax.NetAmount != 0 || tax.TaxAmount != 0 {
			r[tax.Rate] = r[tax.Rate].plus(amounts{tax.NetAmount, tax.TaxAmount, tax.NetAmount + tax.TaxAmount})
		}
	}
}

func (r byRate) sum() amounts {
	var sum amounts
	for _, part := range r {
		sum = sum.plus(part)
	}
	return sum
}

// recompute is what lines come to: each quantity × unit, the nets summed by
// rate, and the tax rounded once for each rate.
func recompute(lines []event.Line) (byRate, error) {
	nets := make(map[money.Rate]int64)
	for _, line := range lines {
		net, err := money.Multiply(line.Quantity, line.UnitAmount)
		if err != nil {
			return nil, err
		}
		if nets[line.TaxRate], err = money.Add(nets[line.TaxRate], net); err != nil {
			return nil, err
		}
	}
	rates := make(byRate)
	for rate, net := range nets {
		rates.add(event.Tax{Rate: rate, NetAmount: net, TaxAmount: rate.Tax(net)})
	}
	return rates, nil
}

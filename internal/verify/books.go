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
	Lines   []line
	Taxes   []taxRow
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

type order struct {
	amounts
	Version          int64
	Status, Currency string
	Refunded         int64
	Created, Updated time.Time
}

type line struct {
	Quantity, Unit int64
	PPM            int32
}

type taxRow struct {
	PPM      int32
	Net, Tax int64
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
	Taxes []taxRow
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
	Lines           []line
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

// byRate is net and tax by rate in millionths. Rates that come to nothing are
// left out: a document may name them or not.
type byRate map[int32]amounts

func (r byRate) add(ppm int32, net, tax int64) {
	if net != 0 || tax != 0 {
		was := r[ppm]
		r[ppm] = amounts{Net: was.Net + net, Tax: was.Tax + tax, Total: was.Total + net + tax}
	}
}

func ofRows(rows []taxRow) byRate {
	rates := make(byRate)
	for _, row := range rows {
		rates.add(row.PPM, row.Net, row.Tax)
	}
	return rates
}

func ofTaxes(taxes []event.Tax) byRate {
	rates := make(byRate)
	for _, tax := range taxes {
		rates.add(int32(tax.Rate), tax.NetAmount, tax.TaxAmount)
	}
	return rates
}

func (r byRate) sum() amounts {
	var sum amounts
	for _, part := range r {
		sum.Net += part.Net
		sum.Tax += part.Tax
		sum.Total += part.Total
	}
	return sum
}

// recompute is what lines come to: each quantity × unit, the nets summed by
// rate, and the tax rounded once for each rate.
func recompute(lines []line) (byRate, error) {
	nets := make(map[int32]int64)
	for _, line := range lines {
		net, err := money.Multiply(line.Quantity, line.Unit)
		if err != nil {
			return nil, err
		}
		if nets[line.PPM], err = money.Add(nets[line.PPM], net); err != nil {
			return nil, err
		}
	}
	rates := make(byRate)
	for ppm, net := range nets {
		rates.add(ppm, net, money.Rate(ppm).Tax(net))
	}
	return rates, nil
}

// Package factory makes order events whose sums are right, as the raw material
// of tests and benchmarks. It does no I/O.
package factory

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/money"
	"github.com/onceledger/onceledger/internal/orders"
)

// Order is an order's life. Each method is the next thing that happens to it and
// returns the event that says so, as the API would write it. What cannot happen
// is a mistake in the test, and panics.
//
// The zero value with a TenantID is two books for 29.75 EUR.
type Order struct {
	TenantID uuid.UUID
	Currency string              // "" is EUR
	Lines    []orders.LineParams // nil is two books at 12.50 with 19 % tax
	Now      func() time.Time    // when the next thing happens; nil is time.Now

	State event.Order // after the last event

	refunded []event.Tax // what of each of State.Taxes was given back
}

// Created is the order's first event.
func (o *Order) Created() event.Event {
	currency, lines := o.Currency, o.Lines
	if currency == "" {
		currency = "EUR"
	}
	if lines == nil {
		lines = []orders.LineParams{{SKU: "book", Description: "A book", Quantity: 2, UnitAmount: 1250, TaxRate: 190_000}}
	}
	priced, err := orders.Price(orders.PlaceParams{
		CustomerID: "c-42", CustomerEmail: "a@example.com", Currency: currency, Lines: lines,
	})
	if err != nil {
		panic(err)
	}
	o.State = event.Order{
		OrderID:       ID(o.now()),
		CustomerID:    priced.CustomerID,
		CustomerEmail: priced.CustomerEmail,
		Currency:      priced.Currency,
		NetAmount:     priced.NetAmount,
		TaxAmount:     priced.TaxAmount,
		TotalAmount:   priced.TotalAmount,
		Metadata:      priced.Metadata,
		CreatedAt:     o.now(),
	}
	for _, line := range priced.Lines {
		o.State.Lines = append(o.State.Lines, event.Line(line))
	}
	for _, tax := range priced.Taxes {
		o.State.Taxes = append(o.State.Taxes, event.Tax(tax))
	}
	o.refunded = make([]event.Tax, len(o.State.Taxes))
	o.State.Status = string(orders.StatusCreated)
	return o.happened(event.OrderCreated)
}

// Paid pays the order in full. An order that is not there yet is created first.
func (o *Order) Paid() event.Event {
	if o.State.Version == 0 {
		o.Created()
	}
	o.mustBe(orders.StatusCreated)
	o.State.Status = string(orders.StatusPaid)
	o.State.Payment = &event.Payment{
		Reference: "pi-" + o.State.OrderID.String(), Amount: o.State.TotalAmount, PaidAt: o.now(),
	}
	return o.happened(event.OrderPaid)
}

// Cancelled cancels the order.
func (o *Order) Cancelled() event.Event {
	o.mustBe(orders.StatusCreated)
	o.State.Status = string(orders.StatusCancelled)
	return o.happened(event.OrderCancelled)
}

// Refunded gives back an amount of what is left, split over net and tax of each
// rate as the API does it.
func (o *Order) Refunded(amount int64) event.Event {
	o.mustBe(orders.StatusPaid)
	if amount < 1 || amount > o.Left() {
		panic(fmt.Sprintf("%d of %d cannot be refunded", amount, o.Left()))
	}
	refund := event.Refund{RefundID: ID(o.now()), Amount: amount, Reason: "damaged", RefundedAt: o.now()}
	left := make([]int64, len(o.State.Taxes))
	for i, tax := range o.State.Taxes {
		left[i] = tax.NetAmount + tax.TaxAmount - o.refunded[i].NetAmount - o.refunded[i].TaxAmount
	}
	for i, share := range money.Allocate(amount, left) {
		if share == 0 {
			continue
		}
		whole, given := o.State.Taxes[i], &o.refunded[i]
		tax := money.Share(given.NetAmount+given.TaxAmount+share, whole.TaxAmount, whole.NetAmount+whole.TaxAmount) - given.TaxAmount
		part := event.Tax{Rate: whole.Rate, NetAmount: share - tax, TaxAmount: tax}
		given.NetAmount += part.NetAmount
		given.TaxAmount += part.TaxAmount
		refund.NetAmount += part.NetAmount
		refund.TaxAmount += part.TaxAmount
		refund.Taxes = append(refund.Taxes, part)
	}
	o.State.RefundedAmount += amount
	o.State.Refund = &refund
	return o.happened(event.OrderRefunded)
}

// Left is what can still be refunded of a paid order.
func (o *Order) Left() int64 { return o.State.TotalAmount - o.State.RefundedAmount }

func (o *Order) mustBe(status orders.Status) {
	if o.State.Status != string(status) {
		panic(fmt.Sprintf("order is %q, not %q", o.State.Status, status))
	}
}

func (o *Order) now() time.Time {
	if o.Now == nil {
		return time.Now().UTC().Truncate(time.Microsecond)
	}
	return o.Now().UTC().Truncate(time.Microsecond)
}

func (o *Order) happened(fact event.Type) event.Event {
	o.State.Version++
	return event.Event{
		ID:               ID(o.now()),
		TenantID:         o.TenantID,
		AggregateType:    event.AggregateOrder,
		AggregateID:      o.State.OrderID,
		AggregateVersion: o.State.Version,
		Type:             fact,
		SchemaVersion:    event.SchemaVersion,
		OccurredAt:       o.now(),
		Payload:          encode(o.State),
	}
}

// Altered is the event with another payload, and the same id.
func Altered(e event.Event, change func(state *event.Order)) event.Event {
	var state event.Order
	if err := json.Unmarshal(e.Payload, &state); err != nil {
		panic(err)
	}
	change(&state)
	e.Payload = encode(state)
	return e
}

func encode(state event.Order) json.RawMessage {
	payload, err := event.Encode(state)
	if err != nil {
		panic(err)
	}
	return payload
}

var made atomic.Uint32

// ID is a new UUIDv7 that says it was made at a moment. Those of one millisecond
// ascend.
func ID(at time.Time) uuid.UUID {
	var id uuid.UUID
	_, _ = rand.Read(id[10:])
	// 48 bits of milliseconds, then 4 of version, 12 of counter, 2 of variant, 14 of counter.
	binary.BigEndian.PutUint64(id[:], uint64(at.UnixMilli())<<16)
	count := made.Add(1)
	binary.BigEndian.PutUint16(id[6:], 7<<12|uint16(count>>14&0xfff))
	binary.BigEndian.PutUint16(id[8:], 2<<14|uint16(count&0x3fff))
	return id
}

// Partition is one partition of a topic that is being written: it knows its next
// offset.
type Partition struct {
	Number int32
	Next   int64
}

// Append is the records of events as the partition then holds them.
func (p *Partition) Append(events ...event.Event) []event.Record {
	records := make([]event.Record, len(events))
	for i, e := range events {
		records[i] = e.Record()
		records[i].Time = e.OccurredAt
	}
	return p.AppendRecords(records...)
}

// AppendRecords is Append for records that need not be events.
func (p *Partition) AppendRecords(records ...event.Record) []event.Record {
	for i := range records {
		records[i].Partition, records[i].Offset = p.Number, p.Next
		p.Next++
	}
	return records
}

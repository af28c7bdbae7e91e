package verify

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/ledger"
	"github.com/onceledger/onceledger/internal/money"
)

// clockMargin is how far an event's id may be from the time of its change: with
// a clock further off the API is not ready.
const clockMargin = 5 * time.Minute

// examination is one order's books, compared with each other. It does no I/O.
type examination struct {
	*books

	found   []Finding
	waiting []*change // effects are missing; if they are lost is not for one look to say
	due     amounts   // what the ledger must hold for the facts that have an entry

	// What no fact has accounted for so far; in the end nothing.
	invoices, creditNotes []document
	entries               []entry
	events                []outboxEvent
}

// change is one version of an order: a fact, its event and its effects.
type change struct {
	Type    event.Type
	Version int64
	At      time.Time
	Refund  refund
	Event   *outboxEvent // nil when it is not in the outbox
	Missing []string
}

// examine recomputes an order from its lines and compares everything that is
// written about it with that. What happened after horizon must still be in the
// outbox.
func examine(b *books, horizon time.Time) *examination {
	x := &examination{books: b, invoices: b.Invoices, creditNotes: b.CreditNotes, entries: b.Entries, events: b.Events}
	horizon = horizon.Add(clockMargin)
	if x.Order != nil {
		rates, err := recompute(x.Lines)
		if err != nil {
			x.add(WrongAmount, uuid.Nil, "the order's lines cannot be summed: %v", err)
		}
		x.compareOrder(rates)
		changes := x.changes(horizon)
		for _, c := range changes {
			switch c.Type {
			case event.OrderPaid:
				x.comparePayment(c, rates)
			case event.OrderRefunded:
				x.compareRefund(c)
			default: // has no effect but on order_billing
			}
		}
		x.compareKnown(changes)
	}
	x.compareBillingEvents(horizon)
	x.compareRest()
	return x
}

// compareOrder is about what the API wrote: sums, payment and refunds.
func (x *examination) compareOrder(rates byRate) {
	sum := rates.sum()
	if x.Order.amounts != sum || !maps.Equal(ofTaxes(x.Taxes), rates) {
		x.add(WrongAmount, uuid.Nil, "the order says %s, its lines come to %s", x.show(x.Order.amounts), x.show(sum))
	}
	if paid := x.Payment != nil; paid != (x.Order.Status == "paid") {
		x.add(WrongAmount, uuid.Nil, "the order's status is %s; that it has a payment is %t", x.Order.Status, paid)
	}
	if x.Payment != nil && (x.Payment.Amount != sum.Total || x.Payment.Currency != x.Order.Currency) {
		x.add(WrongAmount, uuid.Nil, "%s was paid, the order's lines come to %s",
			format(x.Payment.Amount, x.Payment.Currency), x.show(sum))
	}

	var refunded int64
	given := make(byRate)
	for _, refund := range x.Refunds {
		refunded += refund.Total
		if ofTaxes(refund.Taxes).sum() != refund.amounts {
			x.add(WrongAmount, uuid.Nil, "refund %s of %s is not what its rates come to", refund.ID, x.show(refund.amounts))
		}
		given.add(refund.Taxes...)
	}
	if refunded != x.Order.Refunded {
		x.add(WrongAmount, uuid.Nil, "the order says that %s was refunded, its refunds come to %s",
			format(x.Order.Refunded, x.Order.Currency), format(refunded, x.Order.Currency))
	}
	for rate, part := range given {
		// All refunds together give back the same share of net and of tax.
		all := rates[rate]
		if part.Total > all.Total || part.Tax != money.Share(part.Total, all.Tax, all.Total) {
			x.add(WrongAmount, uuid.Nil, "at the rate %s, %s was refunded of %s", rate, x.show(part), x.show(all))
		}
	}
}

// changes are the order's changes by version, each with its event.
func (x *examination) changes(horizon time.Time) []*change {
	changes := []*change{{Type: event.OrderCreated, At: x.Order.Created}}
	if x.Payment != nil {
		changes = append(changes, &change{Type: event.OrderPaid, At: x.Payment.At})
	}
	if x.Order.Status == "cancelled" {
		changes = append(changes, &change{Type: event.OrderCancelled, At: x.Order.Updated})
	}
	for _, refund := range x.Refunds {
		changes = append(changes, &change{Type: event.OrderRefunded, At: refund.At, Refund: refund})
	}

	held := make(map[int64]bool)
	for _, c := range changes {
		c.Event = x.takeEvent(c.Type, c.At.After(horizon), func(e outboxEvent) bool { return e.Refund == c.Refund.ID })
		if c.Event != nil {
			c.Version = c.Event.Version
			held[c.Version] = true
		}
	}
	next := int64(1) // an event that has left the outbox is older than those in it
	for _, c := range changes {
		if c.Event == nil {
			for held[next] {
				next++
			}
			c.Version = next
			next++
		}
	}
	slices.SortStableFunc(changes, func(a, b *change) int { return cmp.Compare(a.Version, b.Version) })

	for i, c := range changes {
		if c.Version != int64(i)+1 {
			x.add(VersionGap, c.id(), "change %d of the order, %s, has version %d", i+1, c.Type, c.Version)
			break
		}
	}
	if x.Order.Version != int64(len(changes)) {
		x.add(VersionGap, uuid.Nil, "the order has version %d after %d changes", x.Order.Version, len(changes))
	}
	return changes
}

// takeEvent takes the event that a change must have: one, or none where it may
// have left the outbox.
func (x *examination) takeEvent(typ event.Type, mustBeHeld bool, match func(outboxEvent) bool) *outboxEvent {
	events := take(&x.events, func(e outboxEvent) bool { return e.Type == typ && match(e) })
	if len(events) == 0 {
		if mustBeHeld {
			x.add(MissingEvent, uuid.Nil, "the event %s is not in the outbox", typ)
		}
		return nil
	}
	for _, extra := range events[1:] {
		x.add(Duplicated, extra.ID, "a further event %s for the same change", typ)
	}
	return &events[0]
}

func (x *examination) comparePayment(c *change, rates byRate) {
	invoices := take(&x.invoices, func(document) bool { return true })
	entries := take(&x.entries, func(e entry) bool { return e.Kind == ledger.KindPayment })
	x.compareEffects(c, "invoice", rates, invoices, entries)
	for _, invoice := range invoices {
		if lines, err := recompute(invoice.Lines); err != nil || !maps.Equal(lines, rates) {
			x.add(WrongAmount, invoice.ID, "the invoice's lines are not the order's")
		}
	}
	if len(entries) > 0 {
		x.due = x.due.plus(rates.sum())
	}
}

func (x *examination) compareRefund(c *change) {
	notes := take(&x.creditNotes, func(d document) bool { return d.Refund == c.Refund.ID })
	entries := take(&x.entries, func(e entry) bool {
		return e.Kind == ledger.KindRefund && (e.Event == c.id() ||
			slices.ContainsFunc(notes, func(d document) bool { return d.ID == e.Event }))
	})
	x.compareEffects(c, "credit note", ofTaxes(c.Refund.Taxes), notes, entries)
	for _, note := range notes {
		if len(x.Invoices) > 0 && note.Invoice != x.Invoices[0].ID {
			x.add(Phantom, note.ID, "the credit note is for invoice %s, not for the order's", note.Invoice)
		}
	}
	for _, e := range entries {
		if len(x.Invoices) > 0 && e.Reverses != x.Invoices[0].ID {
			x.add(Unbalanced, e.Event, "the entry reverses %s, not the order's payment", e.Reverses)
		}
	}
	if len(entries) > 0 {
		x.due = x.due.plus(amounts{-c.Refund.Net, -c.Refund.Tax, -c.Refund.Total})
	}
}

// compareEffects is about the document and the ledger entry that a payment or
// a refund leads to: one of each, made from its event, over its amounts.
func (x *examination) compareEffects(c *change, what string, want byRate, documents []document, entries []entry) {
	id, sum := c.id(), want.sum()
	if len(documents) == 0 {
		c.Missing = append(c.Missing, what)
	}
	for i, d := range documents {
		if i > 0 {
			x.add(Duplicated, d.ID, "a further %s for the same %s", what, c.Type)
			continue
		}
		if id == uuid.Nil {
			id = d.ID
		}
		if d.ID != id {
			x.add(Phantom, d.ID, "the %s is not from %s, which is event %s", what, c.Type, id)
		}
		if d.amounts != sum || d.Currency != x.Order.Currency || !maps.Equal(ofTaxes(d.Taxes), want) {
			x.add(WrongAmount, d.ID, "the %s says %s, the order %s", what, show(d.amounts, d.Currency), x.show(sum))
		}
		sum = d.amounts
	}
	if len(entries) == 0 {
		c.Missing = append(c.Missing, "ledger entry")
	}
	for i, e := range entries {
		if i > 0 {
			x.add(Duplicated, e.Event, "a further ledger entry for the same %s", c.Type)
			continue
		}
		if e.Event != id && id != uuid.Nil {
			x.add(Phantom, e.Event, "the ledger entry is not from %s, which is event %s", c.Type, id)
		}
		want, got := postings(c.Type, sum, x.Order.Currency), e.postings()
		if len(e.Lines) > 0 && (!maps.Equal(want, got) || e.Currency != x.Order.Currency) {
			x.add(Unbalanced, e.Event, "the ledger entry moves %s, the %s says %s", showPostings(got), what, showPostings(want))
		}
	}
	if c.Event != nil && c.Event.Applied > 1 {
		x.add(Duplicated, id, "%s is marked as applied %d times", c.Type, c.Event.Applied)
	}
	if c.Event != nil && c.Event.Applied == 0 && len(documents)+len(entries) > 0 {
		x.add(Phantom, id, "%s has effects and is not marked as applied", c.Type)
	}
}

// compareKnown is about what the billing side knows of the order.
func (x *examination) compareKnown(changes []*change) {
	k := x.Known
	for _, c := range changes {
		if k == nil || k.Version < c.Version {
			c.Missing = append(c.Missing, fmt.Sprintf("version %d in order_billing", c.Version))
		}
		if len(c.Missing) > 0 {
			x.waiting = append(x.waiting, c)
		}
	}
	switch o := x.Order; {
	case k == nil:
	case k.Version > o.Version:
		x.add(VersionGap, uuid.Nil, "order_billing has version %d, the order is at %d", k.Version, o.Version)
	case k.Version == o.Version && (k.Status != o.Status || k.Currency != o.Currency || k.Total != o.Total || k.Refunded != o.Refunded):
		x.add(WrongAmount, uuid.Nil, "order_billing says %s, %s and %s refunded, the order %s, %s and %s",
			k.Status, format(k.Total, k.Currency), format(k.Refunded, k.Currency),
			o.Status, format(o.Total, o.Currency), format(o.Refunded, o.Currency))
	}
}

// compareBillingEvents is about what the billing side tells others: an event
// for each document, numbered by the documents of the order.
func (x *examination) compareBillingEvents(horizon time.Time) {
	issued := func(typ event.Type, version int64, d document) {
		x.takeEvent(typ, d.Issued.After(horizon), func(e outboxEvent) bool { return e.Version == version })
	}
	if len(x.Invoices) > 0 {
		issued(event.InvoiceIssued, 1, x.Invoices[0])
	}
	for i, note := range x.CreditNotes {
		if note.Ordinal != int64(i)+1 {
			x.add(VersionGap, note.ID, "credit note %d of the order has the ordinal %d", i+1, note.Ordinal)
		}
		issued(event.CreditNoteIssued, 1+note.Ordinal, note)
	}
}

// compareRest names what no fact has accounted for.
func (x *examination) compareRest() {
	for _, e := range x.Entries {
		if len(e.Lines) == 0 {
			x.add(Unbalanced, e.Event, "the ledger entry has no lines")
		}
	}
	for _, d := range x.invoices {
		x.add(Phantom, d.ID, "an invoice over %s without a payment", show(d.amounts, d.Currency))
	}
	for _, d := range x.creditNotes {
		x.add(Phantom, d.ID, "a credit note over %s without a refund", show(d.amounts, d.Currency))
	}
	for _, e := range x.entries {
		x.add(Phantom, e.Event, "a ledger entry of kind %s without a %s", e.Kind, e.Kind)
	}
	for _, e := range x.events {
		x.add(Phantom, e.ID, "an event %s, version %d, without such a change", e.Type, e.Version)
	}
	if x.Order == nil && x.Known != nil {
		x.add(Phantom, uuid.Nil, "order_billing knows an order that does not exist")
	}
}

// deadLettered tells whether the change's event waits in an open dead letter.
func (x *examination) deadLettered(c *change) bool {
	return slices.ContainsFunc(x.DeadLetters, func(d deadLetter) bool {
		if c.Event != nil && d.Event != nil {
			return *d.Event == c.Event.ID
		}
		return d.Type == nil || *d.Type == c.Type
	})
}

// judge tells which of the missing effects are lost or held by a dead letter,
// and how many changes are in flight. passed says that the pipeline is past the order's events up to
// version; it is past those too that the consumer marked or went beyond.
func (x *examination) judge(passed bool, version int64) (lost []Finding, inFlight int64) {
	for _, c := range x.waiting {
		marked := c.Event != nil && c.Event.Applied > 0
		beyond := x.Known != nil && x.Known.Version >= c.Version
		switch {
		case x.deadLettered(c):
			lost = append(lost, x.finding(Held, c.id(), "%s has led to no %s: it waits in a dead letter", c.Type, strings.Join(c.Missing, ", no ")))
		case marked, beyond, passed && c.Version <= version:
			lost = append(lost, x.finding(Lost, c.id(), "%s has led to no %s", c.Type, strings.Join(c.Missing, ", no ")))
		default:
			inFlight++
		}
	}
	return lost, inFlight
}

func (x *examination) add(kind Kind, eventID uuid.UUID, detail string, args ...any) {
	x.found = append(x.found, x.finding(kind, eventID, detail, args...))
}

func (x *examination) finding(kind Kind, eventID uuid.UUID, detail string, args ...any) Finding {
	return Finding{Kind: kind, TenantID: x.TenantID, OrderID: x.OrderID, EventID: eventID, Detail: fmt.Sprintf(detail, args...)}
}

// version is how far the order is; 0 if there is none.
func (x *examination) version() int64 {
	if x.Order == nil {
		return 0
	}
	return x.Order.Version
}

func (x *examination) show(a amounts) string { return show(a, x.Order.Currency) }

func (c *change) id() uuid.UUID {
	if c.Event == nil {
		return uuid.Nil
	}
	return c.Event.ID
}

// posting is an entryLine without its amount.
type posting struct{ debit, credit, currency string }

// postings is what a payment or a refund moves.
func postings(typ event.Type, a amounts, currency string) map[posting]int64 {
	moved := make(map[posting]int64)
	for account, amount := range map[string]int64{ledger.Revenue: a.Net, ledger.TaxPayable: a.Tax} {
		p := posting{ledger.Cash, account, currency}
		if typ == event.OrderRefunded {
			p = posting{account, ledger.Cash, currency}
		}
		if amount != 0 {
			moved[p] = amount
		}
	}
	return moved
}

func (e entry) postings() map[posting]int64 {
	moved := make(map[posting]int64)
	for _, line := range e.Lines {
		moved[posting{line.Debit, line.Credit, line.Currency}] += line.Amount
	}
	return moved
}

func showPostings(moved map[posting]int64) string {
	var texts []string
	for p, amount := range moved {
		texts = append(texts, fmt.Sprintf("%s from %s to %s", format(amount, p.currency), p.credit, p.debit))
	}
	slices.Sort(texts)
	return strings.Join(texts, " and ")
}

// take moves what matches out of *from.
func take[T any](from *[]T, match func(T) bool) []T {
	var taken, left []T
	for _, element := range *from {
		if match(element) {
			taken = append(taken, element)
		} else {
			left = append(left, element)
		}
	}
	*from = left
	return taken
}

package prove

import (
	"fmt"
	"maps"
	"math/big"
	"slices"

	"github.com/onceledger/onceledger/internal/event"
)

// evidence is all that the account is made of.
type evidence struct {
	known    *known
	tenants  []string // their ids, in the known's order
	books    *books
	topics   map[string]*topicSeen
	balances map[account]*big.Int // what the topic ledger.balances says; nil if it was not asked
	answered map[account]int64    // what the API says of an account; nil likewise
	lag      map[string]int64     // by consumer group
}

// Flow is one kind of request on its way through the service: what was asked for,
// and how much of it there is at each station.
type Flow struct {
	Attempted    int `json:"attempted"`
	Acknowledged int `json:"acknowledged"`
	Committed    int `json:"committed"`
	Emitted      int `json:"emitted"`
	Applied      int `json:"applied"`
	Posted       int `json:"posted"` // entries in the ledger; orders and cancellations have none
}

// Conservation is the account: what went in, and what came out.
type Conservation struct {
	Orders        Flow `json:"orders"`
	Payments      Flow `json:"payments"`
	Refunds       Flow `json:"refunds"`
	Cancellations Flow `json:"cancellations"`

	Requests  int `json:"requests"` // of all kinds, reading too
	Refused   int `json:"refused"`  // with good reason: paid already, too much given back
	Unknown   int `json:"unknown"`  // sent, and nobody knew what became of it
	HadDone   int `json:"unknown_had_been_done"`
	HadNot    int `json:"unknown_had_not_been_done"`
	WasRefuse int `json:"unknown_was_refused"`
	Unsolved  int `json:"unknown_unresolved"`

	Events      int   `json:"events"`     // of orders and of billing, in the outbox
	Records     int64 `json:"records"`    // on the topics
	Again       int64 `json:"sent_again"` // of these, beyond the first of each event
	Invoices    int   `json:"invoices"`
	CreditNotes int   `json:"credit_notes"`
	DeadLetters int   `json:"dead_letters"`     // that had to be
	Histories   int   `json:"histories"`        // of orders, found linearizable
	Answers     int   `json:"answers_compared"` // of requests that were sent once more at the end
}

// auditor compares, and notes what does not fit.
type auditor struct {
	evidence
	violations []Violation
	byOrder    map[string][]bookEvent // the outbox's events of orders
	byID       map[string]bookEvent
	tenant     map[string]int    // by id
	refundBy   map[string]string // the refund that an event is of
}

// audit holds against each other what the clients know, what is in the tables and
// what is on the topics. Nothing may be under way.
func audit(e evidence) (Conservation, []Violation) {
	e.known.mutex.Lock()
	defer e.known.mutex.Unlock()
	a := &auditor{
		evidence: e, byOrder: make(map[string][]bookEvent), byID: make(map[string]bookEvent), tenant: make(map[string]int),
		refundBy: make(map[string]string),
	}
	for i, id := range e.tenants {
		a.tenant[id] = i
	}
	for _, e := range a.books.outbox {
		a.byID[e.ID] = e
		if e.AggregateType == event.AggregateOrder {
			a.byOrder[e.Aggregate] = append(a.byOrder[e.Aggregate], e)
		}
	}
	a.requests()
	a.orders()
	a.outbox()
	a.records()
	a.applied()
	a.documents()
	a.contents()
	a.ledger()
	a.sums()
	a.letters()
	a.lags()
	return a.conservation(), append(slices.Clone(e.known.violations), a.violations...)
}

func (a *auditor) violate(v Violation, format string, args ...any) {
	v.Detail = fmt.Sprintf(format, args...)
	a.violations = append(a.violations, v)
}

// requests looks for those that were never answered.
func (a *auditor) requests() {
	for id, o := range a.known.open {
		a.violate(Violation{Invariant: "I10", Kind: "unresolved", Request: id, Key: o.request.Key, Order: o.request.Order},
			"%s %s (request %d, key %s) has no final answer after %d attempts", o.request.Method, o.request.Path, id, o.request.Key, o.attempts)
	}
}

// orders holds the tables against what the clients were answered.
func (a *auditor) orders() {
	placing := 0 // requests that may have made an order that nobody knows
	for _, o := range a.known.open {
		if o.request.Action == actPlace {
			placing++
		}
	}
	refunds := make(map[string]string) // the order of each that was answered
	for id, known := range a.known.orders {
		at := Violation{Order: id}
		stored, ok := a.books.orders[id]
		if !ok {
			at.Invariant, at.Kind = "I10", "acknowledged and not there"
			at.Key, at.Request = known.groups[0].ops[0].request.Key, known.groups[0].ops[0].id
			a.violate(at, "order %s was answered with 201 (request %d, key %s) and is not in the database", id, at.Request, at.Key)
			continue
		}
		if tenant, ours := a.tenant[stored.Tenant]; !ours || tenant != known.tenant {
			at.Invariant, at.Kind = "I9", "another tenant's"
			a.violate(at, "order %s was placed by tenant %s and belongs to %s", id, a.tenants[known.tenant], stored.Tenant)
		}
		p := known.placed
		if stored.Net != p.Net || stored.Tax != p.Tax || stored.Total != p.Total || stored.Currency != p.Currency ||
			stored.Customer != p.Customer || stored.Email != p.Email || stored.Lines != int64(known.asked.Count) || stored.LinesNet != p.Net {
			at.Invariant, at.Kind = "I4", "wrong amount"
			a.violate(at, "order %s was answered as %d + %d = %d %s in %d lines, and is stored as %d + %d = %d %s in %d lines of %d",
				id, p.Net, p.Tax, p.Total, p.Currency, known.asked.Count, stored.Net, stored.Tax, stored.Total, stored.Currency, stored.Lines, stored.LinesNet)
		}
		w := known.wanted()
		for refund, answered := range w.refunds {
			if of, twice := refunds[refund]; twice {
				a.violate(Violation{Invariant: "I7", Kind: "shared refund", Order: id}, "refund %s was answered of order %s and of order %s", refund, of, id)
			}
			refunds[refund] = id
			r, ok := a.books.refunds[refund]
			switch {
			case !ok:
				a.violate(Violation{Invariant: "I10", Kind: "acknowledged and not there", Order: id},
					"refund %s of order %s was answered with 201 and is not in the database", refund, id)
			case r.Order != id || r.Amount != answered.Amount || r.Net != answered.Net || r.Tax != answered.Tax:
				a.violate(Violation{Invariant: "I4", Kind: "wrong amount", Order: id},
					"refund %s of order %s was answered as %d + %d = %d, and is stored as %d + %d = %d of order %s",
					refund, id, answered.Net, answered.Tax, answered.Amount, r.Net, r.Tax, r.Amount, r.Order)
			}
		}
		a.state(known, w, stored)
	}
	for id, stored := range a.books.orders {
		if a.known.orders[id] == nil {
			if placing > 0 {
				placing--
				continue
			}
			a.violate(Violation{Invariant: "I7", Kind: "order that nobody was answered", Order: id},
				"order %s of tenant %s is in the database, and no client was told of it: a request was done twice, or under another key", id, stored.Tenant)
		}
	}
	for refund, stored := range a.books.refunds {
		known := a.known.orders[stored.Order]
		if _, ok := refunds[refund]; !ok && (known == nil || known.wanted().certain) {
			a.violate(Violation{Invariant: "I7", Kind: "refund that nobody was answered", Order: stored.Order},
				"refund %s of order %s is in the database, and no client was told of it", refund, stored.Order)
		}
	}
}

// state holds one order against what became of the requests about it.
func (a *auditor) state(known *knownOrder, w wanted, stored bookOrder) {
	id := known.id
	if w.certain && (stored.Status != w.status || stored.Version != w.version || stored.Refunded != w.refunded) {
		a.violate(Violation{Invariant: "I10", Kind: "not as answered", Order: id},
			"order %s must be %s, version %d, %d given back, by what was answered, and is %s, version %d, %d given back",
			id, w.status, w.version, w.refunded, stored.Status, stored.Version, stored.Refunded)
	}
	payment, paid := a.books.payments[id]
	switch {
	case paid != (stored.Status == "paid"):
		a.violate(Violation{Invariant: "I4", Kind: "payment", Order: id}, "order %s is %s, and has a payment: %t", id, stored.Status, paid)
	case paid && (payment.Amount != stored.Total || payment.Currency != stored.Currency || w.reference != "" && payment.Reference != w.reference):
		a.violate(Violation{Invariant: "I4", Kind: "payment", Order: id}, "order %s of %d %s, answered with reference %q, has a payment of %d %s with %q",
			id, stored.Total, stored.Currency, w.reference, payment.Amount, payment.Currency, payment.Reference)
	}
}

// refundsOf counts an order's refunds.
func (a *auditor) refundsOf() (count map[string]int, sum map[string]int64) {
	count, sum = make(map[string]int), make(map[string]int64)
	for _, r := range a.books.refunds {
		count[r.Order]++
		sum[r.Order] += r.Amount
	}
	return count, sum
}

// outbox requires each order's events: one for each version, of the types that
// the order's state asks for, and nothing else.
func (a *auditor) outbox() {
	refunds, given := a.refundsOf()
	for id, stored := range a.books.orders {
		want := map[string]int{string(event.OrderCreated): 1}
		switch stored.Status {
		case "paid":
			want[string(event.OrderPaid)] = 1
		case "cancelled":
			want[string(event.OrderCancelled)] = 1
		}
		if refunds[id] > 0 {
			want[string(event.OrderRefunded)] = refunds[id]
		}
		if given[id] != stored.Refunded {
			a.violate(Violation{Invariant: "I4", Kind: "refunds", Order: id}, "order %s has %d given back, and its refunds come to %d", id, stored.Refunded, given[id])
		}
		got := make(map[string]int)
		versions := make(map[int64]string)
		for _, e := range a.byOrder[id] {
			got[e.Type]++
			if other, twice := versions[e.Version]; twice {
				a.violate(Violation{Invariant: "I2", Kind: "two events of a version", Order: id, Events: []string{other, e.ID}},
					"version %d of order %s has the events %s and %s", e.Version, id, other, e.ID)
			}
			versions[e.Version] = e.ID
		}
		for version := int64(1); version <= stored.Version; version++ {
			if versions[version] == "" {
				a.violate(Violation{Invariant: "I1", Kind: "no event", Order: id}, "version %d of order %s is committed, and has no event in the outbox", version, id)
			}
		}
		if !maps.Equal(want, got) {
			a.violate(Violation{Invariant: "I1", Kind: "wrong events", Order: id}, "order %s is %s with %d refunds, and has the events %v", id, stored.Status, refunds[id], got)
		}
	}
	for id, events := range a.byOrder {
		if _, ok := a.books.orders[id]; !ok {
			a.violate(Violation{Invariant: "I3", Kind: "event of no order", Order: id, Events: []string{events[0].ID}},
				"event %s (%s) is of order %s, which is not in the database", events[0].ID, events[0].Type, id)
		}
	}
}

// records holds the topics against the outbox.
func (a *auditor) records() {
	for _, topic := range []string{event.OrderEvents, event.BillingEvents} {
		seen := a.topics[topic]
		if seen == nil {
			seen = &topicSeen{}
		}
		a.violations = append(a.violations, seen.faults...)
		for _, e := range a.books.outbox {
			if e.topic() != topic {
				continue
			}
			first := seen.first[e.ID]
			at := Violation{Order: e.Aggregate, Events: []string{e.ID}}
			switch {
			case first == nil && a.known.remade[topic][e.ID]: // was read before the topic was made anew
			case first == nil:
				at.Invariant, at.Kind = "I1", "not on the topic"
				a.violate(at, "event %s (%s, version %d of %s) is committed and is not on %s", e.ID, e.Type, e.Version, e.Aggregate, topic)
			case first.aggregate != e.Aggregate || first.kind != e.Type || first.version != e.Version || first.tenant != e.Tenant || first.value != e.Payload || first.occurred != e.Occurred:
				at.Invariant, at.Kind = "I2", "two contents"
				a.violate(at, "event %s is %s, version %d of %s, of tenant %s, of %s in the outbox, and at %v it is %s, version %d of %s, of tenant %s, of %s (the same payload: %t)",
					e.ID, e.Type, e.Version, e.Aggregate, e.Tenant, dated(e.Occurred), first.places, first.kind, first.version, first.aggregate, first.tenant, dated(first.occurred), first.value == e.Payload)
			}
		}
		for id, first := range seen.first {
			if e, ok := a.byID[id]; !ok || e.topic() != topic {
				a.violate(Violation{Invariant: "I3", Kind: "on the topic and never committed", Order: first.aggregate, Events: []string{id}},
					"event %s (%s, version %d of %s) is on %s at %v, and not in the outbox", id, first.kind, first.version, first.aggregate, topic, first.places)
			}
		}
	}
}

// applied holds billing's marks against the events.
func (a *auditor) applied() {
	stale := make(map[string]bool) // events that a cell made, and that are to be marked
	for _, injection := range a.known.injections {
		if injection.want.Applied {
			stale[injection.event] = true
		}
	}
	marked := make(map[string]bool)
	seen := a.topics[event.OrderEvents]
	remade := a.known.remade[event.OrderEvents] != nil
	for _, mark := range a.books.applied {
		if mark.Consumer != "billing" {
			continue
		}
		marked[mark.Event] = true
		e, ok := a.byID[mark.Event]
		at := Violation{Order: e.Aggregate, Events: []string{mark.Event}}
		switch {
		case stale[mark.Event]:
		case !ok || e.AggregateType != event.AggregateOrder:
			at.Invariant, at.Kind = "I3", "applied and never committed"
			a.violate(at, "event %s is marked as applied from %s, and is no order's event in the outbox", mark.Event, mark.Place)
		case !remade && seen != nil && seen.first[mark.Event] != nil && !slices.Contains(seen.first[mark.Event].places, mark.Place):
			at.Invariant, at.Kind = "I3", "applied from where it is not"
			a.violate(at, "event %s is marked as applied from %s, and lies at %v", mark.Event, mark.Place, seen.first[mark.Event].places)
		}
	}
	held := make(map[string]bookLetter)
	for _, letter := range a.books.letters {
		held[letter.Event] = letter
	}
	for _, e := range a.books.outbox {
		if e.AggregateType != event.AggregateOrder || marked[e.ID] {
			continue
		}
		at := Violation{Invariant: "I1", Kind: "not applied", Order: e.Aggregate, Events: []string{e.ID}}
		if letter, is := held[e.ID]; is {
			at.Kind = "held by a dead letter"
			a.violate(at, "event %s (%s, version %d of order %s) is dead letter %s: %s: %s", e.ID, e.Type, e.Version, e.Aggregate, letter.ID, letter.Class, letter.Detail)
			continue
		}
		a.violate(at, "event %s (%s, version %d of order %s) is not marked as applied by billing", e.ID, e.Type, e.Version, e.Aggregate)
	}
	for id, stored := range a.books.orders {
		view, ok := a.books.view[id]
		want := bookView{Status: stored.Status, Currency: stored.Currency, Version: stored.Version, Total: stored.Total, Refunded: stored.Refunded}
		if ok && view != want {
			a.violate(Violation{Invariant: "I6", Kind: "stale state", Order: id}, "billing sees order %s as %+v, and it is %+v", id, view, want)
		} else if !ok && len(a.byOrder[id]) > 0 && marked[a.byOrder[id][0].ID] {
			a.violate(Violation{Invariant: "I1", Kind: "not seen", Order: id}, "billing has applied events of order %s, and has no row of it", id)
		}
	}
}

// paidEvent is the event by which an order was paid.
func (a *auditor) paidEvent(order string) string {
	for _, e := range a.byOrder[order] {
		if e.Type == string(event.OrderPaid) {
			return e.ID
		}
	}
	return ""
}

// documents requires one invoice for each paid order, one credit note for each
// refund, with their amounts, and no others.
func (a *auditor) documents() {
	invoiced := make(map[string]int)
	for _, d := range a.books.invoices {
		invoiced[d.Order]++
		o, ok := a.books.orders[d.Order]
		at := Violation{Order: d.Order, Events: []string{d.ID}}
		switch {
		case !ok || o.Status != "paid" || d.ID != a.paidEvent(d.Order):
			at.Invariant, at.Kind = "I3", "invoice for nothing"
			a.violate(at, "invoice %s is for order %s, which was not paid by an event of that id", d.ID, d.Order)
		case d.Net != o.Net || d.Tax != o.Tax || d.Total != o.Total || d.Currency != o.Currency || d.Customer != o.Customer ||
			d.Email != o.Email || d.Lines != o.Lines || d.LinesNet != o.Net:
			at.Invariant, at.Kind = "I4", "wrong amount"
			a.violate(at, "order %s is of %d + %d = %d %s in %d lines, and its invoice %s of %d + %d = %d %s in %d lines of %d",
				d.Order, o.Net, o.Tax, o.Total, o.Currency, o.Lines, d.ID, d.Net, d.Tax, d.Total, d.Currency, d.Lines, d.LinesNet)
		}
	}
	for id, o := range a.books.orders {
		switch count := invoiced[id]; {
		case o.Status == "paid" && count == 0:
			a.violate(Violation{Invariant: "I1", Kind: "no invoice", Order: id, Events: []string{a.paidEvent(id)}}, "order %s is paid and has no invoice", id)
		case count > 1:
			a.violate(Violation{Invariant: "I2", Kind: "two invoices", Order: id}, "order %s has %d invoices", id, count)
		}
	}
	credited := make(map[string]int)
	for _, d := range a.books.credits {
		credited[d.Refund]++
		r, ok := a.books.refunds[d.Refund]
		at := Violation{Order: d.Order, Events: []string{d.ID}}
		e := a.byID[d.ID]
		switch {
		case !ok || r.Order != d.Order || e.Aggregate != d.Order || e.Type != string(event.OrderRefunded):
			at.Invariant, at.Kind = "I3", "credit note for nothing"
			a.violate(at, "credit note %s is for refund %s of order %s, which there is not, or which was made by another event", d.ID, d.Refund, d.Order)
		case d.Net != r.Net || d.Tax != r.Tax || d.Total != r.Amount || d.Currency != a.books.orders[d.Order].Currency:
			at.Invariant, at.Kind = "I4", "wrong amount"
			a.violate(at, "refund %s is of %d + %d = %d, and its credit note %s of %d + %d = %d %s", d.Refund, r.Net, r.Tax, r.Amount, d.ID, d.Net, d.Tax, d.Total, d.Currency)
		}
	}
	for refund, r := range a.books.refunds {
		switch count := credited[refund]; {
		case count == 0:
			a.violate(Violation{Invariant: "I1", Kind: "no credit note", Order: r.Order}, "refund %s of order %s has no credit note", refund, r.Order)
		case count > 1:
			a.violate(Violation{Invariant: "I2", Kind: "two credit notes", Order: r.Order}, "refund %s of order %s has %d credit notes", refund, r.Order, count)
		}
	}
	for _, n := range a.books.numbers {
		if n.Least != 1 || n.Most != n.Count || n.Last != n.Count {
			a.violate(Violation{Invariant: "I2", Kind: "number gap"}, "the %d %ss of tenant %s in %d are numbered from %d to %d, and the last number given is %d",
				n.Count, n.Kind, n.Tenant, n.Year, n.Least, n.Most, n.Last)
		}
	}
}

// ledger requires one entry for each payment and each refund, with exactly the
// lines that its amounts come to, and no others.
func (a *auditor) ledger() {
	refundOf := make(map[string]bookRefund) // by the event that made its credit note
	for _, d := range a.books.credits {
		refundOf[d.ID] = a.books.refunds[d.Refund]
	}
	posted := make(map[string]int) // by order and kind
	for id, entry := range a.books.entries {
		o := a.books.orders[entry.Order]
		e := a.byID[id]
		at := Violation{Order: entry.Order, Events: []string{id}}
		var want []bookLine
		line := func(debit, credit string, amount int64) {
			if amount > 0 {
				want = append(want, bookLine{debit, credit, o.Currency, amount})
			}
		}
		switch {
		case entry.Kind == "payment" && e.Type == string(event.OrderPaid) && e.Aggregate == entry.Order:
			line("cash", "revenue", o.Net)
			line("cash", "tax-payable", o.Tax)
		case entry.Kind == "refund" && e.Type == string(event.OrderRefunded) && e.Aggregate == entry.Order && entry.Reverses == a.paidEvent(entry.Order):
			r := refundOf[id]
			line("revenue", "cash", r.Net)
			line("tax-payable", "cash", r.Tax)
		default:
			at.Invariant, at.Kind = "I3", "entry for nothing"
			a.violate(at, "ledger entry %s (%s of order %s) is for no event that asks for it (%q)", id, entry.Kind, entry.Order, e.Type)
			continue
		}
		posted[entry.Kind+entry.Order]++
		if entry.Currency != o.Currency || !sameLines(want, entry.Lines) {
			at.Invariant, at.Kind = "I4", "wrong lines"
			a.violate(at, "ledger entry %s (%s of order %s, %s) must have the lines %v and has %v", id, entry.Kind, entry.Order, o.Currency, want, entry.Lines)
		}
	}
	refunds, _ := a.refundsOf()
	for id, o := range a.books.orders {
		want := map[string]int{"payment": 0, "refund": refunds[id]}
		if o.Status == "paid" {
			want["payment"] = 1
		}
		for kind, count := range want {
			got := posted[kind+id]
			switch {
			case got < count:
				a.violate(Violation{Invariant: "I1", Kind: "not posted", Order: id}, "order %s has %d of %d entries for its %ss in the ledger", id, got, count, kind)
			case got > count:
				a.violate(Violation{Invariant: "I2", Kind: "posted twice", Order: id}, "order %s has %d entries for its %d %ss in the ledger", id, got, count, kind)
			}
		}
	}
}

func sameLines(want, got []bookLine) bool {
	if len(want) != len(got) {
		return false
	}
	left := slices.Clone(want)
	for _, line := range got {
		at := slices.Index(left, line)
		if at < 0 {
			return false
		}
		left = slices.Delete(left, at, at+1)
	}
	return true
}

// sums computes each account from what the clients were answered, and holds the
// ledger, the API and the topic of balances against it.
func (a *auditor) sums() {
	want := make(map[account]*big.Int)
	add := func(tenant int, code, currency string, amount int64) {
		of := account{a.tenants[tenant], code, currency}
		if want[of] == nil {
			want[of] = new(big.Int)
		}
		want[of].Add(want[of], big.NewInt(amount))
	}
	certain := len(a.known.open) == 0
	for _, known := range a.known.orders {
		w, p := known.wanted(), known.placed
		if w.status != "paid" {
			continue
		}
		add(known.tenant, "cash", p.Currency, p.Total)
		add(known.tenant, "revenue", p.Currency, -p.Net)
		add(known.tenant, "tax-payable", p.Currency, -p.Tax)
		for _, r := range w.refunds {
			add(known.tenant, "cash", p.Currency, -r.Amount)
			add(known.tenant, "revenue", p.Currency, r.Net)
			add(known.tenant, "tax-payable", p.Currency, r.Tax)
		}
	}
	if !certain {
		return // an account that is off is no surprise; what is not answered is a violation already
	}
	compare := func(what string, got map[account]*big.Int) {
		for of := range union(want, got) {
			if ours := slices.Contains(a.tenants, of.Tenant); ours && number(want[of]).Cmp(number(got[of])) != 0 {
				a.violate(Violation{Invariant: "I4", Kind: what}, "account %s of tenant %s holds %s %s by what the clients were answered, and %s by the %s",
					of.Code, of.Tenant, number(want[of]), of.Currency, number(got[of]), what)
			}
		}
	}
	compare("ledger", a.books.accounts)
	if a.balances != nil {
		compare("topic of balances", a.balances)
	}
	if a.answered != nil {
		answered := make(map[account]*big.Int)
		for of, sum := range a.answered {
			answered[of] = big.NewInt(sum)
		}
		compare("API", answered)
	}
	byCurrency := make(map[account]*big.Int)
	for of, sum := range a.books.accounts {
		key := account{Tenant: of.Tenant, Currency: of.Currency}
		byCurrency[key] = new(big.Int).Add(number(byCurrency[key]), sum)
	}
	for of, sum := range byCurrency {
		if sum.Sign() != 0 {
			a.violate(Violation{Invariant: "I4", Kind: "trial balance"}, "the accounts of tenant %s in %s come to %s, not to zero", of.Tenant, of.Currency, sum)
		}
	}
}

func number(n *big.Int) *big.Int {
	if n == nil {
		return new(big.Int)
	}
	return n
}

func union(one, other map[account]*big.Int) map[account]bool {
	keys := make(map[account]bool)
	for _, of := range []map[account]*big.Int{one, other} {
		for key := range of {
			keys[key] = true
		}
	}
	return keys
}

// letters requires the dead letters that the cells have asked for, and no others.
// They are known by the record's number: in a topic that was made anew another
// record may lie in its place.
func (a *auditor) letters() {
	wanted := make(map[int]*injection)
	for number, injection := range a.known.injections {
		seen := a.topics[event.OrderEvents]
		sent := injection.place != nil || seen != nil && len(seen.injected[number]) > 0
		if injection.want.DeadLetter != "" && sent { // else prove died before it was sent
			wanted[number] = injection
		}
	}
	for _, letter := range a.books.letters {
		injection := wanted[letter.Injected]
		at := Violation{Invariant: "I1", Kind: "dead letter", Order: letter.Order, Events: []string{letter.Event}}
		if letter.Event == "" {
			at.Events = nil
		}
		switch {
		case injection == nil && a.parked(letter):
		case injection == nil:
			a.violate(at, "the record at %s (event %s of order %s) is dead letter %s: %s: %s", letter.Place, letter.Event, letter.Order, letter.ID, letter.Class, letter.Detail)
		case injection.want.DeadLetter != letter.Class:
			a.violate(at, "the record at %s must be a dead letter %q, and is %q: %s", letter.Place, injection.want.DeadLetter, letter.Class, letter.Detail)
		case injection.place != nil && *injection.place != letter.Place:
			a.violate(at, "the record at %s is dead letter %s, and is said to be at %s", *injection.place, letter.ID, letter.Place)
		}
		delete(wanted, letter.Injected)
	}
	for number, injection := range wanted {
		a.violate(Violation{Invariant: "I1", Kind: "no dead letter"}, "injected record %d (of %s) must be a dead letter %q, and is none", number, injection.cell, injection.want.DeadLetter)
	}
	a.parking()
}

// parked reports whether a letter is an order's event that had to wait, and has.
func (a *auditor) parked(letter bookLetter) bool {
	e := a.byID[letter.Event]
	if letter.Class != "parked" || letter.State != "resolved" || e.Version < 2 {
		return false
	}
	for _, injection := range a.known.injections {
		if injection.want.Parks != "" && injection.want.Parks == e.Aggregate {
			return true
		}
	}
	return false
}

// parking requires that what came of an order after a poisoned event has waited
// behind it: that each event was a parked letter, and that the poisoned one is
// discarded.
func (a *auditor) parking() {
	waited := make(map[string]bool)
	discarded := make(map[int]bool)
	for _, letter := range a.books.letters {
		waited[letter.Event] = waited[letter.Event] || letter.Class == "parked"
		discarded[letter.Injected] = letter.State == "discarded"
	}
	for number, injection := range a.known.injections {
		order := injection.want.Parks
		if order == "" || injection.place == nil {
			continue
		}
		if !discarded[number] {
			a.violate(Violation{Invariant: "I1", Kind: "dead letter", Order: order}, "the dead letter of injected record %d (of %s) is not discarded", number, injection.cell)
		}
		for _, e := range a.byOrder[order] {
			if e.Version > 1 && !waited[e.ID] {
				a.violate(Violation{Invariant: "I6", Kind: "not parked", Order: order, Events: []string{e.ID}},
					"event %s (%s, version %d of order %s) came behind a dead letter of its order and did not wait for it", e.ID, e.Type, e.Version, order)
			}
		}
	}
}

// lags requires that the consumers' offsets are at the end: an offset that stays
// behind is read again and again, or for ever.
func (a *auditor) lags() {
	for group, behind := range a.lag {
		if behind > 0 {
			a.violate(Violation{Invariant: "I8", Kind: "stuck offset"}, "group %s has not committed the last %d offsets, though nothing is under way", group, behind)
		}
	}
}

// conservation counts.
func (a *auditor) conservation() Conservation {
	var c Conservation
	flows := map[action]*Flow{actPlace: &c.Orders, actPay: &c.Payments, actRefund: &c.Refunds, actCancel: &c.Cancellations}
	for _, g := range a.known.groups {
		flow := flows[g.ops[0].request.Action]
		if flow == nil {
			continue
		}
		flow.Attempted++
		if first := g.first(); first != nil && first.final.status < 400 {
			flow.Acknowledged++
		} else if first != nil {
			c.Refused++
		}
	}
	for _, o := range a.known.ops {
		c.Requests++
		if o.unknown == 0 || o.request.Method == "GET" {
			continue
		}
		c.Unknown++
		switch {
		case o.final == nil:
			c.Unsolved++
		case o.final.status >= 400:
			c.WasRefuse++
		case o.final.replayed:
			c.HadDone++
		default:
			c.HadNot++
		}
	}
	for _, o := range a.books.orders {
		c.Orders.Committed++
		switch o.Status {
		case "paid":
			c.Payments.Committed++
		case "cancelled":
			c.Cancellations.Committed++
		}
	}
	c.Refunds.Committed = len(a.books.refunds)
	marked := make(map[string]bool)
	for _, mark := range a.books.applied {
		marked[mark.Event] = mark.Consumer == "billing" || marked[mark.Event]
	}
	byType := map[string]*Flow{
		string(event.OrderCreated): &c.Orders, string(event.OrderPaid): &c.Payments,
		string(event.OrderRefunded): &c.Refunds, string(event.OrderCancelled): &c.Cancellations,
	}
	for _, e := range a.books.outbox {
		c.Events++
		flow := byType[e.Type]
		if flow == nil {
			continue
		}
		if seen := a.topics[e.topic()]; seen != nil && seen.first[e.ID] != nil || a.known.remade[e.topic()][e.ID] {
			flow.Emitted++
		}
		if marked[e.ID] {
			flow.Applied++
		}
	}
	for _, entry := range a.books.entries {
		switch entry.Kind {
		case "payment":
			c.Payments.Posted++
		case "refund":
			c.Refunds.Posted++
		}
	}
	for _, seen := range a.topics {
		c.Records += seen.records
		c.Again += seen.again
	}
	c.Again = max(0, c.Again-a.known.repeats())
	c.Invoices, c.CreditNotes, c.DeadLetters = len(a.books.invoices), len(a.books.credits), len(a.books.letters)
	return c
}

package prove

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"math/big"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
)

// Goal: each way in which the books can be wrong is found, and named as what it is.
// Method: a small service whose books are right, made of a journal as the clients
// write it, of tables and of topics; then one thing after the other is put wrong.

// ids of the small service: orders and events are told from each other at sight.
func orderID(n int) string { return fmt.Sprintf("0190aaaa-0000-7000-8000-%012d", n) }
func eventID(order, version int) string {
	return fmt.Sprintf("0190eeee-0000-7000-8000-%06d%06d", order, version)
}
func refundID(n int) string { return fmt.Sprintf("0190ffff-0000-7000-8000-%012d", n) }

var testTenants = []string{"00000000-0000-7000-8000-00000000000a", "00000000-0000-7000-8000-00000000000b"}

// service is the small service.
type service struct {
	t *testing.T
	evidence

	entries []entry
	ops     int64
	now     int64
	rates   map[int]string // of each order's one line
}

// Times are microseconds since 1970: order n is placed, paid and cancelled in its
// own hundred.
func at(micros int64) time.Time { return time.UnixMicro(micros).UTC() }
func paidAt(n int) int64        { return int64(n*100 + 2) }

// soundService has four orders: 1 is paid and given back in two parts, 2 is paid
// without tax by the other tenant, 3 is cancelled after it was refused to be paid
// twice, 4 is left alone.
func soundService(t *testing.T) *service {
	t.Helper()
	s := &service{t: t, rates: make(map[int]string), evidence: evidence{
		known: newKnown(), tenants: testTenants, lag: map[string]int64{"billing": 0, "balances": 0},
		books: &books{
			orders: make(map[string]bookOrder), payments: make(map[string]bookPayment), refunds: make(map[string]bookRefund),
			view: make(map[string]bookView), entries: make(map[string]*bookEntry), accounts: make(map[account]*big.Int),
		},
		topics:   map[string]*topicSeen{event.OrderEvents: {first: make(map[string]*firstSeen)}, event.BillingEvents: {first: make(map[string]*firstSeen)}},
		balances: make(map[account]*big.Int), answered: make(map[account]int64),
	}}
	s.books.at = 10_000
	s.placed(1, 0, 1000, "0.19")
	s.paid(1)
	s.refunded(1, 1, 595, 500, 95)
	s.refunded(1, 2, 595, 500, 95)
	s.placed(2, 1, 700, "0")
	s.paid(2)
	s.placed(3, 0, 100, "0.19")
	s.cancelled(3)
	s.placed(4, 0, 200, "0.07")
	return s
}

// ask writes a request and its answer as the clients do.
func (s *service) ask(r request, status int, body any) int64 {
	s.ops++
	if r.Method == "" {
		r.Method = "POST"
	}
	text, err := json.Marshal(body)
	require.NoError(s.t, err)
	s.write(entry{Kind: entrySend, Op: s.ops, Attempt: 1, Request: &r})
	s.write(entry{Kind: entryAnswer, Op: s.ops, Attempt: 1, Answer: &answer{Status: status, Location: locationOf(r, read(answer{Status: status, Body: string(text)})), ContentType: "application/json", Body: string(text)}})
	return s.ops
}

func (s *service) write(e entry) {
	s.now++
	e.Seq, e.At = int64(len(s.entries)+1), s.now
	s.entries = append(s.entries, e)
	require.NoError(s.t, s.known.learn(e))
}

func problemBody(code string) any {
	return map[string]string{"type": "https://example.com/problems/" + code + ".md"}
}

func (s *service) tenantOf(n int) int { return s.known.orders[orderID(n)].tenant }

func (s *service) body(n int) map[string]any {
	o := s.books.orders[orderID(n)]
	body := map[string]any{
		"id": orderID(n), "status": o.Status, "version": o.Version, "currency": o.Currency, "customer_id": o.Customer, "customer_email": o.Email,
		"lines":      []any{map[string]any{"sku": "book", "description": "A book", "quantity": 1, "unit_amount": o.Net, "net_amount": o.Net, "tax_rate": s.rates[n]}},
		"taxes":      []any{map[string]any{"rate": s.rates[n], "net_amount": o.Net, "tax_amount": o.Tax}},
		"created_at": at(o.Created), "net_amount": o.Net, "tax_amount": o.Tax, "total_amount": o.Total, "refunded_amount": o.Refunded,
	}
	if o.Status == "paid" {
		body["payment"] = map[string]any{"reference": "pi-" + orderID(n), "amount": o.Total, "paid_at": at(paidAt(n))}
	}
	return body
}

func placeRequest(tenant int, key string, net int64, rate string) request {
	text, _ := json.Marshal(placeBody{
		CustomerID: "c", CustomerEmail: "a@example.com", Currency: "EUR", Lines: []lineBody{{"book", "A book", 1, net, rate}},
	})
	return request{Tenant: tenant, Action: actPlace, Path: "/v1/orders", Key: key, Body: string(text)}
}

func (s *service) placed(n, tenant int, net int64, rate string) {
	r := placeRequest(tenant, fmt.Sprintf("place-%d", n), net, rate)
	var asked placeBody
	require.NoError(s.t, json.Unmarshal([]byte(r.Body), &asked))
	_, tax := asked.amounts()
	s.books.orders[orderID(n)] = bookOrder{
		Tenant: testTenants[tenant], Status: "created", Currency: "EUR", Version: 1, Net: net, Tax: tax, Total: net + tax,
		Lines: 1, LinesNet: net, Customer: "c", Email: "a@example.com",
		Contents: digestOf{}.line("book", "A book", 1, net, net, millionths(rate)), Metadata: metadataOf([]byte("{}")),
		Taxes: []taxPart{{millionths(rate), net, tax}}, Created: int64(n*100 + 1), Updated: int64(n*100 + 4),
	}
	s.rates[n] = rate
	s.ask(r, 201, s.body(n))
	s.event(n, event.OrderCreated)
}

// event has the order's present version happen, come to Kafka and be applied.
func (s *service) event(n int, kind event.Type) string {
	o := s.books.orders[orderID(n)]
	id := eventID(n, int(o.Version))
	says := said{
		Order: orderID(n), Version: o.Version, Status: o.Status, Customer: o.Customer, Email: o.Email, Currency: o.Currency,
		Net: o.Net, Tax: o.Tax, Total: o.Total, Refunded: o.Refunded,
		Lines: o.Contents, Taxes: partsDigest(o.Taxes), Metadata: o.Metadata, Created: o.Created,
	}
	happened := o.Created
	if o.Status == "paid" {
		says.HasPayment, says.Payment, says.PaymentAmount, says.Paid = true, "pi-"+orderID(n), o.Total, paidAt(n)
		happened = paidAt(n)
	} else if o.Status == "cancelled" {
		happened = o.Updated
	}
	if kind == event.OrderRefunded {
		r := s.books.refunds[refundID(int(o.Version)-2)]
		says.HasRefund, says.Refund, says.Amount, says.RefundNet, says.RefundTax = true, refundID(int(o.Version)-2), r.Amount, r.Net, r.Tax
		says.RefundTaxes, says.Reason, says.RefundedAt = partsDigest(r.Taxes), r.Reason, r.At
		happened = r.At
	}
	s.emit(bookEvent{
		ID: id, Tenant: o.Tenant, AggregateType: event.AggregateOrder, Aggregate: orderID(n), Type: string(kind), Version: o.Version,
		Said: says, Occurred: happened,
	})
	s.books.applied = append(s.books.applied, bookApplied{id, "billing", Place{event.OrderEvents, 0, int64(n*100) + o.Version}})
	s.books.view[orderID(n)] = bookView{o.Status, o.Currency, o.Version, o.Total, o.Refunded, false}
	return id
}

func (s *service) emit(e bookEvent) {
	e.Payload = sha256.Sum256([]byte(e.ID))
	s.books.outbox = append(s.books.outbox, e)
	var n int
	_, err := fmt.Sscanf(e.Aggregate, "0190aaaa-0000-7000-8000-%012d", &n)
	require.NoError(s.t, err)
	seen := s.topics[e.topic()]
	seen.records++
	seen.first[e.ID] = &firstSeen{
		id: e.ID, aggregate: e.Aggregate, tenant: e.Tenant, kind: e.Type, version: e.Version, value: e.Payload, occurred: e.Occurred,
		places: []Place{{e.topic(), 0, int64(n*100) + e.Version}},
	}
}

func (s *service) advance(n int, change func(*bookOrder)) {
	o := s.books.orders[orderID(n)]
	o.Version++
	change(&o)
	s.books.orders[orderID(n)] = o
}

func (s *service) about(n int, what action, key string) request {
	return request{Tenant: s.tenantOf(n), Action: what, Path: "/v1/orders/" + orderID(n) + "/" + string(what), Order: orderID(n), Key: key}
}

func (s *service) paid(n int) {
	s.advance(n, func(o *bookOrder) { o.Status = "paid" })
	o := s.books.orders[orderID(n)]
	r := s.about(n, actPay, fmt.Sprintf("pay-%d", n))
	r.Body = fmt.Sprintf(`{"payment_reference":"pi-%s"}`, orderID(n))
	s.ask(r, 200, s.body(n))
	again := s.about(n, actPay, fmt.Sprintf("pay-%d-again", n))
	s.ask(again, 409, problemBody("order-already-paid"))
	s.books.payments[orderID(n)] = bookPayment{"pi-" + orderID(n), "EUR", o.Total, paidAt(n)}
	id := s.event(n, event.OrderPaid)
	s.books.invoices = append(s.books.invoices, bookDocument{
		ID: id, Order: orderID(n), Currency: "EUR", Customer: "c", Email: "a@example.com", Net: o.Net, Tax: o.Tax, Total: o.Total, Lines: 1, LinesNet: o.Net,
		Contents: o.Contents, Taxes: partsDigest(o.Taxes), Year: 1970, Number: int64(n), At: paidAt(n), Issued: paidAt(n) + 50,
	})
	s.number(o.Tenant, "invoice")
	s.emit(bookEvent{ID: "b" + id[1:], Tenant: o.Tenant, AggregateType: event.AggregateBilling, Aggregate: orderID(n), Type: string(event.InvoiceIssued), Version: 1, Occurred: paidAt(n) + 50, Said: said{
		Document: id, Number: fmt.Sprintf("INV-1970-%06d", n), Order: orderID(n), Customer: "c", Email: "a@example.com", Currency: "EUR",
		Net: o.Net, Tax: o.Tax, Total: o.Total, Lines: o.Contents, Taxes: partsDigest(o.Taxes), Paid: paidAt(n), Issued: paidAt(n) + 50,
	}})
	s.post(n, &bookEntry{Event: id, Order: orderID(n), Kind: "payment", Currency: "EUR", Effective: paidAt(n), Recorded: paidAt(n) + 50}, bookLine{"cash", "revenue", "EUR", o.Net}, bookLine{"cash", "tax-payable", "EUR", o.Tax})
}

func (s *service) refunded(n, number int, amount, net, tax int64) {
	s.advance(n, func(o *bookOrder) { o.Refunded += amount })
	o := s.books.orders[orderID(n)]
	r := s.about(n, actRefund, fmt.Sprintf("refund-%d-%d", n, number))
	r.Amount = amount
	s.ask(r, 201, map[string]any{"id": refundID(number), "order_id": orderID(n), "amount": amount, "net_amount": net, "tax_amount": tax,
		"taxes": []any{map[string]any{"rate": s.rates[n], "net_amount": net, "tax_amount": tax}}, "reason": "damaged", "refunded_at": at(paidAt(n) + int64(number))})
	parts, happened := []taxPart{{millionths(s.rates[n]), net, tax}}, paidAt(n)+int64(number)
	s.books.refunds[refundID(number)] = bookRefund{orderID(n), amount, net, tax, parts, "damaged", happened}
	id := s.event(n, event.OrderRefunded)
	s.books.credits = append(s.books.credits, bookDocument{ID: id, Order: orderID(n), Refund: refundID(number), Currency: "EUR", Net: net, Tax: tax, Total: amount,
		Taxes: partsDigest(parts), Invoice: eventID(n, 2), Reason: "damaged", Year: 1970, Number: int64(number), Ordinal: int64(number), At: happened, Issued: happened + 50})
	s.number(o.Tenant, "credit-note")
	s.emit(bookEvent{
		ID: "b" + id[1:], Tenant: o.Tenant, AggregateType: event.AggregateBilling, Aggregate: orderID(n), Type: string(event.CreditNoteIssued), Version: 1 + int64(number),
		Occurred: happened + 50, Said: said{
			Document: id, Number: fmt.Sprintf("CN-1970-%06d", number), Invoice: eventID(n, 2), Order: orderID(n), Refund: refundID(number), Reason: "damaged",
			Customer: "c", Email: "a@example.com", Currency: "EUR", Net: net, Tax: tax, Total: amount, Taxes: partsDigest(parts), RefundedAt: happened, Issued: happened + 50,
		},
	})
	s.post(n, &bookEntry{Event: id, Order: orderID(n), Kind: "refund", Currency: "EUR", Reverses: eventID(n, 2), Effective: happened, Recorded: happened + 50},
		bookLine{"revenue", "cash", "EUR", net}, bookLine{"tax-payable", "cash", "EUR", tax})
}

func (s *service) cancelled(n int) {
	s.advance(n, func(o *bookOrder) { o.Status = "cancelled" })
	s.ask(s.about(n, actCancel, fmt.Sprintf("cancel-%d", n)), 200, s.body(n))
	s.ask(s.about(n, actPay, fmt.Sprintf("pay-%d", n)), 409, problemBody("order-cancelled"))
	s.event(n, event.OrderCancelled)
}

func (s *service) number(tenant, kind string) {
	for i, n := range s.books.numbers {
		if n.Tenant == tenant && n.Kind == kind {
			s.books.numbers[i] = bookNumbers{tenant, kind, 2026, 1, n.Most + 1, n.Count + 1, n.Last + 1}
			return
		}
	}
	s.books.numbers = append(s.books.numbers, bookNumbers{tenant, kind, 2026, 1, 1, 1, 1})
}

func (s *service) post(n int, e *bookEntry, lines ...bookLine) {
	for _, line := range lines {
		if line.Amount == 0 {
			continue
		}
		e.Lines = append(e.Lines, line)
		s.move(n, line.Debit, line.Amount)
		s.move(n, line.Credit, -line.Amount)
	}
	s.books.entries[e.Event] = e
}

func (s *service) move(n int, code string, amount int64) {
	of := account{s.books.orders[orderID(n)].Tenant, code, "EUR"}
	for _, sums := range []map[account]*big.Int{s.books.accounts, s.balances} {
		if sums[of] == nil {
			sums[of] = new(big.Int)
		}
		sums[of].Add(sums[of], big.NewInt(amount))
	}
	s.answered[of] += amount
}

// change changes an order as it is stored.
func (s *service) change(n int, change func(*bookOrder)) {
	o := s.books.orders[orderID(n)]
	change(&o)
	s.books.orders[orderID(n)] = o
}

func (s *service) dropOutbox(id string) {
	for i, e := range s.books.outbox {
		if e.ID == id {
			s.books.outbox = append(s.books.outbox[:i:i], s.books.outbox[i+1:]...)
			return
		}
	}
}

func TestSoundBooks(t *testing.T) {
	t.Parallel()

	s := soundService(t)
	account, violations := audit(s.evidence)
	require.Empty(t, violations)
	histories, unlinear := s.known.linearizable()
	require.Empty(t, unlinear)
	require.Equal(t, 4, histories)
	require.Equal(t, Flow{4, 4, 4, 4, 4, 0}, account.Orders)
	require.Equal(t, Flow{5, 2, 2, 2, 2, 2}, account.Payments)
	require.Equal(t, Flow{2, 2, 2, 2, 2, 2}, account.Refunds)
	require.Equal(t, Flow{1, 1, 1, 1, 1, 0}, account.Cancellations)
	require.Equal(t, 3, account.Refused)
}

func TestWrongBooks(t *testing.T) {
	t.Parallel()

	paid, gave := eventID(1, 2), eventID(1, 3)
	tests := map[string]struct {
		harm      func(*service)
		invariant string
		kind      string
	}{
		// What was acknowledged is not so.
		"OrderIsGone": {func(s *service) { delete(s.books.orders, orderID(4)) }, "I10", "acknowledged and not there"},
		"PaymentWasNotCommitted": {func(s *service) {
			s.change(2, func(o *bookOrder) { o.Status, o.Version = "created", 1 })
		}, "I10", "not as answered"},
		"RefundIsGone": {func(s *service) { delete(s.books.refunds, refundID(2)) }, "I10", "acknowledged and not there"},
		"RequestHasNoAnswer": {func(s *service) {
			s.write(entry{Kind: entrySend, Op: 99, Attempt: 1, Request: &request{Action: actPay}})
		}, "I10", "unresolved"},
		"FailureWasStored":     {func(s *service) { s.failure() }, "I10", "failure stored"},
		"OrderOfNobody":        {func(s *service) { s.books.orders[orderID(9)] = s.books.orders[orderID(4)] }, "I7", "order that nobody was answered"},
		"RefundOfNobody":       {func(s *service) { s.books.refunds[refundID(9)] = bookRefund{Order: orderID(1), Amount: 1, Net: 1} }, "I7", "refund that nobody was answered"},
		"OrderOfAnotherTenant": {func(s *service) { s.change(4, func(o *bookOrder) { o.Tenant = testTenants[1] }) }, "I9", "another tenant's"},
		"OrderHasAnotherTotal": {func(s *service) { s.change(4, func(o *bookOrder) { o.Total++; o.Tax++ }) }, "I4", "wrong amount"},
		"OrderLacksALine":      {func(s *service) { s.change(4, func(o *bookOrder) { o.Lines = 0; o.LinesNet = 0 }) }, "I4", "wrong amount"},
		"RefundIsOfAnotherSum": {func(s *service) {
			s.books.refunds[refundID(2)] = bookRefund{Order: orderID(1), Amount: 595, Net: 501, Tax: 94}
		}, "I4", "wrong amount"},
		"PaymentOfAnotherSum": {func(s *service) { s.books.payments[orderID(2)] = bookPayment{"pi-" + orderID(2), "EUR", 1, 0} }, "I4", "payment"},
		"PaymentOfNothing":    {func(s *service) { s.books.payments[orderID(4)] = bookPayment{"x", "EUR", 214, 0} }, "I4", "payment"},

		// Events: outbox and topic.
		"NoEventOfAVersion": {func(s *service) { s.dropOutbox(gave) }, "I1", "no event"},
		"TwoEventsOfAVersion": {func(s *service) {
			s.books.outbox = append(s.books.outbox, bookEvent{ID: "x", AggregateType: "order", Aggregate: orderID(1), Type: "OrderPaid", Version: 2})
		}, "I2", "two events of a version"},
		"EventOfNoOrder": {func(s *service) {
			s.books.outbox = append(s.books.outbox, bookEvent{ID: "x", AggregateType: "order", Aggregate: orderID(9), Type: "OrderPaid", Version: 2})
		}, "I3", "event of no order"},
		"EventIsNotOnTheTopic":   {func(s *service) { delete(s.topics[event.OrderEvents].first, gave) }, "I1", "not on the topic"},
		"EventWasNeverCommitted": {func(s *service) { s.topics[event.OrderEvents].first["x"] = &firstSeen{id: "x"} }, "I3", "on the topic and never committed"},
		"EventHasAnotherPayload": {func(s *service) { s.topics[event.OrderEvents].first[gave].value[0]++ }, "I2", "two contents"},
		"EventHasAnotherVersion": {func(s *service) { s.topics[event.OrderEvents].first[gave].version++ }, "I2", "two contents"},
		"BillingEventIsNotThere": {func(s *service) { delete(s.topics[event.BillingEvents].first, "b"+paid[1:]) }, "I1", "not on the topic"},
		"RecordsAreOutOfOrder": {func(s *service) {
			s.topics[event.OrderEvents].faults = []Violation{{Invariant: "I6", Kind: "out of order"}}
		}, "I6", "out of order"},
		"OffsetsAreNotCommitted": {func(s *service) { s.lag["billing"] = 1 }, "I8", "stuck offset"},

		// The consumer.
		"EventIsNotApplied": {func(s *service) { s.books.applied = s.books.applied[1:] }, "I1", "not applied"},
		"EventIsADeadLetter": {func(s *service) {
			s.books.applied = s.books.applied[1:]
			s.books.letters = []bookLetter{{ID: "d", Event: eventID(1, 1), Class: "rule"}}
		}, "I1", "held by a dead letter"},
		"DeadLetterThatNobodyAsked": {func(s *service) { s.books.letters = []bookLetter{{ID: "d", Class: "rule"}} }, "I1", "dead letter"},
		"BadRecordIsNoDeadLetter":   {func(s *service) { s.injected(Injected{DeadLetter: "undecodable"}) }, "I1", "no dead letter"},
		"DeadLetterOfAnotherClass": {func(s *service) {
			s.books.letters = []bookLetter{{ID: "d", Class: "rule", Injected: 1, Place: s.injected(Injected{DeadLetter: "undecodable"})}}
		}, "I1", "dead letter"},
		"AppliedAndNeverCommitted": {func(s *service) { s.books.applied = append(s.books.applied, bookApplied{"x", "billing", Place{}}) }, "I3", "applied and never committed"},
		"AppliedFromAnotherPlace":  {func(s *service) { s.books.applied[0].Place.Offset++ }, "I3", "applied from where it is not"},
		"BillingKnowsAnOldState":   {func(s *service) { s.books.view[orderID(1)] = bookView{"paid", "EUR", 3, 1190, 595, false} }, "I6", "stale state"},
		"BillingKnowsAnotherState": {func(s *service) { s.books.view[orderID(4)] = bookView{"created", "EUR", 1, 1, 0, false} }, "I6", "stale state"},
		"BillingReplacedAnEqual": {func(s *service) {
			v := s.books.view[orderID(4)]
			v.Replaced = true
			s.books.view[orderID(4)] = v
		}, "I6", "stale state"},
		"BillingDoesNotKnowTheOrder": {func(s *service) { delete(s.books.view, orderID(4)) }, "I1", "not seen"},

		// Documents.
		"NoInvoice":   {func(s *service) { s.books.invoices = s.books.invoices[1:] }, "I1", "no invoice"},
		"TwoInvoices": {func(s *service) { s.books.invoices = append(s.books.invoices, s.books.invoices[0]) }, "I2", "two invoices"},
		"InvoiceForNothing": {func(s *service) {
			d := s.books.invoices[0]
			d.Order = orderID(4)
			s.books.invoices = append(s.books.invoices, d)
		}, "I3", "invoice for nothing"},
		"InvoiceOfAnotherEvent":  {func(s *service) { s.books.invoices[0].ID = gave }, "I3", "invoice for nothing"},
		"InvoiceOfAnotherSum":    {func(s *service) { s.books.invoices[0].Net--; s.books.invoices[0].Total-- }, "I4", "wrong amount"},
		"InvoiceLacksALine":      {func(s *service) { s.books.invoices[0].Lines = 0 }, "I4", "wrong amount"},
		"NoCreditNote":           {func(s *service) { s.books.credits = s.books.credits[1:] }, "I1", "no credit note"},
		"TwoCreditNotes":         {func(s *service) { s.books.credits = append(s.books.credits, s.books.credits[0]) }, "I2", "two credit notes"},
		"CreditNoteForNothing":   {func(s *service) { s.books.credits[0].Refund = refundID(9) }, "I3", "credit note for nothing"},
		"CreditNoteOfAnotherSum": {func(s *service) { s.books.credits[0].Tax++; s.books.credits[0].Total++ }, "I4", "wrong amount"},
		"NumberGap":              {func(s *service) { s.books.numbers[0].Most++; s.books.numbers[0].Last++ }, "I2", "number gap"},

		// What events and documents say.
		"SKUIsNotAsAsked": {func(s *service) {
			s.change(4, func(o *bookOrder) { o.Contents = digestOf{}.line("x", "A book", 1, 200, 200, 70000) })
		}, "I10", "wrong contents"},
		"MetadataIsNotAsAsked": {func(s *service) {
			s.change(4, func(o *bookOrder) { o.Metadata = metadataOf([]byte(`{"a":1}`)) })
		}, "I10", "wrong contents"},
		"InvoiceHasAnotherLine":       {func(s *service) { s.books.invoices[0].Contents = digestOf{}.and("x") }, "I10", "wrong contents"},
		"CreditNoteOfAnotherInvoice":  {func(s *service) { s.books.credits[0].Invoice = eventID(2, 2) }, "I10", "wrong contents"},
		"InvoiceIssuedWithoutNumber":  {func(s *service) { s.says("b"+paid[1:], func(e *said) { e.Number = "INV-1970-000007" }) }, "I10", "wrong contents"},
		"InvoiceIssuedToAnother":      {func(s *service) { s.says("b"+paid[1:], func(e *said) { e.Customer, e.Email = e.Email, e.Customer }) }, "I10", "wrong contents"},
		"CreditNoteIssuedWithANumber": {func(s *service) { s.says("b"+gave[1:], func(e *said) { e.Number = "" }) }, "I10", "wrong contents"},
		"CreditNoteIssuedToAnother":   {func(s *service) { s.says("b"+gave[1:], func(e *said) { e.Customer = e.Email }) }, "I10", "wrong contents"},
		"CreditNoteIsNotAnnounced":    {func(s *service) { s.dropOutbox("b" + gave[1:]) }, "I1", "not announced"},
		"RefundedWithoutPayment":      {func(s *service) { s.says(gave, func(e *said) { e.HasPayment, e.Payment = false, "" }) }, "I10", "wrong contents"},
		"RefundedOfAnotherSum":        {func(s *service) { s.says(gave, func(e *said) { e.Refunded-- }) }, "I10", "wrong contents"},
		"CreatedWithAnotherTotal":     {func(s *service) { s.says(eventID(4, 1), func(e *said) { e.Total++ }) }, "I10", "wrong contents"},
		"RefundWithoutTax": {func(s *service) {
			s.books.refunds[refundID(1)] = bookRefund{orderID(1), 595, 595, 0, []taxPart{{190000, 595, 0}}, "damaged", paidAt(1) + 1}
		}, "I4", "refund's tax"},

		// Dates.
		"CreatedAtAnotherTime":  {func(s *service) { s.change(4, func(o *bookOrder) { o.Created += 9 }) }, "I10", "wrong date"},
		"PaidAYearEarly":        {func(s *service) { s.books.invoices[0].At -= 365 * 86_400_000_000 }, "I10", "wrong date"},
		"PostedForAYearEarly":   {func(s *service) { s.books.entries[paid].Effective -= 365 * 86_400_000_000 }, "I10", "wrong date"},
		"RecordedBeforeTheRun":  {func(s *service) { s.books.entries[paid].Recorded -= 86_400_000_000 }, "I10", "wrong date"},
		"IssuedAfterTheRun":     {func(s *service) { s.books.invoices[0].Issued += 86_400_000_000 }, "I10", "wrong date"},
		"NumberedInAnotherYear": {func(s *service) { s.books.invoices[0].Year++ }, "I10", "wrong date"},
		"RefundedAtAnotherTime": {func(s *service) { s.books.credits[0].At++ }, "I10", "wrong date"},
		"EventOfAnotherTime":    {func(s *service) { s.books.outbox[0].Occurred++ }, "I10", "wrong date"},
		"EventSaysAnotherTime":  {func(s *service) { s.topics[event.OrderEvents].first[gave].occurred++ }, "I2", "two contents"},
		"PaymentOfAnotherTime": {func(s *service) {
			p := s.books.payments[orderID(2)]
			p.Paid++
			s.books.payments[orderID(2)] = p
		}, "I10", "wrong date"},

		// A receipt that is complete too early.
		"ReceiptBeforeItsTime": {func(s *service) { s.known.contradicts(orderID(1), 0, 1) }, "I10", "receipt before its time"},

		// The ledger.
		"NotPosted": {func(s *service) { delete(s.books.entries, paid) }, "I1", "not posted"},
		"PostedTwice": {func(s *service) {
			e := *s.books.entries[gave]
			s.books.entries[eventID(1, 4)] = &e
			s.books.entries["c"+gave[1:]] = &e
			s.emitRefundAgain()
		}, "I2", "posted twice"},
		"EntryForNothing":      {func(s *service) { e := *s.books.entries[paid]; s.books.entries[eventID(4, 1)] = &e }, "I3", "entry for nothing"},
		"EntryReversesAnother": {func(s *service) { s.books.entries[gave].Reverses = gave }, "I3", "entry for nothing"},
		"LineMore":             {func(s *service) { e := s.books.entries[paid]; e.Lines = append(e.Lines, e.Lines[0]) }, "I4", "wrong lines"},
		"LineLess":             {func(s *service) { e := s.books.entries[paid]; e.Lines = e.Lines[1:] }, "I4", "wrong lines"},
		"LineOfAnotherEntry": {func(s *service) {
			one, other := s.books.entries[paid], s.books.entries[eventID(2, 2)]
			other.Lines, one.Lines = append(other.Lines, one.Lines[1]), one.Lines[:1]
		}, "I4", "wrong lines"},
		"LineIsWrongWayRound":   {func(s *service) { l := &s.books.entries[paid].Lines[0]; l.Debit, l.Credit = l.Credit, l.Debit }, "I4", "wrong lines"},
		"LineIsOneOff":          {func(s *service) { s.books.entries[paid].Lines[0].Amount++ }, "I4", "wrong lines"},
		"LineInAnotherCurrency": {func(s *service) { s.books.entries[paid].Lines[0].Currency = "USD" }, "I4", "wrong lines"},
		"SumOfTheLedger":        {func(s *service) { s.off(s.books.accounts) }, "I4", "ledger"},
		"TrialBalance":          {func(s *service) { s.off(s.books.accounts) }, "I4", "trial balance"},
		"SumOnTheTopic":         {func(s *service) { s.off(s.balances) }, "I4", "topic of balances"},
		"SumOfTheAPI":           {func(s *service) { s.answered[account{testTenants[0], "cash", "EUR"}]++ }, "I4", "API"},
		"AccountIsNotOnTheTopic": {func(s *service) {
			delete(s.balances, account{testTenants[1], "cash", "EUR"})
		}, "I4", "topic of balances"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := soundService(t)
			test.harm(s)
			_, violations := audit(s.evidence)
			require.NotEmpty(t, violations)
			var found []string
			for _, v := range violations {
				found = append(found, v.Invariant+" "+v.Kind)
				require.NotEmpty(t, v.Detail+v.Kind)
			}
			require.Contains(t, found, test.invariant+" "+test.kind)
		})
	}
}

func (s *service) failure() {
	s.write(entry{Kind: entrySend, Op: 99, Attempt: 1, Request: &request{Method: "POST", Action: actPlace, Key: "k"}})
	s.write(entry{Kind: entryAnswer, Op: 99, Attempt: 1, Answer: &answer{Status: 503}})
	s.write(entry{Kind: entrySend, Op: 99, Attempt: 2})
	s.write(entry{Kind: entryAnswer, Op: 99, Attempt: 2, Answer: &answer{Status: 503, Replayed: true}})
}

func (s *service) injected(want Injected) Place {
	place := Place{event.OrderEvents, 3, 77}
	s.write(entry{Kind: entryInject, Number: 1, Injected: &want, Events: []string{"z"}})
	s.write(entry{Kind: entryInjected, Number: 1, Place: &place})
	return place
}

// says changes what an event says.
func (s *service) says(id string, change func(*said)) {
	for i := range s.books.outbox {
		if s.books.outbox[i].ID == id {
			change(&s.books.outbox[i].Said)
		}
	}
}

func (s *service) off(sums map[account]*big.Int) {
	of := account{testTenants[0], "cash", "EUR"}
	sums[of] = new(big.Int).Add(sums[of], big.NewInt(1))
}

// emitRefundAgain makes a third event of a refund of order 1, which posts.
func (s *service) emitRefundAgain() {
	id := "c" + eventID(1, 3)[1:]
	s.books.outbox = append(s.books.outbox, bookEvent{ID: id, AggregateType: "order", Aggregate: orderID(1), Type: string(event.OrderRefunded), Version: 5})
}

// Some things that look wrong are not.
func TestRightBooks(t *testing.T) {
	t.Parallel()

	tests := map[string]func(*service){
		"DeadLetterThatWasAskedFor": func(s *service) {
			s.books.letters = []bookLetter{{ID: "d", Class: "undecodable", Injected: 1, Place: s.injected(Injected{DeadLetter: "undecodable"})}}
		},
		"DeadLettersWithOnePlaceInTwoTopics": func(s *service) {
			place := s.injected(Injected{DeadLetter: "undecodable"})
			s.write(entry{Kind: entryRemade, Topic: event.OrderEvents})
			s.write(entry{Kind: entryInject, Number: 2, Injected: &Injected{DeadLetter: "rule"}})
			s.write(entry{Kind: entryInjected, Number: 2, Place: &place})
			s.books.letters = []bookLetter{{ID: "d", Class: "undecodable", Injected: 1, Place: place}, {ID: "e", Class: "rule", Injected: 2, Place: place}}
		},
		"StaleEventThatWasAskedFor": func(s *service) {
			s.injected(Injected{Applied: true})
			s.books.applied = append(s.books.applied, bookApplied{"z", "billing", Place{event.OrderEvents, 3, 77}})
		},
		"EventOfATopicThatWasMadeAnew": func(s *service) {
			id := eventID(1, 3)
			s.write(entry{Kind: entryRemade, Topic: event.OrderEvents, Events: []string{id}})
			delete(s.topics[event.OrderEvents].first, id)
		},
		"AppliedFromACopy": func(s *service) {
			first := s.topics[event.OrderEvents].first[eventID(1, 1)]
			first.places = append(first.places, Place{event.OrderEvents, 0, 5000})
			s.books.applied[0].Place.Offset = 5000
		},
		"OrderOfARequestThatIsOpen": func(s *service) {
			// Its client will learn of it when it asks again: that it has not yet is
			// a violation, and the order itself is none.
			s.known.open[50] = &op{request: request{Action: actPlace}}
			s.books.orders[orderID(9)] = bookOrder{Tenant: testTenants[0], Status: "created", Currency: "EUR", Version: 1, Net: 1, Total: 1}
			s.event(9, event.OrderCreated)
		},
	}
	for name, change := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := soundService(t)
			change(s)
			_, violations := audit(s.evidence)
			for _, v := range violations {
				require.Equal(t, "unresolved", v.Kind, "%s", v)
			}
		})
	}
}

package prove

import (
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"strings"
	"time"

	"github.com/onceledger/onceledger/internal/event"
)

// digestOf says whether two lists hold the same, in the same order.
type digestOf [sha256.Size]byte

func (d digestOf) and(format string, args ...any) digestOf {
	return sha256.Sum256(fmt.Appendf(d[:], format, args...))
}

func (d digestOf) String() string { return fmt.Sprintf("%.4x", d[:]) }

// line adds a line of an order or invoice; its rate is in millionths.
func (d digestOf) line(sku, description string, quantity, unit, net, rate int64) digestOf {
	return d.and("%q %q %d %d %d %d", sku, description, quantity, unit, net, rate)
}

// tax adds what one rate comes to; the least rate comes first.
func (d digestOf) tax(rate, net, tax int64) digestOf { return d.and("%d %d %d", rate, net, tax) }

// millionths are a rate as a column has it, or -1.
func millionths(rate string) int64 {
	share, ok := new(big.Rat).SetString(rate)
	if !ok {
		return -1
	}
	share.Mul(share, big.NewRat(1_000_000, 1))
	if !share.IsInt() {
		return -1
	}
	return share.Num().Int64()
}

// metadataOf is a digest of a JSON object, however it is written.
func metadataOf(text []byte) digestOf {
	var value any
	if len(text) == 0 {
		text = []byte("{}")
	}
	if json.Unmarshal(text, &value) != nil {
		return digestOf{}.and("not JSON: %s", text)
	}
	canonical, _ := json.Marshal(value) // was read from JSON
	return digestOf{}.and("%s", canonical)
}

// lineAnswer is a line as answers and events have it.
type lineAnswer struct {
	lineBody

	Net int64 `json:"net_amount"`
}

type taxAnswer struct {
	Rate string `json:"rate"`
	Net  int64  `json:"net_amount"`
	Tax  int64  `json:"tax_amount"`
}

func linesDigest(lines []lineAnswer) (d digestOf) {
	for _, l := range lines {
		d = d.line(l.SKU, l.Description, l.Quantity, l.UnitAmount, l.Net, millionths(l.TaxRate))
	}
	return d
}

func taxesDigest(taxes []taxAnswer) (d digestOf) {
	for _, t := range slices.SortedFunc(slices.Values(taxes), func(a, b taxAnswer) int {
		return cmp.Compare(millionths(a.Rate), millionths(b.Rate))
	}) {
		d = d.tax(millionths(t.Rate), t.Net, t.Tax)
	}
	return d
}

// basketSaid is what a client put into an order.
type basketSaid struct {
	Customer, Email, Currency string
	Count                     int
	Lines, Taxes, Metadata    digestOf
}

func (p placeBody) said() basketSaid {
	said := basketSaid{Customer: p.CustomerID, Email: p.CustomerEmail, Currency: p.Currency, Count: len(p.Lines)}
	byRate := make(map[int64][]lineBody)
	for _, l := range p.Lines {
		rate := millionths(l.TaxRate)
		said.Lines = said.Lines.line(l.SKU, l.Description, l.Quantity, l.UnitAmount, l.Quantity*l.UnitAmount, rate)
		byRate[rate] = append(byRate[rate], l)
	}
	for _, rate := range slices.Sorted(maps.Keys(byRate)) {
		net, tax := placeBody{Lines: byRate[rate]}.amounts()
		said.Taxes = said.Taxes.tax(rate, net, tax)
	}
	metadata, _ := json.Marshal(p.Metadata) // texts
	if p.Metadata == nil {
		metadata = nil
	}
	said.Metadata = metadataOf(metadata)
	return said
}

// basket is the same of an answer.
func (b orderBody) basket() basketSaid {
	return basketSaid{b.Customer, b.Email, b.Currency, len(b.Lines), linesDigest(b.Lines), taxesDigest(b.Taxes), metadataOf(b.Metadata)}
}

// said is what an event says, of whichever type it is. Times are microseconds
// since 1970.
type said struct {
	Order, Status, Customer, Email, Currency string
	Version, Net, Tax, Total, Refunded       int64
	Lines, Taxes, Metadata                   digestOf
	Created                                  int64

	Payment               string
	PaymentAmount         int64
	Paid                  int64 // of an order and of an invoice
	Refund, Reason        string
	Amount, RefundNet     int64
	RefundTax             int64
	RefundTaxes           digestOf
	RefundedAt            int64
	Document, Number      string // an invoice's id and number, or a credit note's
	Invoice               string // of a credit note
	Issued                int64
	HasPayment, HasRefund bool
}

// micro is a time as the tables keep it; 0 is none.
func micro(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

// readSaid reads a payload, by the documentation and not by the product's types.
func readSaid(kind, payload string) (said, error) {
	var p struct {
		OrderID    string          `json:"order_id"`
		Version    int64           `json:"version"`
		Status     string          `json:"status"`
		Customer   string          `json:"customer_id"`
		Email      string          `json:"customer_email"`
		Currency   string          `json:"currency"`
		Lines      []lineAnswer    `json:"lines"`
		Taxes      []taxAnswer     `json:"taxes"`
		Net        int64           `json:"net_amount"`
		Tax        int64           `json:"tax_amount"`
		Total      int64           `json:"total_amount"`
		Refunded   int64           `json:"refunded_amount"`
		Metadata   json.RawMessage `json:"metadata"`
		CreatedAt  time.Time       `json:"created_at"`
		PaidAt     time.Time       `json:"paid_at"`
		RefundedAt time.Time       `json:"refunded_at"`
		IssuedAt   time.Time       `json:"issued_at"`
		Number     string          `json:"number"`
		InvoiceID  string          `json:"invoice_id"`
		CreditNote string          `json:"credit_note_id"`
		RefundID   string          `json:"refund_id"`
		Reason     string          `json:"reason"`
		Payment    *struct {
			Reference string    `json:"reference"`
			Amount    int64     `json:"amount"`
			PaidAt    time.Time `json:"paid_at"`
		} `json:"payment"`
		Refund *struct {
			ID         string      `json:"refund_id"`
			Amount     int64       `json:"amount"`
			Net        int64       `json:"net_amount"`
			Tax        int64       `json:"tax_amount"`
			Taxes      []taxAnswer `json:"taxes"`
			Reason     string      `json:"reason"`
			RefundedAt time.Time   `json:"refunded_at"`
		} `json:"refund"`
	}
	if err := json.Unmarshal([]byte(payload), &p); err != nil {
		return said{}, err
	}
	s := said{
		Order: p.OrderID, Status: p.Status, Customer: p.Customer, Email: p.Email, Currency: p.Currency,
		Version: p.Version, Net: p.Net, Tax: p.Tax, Total: p.Total, Refunded: p.Refunded,
		Lines: linesDigest(p.Lines), Taxes: taxesDigest(p.Taxes), Created: micro(p.CreatedAt), Paid: micro(p.PaidAt),
		RefundedAt: micro(p.RefundedAt), Issued: micro(p.IssuedAt), Number: p.Number, Refund: p.RefundID, Reason: p.Reason,
	}
	switch kind {
	case string(event.InvoiceIssued):
		s.Document = p.InvoiceID
	case string(event.CreditNoteIssued):
		s.Document, s.Invoice = p.CreditNote, p.InvoiceID
	default:
		s.Metadata = metadataOf(p.Metadata)
	}
	if p.Payment != nil {
		s.HasPayment, s.Payment, s.PaymentAmount, s.Paid = true, p.Payment.Reference, p.Payment.Amount, micro(p.Payment.PaidAt)
	}
	if r := p.Refund; r != nil {
		s.HasRefund, s.Refund, s.Reason, s.Amount, s.RefundNet, s.RefundTax = true, r.ID, r.Reason, r.Amount, r.Net, r.Tax
		s.RefundTaxes, s.RefundedAt = taxesDigest(r.Taxes), micro(r.RefundedAt)
	}
	return s, nil
}

// differences names what differs, for a person.
func differences(want, got said) string {
	var found []string
	note := func(name string, want, got any) {
		if want != got {
			found = append(found, fmt.Sprintf("%s must be %v and is %v", name, want, got))
		}
	}
	note("order", want.Order, got.Order)
	note("version", want.Version, got.Version)
	note("status", want.Status, got.Status)
	note("customer_id", want.Customer, got.Customer)
	note("customer_email", want.Email, got.Email)
	note("currency", want.Currency, got.Currency)
	note("net", want.Net, got.Net)
	note("tax", want.Tax, got.Tax)
	note("total", want.Total, got.Total)
	note("refunded", want.Refunded, got.Refunded)
	note("lines", want.Lines, got.Lines)
	note("taxes", want.Taxes, got.Taxes)
	note("metadata", want.Metadata, got.Metadata)
	note("created_at", want.Created, got.Created)
	note("payment", want.HasPayment, got.HasPayment)
	note("payment reference", want.Payment, got.Payment)
	note("payment amount", want.PaymentAmount, got.PaymentAmount)
	note("paid_at", want.Paid, got.Paid)
	note("refund", want.HasRefund, got.HasRefund)
	note("refund_id", want.Refund, got.Refund)
	note("refund amount", want.Amount, got.Amount)
	note("refund net", want.RefundNet, got.RefundNet)
	note("refund tax", want.RefundTax, got.RefundTax)
	note("refund taxes", want.RefundTaxes, got.RefundTaxes)
	note("reason", want.Reason, got.Reason)
	note("refunded_at", want.RefundedAt, got.RefundedAt)
	note("document id", want.Document, got.Document)
	note("number", want.Number, got.Number)
	note("invoice_id", want.Invoice, got.Invoice)
	note("issued_at", want.Issued, got.Issued)
	return strings.Join(found, ", ")
}

// taxPart is what one rate of an order or of a refund comes to.
type taxPart struct{ Rate, Net, Tax int64 }

func partsDigest(parts []taxPart) (d digestOf) {
	for _, p := range parts {
		d = d.tax(p.Rate, p.Net, p.Tax)
	}
	return d
}

// splitRefund is what a refund must come to at each rate, by arithmetic that
// shares nothing with the product's: the amount goes to the rates by what is left
// of each, the last units to the largest remainders, of equal ones to the lesser
// rate; the tax of a rate that is given back in total is its share rounded half
// up, and this refund's is what is not given back yet. It adds to given.
func splitRefund(amount int64, order []taxPart, given map[int64]taxPart) []taxPart {
	sum := new(big.Int)
	left := make([]*big.Int, len(order))
	for i, p := range order {
		g := given[p.Rate]
		left[i] = big.NewInt(p.Net + p.Tax - g.Net - g.Tax)
		sum.Add(sum, left[i])
	}
	if sum.Sign() <= 0 {
		return nil
	}
	shares, remainders := make([]*big.Int, len(order)), make([]*big.Int, len(order))
	rest := big.NewInt(amount)
	byRemainder := make([]int, len(order))
	for i := range order {
		shares[i], remainders[i] = new(big.Int).QuoRem(new(big.Int).Mul(big.NewInt(amount), left[i]), sum, new(big.Int))
		rest.Sub(rest, shares[i])
		byRemainder[i] = i
	}
	slices.SortStableFunc(byRemainder, func(a, b int) int { return remainders[b].Cmp(remainders[a]) })
	for _, i := range byRemainder[:max(0, min(rest.Int64(), int64(len(order))))] {
		shares[i].Add(shares[i], big.NewInt(1))
	}
	var parts []taxPart
	for i, p := range order {
		if shares[i].Sign() == 0 || p.Net+p.Tax <= 0 {
			continue
		}
		g := given[p.Rate]
		total := new(big.Int).Add(big.NewInt(g.Net+g.Tax), shares[i])
		exact := new(big.Rat).SetFrac(total.Mul(total, big.NewInt(p.Tax)), big.NewInt(p.Net+p.Tax))
		exact.Add(exact, big.NewRat(1, 2))
		tax := new(big.Int).Div(exact.Num(), exact.Denom()).Int64() - g.Tax
		part := taxPart{p.Rate, shares[i].Int64() - tax, tax}
		parts = append(parts, part)
		given[p.Rate] = taxPart{p.Rate, g.Net + part.Net, g.Tax + part.Tax}
	}
	return parts
}

// clockSlack is how far a time may lie outside of the run: the API's clock is an
// hour off for as long as some faults last.
func (k *known) clockSlack() time.Duration {
	slack := time.Minute
	if k.begin != nil && slices.ContainsFunc(k.begin.Cells, func(cell string) bool { return strings.HasPrefix(cell, "clock-") }) {
		slack += time.Hour
	}
	return slack
}

// contents holds what events and documents say against what the clients were
// answered and what is in the tables, and every time against the one that it is of.
func (a *auditor) contents() {
	wrong := func(order, id, kind, what, found string) {
		if found != "" {
			a.violate(Violation{Invariant: "I10", Kind: kind, Order: order, Events: []string{id}}, "%s %s of order %s: %s", what, id, order, found)
		}
	}
	within := func(order, id, what string, at int64) {
		slack := a.known.clockSlack().Microseconds()
		if began := a.known.began / 1000; at < began-slack || at > a.books.at+slack {
			wrong(order, id, "wrong date", what, fmt.Sprintf("%s is not within the run, from %s to %s", dated(at), dated(began), dated(a.books.at)))
		}
	}
	for id, o := range a.books.orders {
		known := a.known.orders[id]
		if known != nil {
			if got := (basketSaid{o.Customer, o.Email, o.Currency, int(o.Lines), o.Contents, partsDigest(o.Taxes), o.Metadata}); got != known.asked {
				wrong(id, id, "wrong contents", "the row", fmt.Sprintf("it was asked for as %v, and is stored as %v", known.asked, got))
			}
			if o.Created != micro(known.placed.CreatedAt) {
				wrong(id, id, "wrong date", "the row", fmt.Sprintf("created_at was answered as %s, and is %s", dated(micro(known.placed.CreatedAt)), dated(o.Created)))
			}
		}
		within(id, id, "created_at", o.Created)
		a.history(id, o, wrong, within)
	}
	invoices := make(map[string]bookDocument)
	for _, d := range a.books.invoices {
		invoices[d.Order] = d
		o, p := a.books.orders[d.Order], a.books.payments[d.Order]
		if d.Contents != o.Contents || d.Taxes != partsDigest(o.Taxes) {
			wrong(d.Order, d.ID, "wrong contents", "invoice", fmt.Sprintf("lines and taxes must be %v %v and are %v %v", o.Contents, partsDigest(o.Taxes), d.Contents, d.Taxes))
		}
		a.dates(d, p.Paid, wrong, within)
	}
	for _, d := range a.books.credits {
		r := a.books.refunds[d.Refund]
		if d.Taxes != partsDigest(r.Taxes) || d.Reason != r.Reason || d.Invoice != invoices[d.Order].ID {
			wrong(d.Order, d.ID, "wrong contents", "credit note", fmt.Sprintf("taxes, reason and invoice must be %v %q %s and are %v %q %s",
				partsDigest(r.Taxes), r.Reason, invoices[d.Order].ID, d.Taxes, d.Reason, d.Invoice))
		}
		a.dates(d, r.At, wrong, within)
	}
	for id, entry := range a.books.entries {
		want := a.books.payments[entry.Order].Paid
		if entry.Kind == "refund" {
			want = a.books.refunds[a.refundBy[id]].At
		}
		if entry.Effective != want {
			wrong(entry.Order, id, "wrong date", "ledger entry", fmt.Sprintf("effective_at must be %s and is %s", dated(want), dated(entry.Effective)))
		}
		within(entry.Order, id, "recorded_at of ledger entry", entry.Recorded)
	}
	a.billingEvents(invoices, wrong)
}

func dated(at int64) string { return time.UnixMicro(at).UTC().Format(time.RFC3339Nano) }

func (a *auditor) dates(d bookDocument, happened int64, wrong func(order, id, kind, what, found string), within func(order, id, what string, at int64)) {
	if d.At != happened {
		wrong(d.Order, d.ID, "wrong date", "document", fmt.Sprintf("it is of %s, and must be of %s", dated(d.At), dated(happened)))
	}
	if issued := time.UnixMicro(d.Issued).UTC(); int64(issued.Year()) != d.Year {
		wrong(d.Order, d.ID, "wrong date", "document", fmt.Sprintf("it is numbered in %d, and was issued at %s", d.Year, dated(d.Issued)))
	}
	within(d.Order, d.ID, "issued_at of document", d.Issued)
}

// history holds an order's events, one after the other, against its rows, and its
// refunds against what they must come to.
func (a *auditor) history(id string, o bookOrder, wrong func(order, id, kind, what, found string), within func(order, id, what string, at int64)) {
	events := slices.SortedFunc(slices.Values(a.byOrder[id]), func(x, y bookEvent) int { return cmp.Compare(x.Version, y.Version) })
	want := said{
		Order: id, Status: "created", Customer: o.Customer, Email: o.Email, Currency: o.Currency, Net: o.Net, Tax: o.Tax, Total: o.Total,
		Lines: o.Contents, Taxes: partsDigest(o.Taxes), Metadata: o.Metadata, Created: o.Created,
	}
	given := make(map[int64]taxPart)
	for _, e := range events {
		want.Version, want.HasRefund = e.Version, false
		happened := o.Created
		switch event.Type(e.Type) {
		case event.OrderPaid:
			p := a.books.payments[id]
			want.Status, want.HasPayment, want.Payment, want.PaymentAmount, want.Paid = "paid", true, p.Reference, p.Amount, p.Paid
			happened = p.Paid
		case event.OrderCancelled:
			want.Status, happened = "cancelled", o.Updated
		case event.OrderRefunded:
			r, ok := a.books.refunds[e.Said.Refund]
			if !ok || r.Order != id {
				wrong(id, e.ID, "wrong contents", e.Type, fmt.Sprintf("refund %q is none of the order's", e.Said.Refund))
				continue
			}
			a.refundBy[e.ID] = e.Said.Refund
			parts := splitRefund(r.Amount, o.Taxes, given)
			if !slices.Equal(parts, r.Taxes) {
				a.violate(Violation{Invariant: "I4", Kind: "refund's tax", Order: id, Events: []string{e.ID}},
					"refund %s of %d must come to %v at each rate, and comes to %v", e.Said.Refund, r.Amount, parts, r.Taxes)
			}
			var net, tax int64
			for _, part := range parts {
				net, tax = net+part.Net, tax+part.Tax
			}
			if r.Net != net || r.Tax != tax {
				a.violate(Violation{Invariant: "I4", Kind: "refund's tax", Order: id, Events: []string{e.ID}},
					"refund %s of %d must be %d + %d, and is %d + %d", e.Said.Refund, r.Amount, net, tax, r.Net, r.Tax)
			}
			want.Refunded += r.Amount
			want.HasRefund, want.Refund, want.Reason, want.Amount, want.RefundNet, want.RefundTax = true, e.Said.Refund, r.Reason, r.Amount, r.Net, r.Tax
			want.RefundTaxes, want.RefundedAt = partsDigest(r.Taxes), r.At
			happened = r.At
		default: // OrderCreated; others are violations already
		}
		wrong(id, e.ID, "wrong contents", e.Type, differences(want, e.Said))
		if e.Occurred != happened {
			wrong(id, e.ID, "wrong date", e.Type, fmt.Sprintf("it is said to have happened at %s, and did at %s", dated(e.Occurred), dated(happened)))
		}
		within(id, e.ID, "occurred_at of "+e.Type, e.Occurred)
		want.Refund, want.Reason, want.Amount, want.RefundNet, want.RefundTax, want.RefundTaxes, want.RefundedAt = "", "", 0, 0, 0, digestOf{}, 0
	}
	known := a.known.orders[id]
	if known == nil {
		return
	}
	w := known.wanted()
	if p := a.books.payments[id]; w.paid != 0 && p.Paid != w.paid {
		wrong(id, id, "wrong date", "the payment", fmt.Sprintf("paid_at was answered as %s, and is %s", dated(w.paid), dated(p.Paid)))
	}
	for refund, answered := range w.refunds {
		r, ok := a.books.refunds[refund]
		if !ok {
			continue
		}
		if r.At != micro(answered.RefundedAt) {
			wrong(id, refund, "wrong date", "refund", fmt.Sprintf("refunded_at was answered as %s, and is %s", dated(micro(answered.RefundedAt)), dated(r.At)))
		}
		if got := taxesDigest(answered.Taxes); got != partsDigest(r.Taxes) || answered.Reason != r.Reason {
			wrong(id, refund, "wrong contents", "refund", fmt.Sprintf("taxes and reason were answered as %v %q, and are %v %q", got, answered.Reason, partsDigest(r.Taxes), r.Reason))
		}
	}
}

// billingEvents holds what billing has announced against its documents: each once,
// and as it was issued.
func (a *auditor) billingEvents(invoices map[string]bookDocument, wrong func(order, id, kind, what, found string)) {
	documents := make(map[string]bookDocument)
	for _, d := range slices.Concat(a.books.invoices, a.books.credits) {
		documents[d.ID] = d
	}
	announced := make(map[string]bool)
	for _, e := range a.books.outbox {
		if e.AggregateType != event.AggregateBilling {
			continue
		}
		d, ok := documents[e.Said.Document]
		kind, prefix := event.InvoiceIssued, "INV"
		if d.Refund != "" {
			kind, prefix = event.CreditNoteIssued, "CN"
		}
		if !ok || e.Type != string(kind) || announced[d.ID] {
			wrong(e.Aggregate, e.ID, "wrong contents", e.Type, fmt.Sprintf("there is no document %q of that kind, or it was announced before", e.Said.Document))
			continue
		}
		announced[d.ID] = true
		invoice := invoices[d.Order]
		want := said{
			Document: d.ID, Number: fmt.Sprintf("%s-%d-%06d", prefix, d.Year, d.Number), Order: d.Order,
			Customer: invoice.Customer, Email: invoice.Email, Currency: d.Currency, Net: d.Net, Tax: d.Tax, Total: d.Total, Taxes: d.Taxes, Issued: d.Issued,
		}
		version := int64(1)
		if d.Refund != "" {
			want.Invoice, want.Refund, want.Reason, want.RefundedAt = invoice.ID, d.Refund, d.Reason, d.At
			version += d.Ordinal
		} else {
			want.Lines, want.Paid = d.Contents, d.At
		}
		wrong(d.Order, e.ID, "wrong contents", e.Type, differences(want, e.Said))
		if e.Occurred != d.Issued {
			wrong(d.Order, e.ID, "wrong date", e.Type, fmt.Sprintf("it is said to have happened at %s, and did at %s", dated(e.Occurred), dated(d.Issued)))
		}
		if e.Aggregate != d.Order || e.Version != version {
			wrong(d.Order, e.ID, "wrong contents", e.Type, fmt.Sprintf("it is version %d of %s, and must be version %d", e.Version, e.Aggregate, version))
		}
	}
	for id, d := range documents {
		if !announced[id] {
			a.violate(Violation{Invariant: "I1", Kind: "not announced", Order: d.Order, Events: []string{id}}, "document %s of order %s has no event", id, d.Order)
		}
	}
}

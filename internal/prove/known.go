package prove

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"math/big"
	"net/http"
	"path"
	"slices"
	"strings"
	"sync"
	"time"
)

// action is what a client wants.
type action string

const (
	actPlace   action = "place"
	actPay     action = "pay"
	actCancel  action = "cancel"
	actRefund  action = "refund"
	actGet     action = "get"
	actReuse   action = "reuse"   // a key that was used for something else
	actForeign action = "foreign" // another tenant's order
)

// known is everything that the clients know, made of the journal's entries: of
// those that are written now, and in a resumed run of those that were written
// before. Its methods may be called by several goroutines.
type known struct {
	mutex sync.Mutex

	ops    map[int64]*op
	lastOp int64
	open   map[int64]*op // those without a final answer
	recent []*op         // those that were answered last, with their bodies
	groups map[keyOf]*group
	orders map[string]*knownOrder

	violations []Violation // what no account is needed to see
	earlier    []Violation // what was found before the run was broken off
	told       []string    // orders whose receipts were complete too early

	fault      int // the last that is over
	recoveries []recovery
	bites      map[Bite]int64
	injections map[int]*injection
	remade     map[string]map[string]bool // by topic: events that were read of it before it was made anew
	begin      *beginning
	began      int64
	ended      bool
	resumed    int
}

// op is one request of a client, however often it was sent.
type op struct {
	id               int64
	request          request
	called, returned int64
	attempts         int
	pending          bool // it was sent, and neither an answer nor its lack is written down
	unknown          int  // attempts of which nobody knew what they did
	final            *result
}

// recentKept is how many of the requests that were answered can be sent again.
const recentKept = 1000

// keyOf is a tenant's key. Requests with one key are one request.
type keyOf struct {
	tenant int
	key    string
}

// group is the requests with one key, path and body.
type group struct{ ops []*op }

// result is a final answer.
type result struct {
	status   int
	replayed bool
	location string
	kind     string // its Content-Type
	body     [sha256.Size]byte
	code     string // of a problem
	order    orderBody
	refund   refundBody
}

// orderBody is an order as the API answers it.
type orderBody struct {
	ID        string          `json:"id"`
	Status    string          `json:"status"`
	Version   int64           `json:"version"`
	Currency  string          `json:"currency"`
	Customer  string          `json:"customer_id"`
	Email     string          `json:"customer_email"`
	Lines     []lineAnswer    `json:"lines"`
	Taxes     []taxAnswer     `json:"taxes"`
	Metadata  json.RawMessage `json:"metadata"`
	CreatedAt time.Time       `json:"created_at"`
	Net       int64           `json:"net_amount"`
	Tax       int64           `json:"tax_amount"`
	Total     int64           `json:"total_amount"`
	Refunded  int64           `json:"refunded_amount"`
	Payment   *struct {
		Reference string    `json:"reference"`
		Amount    int64     `json:"amount"`
		PaidAt    time.Time `json:"paid_at"`
	} `json:"payment"`

	said basketSaid // what of it stays as it was asked for; it stands for the lines, which are not kept
}

// refundBody is a refund as the API answers it.
type refundBody struct {
	ID         string      `json:"id"`
	OrderID    string      `json:"order_id"`
	Amount     int64       `json:"amount"`
	Net        int64       `json:"net_amount"`
	Tax        int64       `json:"tax_amount"`
	Taxes      []taxAnswer `json:"taxes"`
	Reason     string      `json:"reason"`
	RefundedAt time.Time   `json:"refunded_at"`
}

// placeBody is what a client asks for.
type placeBody struct {
	CustomerID    string            `json:"customer_id"`
	CustomerEmail string            `json:"customer_email"`
	Currency      string            `json:"currency"`
	Lines         []lineBody        `json:"lines"`
	Metadata      map[string]string `json:"metadata,omitempty"`
}

type lineBody struct {
	SKU         string `json:"sku"`
	Description string `json:"description"`
	Quantity    int64  `json:"quantity"`
	UnitAmount  int64  `json:"unit_amount"`
	TaxRate     string `json:"tax_rate"`
}

// amounts are what an order comes to, by arithmetic that shares nothing with the
// product's: whole numbers of any size, tax rounded half up once for each rate.
func (p placeBody) amounts() (net, tax int64) {
	byRate := make(map[string]*big.Int)
	sum := new(big.Int)
	for _, line := range p.Lines {
		product := new(big.Int).Mul(big.NewInt(line.Quantity), big.NewInt(line.UnitAmount))
		sum.Add(sum, product)
		if byRate[line.TaxRate] == nil {
			byRate[line.TaxRate] = new(big.Int)
		}
		byRate[line.TaxRate].Add(byRate[line.TaxRate], product)
	}
	taxes := new(big.Int)
	for rate, of := range byRate {
		share, ok := new(big.Rat).SetString(rate)
		if !ok {
			continue
		}
		exact := share.Mul(share, new(big.Rat).SetInt(of))
		exact.Add(exact, big.NewRat(1, 2))
		taxes.Add(taxes, new(big.Int).Div(exact.Num(), exact.Denom()))
	}
	return sum.Int64(), taxes.Int64()
}

// knownOrder is an order as its clients know it.
type knownOrder struct {
	id       string
	tenant   int
	placed   orderBody
	asked    basketSaid
	groups   []*group // what was asked of it, and it being made
	settled  bool     // its clients are done with it
	examined int      // of its groups' answers, when its history was looked at last
}

// injection is a record that a cell put on a topic.
type injection struct {
	want  Injected
	event string // the id that its header says
	fault int
	cell  string
	place *Place
}

// repeats is how many records prove itself has put on the topics once more.
func (k *known) repeats() (count int64) {
	for _, injection := range k.injections {
		if injection.want.Again && injection.place != nil {
			count++
		}
	}
	return count
}

func newKnown() *known {
	return &known{
		ops: make(map[int64]*op), open: make(map[int64]*op), groups: make(map[keyOf]*group),
		orders: make(map[string]*knownOrder), bites: make(map[Bite]int64),
		injections: make(map[int]*injection), remade: make(map[string]map[string]bool),
	}
}

// learn takes in an entry of the journal.
func (k *known) learn(e entry) error {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	switch e.Kind {
	case entryBegin:
		k.begin, k.began = e.Begin, e.At
	case entryResume:
		k.resumed++
		for _, o := range k.open { // what was under way when prove itself died
			if o.pending {
				o.pending = false
				o.unknown++
			}
		}
	case entrySend:
		return k.sent(e)
	case entryAnswer, entryNothing:
		return k.answered(e)
	case entryLife:
		if order := k.orders[e.Order]; order != nil {
			order.settled = true
		}
	case entryRecovery:
		k.fault = e.Fault
		k.recoveries = append(k.recoveries, *e.Recovery)
		for bite, times := range e.Bites {
			k.bites[bite] = times
		}
	case entryViolated:
		k.earlier = append(k.earlier, *e.Violation)
	case entryInject:
		k.injections[e.Number] = &injection{want: *e.Injected, fault: e.Fault, cell: e.Cell}
		if len(e.Events) > 0 {
			k.injections[e.Number].event = e.Events[0]
		}
	case entryInjected:
		k.injections[e.Number].place = e.Place
	case entryRemade:
		if k.remade[e.Topic] == nil {
			k.remade[e.Topic] = make(map[string]bool)
		}
		for _, id := range e.Events {
			k.remade[e.Topic][id] = true
		}
	case entryEnd:
		k.ended = true
	}
	return nil
}

func (k *known) sent(e entry) error {
	o := k.ops[e.Op]
	if o == nil {
		if e.Request == nil {
			return fmt.Errorf("journal entry %d sends request %d, of which there is no first attempt", e.Seq, e.Op)
		}
		o = &op{id: e.Op, request: *e.Request, called: e.At}
		k.ops[e.Op], k.open[e.Op] = o, o
		k.lastOp = max(k.lastOp, e.Op)
		k.assign(o)
	}
	o.attempts++
	o.pending = true
	return nil
}

// assign puts a request to those with its key, and to its order.
func (k *known) assign(o *op) {
	g := &group{}
	if o.request.Method == http.MethodPost && o.request.Action != actReuse && o.request.Action != actForeign {
		at := keyOf{o.request.Tenant, o.request.Key}
		if k.groups[at] == nil {
			k.groups[at] = g
		}
		g = k.groups[at]
	}
	g.ops = append(g.ops, o)
	switch o.request.Action {
	case actPay, actCancel, actRefund, actGet:
		if order := k.orders[o.request.Order]; order != nil && len(g.ops) == 1 {
			order.groups = append(order.groups, g)
		}
	default: // what makes an order is known with its answer, and the others change none
	}
}

func (k *known) answered(e entry) error {
	o := k.ops[e.Op]
	if o == nil {
		return fmt.Errorf("journal entry %d answers request %d, which was never sent", e.Seq, e.Op)
	}
	o.pending = false
	if e.Kind == entryNothing {
		if !e.NotSent && o.final == nil {
			o.unknown++
		}
		return nil
	}
	got := read(*e.Answer)
	if got.status >= 500 && got.replayed {
		k.violate("I10", "failure stored", o, "it was answered from store with %d: sending it again can never resolve it", got.status)
	}
	if !isFinal(got) {
		if o.final == nil {
			o.unknown++
		}
		return nil
	}
	if o.final != nil {
		k.compare(o, *o.final, got, true, "was answered before")
		return nil
	}
	o.final, o.returned = &got, e.At
	delete(k.open, o.id)
	k.judge(o)
	if k.recent = append(k.recent, o); len(k.recent) > 2*recentKept {
		for _, old := range k.recent[:recentKept] {
			old.request.Body = "" // a long run makes many, and none of these is sent again
		}
		k.recent = slices.Clone(k.recent[recentKept:])
	}
	return nil
}

// isFinal is as sandbox.Answer.Final.
func isFinal(r result) bool {
	return r.status != 0 && r.status < 500 && (r.status != http.StatusConflict || r.code != "request-in-progress")
}

func read(a answer) result {
	got := result{status: a.Status, replayed: a.Replayed, location: a.Location, kind: a.ContentType, body: sha256.Sum256([]byte(a.Body))}
	if a.Status >= 400 {
		var problem struct {
			Type string `json:"type"`
		}
		_ = json.Unmarshal([]byte(a.Body), &problem)
		got.code = strings.TrimSuffix(path.Base(problem.Type), ".md")
		return got
	}
	// What is not readable is an order of zeros, and noticed as that.
	_ = json.Unmarshal([]byte(a.Body), &got.order)
	got.order.said = got.order.basket()
	got.order.Lines, got.order.Taxes, got.order.Metadata = nil, nil, nil
	_ = json.Unmarshal([]byte(a.Body), &got.refund)
	return got
}

// compare holds a second answer against the first.
func (k *known) compare(o *op, first, second result, again bool, when string) {
	stored := o.request.Method == http.MethodPost && o.request.Action != actReuse
	switch {
	case !stored:
	case first.status != second.status || first.body != second.body || first.location != second.location || first.kind != second.kind:
		k.violate("I7", "another answer", o, "it %s with %d (%.12x, %s, at %q), and now with %d (%.12x, %s, at %q)",
			when, first.status, first.body, first.kind, first.location, second.status, second.body, second.kind, second.location)
	case !first.replayed && !second.replayed:
		k.violate("I7", "not a replay", o, "it %s with %d, and neither that answer nor this one says that it is replayed", when, first.status)
	case again && !second.replayed:
		k.violate("I7", "not a replay", o, "it %s with %d, and this answer does not say that it is replayed", when, first.status)
	}
}

// expected are the answers that an action may come to: a status, and for a
// refusal its code.
var expected = map[action][]string{
	actPlace:   {"201"},
	actPay:     {"200", "409 order-already-paid", "409 order-cancelled"},
	actCancel:  {"200", "409 order-already-paid", "409 order-cancelled"},
	actRefund:  {"201", "409 order-not-paid", "422 refund-too-large"},
	actGet:     {"200"},
	actReuse:   {"422 idempotency-key-reused"},
	actForeign: {"404 order-not-found"},
}

var breaks = map[action]string{actReuse: "I7", actForeign: "I9"}

// judge looks at a final answer by itself, and beside those of the same key.
func (k *known) judge(o *op) {
	got := *o.final
	said := strings.TrimSpace(fmt.Sprintf("%d %s", got.status, got.code))
	if !slices.Contains(expected[o.request.Action], said) {
		invariant := breaks[o.request.Action]
		if invariant == "" {
			invariant = "I7"
		}
		k.violate(invariant, "wrong answer", o, "it was answered %s, want %s", said, strings.Join(expected[o.request.Action], " or "))
		return
	}
	if g := k.groups[keyOf{o.request.Tenant, o.request.Key}]; o.request.Method == http.MethodPost && g != nil && o.request.Action != actReuse {
		for _, other := range g.ops {
			if other != o && other.final != nil {
				k.compare(o, *other.final, got, other.returned < o.called, fmt.Sprintf("was answered as request %d", other.id))
				break
			}
		}
	}
	if got.status >= 400 {
		return
	}
	if want := locationOf(o.request, got); got.status == http.StatusCreated && got.location != want {
		k.violate("I7", "wrong location", o, "its Location is %q, want %q", got.location, want)
	}
	switch o.request.Action {
	case actPlace:
		k.judgePlaced(o, got.order)
	case actPay, actCancel, actGet:
		k.judgeOrder(o, got.order)
	case actRefund:
		r := got.refund
		if r.Amount != o.request.Amount || r.Net+r.Tax != r.Amount || r.Net < 0 || r.Tax < 0 || r.OrderID != o.request.Order {
			k.violate("I4", "wrong amount", o, "a refund of %d was answered as %d = %d + %d of order %s", o.request.Amount, r.Amount, r.Net, r.Tax, r.OrderID)
		}
	default: // is never answered so: expected has seen to it
	}
}

// locationOf is where an answer says that what was made is: the order.
func locationOf(r request, got result) string {
	if r.Action == actPlace {
		return "/v1/orders/" + got.order.ID
	}
	return "/v1/orders/" + r.Order
}

func (k *known) judgePlaced(o *op, body orderBody) {
	var asked placeBody
	_ = json.Unmarshal([]byte(o.request.Body), &asked) // was made by us
	net, tax := asked.amounts()
	if body.Net != net || body.Tax != tax || body.Total != net+tax || body.Currency != asked.Currency || body.said.Count != len(asked.Lines) {
		k.violate("I4", "wrong amount", o, "%d lines of %d + %d %s were answered as %d lines of %d + %d = %d %s",
			len(asked.Lines), net, tax, asked.Currency, body.said.Count, body.Net, body.Tax, body.Total, body.Currency)
	}
	if said := asked.said(); body.said != said {
		k.violate("I7", "wrong contents", o, "what was asked for as %v was answered as %v", said, body.said)
	}
	g := k.groups[keyOf{o.request.Tenant, o.request.Key}]
	order := k.orders[body.ID]
	if order == nil {
		k.orders[body.ID] = &knownOrder{id: body.ID, tenant: o.request.Tenant, placed: body, asked: asked.said(), groups: []*group{g}}
		return
	}
	if order.tenant != o.request.Tenant {
		k.violate("I9", "shared order", o, "order %s was answered to tenant %d, whose it is, and to tenant %d", body.ID, order.tenant, o.request.Tenant)
	} else if order.groups[0] != g {
		k.violate("I7", "shared order", o, "order %s was answered to another key before (request %d)", body.ID, order.groups[0].ops[0].id)
	}
}

func (k *known) judgeOrder(o *op, body orderBody) {
	order := k.orders[o.request.Order]
	if order == nil {
		return
	}
	p := order.placed
	if body.ID != p.ID || body.Net != p.Net || body.Tax != p.Tax || body.Total != p.Total || body.Currency != p.Currency || body.Customer != p.Customer || body.Email != p.Email {
		k.violate("I4", "wrong amount", o, "order %s of %d + %d = %d %s was answered as order %s of %d + %d = %d %s",
			p.ID, p.Net, p.Tax, p.Total, p.Currency, body.ID, body.Net, body.Tax, body.Total, body.Currency)
	}
	if body.said != order.asked || !body.CreatedAt.Equal(p.CreatedAt) {
		k.violate("I7", "wrong contents", o, "order %s was asked for as %v and placed at %s, and was answered as %v, placed at %s", p.ID, order.asked, p.CreatedAt, body.said, body.CreatedAt)
	}
	if o.request.Action == actPay && (body.Payment == nil || body.Payment.Amount != p.Total || !strings.Contains(o.request.Body, `"`+body.Payment.Reference+`"`)) {
		k.violate("I4", "wrong amount", o, "its payment was answered as %+v", body.Payment)
	}
}

func (k *known) violate(invariant, kind string, o *op, format string, args ...any) {
	k.violations = append(k.violations, Violation{
		Invariant: invariant, Kind: kind, Order: o.request.Order, Request: o.id, Key: o.request.Key,
		Detail: fmt.Sprintf("%s %s (request %d, key %s): ", o.request.Method, o.request.Path, o.id, o.request.Key) + fmt.Sprintf(format, args...),
	})
}

// contradicts notes, once, that a receipt is complete and the tables are not.
func (k *known) contradicts(order string, invoices, entries int) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	v := Violation{
		Invariant: "I10", Kind: "receipt before its time", Order: order,
		Detail: fmt.Sprintf("the receipt of order %s is complete, and the tables have %d invoices and %d ledger entries of its payment", order, invoices, entries),
	}
	if !slices.Contains(k.told, order) {
		k.told, k.violations = append(k.told, order), append(k.violations, v)
	}
}

// first is the answer that was had first of a group's, or nil.
func (g *group) first() *op {
	var first *op
	for _, o := range g.ops {
		if o.final != nil && (first == nil || o.returned < first.returned) {
			first = o
		}
	}
	return first
}

// wanted is what an order must have come to, if what its clients were answered is
// true.
type wanted struct {
	status    string
	version   int64
	refunded  int64
	reference string
	paid      int64 // when, in microseconds
	refunds   map[string]refundBody
	certain   bool // every request about it was answered
}

func (k *knownOrder) wanted() wanted {
	w := wanted{status: "created", refunds: make(map[string]refundBody), certain: true}
	for _, g := range k.groups {
		first := g.first()
		if first == nil {
			w.certain = w.certain && g.ops[0].request.Action == actGet
			continue
		}
		if first.final.status >= 400 {
			continue
		}
		switch first.request.Action {
		case actPlace:
			w.version++
		case actPay:
			w.status, w.version = "paid", w.version+1
			if first.final.order.Payment != nil {
				w.reference, w.paid = first.final.order.Payment.Reference, micro(first.final.order.Payment.PaidAt)
			}
		case actCancel:
			w.status, w.version = "cancelled", w.version+1
		case actRefund:
			if _, twice := w.refunds[first.final.refund.ID]; !twice {
				w.version++
				w.refunded += first.final.refund.Amount
			}
			w.refunds[first.final.refund.ID] = first.final.refund
		default: // changes nothing
		}
	}
	return w
}

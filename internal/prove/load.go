package prove

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/onceledger/onceledger/internal/sandbox"
)

// load is clients that place, pay, refund, cancel and read orders, some of them
// several at once on one order, for several tenants. Each request is in the
// journal before it is sent, and is sent until its outcome is known.
type load struct {
	journal *journal
	known   *known
	clients []*sandbox.Client // one for each tenant
	tenants []string
	seed    uint64
	count   int           // of clients
	pause   time.Duration // of each client between two orders, on average
	posted  func(ctx context.Context, tenant, order string) (invoices, entries int, err error)

	burst  atomic.Int64 // while above 0, nobody pauses
	number atomic.Int64 // of the last order
	lastOp atomic.Int64
	large  atomic.Int64
	last   atomic.Bool // no further orders are begun

	mutex   sync.Mutex
	steps   int
	stepped chan struct{} // closed at the next step
	gate    chan struct{} // nil while open; closed when it opens
	held    int           // how many hold it shut
	under   int           // requests under way
	idle    chan struct{} // closed when none is

	stop  context.CancelFunc
	group *errgroup.Group
}

// mostLarge is how many orders of the largest amounts there are at most: the
// balances' sums are compared as the API answers them, in 64 bits.
const mostLarge = 200

func (l *load) start(ctx context.Context) {
	l.stepped = make(chan struct{})
	l.lastOp.Store(l.known.lastOp)
	ctx, l.stop = context.WithCancel(ctx)
	l.group, ctx = errgroup.WithContext(ctx)
	for client := range l.count {
		l.group.Go(func() error {
			for !l.last.Load() {
				number := l.number.Add(1)
				err := l.life(ctx, client, uint64(number))
				switch {
				case ctx.Err() != nil:
					return nil //nolint:nilerr // it was told to end where it is
				case err != nil:
					return fmt.Errorf("order %d: %w", number, err)
				}
				if l.burst.Load() > 0 {
					continue
				}
				select {
				case <-ctx.Done():
					return nil
				case <-time.After(l.pause/2 + rand.N(l.pause+1)):
				}
			}
			return nil
		})
	}
}

// finish ends the clients where they are: their requests are in the journal.
func (l *load) finish() error {
	l.stop()
	return l.group.Wait()
}

// drain lets no client begin another order, and waits until each is done with the
// one that it has.
func (l *load) drain(ctx context.Context, within time.Duration) error {
	l.last.Store(true)
	done := make(chan error, 1)
	go func() { done <- l.group.Wait() }()
	select {
	case err := <-done:
		return err
	case <-time.After(within):
		return fmt.Errorf("requests are not answered for good within %s", within)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// hold keeps new requests from being sent, and returns what lets them go on.
func (l *load) hold() (release func()) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.held++
	if l.gate == nil {
		l.gate = make(chan struct{})
	}
	return sync.OnceFunc(func() {
		l.mutex.Lock()
		defer l.mutex.Unlock()
		if l.held--; l.held == 0 {
			close(l.gate)
			l.gate = nil
		}
	})
}

// enter waits until a request may be sent.
func (l *load) enter(ctx context.Context) error {
	for {
		l.mutex.Lock()
		gate := l.gate
		if gate == nil {
			l.under++
			l.mutex.Unlock()
			return nil
		}
		l.mutex.Unlock()
		select {
		case <-gate:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (l *load) leave() {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.under--
	if l.under == 0 && l.idle != nil {
		close(l.idle)
		l.idle = nil
	}
	l.steps++
	close(l.stepped)
	l.stepped = make(chan struct{})
}

// waitIdle waits until no request is under way. The gate must be held.
func (l *load) waitIdle(ctx context.Context) error {
	l.mutex.Lock()
	if l.under == 0 {
		l.mutex.Unlock()
		return nil
	}
	if l.idle == nil {
		l.idle = make(chan struct{})
	}
	idle := l.idle
	l.mutex.Unlock()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("requests are not answered: %w", ctx.Err())
	}
}

// advance waits until the clients have got so many more answers.
func (l *load) advance(ctx context.Context, answers int) error {
	l.mutex.Lock()
	target := l.steps + answers
	l.mutex.Unlock()
	for {
		l.mutex.Lock()
		done, stepped := l.steps >= target, l.stepped
		l.mutex.Unlock()
		if done {
			return nil
		}
		select {
		case <-stepped:
		case <-ctx.Done():
			return fmt.Errorf("the clients get no further: %w", ctx.Err())
		}
	}
}

// ask sends a new request until it has a final answer.
func (l *load) ask(ctx context.Context, r request) (*op, answer, error) {
	if err := l.enter(ctx); err != nil {
		return nil, answer{}, err
	}
	defer l.leave()
	return l.insist(ctx, l.lastOp.Add(1), &r)
}

// insist sends a request, a new one or one that is known, until it has a final
// answer.
func (l *load) insist(ctx context.Context, id int64, fresh *request) (*op, answer, error) {
	attempt := 0
	if fresh == nil {
		l.known.mutex.Lock()
		attempt = l.known.ops[id].attempts
		l.known.mutex.Unlock()
	}
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, 250*time.Millisecond) {
		attempt++
		o, got, err := l.attempt(ctx, id, attempt, fresh)
		if err != nil {
			return o, got, err
		}
		fresh = nil
		if o.final != nil {
			return o, got, nil
		}
		select {
		case <-time.After(pause/2 + rand.N(pause)):
		case <-ctx.Done():
			return o, got, ctx.Err()
		}
	}
}

// attempt sends a request once, with a line in the journal before and after. Its
// error is one of the journal's, or that ctx is done.
func (l *load) attempt(ctx context.Context, id int64, attempt int, fresh *request) (*op, answer, error) {
	line := entry{Kind: entrySend, Op: id, Attempt: attempt, Request: fresh}
	var err error
	if fresh != nil && fresh.Method == http.MethodGet {
		line, err = l.journal.put(line) // forgetting that something was read does no harm
	} else {
		line, err = l.journal.add(line)
	}
	if err == nil {
		err = l.known.learn(line)
	}
	if err != nil {
		return nil, answer{}, err
	}
	l.known.mutex.Lock()
	o := l.known.ops[id]
	l.known.mutex.Unlock()
	r := o.request
	got, sendErr := l.clients[r.Tenant].Send(ctx, r.Method, r.Path, r.Body, r.Key)
	after := entry{Op: id, Attempt: attempt, Kind: entryAnswer, Answer: &answer{
		Status: got.Status, Replayed: got.Replayed, Location: got.Location, ContentType: got.ContentType, Body: got.Body,
	}}
	if sendErr != nil {
		after.Kind, after.Answer = entryNothing, nil
		after.Why, after.NotSent = sendErr.Error(), errors.Is(sendErr, sandbox.ErrNotSent)
	}
	if after, err = l.journal.add(after); err != nil {
		return o, answer{}, err
	}
	if err := l.known.learn(after); err != nil {
		return o, answer{}, err
	}
	if after.Answer == nil {
		return o, answer{}, ctx.Err()
	}
	return o, *after.Answer, nil
}

// post makes a request about an order.
func post(client, tenant int, what action, order, suffix, body string) request {
	return request{
		Client: client, Tenant: tenant, Action: what, Method: http.MethodPost, Path: "/v1/orders/" + order + suffix,
		Key: uuid.NewString(), Body: body, Order: order,
	}
}

func place(client, tenant int, body string) request {
	return request{Client: client, Tenant: tenant, Action: actPlace, Method: http.MethodPost, Path: "/v1/orders", Key: uuid.NewString(), Body: body}
}

func pay(client, tenant int, order, reference string) request {
	return post(client, tenant, actPay, order, "/pay", fmt.Sprintf(`{"payment_reference":%q}`, reference))
}

func cancelling(client, tenant int, order string) request {
	return post(client, tenant, actCancel, order, "/cancel", "")
}

func refund(client, tenant int, order string, amount int64) request {
	r := post(client, tenant, actRefund, order, "/refunds", fmt.Sprintf(`{"amount":%d,"reason":"damaged"}`, amount))
	r.Amount = amount
	return r
}

func get(client, tenant int, order string) request {
	return request{Client: client, Tenant: tenant, Action: actGet, Method: http.MethodGet, Path: "/v1/orders/" + order, Order: order}
}

// life takes one order through its life: a plain one, or one of those that show
// something.
func (l *load) life(ctx context.Context, client int, number uint64) error {
	random := rand.New(rand.NewPCG(l.seed, number))
	tenant := random.IntN(len(l.clients))
	body := basket(random)
	if random.IntN(64) == 0 && l.large.Add(1) <= mostLarge {
		body = largeBasket(random)
	}
	first := place(client, tenant, body)
	ways := []func(context.Context, *rand.Rand, request) (*orderBody, error){
		l.once, l.once, l.once, l.twiceAtOnce, l.otherTenant,
	}
	placed, err := ways[random.IntN(len(ways))](ctx, random, first)
	if err != nil || placed == nil {
		return err
	}
	lives := []func(context.Context, *rand.Rand, int, int, *orderBody) error{
		l.plain, l.plain, l.plain, l.contended, l.contended, l.reused, l.watched,
	}
	if err := lives[random.IntN(len(lives))](ctx, random, client, tenant, placed); err != nil {
		return err
	}
	line, err := l.journal.put(entry{Kind: entryLife, Order: placed.ID})
	if err == nil {
		err = l.known.learn(line)
	}
	return err
}

// placed is the order that an answer is about, or nil if it was refused, which is
// a violation that has been noted.
func placed(o *op) *orderBody {
	if o.final.status >= 400 {
		return nil
	}
	return &o.final.order
}

func (l *load) once(ctx context.Context, _ *rand.Rand, first request) (*orderBody, error) {
	o, _, err := l.ask(ctx, first)
	if err != nil {
		return nil, err
	}
	return placed(o), nil
}

// twiceAtOnce sends one request from two places: one order is made.
func (l *load) twiceAtOnce(ctx context.Context, _ *rand.Rand, first request) (*orderBody, error) {
	var two [2]*op
	err := l.together(ctx, &two[0], first, &two[1], first)
	if err != nil {
		return nil, err
	}
	return placed(two[0]), nil
}

// otherTenant has another tenant use the same key for the same thing: it gets an
// order of its own, and neither sees the other's.
func (l *load) otherTenant(ctx context.Context, random *rand.Rand, first request) (*orderBody, error) {
	second := first
	second.Tenant = (first.Tenant + 1 + random.IntN(max(1, len(l.clients)-1))) % len(l.clients)
	var two [2]*op
	if err := l.together(ctx, &two[0], first, &two[1], second); err != nil {
		return nil, err
	}
	mine, theirs := placed(two[0]), placed(two[1])
	if mine == nil || theirs == nil || second.Tenant == first.Tenant {
		return mine, nil
	}
	foreign := get(first.Client, second.Tenant, mine.ID)
	foreign.Action = actForeign
	if _, _, err := l.ask(ctx, foreign); err != nil {
		return nil, err
	}
	foreign = pay(first.Client, first.Tenant, theirs.ID, "foreign-"+theirs.ID)
	foreign.Action = actForeign
	_, _, err := l.ask(ctx, foreign)
	return mine, err
}

// together sends two requests at the same time.
func (l *load) together(ctx context.Context, one **op, first request, two **op, second request) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() (err error) { *one, _, err = l.ask(ctx, first); return err })
	group.Go(func() (err error) { *two, _, err = l.ask(ctx, second); return err })
	return group.Wait()
}

func (l *load) all(ctx context.Context, requests ...request) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, r := range requests {
		group.Go(func() error {
			_, _, err := l.ask(ctx, r)
			return err
		})
	}
	return group.Wait()
}

// plain is one client with an order of its own.
func (l *load) plain(ctx context.Context, random *rand.Rand, client, tenant int, order *orderBody) error {
	switch random.IntN(8) {
	case 0: // left alone
		return nil
	case 1:
		return l.all(ctx, cancelling(client, tenant, order.ID))
	}
	if err := l.all(ctx, pay(client, tenant, order.ID, "pi-"+order.ID)); err != nil {
		return err
	}
	for _, amount := range portions(random, order.Total) {
		if err := l.all(ctx, refund(client, tenant, order.ID, amount)); err != nil {
			return err
		}
	}
	return nil
}

// portions are refunds of an order: none, a part, two parts, or all of it.
func portions(random *rand.Rand, total int64) []int64 {
	part := 1 + random.Int64N(total)
	switch random.IntN(4) {
	case 0:
		return nil
	case 1:
		return []int64{part}
	case 2:
		return []int64{total}
	default:
		if part == total {
			return []int64{total}
		}
		return []int64{part, total - part}
	}
}

// contended is several clients at one order at the same time: of payments one is
// taken, of paying and cancelling one wins, and together refunds do not pass what
// was paid.
func (l *load) contended(ctx context.Context, random *rand.Rand, client, tenant int, order *orderBody) error {
	first := pay(client, tenant, order.ID, "pi-"+order.ID)
	rush := []request{first, pay(client, tenant, order.ID, "pj-"+order.ID), get(client, tenant, order.ID)}
	if random.IntN(2) == 0 {
		rush = append(rush, cancelling(client, tenant, order.ID))
	}
	if random.IntN(2) == 0 {
		rush = append(rush, first) // the same key twice at once
	}
	if random.IntN(3) == 0 {
		rush = append(rush, refund(client, tenant, order.ID, 1+random.Int64N(order.Total)))
	}
	random.Shuffle(len(rush), func(i, j int) { rush[i], rush[j] = rush[j], rush[i] })
	if err := l.all(ctx, rush...); err != nil {
		return err
	}
	// Two refunds that together are too much, the first of them sent twice.
	half := min(order.Total/2+1, order.Total)
	part := refund(client, tenant, order.ID, half)
	rest := refund(client, tenant, order.ID, min(order.Total-half+1, order.Total))
	return l.all(ctx, part, part, rest, get(client, tenant, order.ID))
}

// reused is a client that uses a key for something else: it is refused.
func (l *load) reused(ctx context.Context, random *rand.Rand, client, tenant int, order *orderBody) error {
	first := pay(client, tenant, order.ID, "pi-"+order.ID)
	if err := l.all(ctx, first); err != nil {
		return err
	}
	again := first
	again.Action, again.Body = actReuse, fmt.Sprintf(`{"payment_reference":%q}`, "other-"+order.ID)
	whole := refund(client, tenant, order.ID, order.Total)
	more := refund(client, tenant, order.ID, 1)
	more.Action, more.Key = actReuse, first.Key
	if err := l.all(ctx, again, more, whole); err != nil {
		return err
	}
	// The key of one order's request with the same body for another order.
	other, _, err := l.ask(ctx, place(client, tenant, basket(random)))
	if err != nil {
		return err
	}
	second := placed(other)
	if second == nil {
		return nil
	}
	elsewhere := post(client, tenant, actReuse, second.ID, "/pay", first.Body)
	elsewhere.Key = first.Key
	end := cancelling(client, tenant, second.ID)
	if err := l.all(ctx, elsewhere, end); err != nil {
		return err
	}
	ended := post(client, tenant, actReuse, order.ID, "/cancel", "")
	ended.Key = end.Key
	if err := l.all(ctx, ended, get(client, tenant, order.ID), get(client, tenant, second.ID)); err != nil {
		return err
	}
	line, err := l.journal.put(entry{Kind: entryLife, Order: second.ID})
	if err == nil {
		err = l.known.learn(line)
	}
	return err
}

// watched is read all the while.
func (l *load) watched(ctx context.Context, random *rand.Rand, client, tenant int, order *orderBody) error {
	see := get(client, tenant, order.ID)
	if err := l.all(ctx, see, pay(client, tenant, order.ID, "pi-"+order.ID), see); err != nil {
		return err
	}
	for _, amount := range portions(random, order.Total) {
		if err := l.all(ctx, see, refund(client, tenant, order.ID, amount), see); err != nil {
			return err
		}
	}
	return l.all(ctx, see)
}

// probe places an order and pays it: when its receipt is whole, the service is
// back.
func (l *load) probe(ctx context.Context, tenant int) (string, error) {
	body := placeBody{
		CustomerID: "probe", CustomerEmail: "probe@example.com", Currency: "EUR",
		Lines: []lineBody{{SKU: "probe", Description: "A probe", Quantity: 1, UnitAmount: 1000, TaxRate: "0.19"}},
	}
	text, _ := json.Marshal(body) // texts and numbers
	first := place(-1, tenant, string(text))
	first.Probe = true
	o, _, err := l.insist(ctx, l.lastOp.Add(1), &first)
	if err != nil {
		return "", err
	}
	order := placed(o)
	if order == nil {
		return "", fmt.Errorf("an order was refused with %d %s", o.final.status, o.final.code)
	}
	second := pay(-1, tenant, order.ID, "pi-"+order.ID)
	second.Probe = true
	if _, _, err = l.insist(ctx, l.lastOp.Add(1), &second); err != nil {
		return "", err
	}
	line, err := l.journal.put(entry{Kind: entryLife, Order: order.ID})
	if err == nil {
		err = l.known.learn(line)
	}
	return order.ID, err
}

// receiptComplete asks for an order's receipt.
func (l *load) receiptComplete(ctx context.Context, tenant int, order string) (bool, error) {
	got, err := l.clients[tenant].Send(ctx, http.MethodGet, "/v1/orders/"+order+"/receipt", "", "")
	if err != nil {
		return false, err
	}
	var receipt struct {
		Complete bool     `json:"complete"`
		WaitsFor []string `json:"waits_for"`
	}
	if err := json.Unmarshal([]byte(got.Body), &receipt); err != nil || got.Status != http.StatusOK {
		return false, fmt.Errorf("the receipt of order %s was answered %d: %.200s", order, got.Status, got.Body)
	}
	if !receipt.Complete {
		return false, fmt.Errorf("order %s waits for %s", order, receipt.WaitsFor)
	}
	invoices, entries, err := l.posted(ctx, l.tenants[tenant], order)
	if err == nil && (invoices != 1 || entries != 1) {
		l.known.contradicts(order, invoices, entries)
		err = fmt.Errorf("order %s has %d invoices and %d ledger entries, and its receipt is complete", order, invoices, entries)
	}
	return err == nil, err
}

// postedIn looks into the tables for a paid order's invoice and its ledger entry.
func postedIn(pool *pgxpool.Pool) func(ctx context.Context, tenant, order string) (invoices, entries int, err error) {
	return func(ctx context.Context, tenant, order string) (invoices, entries int, err error) {
		err = pool.QueryRow(ctx, `
			SELECT (SELECT count(*) FROM invoices WHERE tenant_id = $1::uuid AND order_id = $2::uuid),
			       (SELECT count(*) FROM ledger_entries WHERE tenant_id = $1::uuid AND order_id = $2::uuid AND kind = 'payment')`,
			tenant, order).Scan(&invoices, &entries)
		if err != nil {
			return 0, 0, fmt.Errorf("look for the invoice of order %s: %w", order, err)
		}
		return invoices, entries, nil
	}
}

// resolve sends again every request that has no final answer: those that were
// under way when an earlier run was broken off.
func (l *load) resolve(ctx context.Context) error {
	l.known.mutex.Lock()
	var open []int64
	for id := range l.known.open {
		open = append(open, id)
	}
	l.known.mutex.Unlock()
	slices.Sort(open)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(8)
	for _, id := range open {
		group.Go(func() error {
			_, _, err := l.insist(ctx, id, nil)
			return err
		})
	}
	return group.Wait()
}

// again sends some requests that have been answered once more: the answers must
// be the same, and the account after it must not change. It says how many were
// answered.
func (l *load) again(ctx context.Context, most int) (int, error) {
	l.known.mutex.Lock()
	var picked []*op
	for _, o := range slices.Backward(l.known.recent) {
		if len(picked) < most && o.request.Method == http.MethodPost {
			picked = append(picked, o)
		}
	}
	attempts := make([]int, len(picked))
	for i, o := range picked {
		attempts[i] = o.attempts
	}
	l.known.mutex.Unlock()
	var compared atomic.Int64
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(8)
	for i, o := range picked {
		group.Go(func() error {
			_, got, err := l.attempt(ctx, o.id, attempts[i]+1, nil)
			if err == nil && isFinal(read(got)) {
				compared.Add(1)
			}
			return err
		})
	}
	err := group.Wait()
	return int(compared.Load()), err
}

// KnownOrder is an order of the clients.
type KnownOrder struct {
	TenantID uuid.UUID
	ID       uuid.UUID
	Version  int64
}

func (l *load) settled(status string, most int) []KnownOrder {
	l.known.mutex.Lock()
	defer l.known.mutex.Unlock()
	var found []KnownOrder
	for id, order := range l.known.orders {
		if w := order.wanted(); order.settled && w.status == status {
			found = append(found, KnownOrder{TenantID: l.tenantID(order.tenant), ID: uuid.MustParse(id), Version: w.version})
		}
	}
	// UUIDv7: the newest are the highest.
	slices.SortFunc(found, func(a, b KnownOrder) int { return -slices.Compare(a.ID[:], b.ID[:]) })
	return found[:min(most, len(found))]
}

func (l *load) tenantID(tenant int) uuid.UUID {
	id, _ := uuid.Parse(l.tenants[tenant]) // read from the database
	return id
}

// basket is a request for a new order.
func basket(random *rand.Rand) string {
	pick := func(from ...string) string { return from[random.IntN(len(from))] }
	order := placeBody{
		CustomerID:    fmt.Sprintf("c-%d", random.IntN(50)),
		CustomerEmail: fmt.Sprintf("a%d@example.com", random.IntN(50)),
		Currency:      pick("EUR", "EUR", "USD", "JPY", "KWD"),
	}
	if random.IntN(2) == 0 {
		order.Metadata = map[string]string{"cart": fmt.Sprintf("<%d>", random.IntN(1000)), "note": "\u00e9 & \"so\""}
	}
	lines := 1 + random.IntN(3)
	if random.IntN(20) == 0 {
		lines = 30 + random.IntN(100)
	}
	for i := range lines {
		order.Lines = append(order.Lines, lineBody{
			SKU: fmt.Sprintf("book-%d", i), Description: "A book",
			Quantity: 1 + random.Int64N(5), UnitAmount: 1 + random.Int64N(9999), TaxRate: pick("0", "0.07", "0.19", "0.081"),
		})
	}
	text, _ := json.Marshal(order) // texts and numbers
	return string(text)
}

// largeBasket comes near the largest amount there is, 2^53-1 with its tax, in odd
// minor units: whoever adds such amounts in floating point is off by some.
func largeBasket(random *rand.Rand) string {
	const largest = 1<<53 - 1
	order := placeBody{CustomerID: "c-large", CustomerEmail: "a@example.com", Currency: "KWD"}
	lines := 3 + random.IntN(5)
	for i := range lines {
		most := int64(largest) / int64(lines) * 4 / 5
		order.Lines = append(order.Lines, lineBody{
			SKU: fmt.Sprintf("ship-%d", i), Description: "A ship",
			Quantity: 1, UnitAmount: (most - random.Int64N(most/100)) | 1, TaxRate: []string{"0", "0.19"}[i%2],
		})
	}
	text, _ := json.Marshal(order) // texts and numbers
	return string(text)
}

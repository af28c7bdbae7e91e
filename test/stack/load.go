package stack

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sync/errgroup"
)

// Load is clients that make orders, all at the same time. Each takes an order
// through a life (left alone, cancelled, paid, paid and refunded in part or
// whole), waits until its receipt is complete, and goes on to the next one.
type Load struct {
	Seed uint64

	client *Client
	ctx    context.Context
	group  *errgroup.Group
	last   atomic.Int64 // the number of the last order; more are to come while it is 0
	began  atomic.Int64

	mutex     sync.Mutex
	orders    []Order
	exchanges []Exchange
	steps     int
	stepped   chan struct{} // closed at the next step
}

// Order is an order as its client knows it: only what was answered counts.
type Order struct {
	ID       string
	Status   string
	Currency string
	Total    int64
	Refunds  int64
	Refunded int64
	Version  int64
}

// StartLoad starts clients that make orders until Finish. What they buy is
// random, by a seed.
func (s *Stack) StartLoad(t testing.TB, api *Process, clients int, seed uint64) *Load {
	t.Helper()
	l := &Load{Seed: seed, client: s.NewClient(api), stepped: make(chan struct{})}
	l.group, l.ctx = errgroup.WithContext(t.Context())
	for range clients {
		l.group.Go(func() error {
			for {
				number := l.began.Add(1)
				if last := l.last.Load(); last != 0 && number > last {
					return nil
				}
				if err := l.order(uint64(number)); err != nil {
					return fmt.Errorf("order %d of seed %d: %w", number, seed, err)
				}
			}
		})
	}
	s.loads = append(s.loads, l)
	return l
}

// Finish waits until so many orders have been made, at least, and all that were
// begun have complete receipts.
func (l *Load) Finish(orders int) error {
	l.last.Store(max(int64(orders), l.began.Load(), 1))
	return l.group.Wait()
}

// Run makes orders and waits for their receipts.
func (s *Stack) Run(t testing.TB, api *Process, clients, orders int, seed uint64) *Load {
	t.Helper()
	l := s.StartLoad(t, api, clients, seed)
	if err := l.Finish(orders); err != nil {
		t.Fatal(err)
	}
	return l
}

// Advance waits until the clients have got so many more answers and receipts.
func (l *Load) Advance(steps int) error {
	ctx, cancel := context.WithTimeout(l.ctx, Patience)
	defer cancel()
	l.mutex.Lock()
	target := l.steps + steps
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

// note remembers what the clients have got, and wakes who waits for it.
func (l *Load) note(change func()) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	change()
	l.steps++
	close(l.stepped)
	l.stepped = make(chan struct{})
}

// order takes one order through its life.
func (l *Load) order(number uint64) error {
	random := rand.New(rand.NewPCG(l.Seed, number))
	var order Order
	created, err := l.post("/v1/orders", basket(random), http.StatusCreated)
	if err != nil {
		return err
	}
	order.read(created)
	path := "/v1/orders/" + order.ID

	switch life := random.IntN(10); {
	case life == 0: // left alone
	case life <= 2:
		answer, err := l.post(path+"/cancel", "", http.StatusOK)
		if err != nil {
			return err
		}
		order.read(answer)
	default:
		answer, err := l.post(path+"/pay", fmt.Sprintf(`{"payment_reference":"pi-%s"}`, order.ID), http.StatusOK)
		if err != nil {
			return err
		}
		order.read(answer)
		var refunds []int64
		if part := 1 + random.Int64N(order.Total); life > 5 {
			refunds = append(refunds, part)
			if rest := order.Total - part; life == 9 && rest > 0 {
				refunds = append(refunds, rest)
			}
		}
		for _, amount := range refunds {
			if _, err := l.post(path+"/refunds", fmt.Sprintf(`{"amount":%d,"reason":"damaged"}`, amount), http.StatusCreated); err != nil {
				return err
			}
			order.Refunds++
			order.Refunded += amount
			order.Version++
		}
	}
	if err := l.waitReceipt(path); err != nil {
		return err
	}
	l.note(func() { l.orders = append(l.orders, order) })
	return nil
}

// read takes what an answer says of the order.
func (o *Order) read(answer Answer) {
	var body struct {
		ID       string `json:"id"`
		Status   string `json:"status"`
		Version  int64  `json:"version"`
		Currency string `json:"currency"`
		Total    int64  `json:"total_amount"`
	}
	_ = json.Unmarshal([]byte(answer.Body), &body) // an empty order will be missed
	o.ID, o.Status, o.Version, o.Currency, o.Total = body.ID, body.Status, body.Version, body.Currency, body.Total
}

// basket is a request for a new order.
func basket(random *rand.Rand) string {
	type line struct {
		SKU         string `json:"sku"`
		Description string `json:"description"`
		Quantity    int64  `json:"quantity"`
		UnitAmount  int64  `json:"unit_amount"`
		TaxRate     string `json:"tax_rate"`
	}
	pick := func(from ...string) string { return from[random.IntN(len(from))] }
	order := map[string]any{
		"customer_id":    fmt.Sprintf("c-%d", random.IntN(50)),
		"customer_email": "a@example.com",
		"currency":       pick("EUR", "EUR", "USD", "JPY", "KWD"),
	}
	var lines []line
	for range 1 + random.IntN(3) {
		lines = append(lines, line{
			SKU: "book", Description: "A book",
			Quantity: 1 + random.Int64N(5), UnitAmount: 1 + random.Int64N(9999), TaxRate: pick("0", "0.07", "0.19", "0.081"),
		})
	}
	order["lines"] = lines
	text, _ := json.Marshal(order) // texts and numbers
	return string(text)
}

func (l *Load) post(path, body string, want int) (Answer, error) {
	exchange, err := l.client.Post(l.ctx, path, body)
	if err != nil {
		return Answer{}, fmt.Errorf("POST %s: %w", path, err)
	}
	l.note(func() { l.exchanges = append(l.exchanges, exchange) })
	if exchange.Status != want {
		return Answer{}, fmt.Errorf("POST %s: want %d, got %d after %d without an answer: %s", path, want, exchange.Status, exchange.Unknown, exchange.Answer.Body)
	}
	return exchange.Answer, nil
}

func (l *Load) waitReceipt(path string) error {
	err := l.client.insist(l.ctx, func() (bool, error) {
		answer, err := l.client.Get(l.ctx, path+"/receipt")
		if err != nil {
			return false, err
		}
		var receipt struct {
			Complete bool     `json:"complete"`
			WaitsFor []string `json:"waits_for"`
		}
		if err := json.Unmarshal([]byte(answer.Body), &receipt); err != nil || answer.Status != http.StatusOK {
			return false, fmt.Errorf("%d %s", answer.Status, answer.Body)
		}
		return receipt.Complete, fmt.Errorf("it waits for %s", receipt.WaitsFor)
	})
	if err != nil {
		return fmt.Errorf("receipt of %s: %w", path, err)
	}
	return nil
}

package drill

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"
)

// clients are customers' programs: each takes an order from placing it over
// paying it to a refund, and goes on to the next one.
type clients struct {
	api, key string
	http     *http.Client
	begun    atomic.Int64
	orders   int
	patience time.Duration // with one request
	group    *errgroup.Group
	cancel   context.CancelFunc
	// trouble is why the request that was answered last has to be sent again, if
	// it has.
	trouble atomic.Pointer[error]
	// failed is why one of them gave up; nil while none did.
	failed func() error
}

// atOnce is how many clients there are.
const atOnce = 4

func newClients(config Config) *clients {
	return &clients{
		api: strings.TrimSuffix(config.API, "/"), key: config.Key, orders: config.Orders, patience: config.Wait,
		http: &http.Client{Timeout: min(20*time.Second, config.Wait/2)}, // one that hangs is told, too
	}
}

// check asks the API for something that takes a key.
func (c *clients) check(ctx context.Context) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.api+"/v1/orders?limit=1", nil)
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+c.key)
	response, err := c.http.Do(request)
	if err != nil {
		return err // names the request
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	switch {
	case err != nil:
		return fmt.Errorf("GET %s: %w", request.URL, err)
	case response.StatusCode == http.StatusUnauthorized:
		return fmt.Errorf("GET %s: the key is not valid there (ONCELEDGER_API_KEY): %s", request.URL, response.Status)
	case response.StatusCode != http.StatusOK:
		return fmt.Errorf("GET %s was answered %d: %.300s", request.URL, response.StatusCode, bytes.TrimSpace(text))
	}
	return nil
}

func (c *clients) start(ctx context.Context) {
	ctx, c.cancel = context.WithCancel(ctx)
	c.group, ctx = errgroup.WithContext(ctx)
	c.failed = func() error {
		if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
			return err
		}
		return nil
	}
	for range atOnce {
		c.group.Go(func() error {
			for c.begun.Add(1) <= int64(c.orders) {
				if err := c.order(ctx); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

// finish waits for the last order.
func (c *clients) finish() error { return c.group.Wait() }

// stop ends the clients where they are.
func (c *clients) stop() {
	c.cancel()
	_ = c.group.Wait() // they were told to
}

// fault ends the clients, and is what kept them from their work.
func (c *clients) fault() error {
	c.cancel()
	if err := c.group.Wait(); !errors.Is(err, context.Canceled) {
		return err
	}
	if trouble := c.trouble.Load(); trouble != nil {
		return *trouble
	}
	return nil
}

func (c *clients) order(ctx context.Context) error {
	const basket = `{"customer_id":"drill","customer_email":"drill@example.com","currency":"EUR",` +
		`"lines":[{"sku":"drill","description":"A drill","quantity":1,"unit_amount":1000,"tax_rate":"0.19"}],"metadata":{"drill":"slot-loss"}}`
	var placed struct {
		ID string `json:"id"`
	}
	if err := c.post(ctx, "/v1/orders", basket, &placed); err != nil {
		return fmt.Errorf("place an order: %w", err)
	}
	if err := c.post(ctx, "/v1/orders/"+placed.ID+"/pay", `{"payment_reference":"drill-`+placed.ID+`"}`, nil); err != nil {
		return fmt.Errorf("pay order %s: %w", placed.ID, err)
	}
	if err := c.post(ctx, "/v1/orders/"+placed.ID+"/refunds", `{"amount":100,"reason":"drill"}`, nil); err != nil {
		return fmt.Errorf("refund of order %s: %w", placed.ID, err)
	}
	return nil
}

// post sends a request until its outcome is known, always with the same key, for
// as long as it has patience. What was in the way at last is the error.
func (c *clients) post(ctx context.Context, path, body string, answer any) error {
	key := uuid.NewString()
	enough := time.After(c.patience)
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		again, err := c.try(ctx, path, body, key, answer)
		if !again {
			c.trouble.Store(nil)
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		c.trouble.Store(&err)
		select {
		case <-time.After(pause/2 + rand.N(pause)):
		case <-enough:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (c *clients) try(ctx context.Context, path, body, key string, answer any) (again bool, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, c.api+path, strings.NewReader(body))
	if err != nil {
		return false, err
	}
	request.Header.Set("Authorization", "Bearer "+c.key)
	request.Header.Set("Idempotency-Key", key)
	request.Header.Set("Content-Type", "application/json")
	response, err := c.http.Do(request)
	if err != nil {
		return true, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return true, err
	}
	switch {
	case response.StatusCode < 300 && answer != nil:
		return false, json.Unmarshal(text, answer)
	case response.StatusCode < 300:
		return false, nil
	}
	again = response.StatusCode >= 500 || response.StatusCode == http.StatusConflict && strings.Contains(string(text), "request-in-progress")
	return again, fmt.Errorf("POST %s was answered %d: %.300s", path, response.StatusCode, text)
}

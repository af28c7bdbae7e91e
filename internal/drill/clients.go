package drill

import (
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
	group    *errgroup.Group
	cancel   context.CancelFunc
}

// atOnce is how many clients there are.
const atOnce = 4

func startClients(ctx context.Context, api, key string, orders int) *clients {
	ctx, cancel := context.WithCancel(ctx)
	c := &clients{
		api: strings.TrimSuffix(api, "/"), key: key, orders: orders, cancel: cancel,
		http: &http.Client{Timeout: 20 * time.Second},
	}
	c.group, ctx = errgroup.WithContext(ctx)
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
	return c
}

// finish waits for the last order.
func (c *clients) finish() error { return c.group.Wait() }

// stop ends the clients where they are.
func (c *clients) stop() {
	c.cancel()
	_ = c.group.Wait() // they were told to
}

// fault is what is wrong with the clients, when what they do has no effect.
func (c *clients) fault() error {
	c.cancel()
	if err := c.group.Wait(); !errors.Is(err, context.Canceled) {
		return err
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

// post sends a request until its outcome is known, always with the same key.
func (c *clients) post(ctx context.Context, path, body string, answer any) error {
	key := uuid.NewString()
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		again, err := c.try(ctx, path, body, key, answer)
		if !again {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(pause/2 + rand.N(pause)):
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

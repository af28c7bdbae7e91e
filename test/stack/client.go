package stack

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"time"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/sandbox"
)

// Exchange is a request and the answer that it came to.
type Exchange struct {
	Path, Body, Key string

	Answer
	Unknown int // how often it was sent before that, and what came of it was not known
}

// Answer is what the API said, as far as a client may rely on it.
type Answer = sandbox.Answer

// Client is a customer's program. It sends each request until it has an answer,
// always with the same Idempotency-Key: a connection that breaks, a 5xx and "in
// progress" may mean that the request was done, and that it was not.
type Client struct{ *sandbox.Client }

// NewClient makes a client of an API; several goroutines may use it.
func (s *Stack) NewClient(api *Process) *Client {
	return &Client{sandbox.NewClient(api.URL, s.Key)}
}

// Post sends a POST with a new Idempotency-Key.
func (c *Client) Post(ctx context.Context, path, body string) (Exchange, error) {
	exchange := Exchange{Path: path, Body: body, Key: uuid.NewString()}
	err := c.Exchange(ctx, &exchange)
	return exchange, err
}

// Exchange sends a request until it has an answer.
func (c *Client) Exchange(ctx context.Context, exchange *Exchange) error {
	return c.insist(ctx, func() (known bool, err error) {
		exchange.Answer, err = c.Send(ctx, http.MethodPost, exchange.Path, exchange.Body, exchange.Key)
		known = err == nil && exchange.Final()
		if !known && !errors.Is(err, sandbox.ErrNotSent) && ctx.Err() == nil {
			exchange.Unknown++
		}
		return known, err
	})
}

// Get asks until there is an answer.
func (c *Client) Get(ctx context.Context, path string) (answer Answer, err error) {
	err = c.insist(ctx, func() (bool, error) {
		answer, err = c.Send(ctx, http.MethodGet, path, "", "")
		return err == nil && answer.Status < 500, err
	})
	return answer, err
}

// insist tries until the outcome is known, after pauses that grow.
func (c *Client) insist(ctx context.Context, try func() (known bool, err error)) error {
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, 200*time.Millisecond) {
		known, err := try()
		if known {
			return nil
		}
		select {
		case <-time.After(pause/2 + rand.N(pause)):
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		}
	}
}

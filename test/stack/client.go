package stack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"syscall"
	"time"

	"github.com/google/uuid"
)

// Exchange is a request and the answer that it came to.
type Exchange struct {
	Path, Body, Key string

	Answer
	Unknown int // how often it was sent before that, and what came of it was not known
}

// Answer is what the API said, as far as a client may rely on it.
type Answer struct {
	Status                int
	ContentType, Location string
	Body                  string
	Replayed              bool
}

// Client is a customer's program. It sends each request until it has an answer,
// always with the same Idempotency-Key: a connection that breaks, a 5xx and "in
// progress" may mean that the request was done, and that it was not.
type Client struct {
	api  *Process
	key  string
	http *http.Client
}

// NewClient makes a client of an API; several goroutines may use it.
func (s *Stack) NewClient(api *Process) *Client {
	return &Client{api: api, key: s.Key, http: &http.Client{
		Timeout:   20 * time.Second,
		Transport: &http.Transport{MaxIdleConnsPerHost: 100},
	}}
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
		exchange.Answer, err = c.send(ctx, http.MethodPost, exchange.Path, exchange.Body, exchange.Key)
		inProgress := exchange.Status == http.StatusConflict && strings.Contains(exchange.Answer.Body, "request-in-progress")
		known = err == nil && exchange.Status < 500 && !inProgress
		if !known && !errors.Is(err, errNotSent) && ctx.Err() == nil {
			exchange.Unknown++
		}
		return known, err
	})
}

// Get asks until there is an answer.
func (c *Client) Get(ctx context.Context, path string) (answer Answer, err error) {
	err = c.insist(ctx, func() (bool, error) {
		answer, err = c.send(ctx, http.MethodGet, path, "", "")
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

// errNotSent is an attempt that reached no API.
var errNotSent = errors.New("the API does not listen")

func (c *Client) send(ctx context.Context, method, path, body, key string) (Answer, error) {
	url := c.api.URL()
	if url == "" {
		return Answer{}, errNotSent
	}
	request, err := http.NewRequestWithContext(ctx, method, url+path, strings.NewReader(body))
	if err != nil {
		return Answer{}, err
	}
	// Go would send it again by itself, and nobody would count that.
	request.GetBody = nil
	request.Header.Set("Authorization", "Bearer "+c.key)
	if key != "" {
		request.Header.Set("Idempotency-Key", key)
		request.Header.Set("Content-Type", "application/json")
	}
	response, err := c.http.Do(request)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return Answer{}, errors.Join(errNotSent, err)
	}
	if err != nil {
		return Answer{}, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return Answer{}, fmt.Errorf("read answer: %w", err)
	}
	return Answer{
		Status:      response.StatusCode,
		ContentType: response.Header.Get("Content-Type"),
		Location:    response.Header.Get("Location"),
		Body:        string(text),
		Replayed:    response.Header.Get("Idempotency-Replayed") == "true",
	}, nil
}

package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"syscall"
	"time"
)

// Answer is what the API said, as far as a client may rely on it.
type Answer struct {
	Status                int
	ContentType, Location string
	Body                  string
	Replayed              bool
}

// Client is a customer's program with an API key. Each request is sent once:
// whoever uses it decides what to do without an answer.
type Client struct {
	url  func() string
	key  string
	http *http.Client
}

// NewClient makes a client of the API that is at url at the moment; several
// goroutines may use it.
func NewClient(url func() string, key string) *Client {
	return &Client{url: url, key: key, http: &http.Client{
		Timeout:   20 * time.Second,
		Transport: &http.Transport{MaxIdleConnsPerHost: 100},
	}}
}

// ErrNotSent is an attempt that reached no API.
var ErrNotSent = errors.New("the API does not listen")

// Send sends a request once. After an error that is not ErrNotSent, the request
// may have been done.
func (c *Client) Send(ctx context.Context, method, path, body, idempotencyKey string) (Answer, error) {
	url := c.url()
	if url == "" {
		return Answer{}, ErrNotSent
	}
	request, err := http.NewRequestWithContext(ctx, method, url+path, strings.NewReader(body))
	if err != nil {
		return Answer{}, err
	}
	// Go would send it again by itself, and nobody would count that.
	request.GetBody = nil
	request.Header.Set("Authorization", "Bearer "+c.key)
	if idempotencyKey != "" {
		request.Header.Set("Idempotency-Key", idempotencyKey)
		request.Header.Set("Content-Type", "application/json")
	}
	response, err := c.http.Do(request)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return Answer{}, errors.Join(ErrNotSent, err)
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

// Final reports whether an answer is the last word: a 5xx and "in progress" may
// mean that the request was done, and that it was not.
func (a Answer) Final() bool {
	inProgress := a.Status == http.StatusConflict && strings.Contains(a.Body, "request-in-progress")
	return a.Status != 0 && a.Status < 500 && !inProgress
}

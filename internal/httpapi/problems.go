package httpapi

import (
	"context"
	"errors"
	"log/slog"
	"net/http"

	"github.com/labstack/echo/v4"

	"github.com/onceledger/onceledger/internal/failure"
	"github.com/onceledger/onceledger/internal/idempotency"
	"github.com/onceledger/onceledger/internal/postgres"
)

// problemBase is where each problem's page is: docs/problems in the repository.
const problemBase = "https://github.com/onceledger/onceledger/blob/main/docs/problems/"

const mimeProblem = "application/problem+json"

// problem is a problem document (RFC 9457).
type problem struct {
	Type      string          `json:"type"`
	Title     string          `json:"title"`
	Status    int             `json:"status"`
	Detail    string          `json:"detail,omitempty"`
	RequestID string          `json:"request_id"`
	Errors    []failure.Field `json:"errors,omitempty"`
	Done      any             `json:"done,omitempty"`
}

// Partial is a failure after a part of what was asked for was done, which stays
// done: the problem document says what, as its member done.
type Partial struct {
	Err  error
	Done any
}

func (p *Partial) Error() string { return p.Err.Error() }
func (p *Partial) Unwrap() error { return p.Err }

var (
	errTryAgain = failure.New(failure.Unavailable, "try-again",
		"The service cannot do this right now, and whether it was done is not known. Send it again with the same Idempotency-Key.")
	errInternal = failure.New(failure.Unavailable, "internal", "Something is wrong with the service.")
)

var statuses = map[failure.Kind]int{
	failure.Invalid:      http.StatusBadRequest,
	failure.RuleViolated: http.StatusUnprocessableEntity,
	failure.Unauthorized: http.StatusUnauthorized,
	failure.NotFound:     http.StatusNotFound,
	failure.Conflict:     http.StatusConflict,
	failure.Unavailable:  http.StatusServiceUnavailable,
}

func newProblem(c echo.Context, refusal *failure.Error) problem {
	return problem{
		Type:      problemBase + refusal.Code + ".md",
		Title:     refusal.Title,
		Status:    statuses[refusal.Kind],
		Detail:    refusal.Detail,
		RequestID: requestID(c),
		Errors:    refusal.Fields,
	}
}

func problemAnswer(c echo.Context, refusal *failure.Error) (idempotency.Answer, error) {
	document := newProblem(c, refusal)
	body, err := encode(document)
	return idempotency.Answer{Status: document.Status, ContentType: mimeProblem, Body: body}, err
}

// ErrorHandler is the one place where an error becomes an answer: here, and in
// what else is served over HTTP.
func ErrorHandler(log *slog.Logger) echo.HTTPErrorHandler { return problems{log}.write }

type problems struct{ log *slog.Logger }

func (p problems) write(err error, c echo.Context) {
	if c.Response().Committed {
		return
	}
	document := p.of(err, c)
	if partial, ok := errors.AsType[*Partial](err); ok {
		document.Done = partial.Done
	}
	switch document.Status {
	case http.StatusServiceUnavailable, http.StatusConflict:
		if c.Response().Header().Get(echo.HeaderRetryAfter) == "" {
			c.Response().Header().Set(echo.HeaderRetryAfter, "1")
		}
	case http.StatusUnauthorized:
		c.Response().Header().Set(echo.HeaderWWWAuthenticate, "Bearer")
	}
	body, err := encode(document)
	if err == nil {
		err = c.Blob(document.Status, mimeProblem, body)
	}
	if err != nil {
		p.log.WarnContext(c.Request().Context(), "answer not written", "error", err, "request_id", requestID(c))
	}
}

func (p problems) of(err error, c echo.Context) problem {
	if routing, ok := errors.AsType[*echo.HTTPError](err); ok {
		return problem{
			Type: "about:blank", Title: http.StatusText(routing.Code), Status: routing.Code, RequestID: requestID(c),
		}
	}
	if refusal, ok := errors.AsType[*failure.Error](err); ok {
		return newProblem(c, refusal)
	}
	ctx := c.Request().Context()
	if postgres.Unavailable(err) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		p.log.WarnContext(ctx, "not available", "error", err, "request_id", requestID(c))
		return newProblem(c, errTryAgain)
	}
	p.log.ErrorContext(ctx, "internal error", "error", err, "request_id", requestID(c))
	document := newProblem(c, errInternal)
	document.Status = http.StatusInternalServerError
	return document
}

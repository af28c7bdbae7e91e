// Package httpapi is the HTTP API: it decodes a request, calls the domain in a
// transaction, and encodes what came of it.
//
// Nothing is answered with a 2xx before it is committed. Each POST is done once
// for its Idempotency-Key, in the transaction that also stores its answer. What
// a client got wrong is a problem document (RFC 9457) and never a 500.
package httpapi

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"regexp"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/labstack/echo/v4"
	"github.com/labstack/echo/v4/middleware"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/onceledger/onceledger/internal/failure"
	"github.com/onceledger/onceledger/internal/orders"
	"github.com/onceledger/onceledger/internal/tenants"
)

const (
	requestTimeout = 10 * time.Second // for everything a request waits for
	bodyLimit      = "256K"
)

// API answers requests.
type API struct {
	pool    *pgxpool.Pool
	log     *slog.Logger
	now     func() time.Time
	metrics *metrics
	shed    func() bool
}

// Config is what an API is made of.
type Config struct {
	Pool       *pgxpool.Pool // with the login onceledger_api
	Log        *slog.Logger
	Now        func() time.Time
	Metrics    prometheus.Registerer
	Shed       func() bool  // whether to refuse a request that writes; asked for each, so it must cost nothing; nil is never
	Operations http.Handler // /healthz, /readyz and /metrics
}

// New is the API as a handler.
func New(config Config) http.Handler {
	a := &API{
		pool:    config.Pool,
		log:     config.Log,
		now:     config.Now,
		metrics: newMetrics(config.Metrics),
		shed:    config.Shed,
	}
	if a.shed == nil {
		a.shed = func() bool { return false }
	}
	e := echo.New()
	e.HTTPErrorHandler = ErrorHandler(config.Log)

	e.Use(middleware.RequestIDWithConfig(RequestID()))
	e.Use(a.observe)
	e.Use(middleware.RecoverWithConfig(middleware.RecoverConfig{DisablePrintStack: true, LogErrorFunc: a.logPanic}))
	e.Use(middleware.ContextTimeoutWithConfig(middleware.ContextTimeoutConfig{
		Timeout:      requestTimeout,
		ErrorHandler: func(err error, _ echo.Context) error { return err },
	}))
	e.Use(middleware.BodyLimit(bodyLimit))

	for _, path := range []string{"/healthz", "/readyz", "/metrics"} {
		e.GET(path, echo.WrapHandler(config.Operations))
	}

	// Each route by itself and no group of them: a group with middleware would
	// answer a wrong method with 404.
	get := func(path string, handler echo.HandlerFunc) { e.GET("/v1"+path, handler, a.authenticate) }
	post := func(path string, handler echo.HandlerFunc) { e.POST("/v1"+path, handler, a.shedLoad, a.authenticate) }
	post("/orders", a.createOrder)
	get("/orders", a.listOrders)
	get("/orders/:id", a.getOrder)
	post("/orders/:id/pay", a.payOrder)
	post("/orders/:id/cancel", a.cancelOrder)
	post("/orders/:id/refunds", a.refundOrder)
	get("/orders/:id/receipt", a.getReceipt)
	get("/invoices", a.listInvoices)
	get("/invoices/:id", a.getInvoice)
	get("/ledger/entries", a.listEntries)
	get("/ledger/accounts/:code/balance", a.getBalance)
	get("/ledger/trial-balance", a.getTrialBalance)
	return e
}

const tenantKey = "tenant"

// errShed is a refusal before anything was looked at: not even the key.
var errShed = failure.New(failure.Unavailable, "load-shed",
	"Nothing can be written at the moment: events do not get to Kafka. Send it again with the same Idempotency-Key.")

// shedAfter is when a client that was refused is to come back, in seconds. It
// takes a relay longer than a moment to catch up.
const shedAfter = "15"

// shedLoad refuses what would write while the log that Postgres keeps for the
// relay nears its limit. Reads go on.
func (a *API) shedLoad(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		if a.shed() {
			a.metrics.shed.Inc()
			c.Response().Header().Set(echo.HeaderRetryAfter, shedAfter)
			return errShed
		}
		return next(c)
	}
}

// authenticate finds the tenant by the request's key.
func (a *API) authenticate(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		tenantID, err := tenants.Authenticate(c.Request().Context(), a.pool, c.Request().Header.Get(echo.HeaderAuthorization))
		if err != nil {
			return err
		}
		c.Set(tenantKey, tenantID)
		return next(c)
	}
}

func tenant(c echo.Context) uuid.UUID { return c.Get(tenantKey).(uuid.UUID) }

// read runs fn in a read-only transaction that sees one moment, and answers with
// what it returns.
func (a *API) read(c echo.Context, fn func(ctx context.Context, tx pgx.Tx, tenantID uuid.UUID) (any, error)) error {
	var answer any
	ctx, tenantID := c.Request().Context(), tenant(c)
	err := tenants.ReadTx(ctx, a.pool, tenantID, func(tx pgx.Tx) error {
		var err error
		answer, err = fn(ctx, tx, tenantID)
		return err
	})
	if err != nil {
		return err
	}
	body, err := encode(answer)
	if err != nil {
		return err
	}
	return c.Blob(http.StatusOK, echo.MIMEApplicationJSON, body)
}

// observe counts a request and writes its one log line.
func (a *API) observe(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		begin := time.Now()
		if err := next(c); err != nil {
			c.Error(err) // writes the answer, so that its status is known here
		}
		took := time.Since(begin)
		route, status := c.Path(), c.Response().Status
		a.metrics.observe(c.Request().Method, route, status, took)

		level := slog.LevelInfo
		if route == "/healthz" || route == "/readyz" || route == "/metrics" {
			level = slog.LevelDebug
		}
		a.log.LogAttrs(c.Request().Context(), level, "request",
			slog.String("method", c.Request().Method), slog.String("route", route),
			slog.Int("status", status), slog.Duration("took", took),
			slog.String("request_id", requestID(c)), slog.Any("tenant", c.Get(tenantKey)))
		return nil
	}
}

func (a *API) logPanic(c echo.Context, err error, stack []byte) error {
	a.log.ErrorContext(c.Request().Context(), "panic", "error", err, "stack", string(stack), "request_id", requestID(c))
	return errors.New("panic")
}

var requestIDForm = regexp.MustCompile(`^[A-Za-z0-9._:/+=-]{1,128}$`)

// RequestID gives each request an id, its client's where that is one.
func RequestID() middleware.RequestIDConfig {
	return middleware.RequestIDConfig{Generator: uuid.NewString, RequestIDHandler: checkRequestID}
}

// checkRequestID replaces a client's request id that could not stand in a log
// line and a stored answer as it is.
func checkRequestID(c echo.Context, id string) {
	if !requestIDForm.MatchString(id) {
		c.Response().Header().Set(echo.HeaderXRequestID, uuid.NewString())
	}
}

func requestID(c echo.Context) string { return c.Response().Header().Get(echo.HeaderXRequestID) }

// pathID is the id in the path. What is not a UUID is not the id of anything.
func pathID(c echo.Context, notFound error) (uuid.UUID, error) {
	id, err := uuid.Parse(c.Param("id"))
	if err != nil || len(c.Param("id")) != 36 {
		return uuid.Nil, notFound
	}
	return id, nil
}

var traceparentForm = regexp.MustCompile(`^00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}$`)

// stamp is the time and the trace of a request. A trace or parent id of zeros is
// none, by the W3C's word.
func (a *API) stamp(c echo.Context) orders.Stamp {
	stamp := orders.Stamp{At: a.now().UTC().Truncate(time.Microsecond)}
	parent := traceparentForm.FindStringSubmatch(c.Request().Header.Get("traceparent"))
	if parent != nil && strings.Trim(parent[1], "0") != "" && strings.Trim(parent[2], "0") != "" {
		stamp.Traceparent = parent[0]
	}
	return stamp
}

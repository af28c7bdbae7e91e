package operators

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/labstack/echo/v4"
	"github.com/labstack/echo/v4/middleware"

	"github.com/onceledger/onceledger/internal/deadletters"
	"github.com/onceledger/onceledger/internal/failure"
	"github.com/onceledger/onceledger/internal/httpapi"
	"github.com/onceledger/onceledger/internal/inbox"
)

// Path is where everything here is, for whoever serves it beside other things.
const Path = "/v1/operator/"

const (
	requestTimeout = time.Minute // an act is many transactions, each bounded by itself
	bodyLimit      = "128K"
	usualPage      = 100
)

// api answers operators.
type api struct {
	pool    *pgxpool.Pool
	letters *deadletters.Service
	log     *slog.Logger
}

// Handler is the operators' API: the dead letters of a worker's consumers. pool is
// for keys.
func Handler(pool *pgxpool.Pool, letters *deadletters.Service, log *slog.Logger) http.Handler {
	a := &api{pool: pool, letters: letters, log: log}
	e := echo.New()
	e.HTTPErrorHandler = httpapi.ErrorHandler(log)
	e.Use(middleware.RequestIDWithConfig(httpapi.RequestID()))
	e.Use(middleware.RecoverWithConfig(middleware.RecoverConfig{DisablePrintStack: true, LogErrorFunc: a.logPanic}))
	e.Use(middleware.ContextTimeoutWithConfig(middleware.ContextTimeoutConfig{
		Timeout:      requestTimeout,
		ErrorHandler: func(err error, _ echo.Context) error { return err },
	}))
	e.Use(middleware.BodyLimit(bodyLimit))

	e.GET(Path+"dead-letters", a.list, a.authenticate)
	e.GET(Path+"dead-letters/:id", a.show, a.authenticate)
	e.POST(Path+"dead-letters/retry", a.retry, a.authenticate)
	e.POST(Path+"dead-letters/discard", a.discard, a.authenticate)
	e.POST(Path+"dead-letters/:id/retry", a.retry, a.authenticate)
	e.POST(Path+"dead-letters/:id/discard", a.discard, a.authenticate)
	return e
}

const operatorKey = "operator"

func (a *api) authenticate(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		name, err := Authenticate(c.Request().Context(), a.pool, c.Request().Header.Get(echo.HeaderAuthorization))
		if err != nil {
			return err
		}
		c.Set(operatorKey, name)
		return next(c)
	}
}

func (a *api) logPanic(c echo.Context, err error, stack []byte) error {
	a.log.ErrorContext(c.Request().Context(), "panic", "error", err, "stack", string(stack))
	return errors.New("panic")
}

func (a *api) list(c echo.Context) error {
	query := c.QueryParams()
	filter, err := filterOf(query)
	if err != nil {
		return err
	}
	after, limit, err := page(query)
	if err != nil {
		return err
	}
	letters, more, err := a.letters.List(c.Request().Context(), filter, after, limit)
	if err != nil {
		return err
	}
	answer := struct {
		Letters    []deadletters.Letter `json:"dead_letters"`
		NextCursor *string              `json:"next_cursor"`
	}{Letters: letters}
	if more {
		id := letters[len(letters)-1].ID
		cursor := base64.RawURLEncoding.EncodeToString(id[:])
		answer.NextCursor = &cursor
	}
	return write(c, answer)
}

func (a *api) show(c echo.Context) error {
	id, err := pathID(c)
	if err != nil {
		return err
	}
	details, err := a.letters.Show(c.Request().Context(), id)
	if err != nil {
		return err
	}
	return write(c, details)
}

// selection is the body of an act: which letters, if the path does not say it, and
// why.
type selection struct {
	deadletters.Filter
	Reason string `json:"reason"`
	Limit  int    `json:"limit"`
}

type actFunc func(context.Context, deadletters.Filter, deadletters.Act) (deadletters.Report, error)

func (a *api) retry(c echo.Context) error   { return a.act(c, a.letters.Retry) }
func (a *api) discard(c echo.Context) error { return a.act(c, a.letters.Discard) }

// act previews with ?preview=true; without, it acts. A second time there is nothing
// to do, so it needs no Idempotency-Key.
func (a *api) act(c echo.Context, do actFunc) error {
	body, err := decode(c.Request().Body)
	if err != nil {
		return err
	}
	if c.Param("id") != "" {
		id, err := pathID(c)
		if err != nil {
			return err
		}
		if !body.Filter.Empty() {
			return deadletters.ErrSelection.Withf("The path names one dead letter, and the body others.")
		}
		body.IDs = []uuid.UUID{id}
	}
	preview := false
	for name, values := range c.QueryParams() {
		if name != "preview" || len(values) != 1 {
			return invalid(name, "is not asked for here: want preview=true, once, or nothing")
		}
		if preview, err = strconv.ParseBool(values[0]); err != nil {
			return invalid("preview", "must be true or false")
		}
	}
	name, _ := c.Get(operatorKey).(string)
	ctx := c.Request().Context()
	report, err := do(ctx, body.Filter, deadletters.Act{By: name, Reason: body.Reason, Preview: preview, Limit: body.Limit})
	if !preview && (err == nil || len(report.Letters) > 0) {
		a.log.InfoContext(ctx, "dead letters seen to", "action", report.Action, "by", name, "letters", len(report.Letters), "whole", err == nil)
	}
	if err != nil {
		if !preview && len(report.Letters) > 0 { // each order is committed by itself, and stays done
			return &httpapi.Partial{Err: err, Done: report}
		}
		return err
	}
	return write(c, report)
}

func decode(from io.Reader) (selection, error) {
	var body selection
	text, err := io.ReadAll(from)
	if err != nil {
		return body, err // too large, or gone
	}
	if len(bytes.TrimSpace(text)) == 0 {
		return body, nil
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&body); err != nil {
		return body, invalid("body", "is not what is asked for: "+err.Error())
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return body, invalid("body", "must be one JSON object")
	}
	return body, body.refuseEmpty(text)
}

// refuseEmpty refuses a member that is there and says nothing, such as an order's
// id that the caller failed to fill in: left out of the selection it would widen it.
func (s selection) refuseEmpty(text []byte) error {
	var members map[string]json.RawMessage
	if err := json.Unmarshal(text, &members); err != nil {
		return invalid("body", "must be one JSON object")
	}
	empty := map[string]bool{
		"ids": len(s.IDs) == 0, "classes": len(s.Classes) == 0, "states": len(s.States) == 0, "consumer": s.Consumer == "",
		"tenant_id": s.TenantID == uuid.Nil, "order_id": s.OrderID == uuid.Nil, "event_id": s.EventID == uuid.Nil,
		"since": s.Since.IsZero(), "until": s.Until.IsZero(), "limit": s.Limit == 0,
	}
	var faults []failure.Field
	for name := range members {
		if empty[strings.ToLower(name)] {
			faults = append(faults, failure.Field{Field: name, Detail: isEmpty})
		}
	}
	return faulty(faults)
}

const isEmpty = "is given but empty: leave it out, or say which"

func faulty(faults []failure.Field) error {
	if len(faults) == 0 {
		return nil
	}
	slices.SortFunc(faults, func(a, b failure.Field) int { return strings.Compare(a.Field, b.Field) })
	return deadletters.ErrSelection.WithFields(faults...)
}

// filterOf reads a filter from a query. What it does not know it refuses: a name
// that is misspelt would find everything.
func filterOf(query url.Values) (deadletters.Filter, error) {
	var f deadletters.Filter
	var faults []failure.Field
	fault := func(name, detail string) { faults = append(faults, failure.Field{Field: name, Detail: detail}) }
	id := func(name, value string) uuid.UUID {
		id, err := uuid.Parse(value)
		if err != nil || len(value) != 36 || id == uuid.Nil {
			fault(name, "must be a UUID, and not the nil one")
		}
		return id
	}
	at := func(name, value string) time.Time {
		at, err := time.Parse(time.RFC3339, value)
		if err != nil {
			fault(name, "must be a time of RFC 3339, such as 2026-01-31T12:00:00Z")
		} else if at.IsZero() {
			fault(name, isEmpty)
		}
		return at
	}
	for name, values := range query {
		value := values[len(values)-1]
		if slices.Contains(values, "") {
			fault(name, isEmpty)
			continue
		}
		if len(values) > 1 && !slices.Contains([]string{"id", "class", "state"}, name) {
			fault(name, "is given more than once")
			continue
		}
		switch name {
		case "id":
			for _, value := range values {
				f.IDs = append(f.IDs, id(name, value))
			}
		case "class":
			for _, value := range values {
				f.Classes = append(f.Classes, inbox.Class(value))
			}
		case "state":
			f.States = values
		case "consumer":
			if f.Consumer = value; value == "" {
				fault(name, "is empty: say which, or leave it out")
			}
		case "tenant_id":
			f.TenantID = id(name, value)
		case "order_id":
			f.OrderID = id(name, value)
		case "event_id":
			f.EventID = id(name, value)
		case "since":
			f.Since = at(name, value)
		case "until":
			f.Until = at(name, value)
		case "limit", "cursor":
		default:
			fault(name, "is not known here")
		}
	}
	return f, faulty(faults)
}

func page(query url.Values) (after uuid.UUID, limit int, err error) {
	limit = usualPage
	if text := query.Get("limit"); text != "" {
		if limit, err = strconv.Atoi(text); err != nil {
			return after, limit, invalid("limit", fmt.Sprintf("must be a whole number from 1 to %d", deadletters.LargestPage))
		}
	}
	if text := query.Get("cursor"); text != "" {
		raw, err := base64.RawURLEncoding.DecodeString(text)
		if err == nil {
			after, err = uuid.FromBytes(raw)
		}
		if err != nil {
			return after, limit, invalid("cursor", "must be the next_cursor of an earlier page")
		}
	}
	return after, limit, nil
}

func pathID(c echo.Context) (uuid.UUID, error) {
	id, err := uuid.Parse(c.Param("id"))
	if err != nil || len(c.Param("id")) != 36 {
		return uuid.Nil, deadletters.ErrNotFound
	}
	return id, nil
}

func invalid(field, detail string) error {
	return deadletters.ErrSelection.WithFields(failure.Field{Field: field, Detail: detail})
}

func write(c echo.Context, answer any) error {
	body, err := json.Marshal(answer)
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	return c.Blob(http.StatusOK, echo.MIMEApplicationJSON, body)
}

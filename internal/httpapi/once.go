package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/labstack/echo/v4"

	"github.com/onceledger/onceledger/internal/crash"
	"github.com/onceledger/onceledger/internal/failure"
	"github.com/onceledger/onceledger/internal/idempotency"
	"github.com/onceledger/onceledger/internal/money"
	"github.com/onceledger/onceledger/internal/tenants"
)

const headerReplayed = "Idempotency-Replayed"

// once does a POST once for its key and answers it. work's writes, the claim of
// the key and the answer are one transaction; the answer goes out after its
// commit.
//
// A refusal that rests on the present state (already paid) is an answer too and
// is stored: the attempt is rolled back whole, and a second transaction keeps
// nothing but the refusal. What is malformed was refused before, and an outage is
// not an answer; neither is stored.
func (a *API) once(c echo.Context, body []byte, work func(ctx context.Context, tx pgx.Tx) (idempotency.Answer, error)) error {
	key, err := idempotency.ParseKey(c.Request().Header["Idempotency-Key"])
	if err != nil {
		return err
	}
	request := idempotency.Request{
		Key: key, Method: c.Request().Method, Path: c.Request().URL.Path, Body: body,
	}

	crash.Point(crash.APIReceivedNotBegun)
	answer, replayed, err := a.onceTx(c, request, work)
	if refusal, isAnswer := storable(err); isAnswer {
		answer, replayed, err = a.onceTx(c, request, func(context.Context, pgx.Tx) (idempotency.Answer, error) {
			return problemAnswer(c, refusal)
		})
	}
	if err != nil {
		return err
	}
	crash.Point(crash.APICommittedNotAnswered)

	header := c.Response().Header()
	if answer.Location != "" {
		header.Set(echo.HeaderLocation, answer.Location)
	}
	if replayed {
		header.Set(headerReplayed, "true")
		a.metrics.replayed.Inc()
	}
	return c.Blob(answer.Status, answer.ContentType, answer.Body)
}

func (a *API) onceTx(c echo.Context, request idempotency.Request, work func(ctx context.Context, tx pgx.Tx) (idempotency.Answer, error)) (answer idempotency.Answer, replayed bool, err error) {
	ctx, tenantID := c.Request().Context(), tenant(c)
	err = tenants.InTx(ctx, a.pool, tenantID, func(tx pgx.Tx) error {
		answer, replayed, err = idempotency.OnceTx(ctx, tx, tenantID, request, func() (idempotency.Answer, error) {
			return work(ctx, tx)
		})
		if err == nil {
			crash.Point(crash.APIBeforeCommit)
		}
		return err
	})
	return answer, replayed, err
}

// storable picks the refusals that are the answer to a request for good.
func storable(err error) (*failure.Error, bool) {
	refusal, ok := errors.AsType[*failure.Error](err)
	if !ok || errors.Is(err, idempotency.ErrInProgress) || errors.Is(err, idempotency.ErrKeyReused) {
		return nil, false
	}
	switch refusal.Kind {
	case failure.Conflict, failure.RuleViolated, failure.NotFound:
		return refusal, true
	case failure.Invalid, failure.Unauthorized, failure.Unavailable:
		return nil, false
	}
	return nil, false
}

func jsonAnswer(status int, location string, body any) (idempotency.Answer, error) {
	encoded, err := encode(body)
	return idempotency.Answer{
		Status: status, ContentType: echo.MIMEApplicationJSON, Location: location, Body: encoded,
	}, err
}

func encode(body any) ([]byte, error) {
	var buffer bytes.Buffer
	encoder := json.NewEncoder(&buffer)
	encoder.SetEscapeHTML(false)
	err := encoder.Encode(body)
	return buffer.Bytes(), err
}

var errBody = failure.New(failure.Invalid, "body-invalid", "The body is not the JSON object that is asked for.")

// decode reads a body strictly: one JSON object in UTF-8, with the members that
// are known and no others, each once. It returns the bytes too: they are what an
// idempotency key stands for.
func decode(c echo.Context, into any) ([]byte, error) {
	body, err := readBody(c)
	if err != nil {
		return nil, err
	}
	if !utf8.Valid(body) {
		return nil, errBody.Withf("It is not UTF-8.")
	}
	if trimmed := bytes.TrimSpace(body); len(trimmed) == 0 || trimmed[0] != '{' {
		return nil, errBody.Withf("It does not begin with {.")
	}
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(into); err != nil {
		return nil, explainJSON(err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return nil, errBody.Withf("Something follows the object.")
	}
	names := json.NewDecoder(bytes.NewReader(body))
	names.UseNumber()
	return body, checkNames(names, "", true)
}

var memberForm = regexp.MustCompile(`^[a-z_]+$`)

// checkNames refuses what encoding/json lets pass: a member that is there twice,
// of which it takes the last, and one in other letters than asked for (Amount).
// The names in metadata are the customer's own.
func checkNames(decoder *json.Decoder, path string, ours bool) error {
	token, err := decoder.Token()
	if err != nil {
		return explainJSON(err)
	}
	switch token {
	case json.Delim('['):
		for i := 0; decoder.More(); i++ {
			if err := checkNames(decoder, fmt.Sprintf("%s[%d]", path, i), ours); err != nil {
				return err
			}
		}
		_, err = decoder.Token()
	case json.Delim('{'):
		seen := make(map[string]bool)
		for decoder.More() {
			token, err := decoder.Token()
			if err != nil {
				return explainJSON(err)
			}
			name, _ := token.(string)
			field := strings.TrimPrefix(path+"."+name, ".")
			if ours && !memberForm.MatchString(name) {
				return errBody.WithFields(failure.Field{Field: field, Detail: "is not a member that is known"})
			}
			if seen[name] {
				return errBody.WithFields(failure.Field{Field: field, Detail: "must be there once"})
			}
			seen[name] = true
			if err := checkNames(decoder, field, ours && field != "metadata"); err != nil {
				return err
			}
		}
		_, err = decoder.Token()
	}
	return err
}

func readBody(c echo.Context) ([]byte, error) {
	body, err := io.ReadAll(c.Request().Body)
	if _, tooLarge := errors.AsType[*echo.HTTPError](err); err != nil && !tooLarge {
		return nil, errBody.Withf("It ended before its time.")
	}
	return body, err
}

func explainJSON(err error) error {
	if wrongType, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return errBody.WithFields(failure.Field{
			Field: wrongType.Field, Detail: "must not be a JSON " + wrongType.Value,
		})
	}
	return errBody.Withf("%s.", err)
}

// empty refuses a body where none is asked for, but for white space and {}.
func empty(c echo.Context) ([]byte, error) {
	body, err := readBody(c)
	if err != nil {
		return nil, err
	}
	if trimmed := bytes.TrimSpace(body); len(trimmed) > 0 && string(trimmed) != "{}" {
		return nil, errBody.Withf("No body is asked for.")
	}
	return body, nil
}

// integer is a whole number in a request, written as one: not 1e3, not 1.0, not
// "1", not null, not left out. What is wrong is kept for the check that knows
// the field's name.
type integer struct {
	value   int64
	written bool
}

var integerForm = regexp.MustCompile(`^-?[1-9][0-9]{0,17}$|^0$`)

func (i *integer) UnmarshalJSON(text []byte) error {
	*i = integer{}
	if integerForm.Match(text) {
		i.written = true
		return json.Unmarshal(text, &i.value)
	}
	return nil
}

// or is the number, or outside where it is not one, which must be a number that
// the field's own range refuses.
func (i integer) or(outside int64) int64 {
	if i.written {
		return i.value
	}
	return outside
}

// rate is a tax rate in a request, kept as integer keeps a number.
type rate struct {
	value   money.Rate
	written bool
}

func (r *rate) UnmarshalJSON(text []byte) error {
	*r = rate{}
	var digits *string
	if json.Unmarshal(text, &digits) == nil && digits != nil {
		value, err := money.ParseRate(*digits)
		*r = rate{value, err == nil}
	}
	return nil
}

// orNone is the rate, or -1 where it is not one.
func (r rate) orNone() money.Rate {
	if r.written {
		return r.value
	}
	return -1
}

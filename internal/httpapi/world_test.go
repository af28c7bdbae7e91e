package httpapi_test

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/httpapi"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
	"github.com/onceledger/onceledger/internal/telemetry"
	"github.com/onceledger/onceledger/internal/tenants"
)

// world is the API on a database of its own, with a tenant and its key.
type world struct {
	t       *testing.T
	handler http.Handler
	key     string
	db      *pgtest.Database
	owner   *pgxpool.Pool
	inbox   *inbox.Inbox
	offset  int64
}

func newWorld(t *testing.T) *world {
	t.Helper()
	return newWorldOn(t, pgtest.New(t))
}

func newWorldOn(t *testing.T, database *pgtest.Database) *world {
	t.Helper()
	w := &world{
		t: t, db: database, owner: database.Pool(t, ""),
		handler: handler(database.Pool(t, "api"), time.Now, database.Name),
		inbox: inbox.New(inbox.Config{
			Consumer: billing.Consumer, Pool: database.Pool(t, "worker"), Handler: billing.Handler{Now: time.Now},
			Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry(), Now: time.Now,
		}),
	}
	w.key = w.addTenant("acme")
	return w
}

// handler is the API as cmd/api makes it. Slots belong to the whole server, so
// each database's has the name of the database.
func handler(pool *pgxpool.Pool, now func() time.Time, slot string) http.Handler {
	return handlerThatSheds(pool, now, slot, func() bool { return false })
}

func handlerThatSheds(pool *pgxpool.Pool, now func() time.Time, slot string, shed func() bool) http.Handler {
	registry := prometheus.NewRegistry()
	return httpapi.New(httpapi.Config{
		Shed: shed, Pool: pool, Log: slog.New(slog.DiscardHandler), Now: now, Metrics: registry,
		Operations: telemetry.Handler(registry, httpapi.Checks(pool, now, "onceledger_outbox", slot)),
	})
}

// addTenant makes a tenant and gives its key.
func (w *world) addTenant(name string) (key string) {
	w.t.Helper()
	key, err := tenants.CreateKey(w.t.Context(), w.owner, name, "test")
	require.NoError(w.t, err)
	return key
}

// on is this world for a subtest that shares it.
func (w *world) on(t *testing.T) *world {
	shared := *w
	shared.t = t
	return &shared
}

// as is this world as another tenant sees it.
func (w *world) as(key string) *world {
	other := *w
	other.key = key
	return &other
}

// impatient is this world with an API that waits for a lock no longer than
// limit, on connections of its own.
func (w *world) impatient(limit time.Duration) *world {
	w.t.Helper()
	pool, err := postgres.Open(w.t.Context(), w.db.URL("api"), postgres.Options{
		MaxConns: 8, TransactionTimeout: 30 * time.Second, LockTimeout: limit,
	})
	require.NoError(w.t, err)
	w.t.Cleanup(pool.Close)
	other := *w
	other.handler = handler(pool, time.Now, w.db.Name)
	return &other
}

type answer struct {
	*httptest.ResponseRecorder
	t *testing.T
}

func (a answer) json() map[string]any {
	a.t.Helper()
	var body map[string]any
	require.NoError(a.t, json.Unmarshal(a.Body.Bytes(), &body), a.Body.String())
	return body
}

// requireProblem wants a problem document with this status and code; code
// "about:blank" is one of the router's.
func (a answer) requireProblem(status int, code string) answer {
	a.t.Helper()
	require.Equal(a.t, status, a.Code, a.Body.String())
	require.Equal(a.t, "application/problem+json", a.Header().Get("Content-Type"))
	document := a.json()
	if code == "about:blank" {
		require.Equal(a.t, code, document["type"])
	} else {
		require.Equal(a.t, "https://github.com/onceledger/onceledger/blob/main/docs/problems/"+code+".md", document["type"])
	}
	require.NotEmpty(a.t, document["title"])
	require.EqualValues(a.t, status, document["status"])
	require.NotEmpty(a.t, document["request_id"])
	return a
}

// fields are the names of the fields that a problem document says are at fault.
func (a answer) fields() []string {
	a.t.Helper()
	var document struct {
		Errors []struct{ Field, Detail string }
	}
	require.NoError(a.t, json.Unmarshal(a.Body.Bytes(), &document))
	var names []string
	for _, fault := range document.Errors {
		require.NotEmpty(a.t, fault.Detail)
		names = append(names, fault.Field)
	}
	return names
}

// send sends a request with the tenant's key; header holds pairs of name and
// value.
func (w *world) send(method, path, body string, header ...string) answer {
	w.t.Helper()
	return w.sendContext(w.t.Context(), method, path, body, header...)
}

func (w *world) sendContext(ctx context.Context, method, path, body string, header ...string) answer {
	w.t.Helper()
	request := httptest.NewRequestWithContext(ctx, method, path, strings.NewReader(body))
	if w.key != "" {
		request.Header.Set("Authorization", "Bearer "+w.key)
	}
	for i := 0; i < len(header); i += 2 {
		request.Header.Add(header[i], header[i+1])
	}
	recorder := httptest.NewRecorder()
	w.handler.ServeHTTP(recorder, request)
	return answer{recorder, w.t}
}

func (w *world) post(path, body string) answer {
	w.t.Helper()
	return w.postKey(path, body, uuid.NewString())
}

func (w *world) postKey(path, body, key string) answer {
	w.t.Helper()
	return w.send(http.MethodPost, path, body, "Idempotency-Key", key)
}

func (w *world) get(path string) answer {
	w.t.Helper()
	return w.send(http.MethodGet, path, "")
}

const oneBook = `{"customer_id":"c-42","customer_email":"a@example.com","currency":"EUR",` +
	`"lines":[{"sku":"book","description":"A book","quantity":2,"unit_amount":1250,"tax_rate":"0.19"}],"metadata":{}}`

// oneBookWith is oneBook with a part of its text replaced.
func oneBookWith(part, by string) string {
	if !strings.Contains(oneBook, part) {
		panic("oneBook has no " + part)
	}
	return strings.Replace(oneBook, part, by, 1)
}

// order places an order of two books, 2975 in all, and gives its path.
func (w *world) order() (path string) {
	w.t.Helper()
	created := w.post("/v1/orders", oneBook)
	require.Equal(w.t, http.StatusCreated, created.Code, created.Body)
	return created.Header().Get("Location")
}

func (w *world) paidOrder() (path string) {
	w.t.Helper()
	path = w.order()
	paid := w.post(path+"/pay", `{"payment_reference":"`+uuid.NewString()+`"}`)
	require.Equal(w.t, http.StatusOK, paid.Code, paid.Body)
	return path
}

// written counts what requests have left in the database.
type written struct{ Orders, Events, Keys, Payments, Refunds int }

func (w *world) written() written {
	w.t.Helper()
	return pgtest.Rows[written](w.t, w.owner, `
		SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM outbox_events), (SELECT count(*) FROM idempotency_keys),
			(SELECT count(*) FROM payments), (SELECT count(*) FROM refunds)`)[0]
}

// together makes n calls at once, all behind one gate, and counts their
// answers by status.
func together(n int, call func(i int) answer) (answers []answer, byStatus map[int]int) {
	gate, done := make(chan struct{}), make(chan answer, n)
	for i := range n {
		go func() {
			<-gate
			done <- call(i)
		}()
	}
	close(gate)
	byStatus = make(map[int]int)
	for range n {
		a := <-done
		answers = append(answers, a)
		byStatus[a.Code]++
	}
	return answers, byStatus
}

// records are the order events of the outbox, as they will be on the topic.
func (w *world) records() []event.Record {
	w.t.Helper()
	rows, err := w.owner.Query(w.t.Context(), `
		SELECT id, tenant_id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version, payload,
			coalesce(traceparent, ''), occurred_at
		FROM outbox_events WHERE aggregate_type = 'order' ORDER BY id`)
	require.NoError(w.t, err)
	records, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (event.Record, error) {
		var e event.Event
		err := row.Scan(&e.ID, &e.TenantID, &e.AggregateType, &e.AggregateID, &e.AggregateVersion,
			&e.Type, &e.SchemaVersion, &e.Payload, &e.Traceparent, &e.OccurredAt)
		record := e.Record()
		record.Time = e.OccurredAt
		return record, err
	})
	require.NoError(w.t, err)
	return records
}

// bill plays relay and broker: it hands every event of the outbox to billing,
// those that it has had before too.
func (w *world) bill() {
	w.t.Helper()
	w.deliver(w.records()...)
}

// deliver hands records to billing, each from an offset of its own.
func (w *world) deliver(records ...event.Record) {
	w.t.Helper()
	for i := range records {
		records[i].Offset = w.offset
		w.offset++
	}
	require.NoError(w.t, w.inbox.Process(w.t.Context(), records))
}

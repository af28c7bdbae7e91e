package httpapi_test

import (
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
	database := pgtest.New(t)
	owner := database.Pool(t, "")
	key, err := tenants.CreateKey(t.Context(), owner, "acme", "test")
	require.NoError(t, err)

	pool := database.Pool(t, "api")
	registry := prometheus.NewRegistry()
	log := slog.New(slog.DiscardHandler)
	return &world{
		t: t, key: key, db: database, owner: owner,
		handler: httpapi.New(httpapi.Config{
			Pool: pool, Log: log, Now: time.Now, Metrics: registry,
			Operations: telemetry.Handler(registry, httpapi.Checks(pool, time.Now, "onceledger_outbox", "onceledger_outbox")),
		}),
		inbox: inbox.New(inbox.Config{
			Consumer: billing.Consumer, Pool: database.Pool(t, "worker"), Handler: billing.Handler{Now: time.Now},
			Log: log, Metrics: prometheus.NewRegistry(), Now: time.Now,
		}),
	}
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

// send sends a request with the tenant's key; header holds pairs of name and
// value.
func (w *world) send(method, path, body string, header ...string) answer {
	w.t.Helper()
	request := httptest.NewRequestWithContext(w.t.Context(), method, path, strings.NewReader(body))
	request.Header.Set("Authorization", "Bearer "+w.key)
	for i := 0; i < len(header); i += 2 {
		request.Header.Add(header[i], header[i+1])
	}
	recorder := httptest.NewRecorder()
	w.handler.ServeHTTP(recorder, request)
	return answer{recorder, w.t}
}

func (w *world) post(path, body string) answer {
	w.t.Helper()
	return w.send(http.MethodPost, path, body, "Idempotency-Key", uuid.NewString())
}

func (w *world) get(path string) answer {
	w.t.Helper()
	return w.send(http.MethodGet, path, "")
}

// bill plays relay and broker: it hands every event of the outbox to billing,
// those that it has had before too.
func (w *world) bill() {
	w.t.Helper()
	rows, err := w.owner.Query(w.t.Context(), `
		SELECT id, tenant_id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version, payload, occurred_at
		FROM outbox_events WHERE aggregate_type = 'order' ORDER BY id`)
	require.NoError(w.t, err)
	records, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (event.Record, error) {
		var e event.Event
		err := row.Scan(&e.ID, &e.TenantID, &e.AggregateType, &e.AggregateID, &e.AggregateVersion,
			&e.Type, &e.SchemaVersion, &e.Payload, &e.OccurredAt)
		record := e.Record()
		record.Time, record.Offset = e.OccurredAt, w.offset
		w.offset++
		return record, err
	})
	require.NoError(w.t, err)
	require.NoError(w.t, w.inbox.Process(w.t.Context(), records))
}


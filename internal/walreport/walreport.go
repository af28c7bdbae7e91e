// Package walreport measures what an order costs in write-ahead log: by table, on
// the side of the API and of the worker, and what of it is the outbox.
//
// It makes a database of its own on the server, with the server's settings; sends
// orders and payments through the API's own handler, one after the other; has the
// worker's own inbox apply the events; and then reads the log record by record
// (pg_walinspect). Every record of those transactions is counted, and each byte
// once. What others write to the server meanwhile is left out.
//
// Page images are counted apart: how many there are depends on how often the
// server makes a checkpoint and on how much of a table is touched in between,
// which a small new database does not tell.
package walreport

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/httpapi"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/migrate"
	"github.com/onceledger/onceledger/internal/postgres"
	"github.com/onceledger/onceledger/internal/tenants"
)

// Config says what to measure.
type Config struct {
	URL    string // of any database of the server, for a superuser
	Orders int    // to place and pay
	Batch  int    // events that the worker takes at once at most
}

// Report is what was written. All numbers are of the whole run.
type Report struct {
	Orders      int               `json:"orders"`
	Batch       int               `json:"batch"`
	Settings    map[string]string `json:"settings"` // those that change the numbers
	Tables      []Table           `json:"tables"`   // most bytes first
	API         Side              `json:"api"`
	Worker      Side              `json:"worker"`
	OutboxBytes int64             `json:"outbox_bytes"` // without images
	OutboxShare float64           `json:"outbox_share"` // of the bytes of both sides, without images
}

// Table is what is written for one table, its indexes and its TOAST; or what
// belongs to none, such as commits, in parentheses.
type Table struct {
	Name   string `json:"name"`
	API    Bytes  `json:"api"`
	Worker Bytes  `json:"worker"`
}

// Bytes are those of the log's records, without and for page images.
type Bytes struct {
	Records int64 `json:"records"`
	Images  int64 `json:"images"`
}

// Side is all that one side has written, between two places in the log.
type Side struct {
	Bytes
	Transactions int64         `json:"transactions"`
	From         pglogrepl.LSN `json:"from"`
	To           pglogrepl.LSN `json:"to"`
}

// Run measures. The database that it makes is gone afterwards; roles that the
// server lacks are made by the migrations and stay.
func Run(ctx context.Context, config Config) (_ *Report, err error) {
	if config.Orders < 1 || config.Orders > 20_000 || config.Batch < 1 {
		return nil, errors.New("orders and batch are 1 at least, and orders 20000 at most: the log must still be there when it is read")
	}
	name := "onceledger_wal_report_" + strings.ReplaceAll(uuid.NewString(), "-", "")[:12]
	admin, err := pgx.Connect(ctx, config.URL)
	if err != nil {
		return nil, fmt.Errorf("reach database: %w", err)
	}
	defer admin.Close(context.WithoutCancel(ctx))
	var super bool
	if err := admin.QueryRow(ctx, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user").Scan(&super); err != nil {
		return nil, fmt.Errorf("ask for rights: %w", err)
	}
	if !super {
		return nil, errors.New("the login is no superuser, and reading the log takes one")
	}
	if _, err := admin.Exec(ctx, "CREATE DATABASE "+name); err != nil {
		return nil, fmt.Errorf("make a database to measure in: %w", err)
	}
	defer func() {
		cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		if _, dropErr := admin.Exec(cleanup, "DROP DATABASE "+name+" WITH (FORCE)"); dropErr != nil {
			err = errors.Join(err, fmt.Errorf("drop database %s: %w", name, dropErr))
		}
	}()

	m := measurement{config: config, database: name}
	if err := m.open(ctx); err != nil {
		return nil, err
	}
	defer m.close()
	return m.run(ctx)
}

// measurement is one run.
type measurement struct {
	config   Config
	database string
	owner    *pgxpool.Pool
	pools    []*pgxpool.Pool
	api      http.Handler
	key      string
	inbox    *inbox.Inbox
}

func (m *measurement) close() {
	for _, pool := range m.pools {
		pool.Close()
	}
}

// openAs opens a pool whose sessions act as a role of the service; "" is the
// owner. One connection: what is measured comes one after the other.
func (m *measurement) openAs(ctx context.Context, role string) (*pgxpool.Pool, error) {
	address, err := url.Parse(m.config.URL)
	if err != nil {
		return nil, errors.New("the database address is not a URL like postgres://user:password@host:5432/name")
	}
	address.Path = "/" + m.database
	query := address.Query()
	if role != "" {
		query.Set("role", role)
	}
	address.RawQuery = query.Encode()
	pool, err := postgres.Open(ctx, address.String(), postgres.Options{
		ApplicationName: "onceledger wal report", MaxConns: 1, TransactionTimeout: 10 * time.Minute,
	})
	if err != nil {
		return nil, err
	}
	m.pools = append(m.pools, pool)
	return pool, nil
}

func (m *measurement) open(ctx context.Context) (err error) {
	if m.owner, err = m.openAs(ctx, ""); err != nil {
		return err
	}
	if err := migrate.Up(ctx, m.owner.Config().ConnString()); err != nil {
		return err
	}
	if _, err := m.owner.Exec(ctx, "CREATE EXTENSION pg_walinspect"); err != nil {
		return fmt.Errorf("the server has no pg_walinspect: install its contrib modules (postgresql-contrib): %w", err)
	}
	if m.key, err = tenants.CreateKey(ctx, m.owner, "wal report", "wal report"); err != nil {
		return err
	}
	quiet := slog.New(slog.DiscardHandler)
	api, err := m.openAs(ctx, "onceledger_api")
	if err != nil {
		return err
	}
	m.api = httpapi.New(httpapi.Config{
		Pool: api, Log: quiet, Now: time.Now, Metrics: prometheus.NewRegistry(), Operations: http.NotFoundHandler(),
	})
	worker, err := m.openAs(ctx, "onceledger_worker")
	if err != nil {
		return err
	}
	m.inbox = inbox.New(inbox.Config{
		Consumer: billing.Consumer, Pool: worker, Handler: billing.Handler{Now: time.Now},
		Log: quiet, Metrics: prometheus.NewRegistry(), Now: time.Now,
	})
	return nil
}

func (m *measurement) run(ctx context.Context) (*Report, error) {
	// What the first of everything costs (relations that are extended, a series of
	// numbers that begins) is not what an order costs.
	if err := errors.Join(m.order(ctx), m.bill(ctx)); err != nil {
		return nil, err
	}
	report := &Report{Orders: m.config.Orders, Batch: m.config.Batch}
	var err error
	report.API, err = m.between(ctx, func() error {
		for range m.config.Orders {
			if err := m.order(ctx); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if report.Worker, err = m.between(ctx, func() error { return m.bill(ctx) }); err != nil {
		return nil, err
	}
	return report, m.count(ctx, report)
}

// between runs a side and tells between which places in the log it has written.
func (m *measurement) between(ctx context.Context, work func() error) (side Side, err error) {
	place := func(at *pglogrepl.LSN) error {
		if err := m.owner.QueryRow(ctx, "SELECT pg_current_wal_flush_lsn()::text").Scan(at); err != nil {
			return fmt.Errorf("read the log's position: %w", err)
		}
		return nil
	}
	if err := place(&side.From); err != nil {
		return side, err
	}
	if err := work(); err != nil {
		return side, err
	}
	return side, place(&side.To)
}

const oneBook = `{"customer_id":"c-42","customer_email":"a@example.com","currency":"EUR",` +
	`"lines":[{"sku":"book","description":"A book","quantity":2,"unit_amount":1250,"tax_rate":"0.19"}],"metadata":{}}`

// order places an order of one line and pays it.
func (m *measurement) order(ctx context.Context) error {
	location, err := m.post(ctx, "/v1/orders", oneBook)
	if err != nil {
		return err
	}
	_, err = m.post(ctx, location+"/pay", `{"payment_reference":"`+uuid.NewString()+`"}`)
	return err
}

func (m *measurement) post(ctx context.Context, path, body string) (location string, err error) {
	request := httptest.NewRequestWithContext(ctx, http.MethodPost, path, strings.NewReader(body))
	request.Header.Set("Authorization", "Bearer "+m.key)
	request.Header.Set("Idempotency-Key", uuid.NewString())
	answer := httptest.NewRecorder()
	m.api.ServeHTTP(answer, request)
	if answer.Code >= 300 {
		return "", fmt.Errorf("POST %s: %d: %s", path, answer.Code, answer.Body)
	}
	return answer.Header().Get("Location"), nil
}

// bill has the worker apply the order events that it has not applied, in batches.
func (m *measurement) bill(ctx context.Context) error {
	rows, err := m.owner.Query(ctx, `
		SELECT id, tenant_id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version, payload,
			coalesce(traceparent, ''), occurred_at
		FROM outbox_events AS event
		WHERE aggregate_type = 'order' AND NOT EXISTS (SELECT FROM processed_events WHERE event_id = event.id)
		ORDER BY id`)
	if err != nil {
		return fmt.Errorf("read the outbox: %w", err)
	}
	var offset int64
	records, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (event.Record, error) {
		var e event.Event
		err := row.Scan(&e.ID, &e.TenantID, &e.AggregateType, &e.AggregateID, &e.AggregateVersion,
			&e.Type, &e.SchemaVersion, &e.Payload, &e.Traceparent, &e.OccurredAt)
		record := e.Record()
		record.Time, record.Offset = e.OccurredAt, offset
		offset++
		return record, err
	})
	if err != nil {
		return fmt.Errorf("read the outbox: %w", err)
	}
	for len(records) > 0 {
		batch := records[:min(len(records), m.config.Batch)]
		if err := m.inbox.Process(ctx, batch); err != nil {
			return fmt.Errorf("apply events: %w", err)
		}
		records = records[len(batch):]
	}
	return nil
}

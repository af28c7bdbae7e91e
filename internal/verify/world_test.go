package verify_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/money"
	"github.com/onceledger/onceledger/internal/orders"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
	"github.com/onceledger/onceledger/internal/verify"
)

// world is the product without its network: orders are changed by the code that
// the API calls, and events applied by the code that the worker calls. Where the
// relay and the consumer are is the test's to say.
type world struct {
	pool   *pgxpool.Pool // as owner, who may spoil what the services cannot
	reader *pgxpool.Pool // as the role that verifies
	tenant uuid.UUID
	slot   string
	inbox  *inbox.Inbox

	given   map[uuid.UUID]bool // events that the consumer was given
	offset  int64              // of its next record
	rounds  atomic.Int64       // how often it was given all that there was
	payment atomic.Int64
}

func newWorld(t *testing.T) *world {
	t.Helper()
	database := pgtest.New(t)
	w := &world{
		pool:   database.Pool(t, ""),
		reader: database.Pool(t, "verify"),
		slot:   database.Name,
		given:  make(map[uuid.UUID]bool),
	}
	w.inbox = inbox.New(inbox.Config{
		Consumer: billing.Consumer,
		Pool:     database.Pool(t, "worker"),
		Handler:  billing.Handler{Now: time.Now},
		Log:      slog.New(slog.DiscardHandler),
		Metrics:  prometheus.NewRegistry(),
		Now:      time.Now,
	})
	w.tenant = w.newTenant(t, "first")
	w.exec(t, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", w.slot)
	return w
}

func (w *world) newTenant(t *testing.T, name string) uuid.UUID {
	id := uuid.Must(uuid.NewV7())
	w.exec(t, "INSERT INTO tenants (id, name) VALUES ($1, $2)", id, name)
	return id
}

func (w *world) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	_, err := w.pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// spoil changes what no service can change: triggers and foreign keys are off.
func (w *world) spoil(t *testing.T, sql string, args ...any) {
	t.Helper()
	err := postgres.InTx(t.Context(), w.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), "SET LOCAL session_replication_role = replica"); err != nil {
			return err
		}
		tag, err := tx.Exec(t.Context(), sql, args...)
		if err == nil && tag.RowsAffected() == 0 {
			err = fmt.Errorf("nothing was spoilt by %s", sql)
		}
		return err
	})
	require.NoError(t, err)
}

// id reads one id.
func (w *world) id(t *testing.T, sql string, args ...any) uuid.UUID {
	t.Helper()
	var id uuid.UUID
	require.NoError(t, w.pool.QueryRow(t.Context(), sql, args...).Scan(&id))
	return id
}

// event is the id of an order's last event of a type.
func (w *world) event(t *testing.T, order uuid.UUID, typ event.Type) uuid.UUID {
	t.Helper()
	return w.id(t, `SELECT id FROM outbox_events WHERE aggregate_id = $1 AND event_type = $2
		ORDER BY aggregate_version DESC LIMIT 1`, order, typ)
}

func line(quantity, unit int64, rate money.Rate) orders.LineParams {
	return orders.LineParams{SKU: "book", Description: "A book", Quantity: quantity, UnitAmount: unit, TaxRate: rate}
}

func (w *world) change(ctx context.Context, fn func(tx pgx.Tx, stamp orders.Stamp) error) error {
	return postgres.InTx(ctx, w.pool, func(tx pgx.Tx) error {
		return fn(tx, orders.Stamp{At: time.Now().UTC().Truncate(time.Microsecond)})
	})
}

func (w *world) place(t *testing.T, currency string, lines ...orders.LineParams) uuid.UUID {
	t.Helper()
	priced, err := orders.Price(orders.PlaceParams{
		CustomerID: "c-42", CustomerEmail: "a@example.com", Currency: currency, Lines: lines,
	})
	require.NoError(t, err)
	var id uuid.UUID
	require.NoError(t, w.change(t.Context(), func(tx pgx.Tx, stamp orders.Stamp) error {
		order, err := orders.PlaceTx(t.Context(), tx, w.tenant, priced, stamp)
		id = order.ID
		return err
	}))
	return id
}

func (w *world) pay(t *testing.T, order uuid.UUID) {
	t.Helper()
	require.NoError(t, w.change(t.Context(), func(tx pgx.Tx, stamp orders.Stamp) error {
		reference := fmt.Sprintf("pi_%d", w.payment.Add(1))
		_, err := orders.PayTx(t.Context(), tx, w.tenant, order, orders.PayParams{Reference: reference}, stamp)
		return err
	}))
}

func (w *world) cancel(t *testing.T, order uuid.UUID) {
	t.Helper()
	require.NoError(t, w.change(t.Context(), func(tx pgx.Tx, stamp orders.Stamp) error {
		_, err := orders.CancelTx(t.Context(), tx, w.tenant, order, stamp)
		return err
	}))
}

func (w *world) refund(t *testing.T, order uuid.UUID, amount int64) uuid.UUID {
	t.Helper()
	var id uuid.UUID
	require.NoError(t, w.change(t.Context(), func(tx pgx.Tx, stamp orders.Stamp) error {
		refund, err := orders.RefundTx(t.Context(), tx, w.tenant, order, orders.RefundParams{Amount: amount, Reason: "damaged"}, stamp)
		id = refund.ID
		return err
	}))
	return id
}

// placeEUR makes an order of 29.75 EUR.
func (w *world) placeEUR(t *testing.T) uuid.UUID {
	t.Helper()
	return w.place(t, "EUR", line(2, 1250, 190000))
}

// deliver gives the consumer the events that it was not given before.
func (w *world) deliver(t *testing.T) {
	t.Helper()
	rows, err := w.pool.Query(t.Context(), `
		SELECT id, tenant_id, aggregate_id, aggregate_version, event_type, schema_version, payload, occurred_at
		FROM outbox_events WHERE aggregate_type = 'order' ORDER BY aggregate_id, aggregate_version`)
	require.NoError(t, err)
	events, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (event.Event, error) {
		e := event.Event{AggregateType: event.AggregateOrder}
		err := row.Scan(&e.ID, &e.TenantID, &e.AggregateID, &e.AggregateVersion, &e.Type, &e.SchemaVersion, &e.Payload, &e.OccurredAt)
		return e, err
	})
	require.NoError(t, err)
	var records []event.Record
	for _, e := range events {
		if w.given[e.ID] {
			continue
		}
		w.given[e.ID] = true
		record := e.Record()
		record.Offset = w.offset
		w.offset++
		record.Time = e.OccurredAt
		records = append(records, record)
	}
	require.NoError(t, w.inbox.Process(t.Context(), records))
	w.rounds.Add(1)
}

// copyEvent writes an order's event a second time, under another id.
func (w *world) copyEvent(t *testing.T, order uuid.UUID, typ event.Type) {
	t.Helper()
	w.spoil(t, `INSERT INTO outbox_events (id, tenant_id, aggregate_type, aggregate_id, aggregate_version, event_type, payload, occurred_at)
		SELECT $1, tenant_id, aggregate_type, aggregate_id, aggregate_version, event_type, payload, occurred_at
		FROM outbox_events WHERE id = $2`, uuid.Must(uuid.NewV7()), w.event(t, order, typ))
}

// runRelay stands in for the relay: until the test ends, whatever is committed
// is delivered within some milliseconds.
func (w *world) runRelay(t *testing.T) {
	t.Helper()
	w.readSlot(t, w.slot)
}

// readSlot is who reads a slot, and has read it all within some milliseconds.
func (w *world) readSlot(t *testing.T, slot string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		ticker := time.NewTicker(5 * time.Millisecond)
		defer ticker.Stop()
		for {
			_, err := w.pool.Exec(ctx, "SELECT pg_replication_slot_advance($1, pg_current_wal_flush_lsn())", slot)
			if err != nil && ctx.Err() == nil {
				t.Errorf("advance slot: %v", err)
				return
			}
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
}

// upToDate is a consumer that has read its topic to the end.
func upToDate(context.Context) (committed, end map[int32]int64, err error) {
	return map[int32]int64{0: 7, 1: 9}, map[int32]int64{0: 7, 1: 9, 2: 0}, nil
}

// verify runs with the consumer at the end of its topic, unless a function says
// otherwise.
func (w *world) verify(t *testing.T, configure ...func(*verify.Config)) *verify.Report {
	t.Helper()
	config := verify.Config{DB: w.reader, Slot: w.slot, Wait: time.Minute, Lag: upToDate}
	for _, change := range configure {
		change(&config)
	}
	report, err := verify.Run(t.Context(), config)
	require.NoError(t, err)
	return report
}

package orders_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/orders"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/tenants"
)

// world is a database with one tenant, worked on as the API does: with its
// role, in transactions of its tenant.
type world struct {
	t      *testing.T
	tenant uuid.UUID
	api    *pgxpool.Pool
	owner  *pgxpool.Pool
}

func newWorld(t *testing.T) *world {
	t.Helper()
	database := pgtest.New(t)
	w := &world{t: t, api: database.Pool(t, "api"), owner: database.Pool(t, "")}
	w.tenant = w.addTenant("acme")
	return w
}

func (w *world) addTenant(name string) uuid.UUID {
	w.t.Helper()
	id := uuid.Must(uuid.NewV7())
	_, err := w.owner.Exec(w.t.Context(), "INSERT INTO tenants (id, name) VALUES ($1, $2)", id, name)
	require.NoError(w.t, err)
	return id
}

// stamp is a moment of the clock as Postgres keeps it.
func stamp() orders.Stamp {
	return orders.Stamp{At: time.Now().UTC().Truncate(time.Microsecond)}
}

// in runs fn in a transaction of a tenant.
func (w *world) in(tenant uuid.UUID, fn func(tx pgx.Tx) error) error {
	w.t.Helper()
	return tenants.InTx(w.t.Context(), w.api, tenant, fn)
}

var errGaveUp = errors.New("gave up")

// inVain is in, but rolls back where fn succeeds.
func (w *world) inVain(tenant uuid.UUID, fn func(tx pgx.Tx) error) {
	w.t.Helper()
	err := w.in(tenant, func(tx pgx.Tx) error { return errors.Join(fn(tx), errGaveUp) })
	require.Equal(w.t, errGaveUp.Error(), err.Error())
}

func (w *world) place(p orders.PlaceParams) orders.Order {
	w.t.Helper()
	priced, err := orders.Price(p)
	require.NoError(w.t, err)
	var order orders.Order
	require.NoError(w.t, w.in(w.tenant, func(tx pgx.Tx) (err error) {
		order, err = orders.PlaceTx(w.t.Context(), tx, w.tenant, priced, stamp())
		return err
	}))
	return order
}

func (w *world) pay(id uuid.UUID, reference string) (order orders.Order, err error) {
	err = w.in(w.tenant, func(tx pgx.Tx) (err error) {
		order, err = orders.PayTx(w.t.Context(), tx, w.tenant, id, orders.PayParams{Reference: reference}, stamp())
		return err
	})
	return order, err
}

func (w *world) cancel(id uuid.UUID) (order orders.Order, err error) {
	err = w.in(w.tenant, func(tx pgx.Tx) (err error) {
		order, err = orders.CancelTx(w.t.Context(), tx, w.tenant, id, stamp())
		return err
	})
	return order, err
}

func (w *world) refund(id uuid.UUID, amount int64) (refund orders.Refund, err error) {
	err = w.in(w.tenant, func(tx pgx.Tx) (err error) {
		refund, err = orders.RefundTx(w.t.Context(), tx, w.tenant, id, orders.RefundParams{Amount: amount, Reason: "damaged"}, stamp())
		return err
	})
	return refund, err
}

func (w *world) get(tenant, id uuid.UUID) (order orders.Order, err error) {
	err = tenants.ReadTx(w.t.Context(), w.api, tenant, func(tx pgx.Tx) (err error) {
		order, err = orders.GetTx(w.t.Context(), tx, tenant, id)
		return err
	})
	return order, err
}

// fact is a row of the outbox.
type fact struct {
	Event event.Event
	State event.Order
	TxID  uint64
}

// facts are the events of an order, in the order of their versions. Each
// payload is checked against its type's schema.
func (w *world) facts(id uuid.UUID) []fact {
	w.t.Helper()
	rows, err := w.owner.Query(w.t.Context(), `
		SELECT id, tenant_id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version,
			payload, coalesce(traceparent, ''), occurred_at, tx_id::text::bigint
		FROM outbox_events WHERE aggregate_id = $1 ORDER BY aggregate_version, id`, id)
	require.NoError(w.t, err)
	facts, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (f fact, err error) {
		e := &f.Event
		err = row.Scan(&e.ID, &e.TenantID, &e.AggregateType, &e.AggregateID, &e.AggregateVersion, &e.Type, &e.SchemaVersion,
			&e.Payload, &e.Traceparent, &e.OccurredAt, &f.TxID)
		return f, errors.Join(err, json.Unmarshal(e.Payload, &f.State))
	})
	require.NoError(w.t, err)
	for _, f := range facts {
		requireValid(w.t, f.Event)
	}
	return facts
}

func requireValid(t *testing.T, e event.Event) {
	t.Helper()
	compiler := jsonschema.NewCompiler()
	compiler.AssertFormat()
	var wanted string
	for _, name := range []string{"common", string(e.Type)} {
		text, err := os.ReadFile("../event/schemas/" + name + ".v1.json")
		require.NoError(t, err)
		document, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
		require.NoError(t, err)
		wanted = document.(map[string]any)["$id"].(string)
		require.NoError(t, compiler.AddResource(wanted, document))
	}
	schema, err := compiler.Compile(wanted)
	require.NoError(t, err)
	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(e.Payload))
	require.NoError(t, err)
	require.NoError(t, schema.Validate(document))
}

// contents is every row of every table that the API writes, to be compared with
// what is there later.
func (w *world) contents() map[string][]string {
	w.t.Helper()
	contents := make(map[string][]string)
	for _, table := range []string{
		"orders", "order_lines", "order_taxes", "payments", "refunds", "refund_taxes", "outbox_events", "idempotency_keys",
	} {
		rows, err := w.owner.Query(w.t.Context(), "SELECT t::text FROM "+table+" AS t ORDER BY 1")
		require.NoError(w.t, err)
		contents[table], err = pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(w.t, err)
	}
	return contents
}

// lastWriter is the transaction that wrote an order's row.
func (w *world) lastWriter(id uuid.UUID) (xid uint32) {
	w.t.Helper()
	err := w.owner.QueryRow(w.t.Context(), "SELECT xmin::text::bigint FROM orders WHERE id = $1", id).Scan(&xid)
	require.NoError(w.t, err)
	return xid
}

// together runs n calls at once: all wait behind one gate until each is there.
func together(ctx context.Context, n int, call func(ctx context.Context, i int) error) []error {
	gate, errs := make(chan struct{}), make([]error, n)
	done := make(chan struct{})
	for i := range n {
		go func() {
			defer func() { done <- struct{}{} }()
			<-gate
			errs[i] = call(ctx, i)
		}()
	}
	close(gate)
	for range n {
		<-done
	}
	return errs
}

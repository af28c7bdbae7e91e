package inbox_test

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/inbox/inboxtest"
	"github.com/onceledger/onceledger/internal/pgtest"
)

// recorder is a handler that writes down each event that it is given, in order
// and without looking whether it is there already: an effect that would show if
// it happened twice. It must refuse events whose payload says so.
type recorder struct {
	calls  atomic.Int64                                     // of Apply
	before func(ctx context.Context, tx pgx.Tx) error       // called first, if set
	after  func(ctx context.Context, tx pgx.Tx) error       // called last, if set
	refuse func(e event.Event) (class inbox.Class, is bool) // if set
}

func (r *recorder) Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	r.calls.Add(1)
	if r.before != nil {
		if err := r.before(ctx, tx); err != nil {
			return err
		}
	}
	var refused inbox.Rejections
	for _, e := range events {
		if r.refuse == nil {
			break
		}
		if class, is := r.refuse(e); is {
			refused = append(refused, inbox.Rejection{EventID: e.ID, Fault: inbox.Fault{Class: class, Detail: "refused by the test"}})
		}
	}
	if len(refused) > 0 {
		return refused
	}
	for _, e := range events {
		_, err := tx.Exec(ctx, "INSERT INTO effects (event_id, payload) VALUES ($1, $2)", e.ID, string(e.Payload))
		if err != nil {
			return err
		}
	}
	if r.after != nil {
		return r.after(ctx, tx)
	}
	return nil
}

// world is a consumer with a recorder.
type world struct {
	*inboxtest.Consumer
	handler *recorder
	tenant  uuid.UUID
}

func newWorld(t *testing.T, configure ...func(*inbox.Config)) *world {
	t.Helper()
	handler := &recorder{}
	w := &world{Consumer: inboxtest.New(t, handler, configure...), handler: handler}
	w.tenant = w.Tenant(t)
	w.makeEffects(t)
	return w
}

func (w *world) makeEffects(t *testing.T) {
	t.Helper()
	w.Exec(t, `
		CREATE TABLE effects (
			n bigint GENERATED ALWAYS AS IDENTITY, event_id uuid, payload text,
			CONSTRAINT effects_storable CHECK (payload NOT LIKE '%`+unstorable+`%'))`)
	w.Exec(t, "GRANT SELECT, INSERT ON effects TO onceledger_worker")
}

// another is a second worker on the same database.
func (w *world) another(t *testing.T, configure ...func(*inbox.Config)) *world {
	t.Helper()
	handler := &recorder{}
	return &world{Consumer: inboxtest.On(t, w.DB, handler, configure...), handler: handler, tenant: w.tenant}
}

// effects are the events that had an effect, in the order in which they had it.
func (w *world) effects(t *testing.T) []uuid.UUID {
	t.Helper()
	return pgtest.Column[uuid.UUID](t, w.Owner, "SELECT event_id FROM effects ORDER BY n")
}

// calls is how often the handler was given something to apply.
func (w *world) calls() int { return int(w.handler.calls.Load()) }

// order is a new order of the world's tenant.
func (w *world) order() *factory.Order { return &factory.Order{TenantID: w.tenant} }

// created is n events, each of an order of its own.
func (w *world) created(n int) []event.Event {
	events := make([]event.Event, n)
	for i := range events {
		events[i] = w.order().Created()
	}
	return events
}

func ids(events ...event.Event) []uuid.UUID {
	all := make([]uuid.UUID, len(events))
	for i, e := range events {
		all[i] = e.ID
	}
	return all
}

// unstorable is a text that the database refuses to store as an effect.
const unstorable = "cannot be stored"

// spoilt is the event with a payload that the database will refuse.
func spoilt(e event.Event) event.Event {
	return factory.Altered(e, func(state *event.Order) { state.CustomerID = unstorable })
}

// refuseMarked refuses events whose customer is named after a class.
func refuseMarked(e event.Event) (inbox.Class, bool) {
	_, class, is := strings.Cut(string(e.Payload), `"customer_id":"refuse as `)
	class, _, _ = strings.Cut(class, `"`)
	return inbox.Class(class), is
}

// marked is the event for refuseMarked to refuse.
func marked(e event.Event, class inbox.Class) event.Event {
	return factory.Altered(e, func(state *event.Order) { state.CustomerID = "refuse as " + string(class) })
}

// fails is a handler that always fails.
type fails struct{ err error }

func (f fails) Apply(context.Context, pgx.Tx, []event.Event) error { return f.err }

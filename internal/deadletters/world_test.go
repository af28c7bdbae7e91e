package deadletters_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/deadletters"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/inbox/inboxtest"
	"github.com/onceledger/onceledger/internal/pgtest"
)

// world is billing's consumer with its dead letters, and an operator on
// connections of his own.
type world struct {
	*inboxtest.Consumer
	letters *deadletters.Service
	tenant  uuid.UUID
}

// gate is billing, and a place to stop it in the middle of its transaction.
type gate struct {
	billing.Handler
	at func(ctx context.Context, events []event.Event) // called when all is written
}

func (g *gate) Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	err := g.Handler.Apply(ctx, tx, events)
	if g.at != nil && err == nil {
		g.at(ctx, events)
	}
	return err
}

func newWorld(t *testing.T) *world {
	t.Helper()
	return newWorldOf(t, billing.Handler{Now: time.Now}, billing.Handler{Now: time.Now})
}

// newWorldOf has a worker and an operator with handlers of their own.
func newWorldOf(t *testing.T, workers, operators inbox.Handler) *world {
	t.Helper()
	w := &world{Consumer: inboxtest.New(t, workers)}
	w.letters = w.operator(t, operators)
	w.tenant = w.Tenant(t)
	return w
}

func (w *world) operator(t *testing.T, handler inbox.Handler, configure ...func(*pgxpool.Config)) *deadletters.Service {
	t.Helper()
	pool := w.DB.Pool(t, "worker", configure...)
	return deadletters.New(pool, map[string]*inbox.Inbox{inboxtest.Name: inbox.New(inbox.Config{
		Consumer: inboxtest.Name, Pool: pool, Handler: handler, Log: slog.New(slog.DiscardHandler),
		Metrics: prometheus.NewRegistry(), Now: time.Now,
	})})
}

func (w *world) order() *factory.Order { return &factory.Order{TenantID: w.tenant} }

// bad is the event with a customer that the database refuses, until it is mended.
func bad(e event.Event) event.Event {
	return factory.Altered(e, func(state *event.Order) { state.CustomerID = "refused" })
}

// refuse has the database refuse bad payments.
func (w *world) refuse(t *testing.T) {
	t.Helper()
	w.Exec(t, "ALTER TABLE invoices ADD CONSTRAINT invoices_customer_known CHECK (customer_id <> 'refused') NOT VALID")
}

// mend takes that back.
func (w *world) mend(t *testing.T) {
	t.Helper()
	w.Exec(t, "ALTER TABLE invoices DROP CONSTRAINT invoices_customer_known")
}

// letter is an event's dead letter, the last one if it has several.
func (w *world) letter(t *testing.T, e event.Event) deadletters.Letter {
	t.Helper()
	letters, _, err := w.letters.List(t.Context(), deadletters.Filter{EventID: e.ID}, uuid.Nil, 100)
	require.NoError(t, err)
	require.NotEmpty(t, letters)
	return letters[len(letters)-1]
}

func (w *world) retry(t *testing.T, filter deadletters.Filter, act ...deadletters.Act) deadletters.Report {
	t.Helper()
	report, err := w.letters.Retry(t.Context(), filter, append(act, deadletters.Act{By: "test"})[0])
	require.NoError(t, err)
	return report
}

var preview = deadletters.Act{By: "test", Preview: true, Reason: "to see"}

func (w *world) discard(t *testing.T, reason string, events ...event.Event) deadletters.Report {
	t.Helper()
	var filter deadletters.Filter
	for _, e := range events {
		filter.IDs = append(filter.IDs, w.letter(t, e).ID)
	}
	report, err := w.letters.Discard(t.Context(), filter, deadletters.Act{By: "test", Reason: reason})
	require.NoError(t, err)
	return report
}

func of(orders ...*factory.Order) deadletters.Filter {
	if len(orders) != 1 {
		panic("one order")
	}
	return deadletters.Filter{OrderID: orders[0].State.OrderID}
}

// outcomes are what became of events by the report, in its order.
func outcomes(report deadletters.Report) []inbox.Outcome {
	var all []inbox.Outcome
	for _, result := range report.Letters {
		all = append(all, result.Outcome)
	}
	return all
}

// states are the states of all letters, the oldest first.
func (w *world) states(t *testing.T) []string {
	t.Helper()
	return pgtest.Column[string](t, w.Owner, "SELECT state FROM dead_letters ORDER BY id")
}

// requireSettled wants no open letter, and everything of an order applied in its order.
func (w *world) requireSettled(t *testing.T, order *factory.Order, creditNotes int) {
	t.Helper()
	require.Empty(t, pgtest.Column[string](t, w.Owner, "SELECT class || ': ' || detail FROM dead_letters WHERE state = 'open'"))
	require.Equal(t, []int64{order.State.Version}, pgtest.Column[int64](t, w.Owner,
		"SELECT version FROM order_billing WHERE order_id = $1", order.State.OrderID))
	require.Equal(t, []int{1, creditNotes, 1 + creditNotes}, pgtest.Column[int](t, w.Owner, `
		SELECT count(*) FROM invoices WHERE order_id = $1
		UNION ALL SELECT count(*) FROM credit_notes WHERE order_id = $1
		UNION ALL SELECT count(*) FROM ledger_entries WHERE order_id = $1`, order.State.OrderID))
	// Credit notes in the order of their refunds: their events' ids ascend.
	require.Equal(t, pgtest.Column[uuid.UUID](t, w.Owner, "SELECT id FROM credit_notes WHERE order_id = $1 ORDER BY id", order.State.OrderID),
		pgtest.Column[uuid.UUID](t, w.Owner, "SELECT id FROM credit_notes WHERE order_id = $1 ORDER BY ordinal", order.State.OrderID))
}

// requireNothingBehindNothing is what there can never be.
func (w *world) requireNothingBehindNothing(t *testing.T) {
	t.Helper()
	stray, err := db.New().DeadLettersBehindNothing(t.Context(), w.Owner, inboxtest.Name)
	require.NoError(t, err)
	require.Zero(t, stray)
}

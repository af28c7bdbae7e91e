package ledger_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/ledger"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
)

// world is a ledger on a database of its own, with two tenants.
type world struct {
	db            *pgtest.Database
	owner, worker *pgxpool.Pool
	tenant, other uuid.UUID
}

func newWorld(t *testing.T) *world {
	t.Helper()
	database := pgtest.New(t)
	w := &world{
		db: database, owner: database.Pool(t, ""), worker: database.Pool(t, "worker"),
		tenant: uuid.New(), other: uuid.New(),
	}
	_, err := w.owner.Exec(t.Context(), "INSERT INTO tenants (id, name) VALUES ($1, 'acme'), ($2, 'other')", w.tenant, w.other)
	require.NoError(t, err)
	return w
}

func newID() uuid.UUID { return uuid.Must(uuid.NewV7()) }

// at is when things happen in these tests.
var at = time.Date(2026, time.March, 1, 12, 0, 0, 123_456_000, time.UTC)

// payment is the entry for a payment of 25.00 and 4.75 tax.
func (w *world) payment() ledger.Entry {
	return ledger.Payment(w.tenant, newID(), newID(), "EUR", 2500, 475, at)
}

// post posts entries as the worker does.
func (w *world) post(ctx context.Context, entries ...ledger.Entry) error {
	return postgres.InTx(ctx, w.worker, func(tx pgx.Tx) error { return ledger.PostTx(ctx, tx, entries) })
}

// read runs fn as the worker.
func (w *world) read(t *testing.T, fn func(tx pgx.Tx)) {
	t.Helper()
	require.NoError(t, postgres.InTx(t.Context(), w.worker, func(tx pgx.Tx) error {
		fn(tx)
		return nil
	}))
}

// written counts the rows of the ledger's tables.
func (w *world) written(t *testing.T) (entries, lines, accounts int) {
	t.Helper()
	require.NoError(t, w.owner.QueryRow(t.Context(), `
		SELECT (SELECT count(*) FROM ledger_entries), (SELECT count(*) FROM ledger_lines), (SELECT count(*) FROM ledger_accounts)`,
	).Scan(&entries, &lines, &accounts))
	return entries, lines, accounts
}

package relay_test

import (
	"cmp"
	"context"
	"errors"
	"regexp"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/relay"
)

func (b *bench) assign(t *testing.T, kind relay.Kind) {
	t.Helper()
	require.NoError(t, db.New().RelayAssignmentBegin(t.Context(), b.pool, b.slot, string(kind)))
	settled, err := db.New().RelayAssignmentSettle(t.Context(), b.pool, 0, b.slot, string(kind))
	require.NoError(t, err)
	require.EqualValues(t, 1, settled)
}

// Rows that were restored from another server's dump have that server's
// transaction numbers, which may be yet to come here. They are sent once, and not
// in each round.
func TestPollSendsRestoredRowsOnce(t *testing.T) {
	t.Parallel()

	b := setup(t)
	b.assign(t, relay.KindPoll)
	o := newOrders(t, 3)
	restored := b.commit(t, o.events(t, 30)...)
	_, err := b.pool.Exec(t.Context(), "UPDATE outbox_events SET tx_id = (tx_id::text::bigint + 1000000000)::text::xid8")
	require.NoError(t, err)
	r := b.start(t)
	b.receive(t, len(restored))
	for range 5 {
		restored = append(restored, b.commit(t, o.event(t))...)
		b.receive(t, len(restored))
	}
	require.NoError(t, r.stop())
	b.start(t)
	restored = append(restored, b.commit(t, o.event(t))...)
	require.ElementsMatch(t, restored, b.receive(t, len(restored)))
	require.Len(t, b.records, len(restored), "nothing comes twice")
}

// However long a transaction has been open, here or in another database, a look
// at the table reads what is new and nothing else.
func TestPollReadsWhatIsNew(t *testing.T) {
	t.Parallel()

	// A server of its own: an open transaction keeps the records of all relays back.
	server := pgtest.Server(t)
	b := setupOn(t, server.New(t))
	open, err := server.New(t).Pool(t, "").Begin(t.Context())
	require.NoError(t, err)
	_, err = open.Exec(t.Context(), "SELECT pg_current_xact_id()")
	require.NoError(t, err)
	o := newOrders(t, 3)
	for range 100 { // so that a table scan would not be the cheaper way
		b.commit(t, o.events(t, 100)...)
	}
	_, err = b.pool.Exec(t.Context(), "ANALYZE outbox_events")
	require.NoError(t, err)
	seen, err := db.New().OutboxListUnseen(t.Context(), b.pool, "3:3:")
	require.NoError(t, err)
	require.Len(t, seen.Ids, 10_000)
	last := b.commit(t, o.events(t, 7)...)
	found, err := db.New().OutboxListUnseen(t.Context(), b.pool, seen.Snapshot)
	require.NoError(t, err)
	require.ElementsMatch(t, last, found.Ids)

	// What the statement, as it is sent, takes up and throws away again.
	plan := &explain{conn: b.pool}
	_, err = db.New().OutboxListUnseen(t.Context(), plan, seen.Snapshot)
	require.ErrorIs(t, err, errExplained)
	for _, removed := range regexp.MustCompile(`"Rows Removed by [^"]+": (\d+)`).FindAllStringSubmatch(plan.text, -1) {
		require.Len(t, removed[1], 1, "it reads more than is new: %s", plan.text)
	}
	require.Contains(t, plan.text, "tx_id_idx")
	require.NoError(t, open.Rollback(t.Context()))
}

var errExplained = errors.New("it was only explained")

// explain runs a statement under EXPLAIN ANALYZE and keeps the plan.
type explain struct {
	db.DBTX

	conn *pgxpool.Pool
	text string
}

func (e *explain) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return explainedRow{e.conn.QueryRow(ctx, "EXPLAIN (ANALYZE, FORMAT JSON) "+sql, args...).Scan(&e.text)}
}

type explainedRow struct{ err error }

func (r explainedRow) Scan(...any) error { return cmp.Or(r.err, errExplained) }

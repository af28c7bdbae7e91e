package ledger_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
)

// These tests write by SQL of their own, as the worker, whose role may insert
// more than ledger.PostTx ever does: what is refused here is refused by the
// database, whatever the code does.

// requireRefused checks how the database refused something: by SQLSTATE, and by
// the constraint or, where a trigger or a grant refuses, by "".
func requireRefused(t *testing.T, err error, code, constraint string) {
	t.Helper()
	var refusal *pgconn.PgError
	require.ErrorAs(t, err, &refusal)
	require.Equal(t, code, refusal.Code, refusal.Message)
	require.Equal(t, constraint, refusal.ConstraintName, refusal.Message)
}

// TestInsertOnly tries every way to change what is written, as every role.
func TestInsertOnly(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	require.NoError(t, w.post(t.Context(), w.payment()))
	before := w.content(t)

	for _, role := range []string{"api", "relay", "worker", "janitor", "verify", ""} {
		pool, refusal := w.db.Pool(t, role), "permission denied"
		if role == "" {
			role, pool, refusal = "owner", w.owner, "is insert-only"
		}
		for table, column := range map[string]string{
			"ledger_accounts": "kind", "ledger_entries": "effective_at", "ledger_lines": "amount_minor",
		} {
			for statement, sql := range map[string]string{
				"Update":   fmt.Sprintf("UPDATE %[1]s SET %[2]s = %[2]s", table, column),
				"Delete":   "DELETE FROM " + table,
				"Truncate": "TRUNCATE " + table + " CASCADE",
			} {
				t.Run(role+"/"+statement+"/"+table, func(t *testing.T) {
					_, err := pool.Exec(t.Context(), sql)
					requireRefused(t, err, "42501", "")
					require.ErrorContains(t, err, refusal)
				})
			}
		}
	}

	t.Run("UpdateOfNoRowByTheOwner", func(t *testing.T) {
		_, err := w.owner.Exec(t.Context(), "UPDATE ledger_lines SET amount_minor = 1 WHERE false")
		requireRefused(t, err, "42501", "")
	})
	for name, sql := range map[string]string{
		"Upsert": `INSERT INTO ledger_accounts (tenant_id, code, currency, kind) SELECT tenant_id, code, currency, kind FROM ledger_accounts
			ON CONFLICT (tenant_id, code, currency) DO UPDATE SET kind = 'income'`,
		"Merge":            "MERGE INTO ledger_lines USING (SELECT) AS one ON true WHEN MATCHED THEN DELETE",
		"RowLock":          "SELECT FROM ledger_entries FOR UPDATE",
		"DisabledTriggers": "ALTER TABLE ledger_lines DISABLE TRIGGER ALL",
		"ReplicaRole":      "SET session_replication_role = replica",
		"DroppedTrigger":   "DROP TRIGGER ledger_lines_insert_only ON ledger_lines",
		"DroppedTable":     "DROP TABLE ledger_lines",
		"TakenOwnership":   "ALTER TABLE ledger_lines OWNER TO onceledger_worker",
		"GrantToItself":    "GRANT UPDATE ON ledger_lines TO onceledger_worker; UPDATE ledger_lines SET amount_minor = 1",
		"OwnersRole":       "SET ROLE onceledger_janitor",
	} {
		t.Run("worker/"+name, func(t *testing.T) {
			_, err := w.worker.Exec(t.Context(), sql)
			requireRefused(t, err, "42501", "")
		})
	}
	require.Equal(t, before, w.content(t))
}

// content is everything in the ledger's tables.
func (w *world) content(t *testing.T) []string {
	t.Helper()
	return pgtest.Column[string](t, w.owner, `
		SELECT ledger_accounts::text FROM ledger_accounts
		UNION ALL SELECT ledger_entries::text FROM ledger_entries
		UNION ALL SELECT ledger_lines::text FROM ledger_lines
		ORDER BY 1`)
}

// TestReadOnlyRoles checks that nobody but the worker writes to the ledger at all.
func TestReadOnlyRoles(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	for _, role := range []string{"api", "relay", "janitor", "verify"} {
		pool := w.db.Pool(t, role)
		for _, table := range []string{"ledger_accounts", "ledger_entries", "ledger_lines"} {
			t.Run(role+"/"+table, func(t *testing.T) {
				_, err := pool.Exec(t.Context(), "INSERT INTO "+table+" DEFAULT VALUES")
				requireRefused(t, err, "42501", "")
			})
		}
	}
}

// raw is an entry with lines as SQL takes them.
type raw struct {
	tenant, event uuid.UUID
	kind          string
	currency      string
	reverses      *uuid.UUID
	txID          string // SQL
	lines         []rawLine
}

type rawLine struct {
	tenant, event uuid.UUID
	debit, credit string
	currency      string
	amount        int64
}

// book opens the accounts of both tenants in two currencies and returns an
// entry that is right.
func (w *world) book(t *testing.T) raw {
	t.Helper()
	_, err := w.worker.Exec(t.Context(), `
		INSERT INTO ledger_accounts (tenant_id, code, currency, kind)
		SELECT tenant_id, code, currency, 'asset'
		FROM unnest(ARRAY[$1, $2]::uuid[]) AS tenant_id, unnest(ARRAY['cash', 'revenue']) AS code, unnest(ARRAY['EUR', 'USD']) AS currency
		ON CONFLICT DO NOTHING`, w.tenant, w.other)
	require.NoError(t, err)
	event := newID()
	return raw{
		tenant: w.tenant, event: event, kind: "payment", currency: "EUR", txID: "DEFAULT",
		lines: []rawLine{{w.tenant, event, "cash", "revenue", "EUR", 100}},
	}
}

func (r raw) insertEntry(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, `
		INSERT INTO ledger_entries (tenant_id, event_id, kind, order_id, currency, reverses, effective_at, tx_id)
		VALUES ($1, $2, $3, gen_random_uuid(), $4, $5, now(), `+r.txID+`)`, r.tenant, r.event, r.kind, r.currency, r.reverses)
	return err
}

func (r raw) insertLines(ctx context.Context, tx pgx.Tx) error {
	for i, line := range r.lines {
		_, err := tx.Exec(ctx, `
			INSERT INTO ledger_lines (tenant_id, event_id, line_no, debit_account, credit_account, currency, amount_minor)
			VALUES ($1, $2, $3, $4, $5, $6, $7)`,
			line.tenant, line.event, i+1, line.debit, line.credit, line.currency, line.amount)
		if err != nil {
			return err
		}
	}
	return nil
}

func (r raw) insert(ctx context.Context, pool *pgxpool.Pool) error {
	return postgres.InTx(ctx, pool, func(tx pgx.Tx) error {
		if err := r.insertEntry(ctx, tx); err != nil {
			return err
		}
		return r.insertLines(ctx, tx)
	})
}

// Field report R35: the database refuses what does not balance, whoever writes it.
func TestDatabaseRefuses(t *testing.T) {
	t.Parallel()

	// Each spoils one thing in an entry that is right otherwise.
	for name, test := range map[string]struct {
		spoil            func(w *world, entry *raw)
		code, constraint string
		says             string
	}{
		"NothingInAnEntryThatIsRight": {spoil: func(*world, *raw) {}},

		"AnEntryWithoutLines": {func(_ *world, e *raw) { e.lines = nil }, "23000", "", "has no lines"},
		"AnAmountOfZero":      {func(_ *world, e *raw) { e.lines[0].amount = 0 }, "23514", "ledger_lines_amount_positive", ""},
		"ANegativeAmount":     {func(_ *world, e *raw) { e.lines[0].amount = -100 }, "23514", "ledger_lines_amount_positive", ""},
		"DebitAndCreditAlike": {func(_ *world, e *raw) { e.lines[0].debit = "revenue" }, "23514", "ledger_lines_accounts_differ", ""},
		"AnUnknownDebitAccount": {
			func(_ *world, e *raw) { e.lines[0].debit = "nowhere" }, "23503", "ledger_lines_debit_account_fkey", "",
		},
		"AnUnknownCreditAccount": {
			func(_ *world, e *raw) { e.lines[0].credit = "nowhere" }, "23503", "ledger_lines_credit_account_fkey", "",
		},
		"ACurrencyWithoutAccounts": {
			func(_ *world, e *raw) { e.currency, e.lines[0].currency = "GBP", "GBP" }, "23503", "ledger_lines_debit_account_fkey", "",
		},
		"ALineInAnotherCurrencyThanItsEntry": {func(_ *world, e *raw) { e.lines[0].currency = "USD" }, "23000", "", "the currency of its entry"},
		"ASecondLineInAnotherCurrency": {
			func(_ *world, e *raw) {
				e.lines = append(e.lines, e.lines[0])
				e.lines[1].currency = "USD"
			}, "23000", "", "the currency of its entry",
		},
		"ALineOfAnotherTenant": {
			func(w *world, e *raw) { e.lines[0].tenant = w.other }, "23503", "ledger_lines_entry_fkey", "",
		},
		"ALineOfNoEntry": {func(_ *world, e *raw) { e.lines[0].event = newID() }, "23503", "ledger_lines_entry_fkey", ""},
		"AnUnknownKind":  {func(_ *world, e *raw) { e.kind = "gift" }, "23514", "ledger_entries_kind_known", ""},
		"AReversalOfNothing": {
			func(_ *world, e *raw) { e.reverses = new(newID()) }, "23503", "ledger_entries_reverses_fkey", "",
		},
		"ATransactionIdChosenByHand": {func(_ *world, e *raw) { e.txID = "'4711'::xid8" }, "23000", "", "its own transaction"},
		"TheTransactionIdOfAnother": {
			func(_ *world, e *raw) { e.txID = "(SELECT max(tx_id) FROM ledger_entries)" }, "23000", "", "its own transaction",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			require.NoError(t, w.book(t).insert(t.Context(), w.worker))
			before := w.content(t)

			entry := w.book(t)
			test.spoil(w, &entry)
			err := entry.insert(t.Context(), w.worker)
			if test.code == "" {
				require.NoError(t, err)
				return
			}
			requireRefused(t, err, test.code, test.constraint)
			require.ErrorContains(t, err, test.says)
			require.True(t, postgres.DataFault(err), "the inbox must take it for a fault of the event")
			require.Equal(t, before, w.content(t))
		})
	}
}

func TestDatabaseRefusesTheSecondEntryOfAnEvent(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	entry := w.book(t)
	require.NoError(t, entry.insert(t.Context(), w.worker))

	requireRefused(t, entry.insert(t.Context(), w.worker), "23505", "ledger_entries_pkey")
	entry.tenant, entry.lines[0].tenant = w.other, w.other
	requireRefused(t, entry.insert(t.Context(), w.worker), "23505", "ledger_entries_event_id_key")
}

func TestDatabaseRefusesToReverseAnotherTenantsEntry(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	entry := w.book(t)
	require.NoError(t, entry.insert(t.Context(), w.worker))

	reversal := w.book(t)
	reversal.tenant, reversal.lines[0].tenant, reversal.reverses = w.other, w.other, &entry.event
	requireRefused(t, reversal.insert(t.Context(), w.worker), "23503", "ledger_entries_reverses_fkey")
}

func TestLinesBelongToTheirEntrysTransaction(t *testing.T) {
	t.Parallel()

	insertSecond := func(ctx context.Context, tx pgx.Tx, entry raw) error {
		_, err := tx.Exec(ctx, `
			INSERT INTO ledger_lines (tenant_id, event_id, line_no, debit_account, credit_account, currency, amount_minor)
			VALUES ($1, $2, 2, 'cash', 'revenue', 'EUR', 1)`, entry.tenant, entry.event)
		return err
	}

	t.Run("RefusesALineForAnEntryThatIsCommitted", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		entry := w.book(t)
		require.NoError(t, entry.insert(t.Context(), w.worker))
		before := w.content(t)

		for name, pool := range map[string]*pgxpool.Pool{"worker": w.worker, "owner": w.owner} {
			err := postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error { return insertSecond(t.Context(), tx, entry) })
			requireRefused(t, err, "23000", "")
			require.ErrorContains(t, err, "in the transaction", name)
		}
		require.Equal(t, before, w.content(t))
	})

	t.Run("IsNotFooledByATableOfTheSameName", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		entry := w.book(t)
		require.NoError(t, entry.insert(t.Context(), w.worker))
		before := w.content(t)

		_, err := w.worker.Exec(t.Context(), "CREATE TEMPORARY TABLE ledger_entries (LIKE public.ledger_entries)")
		requireRefused(t, err, "42501", "")
		for _, shadow := range []string{"ledger_entries", "ledger_lines"} {
			// The owner may make one; then the checks have to look past it.
			err = postgres.InTx(t.Context(), w.owner, func(tx pgx.Tx) error {
				_, err := tx.Exec(t.Context(), "CREATE TEMPORARY TABLE "+shadow+" (LIKE public."+shadow+") ON COMMIT DROP")
				require.NoError(t, err)
				_, err = tx.Exec(t.Context(), `
					INSERT INTO public.ledger_lines (tenant_id, event_id, line_no, debit_account, credit_account, currency, amount_minor)
					VALUES ($1, $2, 2, 'cash', 'revenue', 'EUR', 1)`, entry.tenant, entry.event)
				return err
			})
			requireRefused(t, err, "23000", "")
		}
		require.Equal(t, before, w.content(t))
	})

	t.Run("RefusesALineBesideOthersThatAreRight", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		old := w.book(t)
		require.NoError(t, old.insert(t.Context(), w.worker))

		fresh := w.book(t)
		err := postgres.InTx(t.Context(), w.worker, func(tx pgx.Tx) error {
			if err := fresh.insertEntry(t.Context(), tx); err != nil {
				return err
			}
			_, err := tx.Exec(t.Context(), `
				INSERT INTO ledger_lines (tenant_id, event_id, line_no, debit_account, credit_account, currency, amount_minor)
				VALUES ($1, $2, 1, 'cash', 'revenue', 'EUR', 1), ($1, $3, 2, 'cash', 'revenue', 'EUR', 1)`,
				w.tenant, fresh.event, old.event)
			return err
		})
		requireRefused(t, err, "23000", "")
	})

	t.Run("AcceptsLinesAnywhereInTheEntrysOwnTransaction", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		entry := w.book(t)
		require.NoError(t, postgres.InTx(t.Context(), w.worker, func(tx pgx.Tx) error {
			savepoint, err := tx.Begin(t.Context())
			require.NoError(t, err)
			require.NoError(t, entry.insertEntry(t.Context(), savepoint))
			require.NoError(t, savepoint.Commit(t.Context()))
			require.NoError(t, entry.insertLines(t.Context(), tx))
			return insertSecond(t.Context(), tx, entry)
		}))
		_, lines, _ := w.written(t)
		require.Equal(t, 2, lines)
	})

	t.Run("RefusesAnEntryWhoseLinesWereRolledBack", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		entry := w.book(t)
		err := postgres.InTx(t.Context(), w.worker, func(tx pgx.Tx) error {
			require.NoError(t, entry.insertEntry(t.Context(), tx))
			savepoint, err := tx.Begin(t.Context())
			require.NoError(t, err)
			require.NoError(t, entry.insertLines(t.Context(), savepoint))
			return savepoint.Rollback(t.Context())
		})
		requireRefused(t, err, "23000", "")
		require.ErrorContains(t, err, "commit: ", "it is the commit that fails")
		require.ErrorContains(t, err, "has no lines")
	})
}

package prove

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// forbidden are writes that every role of the service must be refused, by the
// database and not by the code.
var forbidden = []string{
	"UPDATE ledger_entries SET order_id = order_id",
	"UPDATE ledger_lines SET amount_minor = amount_minor",
	"DELETE FROM ledger_entries",
	"DELETE FROM ledger_lines",
	"TRUNCATE ledger_lines",
	"TRUNCATE ledger_entries CASCADE",
	// A line more in an entry that is there.
	`INSERT INTO ledger_lines (tenant_id, event_id, line_no, debit_account, credit_account, currency, amount_minor)
	 SELECT tenant_id, event_id, 100, debit_account, credit_account, currency, 1 FROM ledger_lines LIMIT 1`,
}

// refusedWrites tries each, as each role, in a transaction that is rolled back
// whatever comes of it.
func (r *run) refusedWrites(ctx context.Context) []Violation {
	var violations []Violation
	for _, role := range []string{"api", "worker", "relay", "janitor", "verify"} {
		for _, sql := range forbidden {
			if fault := r.refused(ctx, role, sql); fault != nil {
				violations = append(violations, Violation{Invariant: "I5", Kind: "not refused", Detail: fmt.Sprintf("as onceledger_%s, %.60q: %v", role, sql, fault)})
			}
		}
	}
	return violations
}

// refused returns nil if the database refuses a statement for what it is.
func (r *run) refused(ctx context.Context, role, sql string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, r.sandbox.URL(role))
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	tx, err := conn.Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(ctx) }()
	tag, err := tx.Exec(ctx, sql)
	if err == nil {
		if tag.Insert() && tag.RowsAffected() == 0 {
			return nil // it sees no entry to add to
		}
		return fmt.Errorf("it was allowed, and changed %d rows", tag.RowsAffected())
	}
	if refusal, ok := errors.AsType[*pgconn.PgError](err); ok && (refusal.Code == "42501" || refusal.Code[:2] == "23") {
		return nil
	}
	return err
}

package lab

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/ledger"
	"github.com/onceledger/onceledger/internal/money"
	"github.com/onceledger/onceledger/internal/postgres"
)

// subtract takes money from a running total.
func subtract(ctx context.Context, c *consumer, record *kgo.Record) error {
	amount := paymentOf(record).Amount
	if _, err := c.db.Exec(ctx, "UPDATE accounts SET balance = balance - $1 WHERE account = $2", amount, c.Way); err != nil { // WRONG: what is added to is never the same twice
		return err
	}
	c.say("balance = balance - %d", amount)
	c.crashPoint(record)
	return c.commitOffset(ctx, record)
}

// subtractOnce does so once for each event, and looks at how many rows it was.
func subtractOnce(ctx context.Context, c *consumer, record *kgo.Record) error {
	amount, isNew := paymentOf(record).Amount, false
	err := postgres.InTx(ctx, c.db, func(tx pgx.Tx) error {
		var err error
		if isNew, err = markTx(ctx, tx, c.Group, idOf(record)); err != nil || !isNew { // RIGHT: once for each event
			return err
		}
		tag, err := tx.Exec(ctx, "UPDATE accounts SET balance = balance - $1 WHERE account = $2 AND balance >= $1", amount, c.Way)
		if err == nil && tag.RowsAffected() != 1 { // RIGHT: no row is no success
			return fmt.Errorf("%s: no account with %d", tag, amount)
		}
		return err
	})
	if err != nil {
		return err
	}
	if isNew {
		c.say("mark: INSERT 0 1, balance = balance - %d: UPDATE 1", amount)
	} else {
		c.say("mark: INSERT 0 0: duplicate, skipped")
	}
	c.crashPoint(record)
	return c.commitOffset(ctx, record)
}

// postToLedger writes the movement down, with the product's own ledger. There is no total to be wrong: it is the sum
// of entries, of which each event can have one.
func postToLedger(ctx context.Context, c *consumer, record *kgo.Record) error {
	refund := ledger.Refund(tenant, uuid.MustParse(idOf(record)), refundedOrder, paymentID, "EUR", paymentOf(record).Amount, 0, time.Now())
	err := postgres.InTx(ctx, c.db, func(tx pgx.Tx) error {
		return ledger.PostTx(ctx, tx, []ledger.Entry{refund})
	})
	switch {
	case err == nil:
		c.say("entry of %d posted", paymentOf(record).Amount)
	case postgres.Code(err) == "23505": // RIGHT: UNIQUE (event_id) refuses the second entry of an event
		c.say("the ledger refuses a second entry of the event (SQLSTATE 23505): duplicate, skipped")
	default:
		return err
	}
	c.crashPoint(record)
	return c.commitOffset(ctx, record)
}

var (
	paymentID     = uuid.MustParse("0190b2f0-0000-7000-8000-000000000002")
	refundedOrder = uuid.MustParse("0190b2f0-0000-7000-8000-000000000003")
)

func runIncrement(ctx context.Context, r *room) error {
	const eur = money.Currency("EUR")
	if err := r.migrate(ctx); err != nil {
		return err
	}
	if err := r.exec(ctx, marksTable+`;
		CREATE TABLE accounts (account text PRIMARY KEY, balance bigint NOT NULL);
		INSERT INTO accounts VALUES ('subtract', 500), ('subtract, once for each event', 500);
		INSERT INTO tenants (id, name) VALUES ('`+tenant.String()+`', 'lab')`); err != nil {
		return err
	}
	err := postgres.InTx(ctx, r.db, func(tx pgx.Tx) error {
		return ledger.PostTx(ctx, tx, []ledger.Entry{ledger.Payment(tenant, paymentID, refundedOrder, eur, 500, 0, time.Now())})
	})
	if err != nil {
		return err
	}
	if err := r.topic(ctx, orderEvents, nil); err != nil {
		return err
	}
	r.step("three accounts with 500 each; one event takes 100; each consumer is killed between its commit and the offset, so the event comes twice")
	refund := paid(1)
	refund.Payload = []byte(`{"order":"order-1","amount":100}`)
	if err := r.publish(ctx, orderEvents, refund); err != nil {
		return err
	}
	for _, s := range []spec{
		{Role: "subtract", Way: "subtract"},
		{Role: "subtract-once", Way: "subtract, once for each event"},
		{Role: "post-to-ledger", Way: "lines of a ledger"},
	} {
		r.part(s.Way)
		s.CrashAt, s.Until = 1, 1
		if err := r.crashAndRestart(ctx, s, nil); err != nil {
			return err
		}
	}
	var cash ledger.Balance
	err = postgres.InTx(ctx, r.db, func(tx pgx.Tx) (err error) {
		cash, err = ledger.BalanceTx(ctx, tx, tenant, ledger.Cash, eur)
		return err
	})
	if err != nil {
		return err
	}
	if err := r.query(ctx, `
		SELECT account AS way, 500 AS before, balance AS after, 400 AS right, CASE balance WHEN 400 THEN '' ELSE 'TAKEN TWICE' END AS verdict
		FROM (SELECT 1 AS at, account, balance FROM accounts UNION ALL SELECT 2, 'lines of a ledger', $1::bigint) AS way
		ORDER BY at, account`, cash.Minor.Int64()); err != nil {
		return err
	}
	r.why("adding to a number depends on how often it is done, so it needs a mark in the same transaction; a row that " +
		"carries the event's id as its key is its own mark, and the sum over such rows cannot be wrong by a delivery.")
	return nil
}

package lab

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/postgres"
)

// dedupe is naive with one statement more: the event's id, in the transaction of the work. internal/inbox is this for
// batches, with dead letters.
func dedupe(ctx context.Context, c *consumer, record *kgo.Record) error {
	isNew := false
	err := postgres.InTx(ctx, c.db, func(tx pgx.Tx) error {
		var err error
		isNew, err = markTx(ctx, tx, c.Group, idOf(record))
		if err != nil || !isNew {
			return err
		}
		return insertInvoice(ctx, tx, c.Way, orderOf(record)) // RIGHT: the mark and the work commit together, or neither
	})
	if err != nil {
		return err
	}
	if isNew {
		c.say("%s: mark and invoice committed", orderOf(record))
	} else {
		c.say("%s: duplicate, skipped", orderOf(record))
	}

	c.crashPoint(record) // the record will be asked for again, and be known

	if err := c.commitOffset(ctx, record); err != nil { // a duplicate moves the offset too
		return err
	}
	c.say("%s: offset %d committed", orderOf(record), record.Offset)
	return nil
}

// markTx marks an event as applied. No row inserted means that it was marked before.
func markTx(ctx context.Context, tx executor, consumer, eventID string) (isNew bool, err error) {
	tag, err := tx.Exec(ctx, "INSERT INTO marks (consumer, event_id) VALUES ($1, $2) ON CONFLICT DO NOTHING", consumer, eventID)
	if err != nil {
		return false, fmt.Errorf("mark event: %w", err)
	}
	return tag.RowsAffected() == 1, nil
}

func runDedupe(ctx context.Context, r *room) error {
	if err := r.exec(ctx, marksTable); err != nil {
		return err
	}
	if err := r.fiveOrders(ctx, "dedupe", "the event's id and the invoice in one transaction, then the offset"); err != nil {
		return err
	}
	r.why("the crash fell between the same two commits and the record came again, but its id was committed with its " +
		"invoice: both are there or neither, so the second delivery finds the mark and does nothing but move the offset.")
	return nil
}

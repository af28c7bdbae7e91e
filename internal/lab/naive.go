package lab

import (
	"context"

	"github.com/twmb/franz-go/pkg/kgo"
)

// naive does the work, and then tells Kafka that it is done: at least once.
func naive(ctx context.Context, c *consumer, record *kgo.Record) error {
	if err := insertInvoice(ctx, c.db, c.Way, orderOf(record)); err != nil { // WRONG: nothing knows whether it was done before
		return err
	}
	c.say("%s: invoice written", orderOf(record))

	c.crashPoint(record) // the record will be asked for again

	if err := c.commitOffset(ctx, record); err != nil {
		return err
	}
	c.say("%s: offset %d committed", orderOf(record), record.Offset)
	return nil
}

func runNaive(ctx context.Context, r *room) error {
	if err := r.fiveOrders(ctx, "naive", "the invoice first, then the offset"); err != nil {
		return err
	}
	r.why("the invoice is in Postgres and the offset in Kafka, the crash fell between the two commits, and the " +
		"record came again to a consumer that could not tell that it was done.")
	return nil
}

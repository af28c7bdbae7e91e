package lab

import (
	"context"

	"github.com/twmb/franz-go/pkg/kgo"
)

// atMostOnce tells Kafka that a record is done, and then does it. Whoever turns on auto-commit has this without
// having written it.
func atMostOnce(ctx context.Context, c *consumer, record *kgo.Record) error {
	if err := c.commitOffset(ctx, record); err != nil { // WRONG: "done" is said before it is
		return err
	}
	c.say("%s: offset %d committed", orderOf(record), record.Offset)

	c.crashPoint(record) // nobody will ever ask for this record again

	if err := insertInvoice(ctx, c.db, c.Way, orderOf(record)); err != nil {
		return err
	}
	c.say("%s: invoice written", orderOf(record))
	return nil
}

func runAtMostOnce(ctx context.Context, r *room) error {
	if err := r.fiveOrders(ctx, "at-most-once", "the offset first, then the invoice"); err != nil {
		return err
	}
	r.why("the offset said that the record was done before it was, so the restarted consumer went on behind it, " +
		"and nothing that it could have logged as an error ever happened.")
	return nil
}

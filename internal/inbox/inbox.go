// Package inbox makes a consumer's effects happen once for each event, however
// often the event arrives.
//
// A batch of records is one transaction, or a few side by side that share it out
// by partition. In each the marks of what was applied
// (processed_events), the effects themselves, and the records that could not be
// applied (dead_letters) commit together. Offsets are committed after that, by
// whoever calls Process. So a crash anywhere leads to the batch being delivered
// again, and what was committed is recognised.
//
// Each record ends as one of four: applied, duplicate, skipped (it carries no
// event) or dead letter. A dead letter of a known aggregate holds back the
// aggregate's later events, which are stored behind it as parked; all other
// aggregates go on.
package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/onceledger/onceledger/internal/crash"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/postgres"
)

// Handler has the effects of a consumer.
type Handler interface {
	// Apply applies events that the consumer has not applied before, in the
	// order given. Its writes share tx with the marks and the dead letters, so
	// a crash leaves all or none. It reports events that it must refuse, all at
	// once, as Rejections; the batch is then tried without them.
	Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error
}

// Inbox applies batches of records for one consumer.
type Inbox struct {
	consumer string
	conn     postgres.Beginner
	handler  Handler
	writers  int
	log      *slog.Logger
	metrics  *metrics
	window   *window
}

// Process brings every record of a batch to an end. An error means that nothing
// is known to be wrong with the records and that the same batch is to be
// processed again later: the database is away, or its commit's outcome is not
// known.
func (in *Inbox) Process(ctx context.Context, records []event.Record) error {
	oldest, err := in.window.oldest(ctx)
	if err != nil {
		return err
	}
	shares := make([][]*delivery, in.sharesOf(len(records)))
	for _, record := range records {
		// By partition, and so by aggregate: what has to stay in order does.
		share := &shares[int(record.Partition)%len(shares)]
		*share = append(*share, judge(record, oldest, in.window.now()))
	}
	// A share that fails leaves the others' transactions committed; when the
	// batch comes again their records are duplicates.
	group, ctx := errgroup.WithContext(ctx)
	for _, share := range shares {
		group.Go(func() error { return in.settle(ctx, share) })
	}
	return group.Wait()
}

// worthSharing is how many records a share has to have for a transaction of its
// own to be worth its commit.
const worthSharing = 100

func (in *Inbox) sharesOf(records int) int {
	return max(1, min(in.writers, records/worthSharing))
}

// settle applies its share of a batch in one transaction. Where that cannot be
// because of what is in it, the culprits become dead letters: at once where the
// handler names them, and otherwise by halving the batch, left before right,
// until one stands alone.
func (in *Inbox) settle(ctx context.Context, batch []*delivery) error {
	if len(batch) == 0 {
		return nil
	}
	var result outcome
	err := postgres.InTx(ctx, in.conn, func(tx pgx.Tx) error {
		var err error
		result, err = in.applyTx(ctx, tx, batch)
		crash.Point(crash.WorkerBeforeCommit)
		return err
	})

	var refused Rejections
	switch {
	case err == nil:
		in.report(ctx, result)
		crash.Point(crash.WorkerCommittedNotStored)
		return nil
	case errors.As(err, &refused):
		if !markRefused(result.fresh, refused) {
			return fmt.Errorf("handler refused events that it was not given: %w", err)
		}
		return in.settle(ctx, batch)
	case postgres.DataFault(err) && len(batch) > 1:
		forgetRefusals(batch)
		middle := len(batch) / 2
		if err := in.settle(ctx, batch[:middle]); err != nil {
			return err
		}
		return in.settle(ctx, batch[middle:])
	case postgres.DataFault(err) && batch[0].fault == nil && batch[0].refusal == nil:
		batch[0].fault = &Fault{ClassData, err.Error()}
		return in.settle(ctx, batch)
	default:
		return err
	}
}

// applyTx is what one batch writes, in one transaction. With the handler's error
// it returns what the handler was given.
func (in *Inbox) applyTx(ctx context.Context, tx pgx.Tx, batch []*delivery) (outcome, error) {
	sorted, err := in.sortOutTx(ctx, tx, batch)
	if err != nil {
		return outcome{}, err
	}
	if len(sorted.fresh) > 0 {
		events := make([]event.Event, len(sorted.fresh))
		for i, d := range sorted.fresh {
			events[i] = d.event
		}
		if err := in.handler.Apply(ctx, tx, events); err != nil {
			return sorted, err
		}
	}
	return sorted, in.storeDeadTx(ctx, tx, sorted.dead)
}

// outcome is what became of the records of a batch.
type outcome struct {
	fresh      []*delivery // marked as applied in this transaction: to be applied
	duplicates []*delivery // applied before
	skipped    []*delivery // no event
	dead       []dead      // could not be applied, or parked
}

type dead struct {
	*delivery
	fault Fault
}

// sortOutTx decides for each record what becomes of it, and marks those that are
// to be applied.
func (in *Inbox) sortOutTx(ctx context.Context, tx pgx.Tx, batch []*delivery) (outcome, error) {
	var result outcome
	blocked, err := in.blockedTx(ctx, tx, batch)
	if err != nil {
		return outcome{}, err
	}

	// In order: what fails holds back what follows it in the same aggregate.
	var candidates, held, again []*delivery
	first := make(map[uuid.UUID]*delivery, len(batch))
	die := func(d *delivery, fault Fault) {
		result.dead = append(result.dead, dead{d, fault})
		if fault.Class.parks() && d.event.AggregateID != uuid.Nil {
			blocked[d.aggregate()] = true
		}
	}
	for _, d := range batch {
		switch {
		case d.skip:
			result.skipped = append(result.skipped, d)
		case d.fault != nil:
			die(d, *d.fault)
		case first[d.event.ID] != nil:
			again = append(again, d)
		case blocked[d.aggregate()]:
			held = append(held, d)
		case d.refusal != nil:
			die(d, *d.refusal)
		default:
			first[d.event.ID] = d
			candidates = append(candidates, d)
		}
	}

	marked, err := in.markTx(ctx, tx, candidates)
	if err != nil {
		return outcome{}, err
	}
	for _, d := range candidates {
		if marked[d.event.ID] {
			result.fresh = append(result.fresh, d)
		} else {
			again = append(again, d)
		}
	}

	// What is marked by now, by this transaction or an earlier one, is applied
	// once; the same id with another content is a fault of its producer.
	suspects := append(again, held...)
	applied, err := in.fingerprintsTx(ctx, tx, suspects)
	if err != nil {
		return outcome{}, err
	}
	for _, d := range suspects {
		fingerprint, isApplied := applied[d.event.ID]
		switch {
		case !isApplied:
			result.dead = append(result.dead, dead{d, Fault{ClassParked, "an earlier event of this aggregate is a dead letter"}})
		case fingerprint == string(d.fingerprint):
			result.duplicates = append(result.duplicates, d)
		default:
			result.dead = append(result.dead, dead{d, Fault{ClassIDReused, "the id was used before for an event with another type or content"}})
		}
	}
	return result, nil
}

func (in *Inbox) report(ctx context.Context, result outcome) {
	in.metrics.count("applied", len(result.fresh))
	in.metrics.count("duplicate", len(result.duplicates))
	in.metrics.count("skipped", len(result.skipped))
	for _, d := range result.dead {
		in.metrics.count(string(d.fault.Class), 1)
		in.log.WarnContext(ctx, "dead letter",
			"class", d.fault.Class, "detail", d.fault.Detail,
			"topic", d.record.Topic, "partition", d.record.Partition, "offset", d.record.Offset,
			"event_id", d.event.ID, "type", d.event.Type, "aggregate_id", d.event.AggregateID)
	}
	newest := time.Time{}
	for _, d := range result.fresh {
		if d.event.OccurredAt.After(newest) {
			newest = d.event.OccurredAt
		}
	}
	if !newest.IsZero() {
		in.metrics.delay.Observe(in.window.now().Sub(newest).Seconds())
	}
}

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
// Each record ends as one of five: applied, duplicate, skipped (it carries no
// event), discarded (a person decided so when it was a dead letter) or dead
// letter. A dead letter of a known aggregate holds back the aggregate's later
// events, which are stored behind it as parked; all other aggregates go on.
// RetryTx tries dead letters again, by the same way as any record.
package inbox

import (
	"context"
	"log/slog"
	"maps"
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
	crash.Point(crash.WorkerPolledNotBegun)
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
	return settle(batch, func(part []*delivery) (outcome, error) {
		var result outcome
		var stored []dead
		err := postgres.InTx(ctx, in.conn, func(tx pgx.Tx) error {
			var err error
			if result, err = in.applyTx(ctx, tx, part, nil, nil); err == nil {
				stored, err = in.storeDeadTx(ctx, tx, result.dead)
			}
			crash.Point(crash.WorkerBeforeCommit)
			return err
		})
		if err == nil {
			in.report(ctx, result, stored)
			crash.Point(crash.WorkerCommittedNotStored)
		}
		return result, err
	})
}

// settle tries a batch, and what there is to try instead when that fails.
func settle(batch []*delivery, try func([]*delivery) (outcome, error)) error {
	if len(batch) == 0 {
		return nil
	}
	result, err := try(batch)
	if err == nil {
		return nil
	}
	parts, err := split(batch, result.fresh, err)
	if err != nil {
		return err
	}
	for _, part := range parts {
		if err := settle(part, try); err != nil {
			return err
		}
	}
	return nil
}

// applyTx marks and applies what is to be applied of a batch, in one transaction,
// and says what becomes of each record. Nothing is held back by the letters that
// are being tried, but by those that failed before this batch it is. With the
// handler's error it returns what the handler was given.
func (in *Inbox) applyTx(ctx context.Context, tx pgx.Tx, batch []*delivery, trying []uuid.UUID, failed map[aggregate]bool) (outcome, error) {
	sorted, err := in.sortOutTx(ctx, tx, batch, trying, failed)
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
	return sorted, nil
}

// sortOutTx decides for each record what becomes of it, and marks those that are
// to be applied.
func (in *Inbox) sortOutTx(ctx context.Context, tx pgx.Tx, batch []*delivery, trying []uuid.UUID, failed map[aggregate]bool) (outcome, error) {
	blocked, err := in.lettersTx(ctx, tx, batch, trying)
	if err != nil {
		return outcome{}, err
	}
	maps.Copy(blocked, failed)
	sorted := sortOut(batch, blocked)

	marked, err := in.markTx(ctx, tx, sorted.candidates)
	if err != nil {
		return outcome{}, err
	}
	sorted.mark(marked)

	fingerprints, err := in.fingerprintsTx(ctx, tx, sorted.suspects)
	if err != nil {
		return outcome{}, err
	}
	sorted.recognise(fingerprints)
	return sorted, nil
}

// report counts what became of a batch, and names the dead letters that it stored:
// what is a dead letter already is no news.
func (in *Inbox) report(ctx context.Context, result outcome, stored []dead) {
	in.metrics.count("applied", len(result.fresh))
	in.metrics.count("duplicate", len(result.duplicates))
	in.metrics.count("skipped", len(result.skipped))
	in.metrics.count("discarded", len(result.discarded))
	for _, d := range stored {
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

package inbox

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/event"
)

// Letter is a dead letter that is tried again: its record as it came.
type Letter struct {
	ID     uuid.UUID
	Record event.Record
}

// Outcome is what became of a record.
type Outcome string

// The outcomes.
const (
	OutcomeApplied   Outcome = "applied"
	OutcomeDuplicate Outcome = "duplicate" // its event was applied before
	OutcomeSkipped   Outcome = "skipped"   // it carries no event
	OutcomeDiscarded Outcome = "discarded" // its event was discarded
	OutcomeFailed    Outcome = "failed"
	OutcomeParked    Outcome = "parked" // waits behind one that failed
)

// Result is what became of a dead letter that was tried again.
type Result struct {
	Outcome Outcome
	Fault   Fault // of what failed, or is parked
}

// RetryTx tries dead letters again, in the order given and in tx, by the same way
// as Process takes new records: the same gate, the same handler, the same event
// ids. What fails holds back the later ones of its aggregate; an open letter that
// is not among the given ones does so too. The letters themselves it leaves as
// they are: to close them is its caller's, in the same transaction, with all open
// letters of their aggregates locked.
//
// An error is of no letter's making, and tx is to be rolled back.
func (in *Inbox) RetryTx(ctx context.Context, tx pgx.Tx, letters []Letter) (map[uuid.UUID]Result, error) {
	// Its own window: that of Process is one goroutine's.
	dedupe := &window{conn: tx, now: in.window.now}
	oldest, err := dedupe.oldest(ctx)
	if err != nil {
		return nil, err
	}
	batch := make([]*delivery, len(letters))
	trying := make([]uuid.UUID, len(letters))
	for i, letter := range letters {
		batch[i] = judge(letter.Record, oldest, in.window.now())
		batch[i].letter, trying[i] = letter.ID, letter.ID
	}

	results := make(map[uuid.UUID]Result, len(letters))
	failed := make(map[aggregate]bool)
	err = settle(batch, func(part []*delivery) (outcome, error) {
		var result outcome
		err := inSavepoint(ctx, tx, func(tx pgx.Tx) error {
			var err error
			if result, err = in.applyTx(ctx, tx, part, trying, failed); err != nil {
				return err
			}
			return checkDeferred(ctx, tx)
		})
		if err == nil {
			for letter, became := range result.letters() {
				results[letter] = became
			}
			for _, d := range result.dead {
				if d.fault.Class.parks() && d.event.AggregateID != uuid.Nil {
					failed[d.aggregate()] = true
				}
			}
		}
		return result, err
	})
	if err != nil {
		return nil, fmt.Errorf("try dead letters again: %w", err)
	}
	return results, nil
}

// ReportRetried counts what became of letters, once that is committed.
func (in *Inbox) ReportRetried(results map[uuid.UUID]Result) {
	for _, result := range results {
		in.metrics.retried.WithLabelValues(string(result.Outcome)).Inc()
	}
}

// letters is what became of the letters of a batch.
func (o outcome) letters() map[uuid.UUID]Result {
	results := make(map[uuid.UUID]Result)
	for outcome, of := range map[Outcome][]*delivery{
		OutcomeApplied: o.fresh, OutcomeDuplicate: o.duplicates, OutcomeSkipped: o.skipped, OutcomeDiscarded: o.discarded,
	} {
		for _, d := range of {
			results[d.letter] = Result{Outcome: outcome}
		}
	}
	for _, d := range o.dead {
		outcome := OutcomeFailed
		if d.fault.Class == ClassParked {
			outcome = OutcomeParked
		}
		results[d.letter] = Result{outcome, Fault{d.fault.Class, storable(d.fault.Detail)}}
	}
	return results
}

// inSavepoint runs fn so that what it wrote can be taken back by itself.
func inSavepoint(ctx context.Context, tx pgx.Tx, fn func(tx pgx.Tx) error) error {
	savepoint, err := tx.Begin(ctx)
	if err != nil {
		return fmt.Errorf("set savepoint: %w", err)
	}
	if err := fn(savepoint); err != nil {
		if back := savepoint.Rollback(ctx); back != nil {
			return fmt.Errorf("go back to savepoint: %w", back)
		}
		return err
	}
	if err := savepoint.Commit(ctx); err != nil {
		return fmt.Errorf("release savepoint: %w", err)
	}
	return nil
}

// checkDeferred has what is checked at the commit be checked now, while it can
// still be told who is to blame.
func checkDeferred(ctx context.Context, tx pgx.Tx) error {
	for _, statement := range []string{"SET CONSTRAINTS ALL IMMEDIATE", "SET CONSTRAINTS ALL DEFERRED"} {
		if _, err := tx.Exec(ctx, statement); err != nil {
			return fmt.Errorf("check what is checked at the commit: %w", err)
		}
	}
	return nil
}

// DecodeHeaders reads headers as a dead letter has them.
func DecodeHeaders(encoded []byte) ([]event.Header, error) {
	var headers []event.Header
	if err := json.Unmarshal(encoded, &headers); err != nil {
		return nil, fmt.Errorf("decode headers: %w", err)
	}
	return headers, nil
}

// Classes are all classes of dead letters.
func Classes() []Class {
	return []Class{
		ClassUndecodable, ClassUnknownSchema, ClassBadID, ClassTooOld, ClassFutureID, ClassIDReused,
		ClassGap, ClassRule, ClassData, ClassParked,
	}
}

// Parks tells whether a letter of this class holds back its aggregate.
func (c Class) Parks() bool { return c.parks() }

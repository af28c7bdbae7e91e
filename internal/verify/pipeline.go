package verify

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/db"
)

// watermark is a point that the pipeline passes: first the relay a mark in the
// database, then the consumer where the topic ended when the relay had.
type watermark struct {
	relay *db.VerifyMarkRow
	ends  map[int32]int64
}

// passed tells whether the pipeline is past everything that was committed when
// the mark was new. It sets a new mark itself. A part of the pipeline that
// cannot be asked has passed nothing; a note says so.
func (r *run) passed(ctx context.Context, mark *watermark) (bool, error) {
	if mark.ends == nil {
		if passed, err := r.relayPassed(ctx, mark); err != nil || !passed {
			return false, err
		}
	}

	if r.Lag == nil {
		r.report.note("Kafka was not asked (KAFKA_BROKERS is not set): a missing effect counts as in flight until its order's next event is applied.")
		return false, nil
	}
	committed, end, err := r.Lag(ctx)
	if err != nil {
		r.report.note("Kafka could not be asked how far the billing consumer is: %v", err)
		return false, ctx.Err()
	}
	if mark.ends == nil {
		mark.ends = end
	}
	for partition, end := range mark.ends {
		if committed[partition] < end {
			return false, nil
		}
	}
	return true, nil
}

// relayPassed tells whether everything that was committed when the mark was new
// is on the topics.
func (r *run) relayPassed(ctx context.Context, mark *watermark) (bool, error) {
	if mark.relay == nil {
		now, err := r.queries.VerifyMark(ctx, r.DB)
		if err != nil {
			return false, err
		}
		mark.relay = &now
	}
	passed, err := r.queries.VerifyRelayPassed(ctx, r.DB, mark.relay.LastTxID, mark.relay.Lsn, r.Slot)
	if errors.Is(err, pgx.ErrNoRows) {
		r.report.note("The relay has no replication slot %s here, so nothing counts as delivered.", r.Slot)
		return false, nil
	}
	return passed, err
}

package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/event"
)

// Resend publishes events of the outbox once more, in the order of their ids in
// the list: the records that a relay would make of them, byte for byte, under the
// same event ids. It takes no turn and moves no position, so that it goes beside
// whichever relay is at work. sent is told of each event that the broker has.
//
// With an error, what sent was not told of may be on the topic or not; to send it
// again does no harm.
func Resend(ctx context.Context, conn db.DBTX, newPublisher func(Reports) (Publisher, error), ids []uuid.UUID, sent func(event.Event)) error {
	reports := &resendReports{delivered: make(chan resent, maxBatch), away: make(chan error, 1)}
	publisher, err := newPublisher(reports)
	if err != nil {
		return err
	}
	defer publisher.Close()
	for page := range slices.Chunk(ids, maxBatch) {
		rows, err := db.New().OutboxGetMany(ctx, conn, page)
		if err != nil {
			return fmt.Errorf("read the outbox: %w", err)
		}
		if len(rows) != len(page) {
			return errors.New("rows are gone that were there a moment ago: was a partition dropped?")
		}
		events := make([]event.Event, len(rows))
		for i, row := range rows {
			events[i] = *fromRow(row)
			if err := publisher.Publish(events[i].Record(), uint64(i)); err != nil {
				return fmt.Errorf("publish event %s: %w", events[i].ID, err)
			}
		}
		for range events {
			seq, err := reports.next(ctx)
			if err != nil {
				return err
			}
			sent(events[seq])
		}
	}
	return nil
}

// resendReports is told by the publisher, which must not be kept waiting: there is
// room for all that is in flight.
type resendReports struct {
	delivered chan resent
	away      chan error
}

type resent struct {
	seq uint64
	err error
}

func (r *resendReports) Delivered(seq uint64, err error) { r.delivered <- resent{seq, err} }

func (r *resendReports) Reachable(err error) {
	if err == nil {
		return
	}
	select {
	case r.away <- err:
	default:
	}
}

// next is the next event that the broker has. A relay waits for a broker that is
// away; who has asked for this waits in front of it, and is told.
func (r *resendReports) next(ctx context.Context) (seq uint64, err error) {
	select {
	case one := <-r.delivered:
		return one.seq, one.err
	case err := <-r.away:
		return 0, err
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

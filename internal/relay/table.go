package relay

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/event"
)

// bringRows brings rows of the table, in the order of ids, as one transaction
// that ends at a position.
func bringRows(ctx context.Context, pool *pgxpool.Pool, ids []uuid.UUID, end position, bring func([]message) error) error {
	if err := bring([]message{{kind: kindBegin, committed: time.Now()}}); err != nil {
		return err
	}
	for page := range slices.Chunk(ids, maxBatch) {
		batch, err := readPage(ctx, pool, page)
		if err == nil {
			err = bring(batch)
		}
		if err != nil {
			return err
		}
	}
	return bring([]message{{kind: kindCommit, at: end}})
}

// readPage waits for rows that are committed and not visible yet: the snapshot
// of a slot is ahead of the others by the moment between the two, which with a
// synchronous standby can be long.
func readPage(ctx context.Context, pool *pgxpool.Pool, ids []uuid.UUID) ([]message, error) {
	for range 50 {
		rows, err := db.New().OutboxGetMany(ctx, pool, ids)
		if err != nil {
			return nil, err
		}
		if len(rows) == len(ids) {
			batch := make([]message, len(rows))
			for i, row := range rows {
				batch[i] = message{kind: kindInsert, event: fromRow(row)}
			}
			return batch, nil
		}
		sleep(ctx, 100*time.Millisecond)
	}
	return nil, errors.New("rows are gone that were there a moment ago: was a partition dropped?")
}

func fromRow(row db.OutboxGetManyRow) *event.Event {
	e := &event.Event{
		ID:               row.ID,
		TenantID:         row.TenantID,
		AggregateType:    row.AggregateType,
		AggregateID:      row.AggregateID,
		AggregateVersion: row.AggregateVersion,
		Type:             event.Type(row.EventType),
		SchemaVersion:    row.SchemaVersion,
		OccurredAt:       row.OccurredAt,
		Payload:          row.Payload,
	}
	if row.Traceparent != nil {
		e.Traceparent = *row.Traceparent
	}
	return e
}

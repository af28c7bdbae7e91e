package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/event"
)

// source is an open slot: what the relay has to publish, in order.
type source struct {
	conn    *pgconn.PgConn
	decoder decoder
	gap     *gap // what comes first, from the table; nil: the slot goes on where the relay left off
}

// gap is a set of events that the slot will not bring, or may not bring: rows of
// transactions from since on. They are listed as of the very point at which the
// slot begins, so that none falls between the two.
type gap struct {
	reason   string
	since    uint64
	pool     *pgxpool.Pool
	snapshot pgx.Tx        // of that point
	end      pglogrepl.LSN // that point
	done     func(events int)
}

// logMessage is what a source brings. Kind 0 is nothing of interest.
type logMessage struct {
	kind      messageKind
	event     *event.Event  // of an insert
	committed time.Time     // of a begin
	lsn       pglogrepl.LSN // of a commit: its end; of a keepalive: all before it was sent
	asked     bool          // of a keepalive: Postgres wants an answer
	serverEnd pglogrepl.LSN // where the server's log ended
}

type messageKind int

const (
	kindBegin messageKind = iota + 1
	kindInsert
	kindCommit
	kindKeepalive
)

// maxBatch bounds a batch. One of the largest events possible has 90 MB.
const maxBatch = 100

// read brings messages until ctx is done or the source fails.
func (s *source) read(ctx context.Context, batches chan<- []logMessage) error {
	// A ctx that can be cancelled costs a third of the throughput when it goes
	// with each read.
	defer context.AfterFunc(ctx, func() { _ = s.conn.Conn().SetReadDeadline(time.Unix(1, 0)) })()
	bring := func(batch []logMessage) error {
		select {
		case batches <- batch:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}

	if s.gap != nil {
		if err := s.gap.read(ctx, bring); err != nil {
			return fmt.Errorf("read what the slot will not bring: %w", err)
		}
	}
	for {
		batch, err := s.nextBatch(ctx)
		if err == nil {
			err = bring(batch)
		}
		if err != nil {
			return fmt.Errorf("read the log: %w", err)
		}
	}
}

// nextBatch is what is there: it goes on its way when nothing more is.
func (s *source) nextBatch(ctx context.Context) ([]logMessage, error) {
	batch := make([]logMessage, 0, maxBatch/4)
	for {
		message, err := s.next(ctx)
		if err != nil {
			return nil, err
		}
		batch = append(batch, message)
		if s.conn.Frontend().ReadBufferLen() == 0 || len(batch) == maxBatch {
			return batch, nil
		}
	}
}

func (s *source) next(ctx context.Context) (logMessage, error) {
	raw, err := s.conn.ReceiveMessage(context.WithoutCancel(ctx))
	if err != nil {
		return logMessage{}, err
	}
	switch raw := raw.(type) {
	case *pgproto3.CopyData:
		return s.decoder.decode(raw.Data)
	case *pgproto3.ErrorResponse:
		return logMessage{}, pgconn.ErrorResponseToPgError(raw)
	case *pgproto3.CopyDone, *pgproto3.CommandComplete:
		return logMessage{}, errors.New("the server ended the stream")
	case *pgproto3.NoticeResponse:
		// So Postgres 18 says that it has just left out rows, since the
		// publication did not exist when they were written.
		if raw.Code == "55000" {
			return logMessage{}, setupErrorf("Postgres leaves out rows: %s (%s) "+
				"Make the publication again; the relay then sends what was left out", raw.Message, raw.Detail)
		}
	}
	return logMessage{}, nil
}

// confirm tells Postgres that everything before lsn can go. It writes while
// read reads: the two sides of the connection have nothing in common.
func (s *source) confirm(ctx context.Context, lsn pglogrepl.LSN, answer bool) error {
	update := pglogrepl.StandbyStatusUpdate{WALWritePosition: lsn, ReplyRequested: answer}
	if err := pglogrepl.SendStandbyStatusUpdate(ctx, s.conn, update); err != nil {
		return fmt.Errorf("confirm to Postgres: %w", err)
	}
	return nil
}

// read brings the rows of the gap, by aggregate and version, as one transaction
// that ends where the slot begins. The snapshot is held for the list alone,
// sixteen bytes a row, and not until the broker has them all.
func (g *gap) read(ctx context.Context, bring func([]logMessage) error) error {
	if err := bring([]logMessage{{kind: kindBegin, committed: time.Now()}}); err != nil {
		return err
	}
	ids, err := db.New().OutboxListSince(ctx, g.snapshot, g.since)
	if err := errors.Join(err, g.snapshot.Commit(ctx)); err != nil {
		return err
	}
	for page := range slices.Chunk(ids, maxBatch) {
		batch, err := g.readPage(ctx, page)
		if err == nil {
			err = bring(batch)
		}
		if err != nil {
			return err
		}
	}
	g.done(len(ids))
	return bring([]logMessage{{kind: kindCommit, lsn: g.end}})
}

// readPage waits for rows that are committed and not visible yet: the snapshot
// of a slot is ahead of the others by the moment between the two, which with a
// synchronous standby can be long.
func (g *gap) readPage(ctx context.Context, ids []uuid.UUID) ([]logMessage, error) {
	for range 50 {
		rows, err := db.New().OutboxGetMany(ctx, g.pool, ids)
		if err != nil {
			return nil, err
		}
		if len(rows) == len(ids) {
			batch := make([]logMessage, len(rows))
			for i, row := range rows {
				batch[i] = logMessage{kind: kindInsert, event: fromRow(row)}
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

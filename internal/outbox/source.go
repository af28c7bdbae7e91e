package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

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
// transactions from since on. They are read as of the very point at which the
// slot begins, so that none falls between the two.
type gap struct {
	reason string
	since  uint64
	tx     pgx.Tx
	end    pglogrepl.LSN // where the slot begins
	done   func(events int)
}

// logMessage is what a source brings. Kind 0 is nothing of interest.
type logMessage struct {
	kind      messageKind
	event     event.Event   // of an insert
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

// maxBatch and maxBatchBytes bound a batch: it is what is there, and goes on its
// way when nothing more is.
const maxBatch, maxBatchBytes = 100, 1 << 20

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

func (s *source) nextBatch(ctx context.Context) ([]logMessage, error) {
	var batch []logMessage
	for bytes := 0; ; {
		message, err := s.next(ctx)
		if err != nil {
			return nil, err
		}
		batch = append(batch, message)
		bytes += len(message.event.Payload)
		if s.conn.Frontend().ReadBufferLen() == 0 || len(batch) == maxBatch || bytes > maxBatchBytes {
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

// pageSize times event.MaxPayload bounds the memory of a page.
const pageSize = 100

// read brings the rows of the gap, by aggregate and version, as one transaction
// that ends where the slot begins. With the broker away the transaction it
// reads in is soon idle too long and ends, and the relay starts over: no
// snapshot is held for the length of an outage.
func (g *gap) read(ctx context.Context, bring func([]logMessage) error) error {
	batch := []logMessage{{kind: kindBegin, committed: time.Now()}}
	events := 0
	after := db.OutboxListSinceParams{SinceXmin: g.since, PageSize: pageSize}
	for {
		rows, err := db.New().OutboxListSince(ctx, g.tx, after)
		if err != nil {
			return err
		}
		for _, row := range rows {
			batch = append(batch, logMessage{kind: kindInsert, event: fromRow(row)})
		}
		if err := bring(batch); err != nil {
			return err
		}
		batch = nil
		if events += len(rows); len(rows) < pageSize {
			break
		}
		last := rows[len(rows)-1]
		after.TenantID, after.AggregateID, after.AggregateType = last.TenantID, last.AggregateID, last.AggregateType
		after.AggregateVersion, after.ID = last.AggregateVersion, last.ID
	}
	if err := g.tx.Commit(ctx); err != nil {
		return err
	}
	g.done(events)
	return bring([]logMessage{{kind: kindCommit, lsn: g.end}})
}

func fromRow(row db.OutboxListSinceRow) event.Event {
	e := event.Event{
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

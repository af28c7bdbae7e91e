package relay

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceledger/onceledger/internal/crash"
	"github.com/onceledger/onceledger/internal/db"
)

// logReader brings what is written to the log, from an open slot.
//
// What it confirms Postgres forgets, so it writes its own record first (mark): a
// slot is then never ahead of it, and one that is has lost or skipped something.
type logReader struct {
	conn    *pgconn.PgConn
	pool    *pgxpool.Pool
	decoder decoder
	gap     *gap // what comes first, from the table; nil: the slot goes on where the relay left off
	mark    mark

	looked    time.Time // at what the slot keeps
	keptEvery time.Duration

	serverEnd atomic.Uint64 // where the server's log ended
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

// read brings messages until ctx is done or the source fails.
func (l *logReader) read(ctx context.Context, batches chan<- []message) error {
	// A ctx that can be cancelled costs a third of the throughput when it goes
	// with each read.
	defer context.AfterFunc(ctx, func() { _ = l.conn.Conn().SetReadDeadline(time.Unix(1, 0)) })()
	bring := bringTo(ctx, batches)

	if l.gap != nil {
		if err := l.gap.read(ctx, bring); err != nil {
			return fmt.Errorf("read what the slot will not bring: %w", err)
		}
	}
	for {
		batch, err := l.nextBatch(ctx)
		if err == nil {
			err = bring(batch)
		}
		if err != nil {
			return fmt.Errorf("read the log: %w", err)
		}
	}
}

// nextBatch is what is there: it goes on its way when nothing more is.
func (l *logReader) nextBatch(ctx context.Context) ([]message, error) {
	batch := make([]message, 0, maxBatch/4)
	for {
		next, err := l.next(ctx)
		if err != nil {
			return nil, err
		}
		batch = append(batch, next)
		if l.conn.Frontend().ReadBufferLen() == 0 || len(batch) == maxBatch {
			return batch, nil
		}
	}
}

func (l *logReader) next(ctx context.Context) (message, error) {
	raw, err := l.conn.ReceiveMessage(context.WithoutCancel(ctx))
	if err != nil {
		return message{}, err
	}
	switch raw := raw.(type) {
	case *pgproto3.CopyData:
		return l.decode(raw.Data)
	case *pgproto3.ErrorResponse:
		return message{}, pgconn.ErrorResponseToPgError(raw)
	case *pgproto3.CopyDone, *pgproto3.CommandComplete:
		return message{}, errors.New("the server ended the stream")
	case *pgproto3.NoticeResponse:
		// So Postgres 18 says that it has just left out rows, since the
		// publication did not exist when they were written.
		if raw.Code == "55000" {
			return message{}, setupErrorf("Postgres leaves out rows: %s (%s) "+
				"Make the publication again; the relay then sends what was left out", raw.Message, raw.Detail)
		}
	}
	return message{}, nil
}

func (l *logReader) decode(data []byte) (message, error) {
	decoded, serverEnd, err := l.decoder.decode(data)
	if serverEnd > 0 {
		l.serverEnd.Store(uint64(serverEnd))
	}
	return decoded, err
}

// confirm lets Postgres forget what is delivered: first the relay's own record,
// then the slot. It writes while read reads: the two sides of the connection
// have nothing in common.
func (l *logReader) confirm(ctx context.Context, now summary, urgent, silent bool) (moved bool, err error) {
	due := l.mark.due(now, urgent)
	if !due && pglogrepl.LSN(now.confirmable) > l.mark.position.Lsn && time.Since(l.looked) >= l.keptEvery {
		if due, err = l.keeps(ctx); err != nil {
			return false, err
		}
	}
	if due {
		crash.Point(crash.RelayAckedNotConfirmed)
		storing, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeTimeout)
		defer cancel()
		if err := l.mark.store(storing, l.pool, now); err != nil {
			return false, err
		}
		moved = true
	}
	update := pglogrepl.StandbyStatusUpdate{WALWritePosition: l.mark.position.Lsn, ReplyRequested: silent}
	if err := pglogrepl.SendStandbyStatusUpdate(ctx, l.conn, update); err != nil {
		return moved, fmt.Errorf("confirm to Postgres: %w", err)
	}
	return moved, nil
}

// keeps reports that Postgres keeps a lot of log that is confirmed. It lets go of
// it when something is confirmed behind its next note of the open transactions
// (running-xacts, some 15 s later): when others have written much and all is quiet
// now, nothing but this would ever make a record.
func (l *logReader) keeps(ctx context.Context) (bool, error) {
	l.looked = time.Now()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeTimeout)
	defer cancel()
	bytes, err := db.New().SlotKeepsConfirmed(ctx, l.pool, l.mark.position.SlotName)
	if err != nil {
		return false, fmt.Errorf("look at what the slot keeps: %w", err)
	}
	return bytes >= idleAdvance, nil
}

func (l *logReader) lag(now summary) float64 {
	return float64(max(l.serverEnd.Load(), uint64(now.confirmable)) - uint64(l.mark.position.Lsn))
}

// read brings the rows of the gap, by aggregate and version, as one transaction
// that ends where the slot begins. The snapshot is held for the list alone,
// sixteen bytes a row, and not until the broker has them all.
func (g *gap) read(ctx context.Context, bring func([]message) error) error {
	ids, err := db.New().OutboxListSince(ctx, g.snapshot, g.since)
	if err := errors.Join(err, g.snapshot.Commit(ctx)); err != nil {
		return err
	}
	if err := bringRows(ctx, g.pool, ids, position(g.end), bring); err != nil {
		return err
	}
	g.done(len(ids))
	return nil
}

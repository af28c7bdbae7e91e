package outbox

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/onceledger/onceledger/internal/event"
)

// stream reads the log of one slot: pgoutput, version 1, values as text.
type stream struct {
	conn      *pgconn.PgConn
	relations map[uint32][]string // the columns of outbox_events, by relation id
	deadline  time.Time
	silent    int           // ticks without a word from the server
	serverEnd pglogrepl.LSN // how far the server's log went when it last spoke
}

// tick is how often the position is confirmed while it moves, and how long a
// read of the log waits at most.
const tick = time.Second

// A server that was silent for askAfter ticks is asked for a sign of life, and
// taken for gone after goneAfter.
const askAfter, goneAfter = 3, 15

// logMessage is one message of the log. Kind 0 is nothing of interest: a tick,
// another table, another operation.
type logMessage struct {
	kind      messageKind
	lsn       pglogrepl.LSN // of a commit: its end; of a keepalive: how far it was sent
	committed time.Time     // of a begin
	event     event.Event   // of an insert; its payload is good until the next read
	asked     bool          // the server wants an answer
}

type messageKind int

const (
	kindBegin messageKind = iota + 1
	kindInsert
	kindCommit
	kindKeepalive
)

// next waits for a message, for one tick at most. A ctx that can be cancelled
// would cost a third of the throughput: wake is there instead.
func (s *stream) next(ctx context.Context) (logMessage, error) {
	raw, err := s.conn.ReceiveMessage(context.WithoutCancel(ctx))
	if err != nil {
		if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
			return logMessage{}, s.countSilence()
		}
		return logMessage{}, fmt.Errorf("read the log: %w", err)
	}
	s.silent = 0
	switch raw := raw.(type) {
	case *pgproto3.CopyData:
		return s.read(raw.Data)
	case *pgproto3.ErrorResponse:
		return logMessage{}, fmt.Errorf("read the log: %w", pgconn.ErrorResponseToPgError(raw))
	case *pgproto3.NoticeResponse:
		// So Postgres 18 says that it has just left out rows, since the
		// publication did not exist when they were written.
		if raw.Code == "55000" {
			return logMessage{}, setupErrorf("Postgres leaves out rows: %s (%s). "+
				"Create the publication again; the relay then sends what was left out", raw.Message, raw.Detail)
		}
		return logMessage{}, nil
	case *pgproto3.CopyDone, *pgproto3.CommandComplete:
		return logMessage{}, errors.New("read the log: the server ended the stream")
	}
	return logMessage{}, nil
}

func (s *stream) countSilence() error {
	if !s.due() {
		return nil // woken
	}
	if s.silent++; s.silent >= goneAfter {
		return fmt.Errorf("read the log: the server has been silent for %s", goneAfter*tick)
	}
	return nil
}

// wake ends a waiting next. It may be called from any goroutine.
func (s *stream) wake() { _ = s.conn.Conn().SetReadDeadline(time.Unix(1, 0)) }

// arm lets next wait again, until the end of the tick.
func (s *stream) arm() error { return s.conn.Conn().SetReadDeadline(s.deadline) }

// due reports that the tick is over.
func (s *stream) due() bool { return !time.Now().Before(s.deadline) }

// confirm tells the server that everything before lsn can go, and begins the
// next tick.
func (s *stream) confirm(ctx context.Context, lsn pglogrepl.LSN) error {
	s.deadline = time.Now().Add(tick)
	if err := s.arm(); err != nil {
		return fmt.Errorf("confirm to Postgres: %w", err)
	}
	err := pglogrepl.SendStandbyStatusUpdate(ctx, s.conn, pglogrepl.StandbyStatusUpdate{
		WALWritePosition: lsn,
		ReplyRequested:   s.silent >= askAfter,
	})
	if err != nil {
		return fmt.Errorf("confirm to Postgres: %w", err)
	}
	return nil
}

func (s *stream) read(data []byte) (logMessage, error) {
	switch {
	case len(data) == 0:
		return logMessage{}, errors.New("read the log: empty message")
	case data[0] == pglogrepl.PrimaryKeepaliveMessageByteID:
		keepalive, err := pglogrepl.ParsePrimaryKeepaliveMessage(data[1:])
		s.serverEnd = max(s.serverEnd, keepalive.ServerWALEnd)
		return logMessage{kind: kindKeepalive, lsn: keepalive.ServerWALEnd, asked: keepalive.ReplyRequested}, err
	case data[0] == pglogrepl.XLogDataByteID:
		log, err := pglogrepl.ParseXLogData(data[1:])
		if err != nil {
			return logMessage{}, err
		}
		s.serverEnd = max(s.serverEnd, log.ServerWALEnd)
		return s.decode(log.WALData)
	}
	return logMessage{}, nil
}

func (s *stream) decode(data []byte) (logMessage, error) {
	if len(data) == 0 {
		return logMessage{}, errors.New("decode the log: empty message")
	}
	if pglogrepl.MessageType(data[0]) == pglogrepl.MessageTypeInsert {
		return s.decodeInsert(data[1:])
	}
	parsed, err := pglogrepl.Parse(data)
	if err != nil {
		return logMessage{}, fmt.Errorf("decode the log: %w", err)
	}
	switch parsed := parsed.(type) {
	case *pglogrepl.BeginMessage:
		return logMessage{kind: kindBegin, committed: parsed.CommitTime}, nil
	case *pglogrepl.CommitMessage:
		return logMessage{kind: kindCommit, lsn: parsed.TransactionEndLSN}, nil
	case *pglogrepl.RelationMessage:
		return logMessage{}, s.learn(parsed)
	}
	return logMessage{}, nil
}

// learn remembers the columns of outbox_events, which come before its first row
// and again whenever they change. Other tables are not ours.
func (s *stream) learn(relation *pglogrepl.RelationMessage) error {
	delete(s.relations, relation.RelationID)
	if relation.RelationName != "outbox_events" {
		return nil
	}
	missing := make(map[string]bool)
	for name := range fields {
		missing[name] = true
	}
	columns := make([]string, 0, len(relation.Columns))
	for _, column := range relation.Columns {
		columns = append(columns, column.Name)
		delete(missing, column.Name)
	}
	for name := range missing {
		return setupErrorf("the publication leaves out column %s of outbox_events", name)
	}
	s.relations[relation.RelationID] = columns
	return nil
}

var errShort = errors.New("decode the log: insert is cut short")

func (s *stream) decodeInsert(data []byte) (logMessage, error) {
	if len(data) < 7 {
		return logMessage{}, errShort
	}
	columns, ours := s.relations[binary.BigEndian.Uint32(data)]
	if !ours {
		return logMessage{}, nil
	}
	message := logMessage{kind: kindInsert}
	count := int(binary.BigEndian.Uint16(data[5:])) // behind the byte 'N'
	if count != len(columns) {
		return logMessage{}, fmt.Errorf("decode the log: row of %d columns, not %d", count, len(columns))
	}
	data = data[7:]
	for _, column := range columns {
		if len(data) < 1 {
			return logMessage{}, errShort
		}
		if data[0] != pglogrepl.TupleDataTypeText {
			data = data[1:] // null; an inserted row has no other kind
			continue
		}
		if len(data) < 5 {
			return logMessage{}, errShort
		}
		length := int(binary.BigEndian.Uint32(data[1:]))
		if data = data[5:]; len(data) < length {
			return logMessage{}, errShort
		}
		if set, wanted := fields[column]; wanted {
			if err := set(&message.event, data[:length]); err != nil {
				return logMessage{}, fmt.Errorf("decode the log: column %s: %w", column, err)
			}
		}
		data = data[length:]
	}
	return message, nil
}

// fields says how a column's text goes into the event. The payload is not
// looked into: its bytes are published as they were written.
var fields = map[string]func(e *event.Event, text []byte) error{
	"id":             func(e *event.Event, text []byte) (err error) { e.ID, err = uuid.ParseBytes(text); return },
	"tenant_id":      func(e *event.Event, text []byte) (err error) { e.TenantID, err = uuid.ParseBytes(text); return },
	"aggregate_type": func(e *event.Event, text []byte) error { e.AggregateType = string(text); return nil },
	"aggregate_id":   func(e *event.Event, text []byte) (err error) { e.AggregateID, err = uuid.ParseBytes(text); return },
	"aggregate_version": func(e *event.Event, text []byte) (err error) {
		e.AggregateVersion, err = strconv.ParseInt(string(text), 10, 64)
		return
	},
	"event_type": func(e *event.Event, text []byte) error { e.Type = event.Type(text); return nil },
	"schema_version": func(e *event.Event, text []byte) error {
		version, err := strconv.ParseInt(string(text), 10, 32)
		e.SchemaVersion = int32(version)
		return err
	},
	"payload":     func(e *event.Event, text []byte) error { e.Payload = text; return nil },
	"traceparent": func(e *event.Event, text []byte) error { e.Traceparent = string(text); return nil },
	"occurred_at": func(e *event.Event, text []byte) (err error) {
		e.OccurredAt, err = time.Parse("2006-01-02 15:04:05.999999-07", string(text))
		return
	},
}

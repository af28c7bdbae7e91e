package relay

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pglogrepl"

	"github.com/onceledger/onceledger/internal/event"
)

// decoder makes sense of the log: pgoutput, version 1, values as text, the
// session's time zone UTC. It goes by the columns' names.
type decoder struct {
	relations map[uint32][]column // outbox_events, by relation id
}

type column struct {
	name string
	set  func(e *event.Event, text []byte) error // nil: of no interest
}

// decode also tells where the server's log ended when it sent this; 0 if it did
// not say.
func (d *decoder) decode(data []byte) (m message, serverEnd pglogrepl.LSN, err error) {
	switch {
	case len(data) == 0:
		return message{}, 0, errShort
	case data[0] == pglogrepl.PrimaryKeepaliveMessageByteID:
		keepalive, err := pglogrepl.ParsePrimaryKeepaliveMessage(data[1:])
		return message{
			kind:  kindKeepalive,
			at:    position(keepalive.ServerWALEnd),
			asked: keepalive.ReplyRequested,
		}, keepalive.ServerWALEnd, err
	case data[0] == pglogrepl.XLogDataByteID:
		log, err := pglogrepl.ParseXLogData(data[1:])
		if err != nil {
			return message{}, 0, err
		}
		m, err := d.decodeChange(log.WALData)
		return m, log.ServerWALEnd, err
	}
	return message{}, 0, nil
}

func (d *decoder) decodeChange(data []byte) (message, error) {
	if len(data) == 0 {
		return message{}, errShort
	}
	if pglogrepl.MessageType(data[0]) == pglogrepl.MessageTypeInsert {
		return d.decodeInsert(data[1:])
	}
	parsed, err := pglogrepl.Parse(data)
	if err != nil {
		return message{}, err
	}
	switch parsed := parsed.(type) {
	case *pglogrepl.BeginMessage:
		return message{kind: kindBegin, committed: parsed.CommitTime}, nil
	case *pglogrepl.CommitMessage:
		return message{kind: kindCommit, at: position(parsed.TransactionEndLSN)}, nil
	case *pglogrepl.RelationMessage:
		return message{}, d.learn(parsed)
	}
	return message{}, nil
}

// learn remembers the columns of outbox_events, which come before its first row
// and again whenever they change. Other tables are not ours.
func (d *decoder) learn(relation *pglogrepl.RelationMessage) error {
	delete(d.relations, relation.RelationID)
	if relation.RelationName != "outbox_events" {
		return nil
	}
	missing := maps.Clone(fields)
	columns := make([]column, len(relation.Columns))
	for i, found := range relation.Columns {
		columns[i] = column{found.Name, fields[found.Name]}
		delete(missing, found.Name)
	}
	for name := range missing {
		return setupErrorf("the publication leaves out column %s of outbox_events", name)
	}
	d.relations[relation.RelationID] = columns
	return nil
}

var errShort = errors.New("a message is cut short")

func (d *decoder) decodeInsert(data []byte) (message, error) {
	if len(data) < 7 {
		return message{}, errShort
	}
	columns, ours := d.relations[binary.BigEndian.Uint32(data)]
	if !ours {
		return message{}, nil
	}
	row := message{kind: kindInsert, event: new(event.Event)}
	count := int(binary.BigEndian.Uint16(data[5:])) // behind the byte 'N'
	if count != len(columns) {
		return message{}, fmt.Errorf("a row has %d columns, not %d", count, len(columns))
	}
	data = data[7:]
	for _, column := range columns {
		if len(data) < 1 {
			return message{}, errShort
		}
		if data[0] != pglogrepl.TupleDataTypeText {
			data = data[1:] // null; an inserted row has no other kind
			continue
		}
		if len(data) < 5 {
			return message{}, errShort
		}
		length := int(binary.BigEndian.Uint32(data[1:]))
		if data = data[5:]; len(data) < length {
			return message{}, errShort
		}
		if column.set != nil {
			if err := column.set(row.event, data[:length]); err != nil {
				return message{}, fmt.Errorf("column %s: %w", column.name, err)
			}
		}
		data = data[length:]
	}
	return row, nil
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
	"payload":     func(e *event.Event, text []byte) error { e.Payload = bytes.Clone(text); return nil },
	"traceparent": func(e *event.Event, text []byte) error { e.Traceparent = string(text); return nil },
	"occurred_at": func(e *event.Event, text []byte) (err error) {
		e.OccurredAt, err = time.Parse("2006-01-02 15:04:05.999999-07", string(text))
		return
	},
}

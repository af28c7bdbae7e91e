package relay

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/db"
)

// mark is the relay's own record of how far it has got, in relay_position. It
// is written before Postgres is told, so a slot is never ahead of it, and tells
// by snapshot_xmin which rows are delivered, whatever happens to the slot.
type mark struct {
	position db.RelayPositionStoreParams // as stored, or about to be
	events   uint64                      // delivered when it was stored

	next    milestone
	covered uint64 // events that the stored snapshot_xmin is known to cover
}

// milestone is a moment: every transaction below xmin had ended, before lsn in
// the log. When the log up to lsn is delivered, so are all their rows.
type milestone struct {
	xmin   uint64
	lsn    pglogrepl.LSN
	events uint64 // delivered at that moment
}

// idleAdvance is how far the log moves on by others' writing before that alone
// is worth a record. What the record itself writes is far below it; otherwise
// the relay would keep itself awake for ever.
const idleAdvance = 1 << 20

// due reports whether there is something to record.
func (m *mark) due(now summary, asked bool) bool {
	confirmable := pglogrepl.LSN(now.confirmable)
	if confirmable <= m.position.Lsn {
		return false
	}
	return m.position.Lsn == 0 || // the slot is new
		now.delivered > m.events ||
		confirmable >= m.next.lsn && now.delivered > m.covered || // until it covers the last event
		confirmable-m.position.Lsn >= idleAdvance ||
		asked // by a server that will not stop before everything is confirmed
}

// store records that everything before now.confirmable is delivered.
func (m *mark) store(ctx context.Context, conn db.DBTX, now summary) error {
	record := m.position
	record.Lsn = pglogrepl.LSN(now.confirmable)
	reached := record.Lsn >= m.next.lsn
	if reached && m.next.lsn > 0 {
		record.SnapshotXmin = m.next.xmin
	}
	row, err := db.New().RelayPositionStore(ctx, conn, record)
	if errors.Is(err, pgx.ErrNoRows) {
		return errors.New("record the position: another relay has got further, or has taken over")
	}
	if err != nil {
		return fmt.Errorf("record the position: %w", err)
	}
	m.position, m.events = record, now.delivered
	if reached {
		m.covered = max(m.covered, m.next.events)
		m.next = milestone{xmin: row.NextXmin, lsn: row.NextLsn, events: now.delivered}
	}
	return nil
}

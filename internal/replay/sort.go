package replay

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/event"
)

// Outcome is what becomes, or would become, of a record.
type Outcome string

// The outcomes. Duplicate, Skipped, HeldBack and Discarded are what the first
// reading left behind: nothing changes. WouldApply, and in its place Applied or
// NewDeadLetter after a run, is an event of which there was no trace.
const (
	Duplicate     Outcome = "duplicate"          // it was applied
	Skipped       Outcome = "no event"           // a tombstone, a heartbeat
	HeldBack      Outcome = "dead letter before" // it could not be applied, and is kept
	Discarded     Outcome = "discarded"          // a person decided against it
	Undecodable   Outcome = "undecodable"        // it cannot be told what it is
	Reused        Outcome = "id reused"          // the id was applied with another content
	TooOld        Outcome = "too old"            // it cannot be told from a repeat; left out
	WouldApply    Outcome = "missing"
	Applied       Outcome = "applied"
	NewDeadLetter Outcome = "new dead letter"
)

// sorted is a record and what becomes of it.
type sorted struct {
	record  event.Record
	event   event.Event
	outcome Outcome
}

// sort says what the records are to the consumer, by what it has written down
// about their events.
func (r *Replay) sort(ctx context.Context, records []event.Record) ([]sorted, error) {
	batch := make([]sorted, len(records))
	var ids []uuid.UUID
	for i, record := range records {
		decoded, err := event.Decode(record)
		batch[i] = sorted{record, decoded, WouldApply}
		switch {
		case errors.Is(err, event.ErrNoEvent):
			batch[i].outcome = Skipped
		case err != nil:
			batch[i].outcome = Undecodable
		default:
			ids = append(ids, decoded.ID)
		}
	}
	applied, err := db.New().ProcessedEventFingerprints(ctx, r.config.DB, r.config.Consumer, ids)
	if err != nil {
		return nil, fmt.Errorf("read applied events: %w", err)
	}
	letters, err := db.New().DeadLetterListByEvents(ctx, r.config.DB, r.config.Consumer, ids)
	if err != nil {
		return nil, fmt.Errorf("read dead letters: %w", err)
	}
	fingerprints := make(map[uuid.UUID]string)
	for _, row := range applied {
		fingerprints[row.EventID] = string(row.Fingerprint)
	}
	states := make(map[uuid.UUID]string)
	for _, row := range letters {
		if states[row.EventID] != "open" {
			states[row.EventID] = row.State
		}
	}
	seen := make(map[uuid.UUID]bool) // twice in one batch
	for i, s := range batch {
		if s.outcome != WouldApply {
			continue
		}
		fingerprint, isApplied := fingerprints[s.event.ID]
		state, isDead := states[s.event.ID]
		switch {
		case isApplied && fingerprint == string(s.event.Fingerprint()):
			batch[i].outcome = Duplicate
		case isApplied:
			batch[i].outcome = Reused
		case isDead && state == "discarded":
			batch[i].outcome = Discarded
		case isDead:
			batch[i].outcome = HeldBack
		case madeAt(s.event.ID).Before(r.oldest):
			batch[i].outcome = TooOld
		case seen[s.event.ID]:
			batch[i].outcome = Duplicate
		}
		seen[s.event.ID] = true
	}
	return batch, nil
}

// madeAt is the moment in a UUIDv7: milliseconds in its first 48 bits.
func madeAt(id uuid.UUID) time.Time {
	return time.UnixMilli(int64(binary.BigEndian.Uint64(id[:8]) >> 16)).UTC()
}

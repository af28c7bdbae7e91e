package replay

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/inbox"
)

// Outcome is what becomes, or would become, of a record.
type Outcome string

// The outcomes. Those of the first group are what the first reading left behind:
// nothing changes. Those of the second are of a record without the trace that it
// ought to have left: in a rehearsal WouldApply, WouldStore or WouldHold, and
// after a run what it came to.
const (
	Duplicate   Outcome = "duplicate"          // it was applied
	Skipped     Outcome = "no event"           // a tombstone, a heartbeat
	HeldBack    Outcome = "dead letter before" // it could not be applied, and is kept
	Discarded   Outcome = "discarded"          // a person decided against it
	Undecodable Outcome = "undecodable"        // it cannot be told what it is; it is kept
	Reused      Outcome = "id reused"          // the id was applied with another content; it is kept
	TooOld      Outcome = "too old"            // it cannot be told from a repeat; left out

	WouldApply    Outcome = "missing"
	WouldStore    Outcome = "missing dead letter"
	WouldHold     Outcome = "missing, and held" // its dead letter says resolved, and others of its order are open
	Applied       Outcome = "applied"
	NewDeadLetter Outcome = "new dead letter"
	NotApplied    Outcome = "still missing" // it has a dead letter that is closed, and could not be applied
)

// sorted is a record and what becomes of it.
type sorted struct {
	record  event.Record
	event   event.Event
	outcome Outcome
	isEvent bool // and can be read
	marked  bool // as applied, before
	kept    bool // as a dead letter, before
}

type place struct {
	topic     string
	partition int32
	offset    int64
}

type aggregate struct{ tenantID, id uuid.UUID }

func aggregateOf(e event.Event) aggregate { return aggregate{e.TenantID, e.AggregateID} }

// trace is what the consumer has written down about some records.
type trace struct {
	fingerprints map[uuid.UUID]string
	letters      map[place][]db.DeadLetter
	discarded    map[uuid.UUID][]db.DeadLetter
}

// look reads the marks of the events, and of what is not marked with its content
// the dead letters.
func (r *Replay) look(ctx context.Context, batch []sorted) (trace, error) {
	found := trace{make(map[uuid.UUID]string), make(map[place][]db.DeadLetter), make(map[uuid.UUID][]db.DeadLetter)}
	var ids []uuid.UUID
	for _, s := range batch {
		if s.event.ID != uuid.Nil {
			ids = append(ids, s.event.ID)
		}
	}
	marks, err := db.New().ProcessedEventFingerprints(ctx, r.config.DB, r.config.Consumer, ids)
	if err != nil {
		return trace{}, fmt.Errorf("read applied events: %w", err)
	}
	for _, row := range marks {
		found.fingerprints[row.EventID] = string(row.Fingerprint)
	}
	params := db.DeadLetterListOfRecordsParams{Consumer: r.config.Consumer}
	for _, s := range batch {
		if s.outcome == Skipped || found.hasMark(s) && s.event.SchemaVersion == event.SchemaVersion {
			continue // a letter of a version that this build does not know may come after the mark
		}
		params.Topics = append(params.Topics, s.record.Topic)
		params.Partitions = append(params.Partitions, s.record.Partition)
		params.Offsets = append(params.Offsets, s.record.Offset)
		if s.event.ID != uuid.Nil {
			params.EventIds = append(params.EventIds, s.event.ID)
		}
	}
	if len(params.Topics) == 0 {
		return found, nil
	}
	letters, err := db.New().DeadLetterListOfRecords(ctx, r.config.DB, params)
	if err != nil {
		return trace{}, fmt.Errorf("read dead letters: %w", err)
	}
	for _, letter := range letters {
		at := place{letter.Topic, letter.Partition, letter.Offset}
		found.letters[at] = append(found.letters[at], letter)
		if letter.State == stateDiscarded && letter.EventID != nil {
			found.discarded[*letter.EventID] = append(found.discarded[*letter.EventID], letter)
		}
	}
	return found, nil
}

// The states of a dead letter; the third is resolved.
const (
	stateOpen      = "open"
	stateDiscarded = "discarded"
)

// hasMark is of an event that was applied, with this content.
func (t trace) hasMark(s sorted) bool {
	fingerprint, marked := t.fingerprints[s.event.ID]
	return s.isEvent && marked && fingerprint == string(s.event.Fingerprint())
}

// letter is the one of this very record: another one may have had its offset
// before the topic was made anew.
func (t trace) letter(s sorted) (db.DeadLetter, bool) {
	for _, letter := range t.letters[place{s.record.Topic, s.record.Partition, s.record.Offset}] {
		if sameBytes(letter, s.record) {
			return letter, true
		}
	}
	return db.DeadLetter{}, false
}

// wasDiscarded is of a record that was discarded, here or at another place.
func (t trace) wasDiscarded(s sorted) bool {
	if letter, kept := t.letter(s); kept && letter.State == stateDiscarded {
		return true
	}
	return slices.ContainsFunc(t.discarded[s.event.ID], func(letter db.DeadLetter) bool {
		return sameBytes(letter, s.record) && is(letter.EventType, string(s.event.Type)) &&
			is(letter.TenantID, s.event.TenantID) && is(letter.AggregateVersion, s.event.AggregateVersion)
	})
}

func is[T comparable](stored *T, value T) bool { return stored != nil && *stored == value }

func sameBytes(letter db.DeadLetter, record event.Record) bool {
	return bytes.Equal(letter.RecordKey, record.Key) && bytes.Equal(letter.RecordValue, record.Value)
}

// sort says what the records are to the consumer, by what it has written down
// about them. It foresees what the inbox does with each, except for what the
// consumer's rules refuse.
func (r *Replay) sort(ctx context.Context, records []event.Record) ([]sorted, error) {
	batch := make([]sorted, len(records))
	for i, record := range records {
		decoded, err := event.Decode(record)
		batch[i] = sorted{record: record, event: decoded, outcome: WouldApply, isEvent: err == nil}
		switch {
		case errors.Is(err, event.ErrNoEvent):
			batch[i].outcome = Skipped
		case err != nil:
			batch[i].outcome = Undecodable
		}
	}
	found, err := r.look(ctx, batch)
	if err != nil {
		return nil, err
	}
	held, err := r.held(ctx, batch, found)
	if err != nil {
		return nil, err
	}
	for i := range batch {
		if batch[i].outcome != Skipped {
			r.judge(&batch[i], found, held)
		}
	}
	return batch, nil
}

// held is which aggregates of events that were not applied have a dead letter that
// they would wait behind.
func (r *Replay) held(ctx context.Context, batch []sorted, found trace) (map[aggregate]bool, error) {
	held := r.assumed.held // the database adds to it
	var ids []uuid.UUID
	for _, s := range batch {
		if s.outcome == WouldApply && !found.hasMark(s) {
			ids = append(ids, s.event.AggregateID)
		}
	}
	if len(ids) == 0 {
		return held, nil
	}
	rows, err := db.New().DeadLetterListHeld(ctx, r.config.DB, r.config.Consumer, ids)
	if err != nil {
		return nil, fmt.Errorf("read which orders are held: %w", err)
	}
	for _, row := range rows {
		held[aggregate{row.TenantID, row.AggregateID}] = true
	}
	return held, nil
}

// assumed is what a rehearsal takes for done: the database does not show it.
type assumed struct {
	applied map[uuid.UUID]string // fingerprints
	held    map[aggregate]bool
}

func (r *Replay) judge(s *sorted, found trace, held map[aggregate]bool) {
	letter, kept := found.letter(*s)
	s.kept = kept
	s.marked = found.hasMark(*s)
	before := func(outcome Outcome) Outcome { // of what cannot be applied
		if kept {
			return outcome
		}
		return WouldStore
	}
	fingerprint, known := found.fingerprints[s.event.ID]
	if !known {
		fingerprint, known = r.assumed.applied[s.event.ID]
	}
	of, fault := aggregateOf(s.event), r.fault(s.event)
	switch {
	case found.wasDiscarded(*s):
		s.outcome = Discarded
	case s.outcome == Undecodable:
		s.outcome = before(Undecodable)
	case s.marked && fault != unknownSchema:
		s.outcome = Duplicate
	case kept && letter.State == stateOpen && (held[of] || fault != ""):
		s.outcome = HeldBack
	case fault == "" && madeAt(s.event.ID).Before(r.oldest):
		s.outcome = TooOld
		if kept {
			s.outcome = HeldBack
		}
	case fault != "":
		s.outcome = before(HeldBack)
		held[of] = held[of] || fault == unknownSchema
	case known && fingerprint == string(s.event.Fingerprint()):
		s.outcome = Duplicate // it comes a second time
	case known:
		s.outcome = before(Reused)
	case held[of] && kept:
		s.outcome = WouldHold
	case held[of]:
		s.outcome = WouldStore
	default:
		s.outcome = WouldApply
		r.assumed.applied[s.event.ID] = string(s.event.Fingerprint())
	}
}

const unknownSchema = inbox.ClassUnknownSchema

// fault is what the inbox finds wrong with an event by itself, besides its age.
func (r *Replay) fault(e event.Event) inbox.Class {
	switch {
	case e.ID == uuid.Nil:
		return ""
	case e.ID.Version() != 7 || e.ID.Variant() != uuid.RFC4122:
		return inbox.ClassBadID
	case madeAt(e.ID).After(r.config.Now().Add(24 * time.Hour)):
		return inbox.ClassFutureID
	case e.SchemaVersion != event.SchemaVersion && !madeAt(e.ID).Before(r.oldest):
		return unknownSchema
	}
	return ""
}

// settle says what has become of a batch that the consumer was given, whole or not.
// What has changed nothing in the books has ended as foreseen.
func (r *Replay) settle(ctx context.Context, batch []sorted, whole bool) error {
	unchanging := func(s sorted) bool { return s.outcome == Skipped || s.outcome == Duplicate && s.marked }
	if !slices.ContainsFunc(batch, func(s sorted) bool { return !unchanging(s) }) {
		return nil
	}
	found, err := r.look(ctx, batch)
	if err != nil {
		return fmt.Errorf("see what was applied: %w", err)
	}
	applied := make(map[uuid.UUID]bool) // once, however often it is in the batch
	for i := range batch {
		s := &batch[i]
		_, kept := found.letter(*s)
		switch {
		case unchanging(*s):
		case kept && !s.kept:
			s.outcome = NewDeadLetter
			r.config.Say("MISSING: %s had left no trace; it is a dead letter now", describe(*s))
		case !s.marked && found.hasMark(*s) && !applied[s.event.ID]:
			applied[s.event.ID] = true
			if s.outcome != Duplicate {
				s.outcome = Applied
				r.config.Say("MISSING: %s had not been applied; it is now", describe(*s))
			}
		case s.outcome == WouldApply && found.hasMark(*s):
			s.outcome = Duplicate
		case whole && (s.outcome == WouldApply || s.outcome == WouldHold || s.outcome == WouldStore):
			s.outcome = NotApplied
			r.config.Say("MISSING: %s had not been applied, and could not be", describe(*s))
		}
	}
	return nil
}

func describe(s sorted) string {
	if !s.isEvent {
		return fmt.Sprintf("the record at partition %d offset %d", s.record.Partition, s.record.Offset)
	}
	return fmt.Sprintf("event %s (%s, version %d of %s)", s.event.ID, s.event.Type, s.event.AggregateVersion, s.event.AggregateID)
}

// madeAt is the moment in a UUIDv7: milliseconds in its first 48 bits.
func madeAt(id uuid.UUID) time.Time {
	return time.UnixMilli(int64(binary.BigEndian.Uint64(id[:8]) >> 16)).UTC()
}

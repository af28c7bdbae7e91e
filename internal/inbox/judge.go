package inbox

import (
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/event"
)

// Class says why a record is a dead letter.
type Class string

// The classes. Those that park hold back later events of the same aggregate.
const (
	ClassUndecodable   Class = "undecodable"    // not an event by the wire contract
	ClassUnknownSchema Class = "unknown-schema" // of a type or schema version that this build does not know
	ClassBadID         Class = "bad-id"         // the id is not a UUIDv7
	ClassTooOld        Class = "too-old"        // older than the oldest dedupe partition
	ClassFutureID      Class = "future-id"      // the id is more than a day ahead
	ClassIDReused      Class = "id-reused"      // the id was applied with other content
	ClassGap           Class = "gap"            // what it builds on has not been seen
	ClassRule          Class = "rule"           // breaks a rule of the domain
	ClassData          Class = "data"           // the database refuses its values
	ClassParked        Class = "parked"         // nothing wrong: waits behind another
)

// parks is false for records whose aggregate is not known or whose event was
// never one of the aggregate's. dead_letters_parking_idx says the same in SQL.
func (c Class) parks() bool {
	switch c {
	case ClassUndecodable, ClassBadID, ClassTooOld, ClassFutureID, ClassIDReused:
		return false
	case ClassUnknownSchema, ClassGap, ClassRule, ClassData, ClassParked:
		return true
	}
	return true
}

// Fault is what is wrong with a record.
type Fault struct {
	Class  Class
	Detail string
}

// Rejection names an event that a handler refuses.
type Rejection struct {
	EventID uuid.UUID
	Fault
}

// Rejections is the error by which a handler names all events that it refuses.
type Rejections []Rejection

func (r Rejections) Error() string {
	return fmt.Sprintf("%d events refused, the first as %s: %s", len(r), r[0].Class, r[0].Detail)
}

// delivery is a record with what is known of it so far.
type delivery struct {
	record      event.Record
	event       event.Event
	fingerprint []byte
	skip        bool
	discarded   bool      // it was a dead letter, and discarded, as far as this transaction sees
	letter      uuid.UUID // the dead letter that is tried again; uuid.Nil for a record that was just read
	fault       *Fault    // what is wrong with it by itself
	refusal     *Fault    // why the handler refuses it, as long as what is before it stands
}

// aggregate names what has to stay in order: an aggregate of a tenant.
type aggregate struct{ tenantID, id uuid.UUID }

func (d *delivery) aggregate() aggregate { return aggregate{d.event.TenantID, d.event.AggregateID} }

// furthestAhead is how far an id's time may be ahead of this process's clock.
const furthestAhead = 24 * time.Hour

// judge reads a record and finds what is wrong with it that needs no database.
// oldest is the first moment that the dedupe table still covers: an older event
// could not be told from a duplicate.
func judge(record event.Record, oldest, now time.Time) *delivery {
	d := &delivery{record: record}
	var err error
	d.event, err = event.Decode(record)
	switch {
	case errors.Is(err, event.ErrNoEvent):
		d.skip = true
		return d
	case err != nil:
		d.fault = &Fault{ClassUndecodable, err.Error()}
		return d
	}

	d.fingerprint = d.event.Fingerprint()
	id := d.event.ID
	switch made := timeOf(id); {
	case id.Version() != 7 || id.Variant() != uuid.RFC4122:
		d.fault = &Fault{ClassBadID, fmt.Sprintf("event id %s is not a UUIDv7", id)}
	case made.Before(oldest):
		d.fault = &Fault{ClassTooOld, fmt.Sprintf("too old to dedupe: made at %s, the oldest that is kept is %s",
			made.Format(time.RFC3339), oldest.Format(time.RFC3339))}
	case made.After(now.Add(furthestAhead)):
		d.fault = &Fault{ClassFutureID, fmt.Sprintf("event id says %s, which is more than a day ahead", made.Format(time.RFC3339))}
	case d.event.SchemaVersion != event.SchemaVersion:
		d.fault = &Fault{ClassUnknownSchema, fmt.Sprintf("schema version %d of %s is not known, only %d is",
			d.event.SchemaVersion, d.event.Type, event.SchemaVersion)}
	}
	return d
}

// timeOf is the moment in a UUIDv7: milliseconds in its first 48 bits.
func timeOf(id uuid.UUID) time.Time {
	var milliseconds int64
	for _, b := range id[:6] {
		milliseconds = milliseconds<<8 | int64(b)
	}
	return time.UnixMilli(milliseconds).UTC()
}

// markRefused notes why the handler refused events that it was given: of an
// aggregate the first, since the others then wait behind it. Another record with
// the id of a refused event is judged by itself. It is false if it noted nothing:
// trying again would change nothing either.
func markRefused(given []*delivery, refused Rejections) (noted bool) {
	faults := make(map[uuid.UUID]Fault, len(refused))
	for _, rejection := range refused {
		faults[rejection.EventID] = rejection.Fault
	}
	waits := make(map[uuid.UUID]bool)
	for _, d := range given {
		fault, isRefused := faults[d.event.ID]
		if !isRefused || waits[d.event.AggregateID] {
			continue
		}
		d.refusal, noted = &fault, true
		waits[d.event.AggregateID] = fault.Class.parks()
	}
	return noted
}

// forgetRefusals makes the handler judge again: one of the events on which it
// based a refusal may turn out to be a culprit itself.
func forgetRefusals(batch []*delivery) {
	for _, d := range batch {
		d.refusal = nil
	}
}

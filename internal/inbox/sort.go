package inbox

import (
	"errors"
	"fmt"
	"slices"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/postgres"
)

// The decisions about a batch that need no database. Those who read and write
// for them are settle and sortOutTx.

// outcome is what becomes of the records of a batch. It is worked out in three
// steps, each of which needs to know more: sortOut, mark, recognise.
type outcome struct {
	fresh      []*delivery // marked as applied in this transaction: to be applied
	duplicates []*delivery // applied before
	skipped    []*delivery // no event
	discarded  []*delivery // a person has decided that it is not to be applied
	dead       []dead      // could not be applied, or parked

	candidates []*delivery // after sortOut: to be marked as applied
	suspects   []*delivery // after mark: not to be applied; duplicates, unless they are faults
	held       []*delivery // behind a dead letter of their aggregate

	marked map[uuid.UUID]bool // by this transaction
}

type dead struct {
	*delivery
	fault Fault
}

// sortOut goes through a batch in order: what fails holds back what follows it in
// the same aggregate. blocked are the aggregates with a dead letter of an earlier
// batch; it adds those of this one.
func sortOut(batch []*delivery, blocked map[aggregate]bool) outcome {
	var o outcome
	first := make(map[uuid.UUID]bool, len(batch))
	for _, d := range batch {
		switch {
		case d.skip:
			o.skipped = append(o.skipped, d)
		case d.discarded:
			o.discarded = append(o.discarded, d)
		case d.fault != nil:
			o.die(d, *d.fault, blocked)
		case first[d.event.ID]:
			o.suspects = append(o.suspects, d)
		case blocked[d.aggregate()]:
			o.held = append(o.held, d)
		case d.refusal != nil:
			o.die(d, *d.refusal, blocked)
		default:
			first[d.event.ID] = true
			o.candidates = append(o.candidates, d)
		}
	}
	return o
}

func (o *outcome) die(d *delivery, fault Fault, blocked map[aggregate]bool) {
	o.dead = append(o.dead, dead{d, fault})
	if fault.Class.parks() && d.event.AggregateID != uuid.Nil {
		blocked[d.aggregate()] = true
	}
}

// mark is told which candidates this transaction has marked as applied. The
// others were marked before.
func (o *outcome) mark(marked map[uuid.UUID]bool) {
	o.marked = marked
	for _, d := range o.candidates {
		if marked[d.event.ID] {
			o.fresh = append(o.fresh, d)
		} else {
			o.suspects = append(o.suspects, d)
		}
	}
	o.suspects = append(o.suspects, o.held...)
}

// recognise is told the fingerprints of those suspects that are marked by now, by
// this transaction or an earlier one. Such an event is applied once; the same id
// with another content is a fault of its producer. What is not marked was held
// back, and is parked; so is what was held back before a later record of the
// batch was marked with its id.
func (o *outcome) recognise(fingerprints map[uuid.UUID]string) {
	earlier := len(o.suspects) - len(o.held)
	for i, d := range o.suspects {
		fingerprint, isApplied := fingerprints[d.event.ID]
		if i >= earlier && o.marked[d.event.ID] {
			isApplied = false
		}
		switch {
		case !isApplied:
			o.dead = append(o.dead, dead{d, Fault{ClassParked, "an earlier event of this aggregate is a dead letter"}})
		case fingerprint == string(d.fingerprint):
			o.duplicates = append(o.duplicates, d)
		default:
			o.dead = append(o.dead, dead{d, Fault{ClassIDReused, "the id was used before for an event with another type or content"}})
		}
	}
}

// split decides what to try, in this order, instead of a batch whose transaction
// failed: the whole once more, without what the handler refused of the events it
// was given; or, where the database refuses something and does not say of which
// record, each half by itself, until one stands alone and is the culprit. It
// returns the error if that is not the records' fault, or nothing is left to
// try: the same batch would only fail in the same way.
func split(batch, given []*delivery, failure error) ([][]*delivery, error) {
	var refused Rejections
	switch {
	case errors.As(failure, &refused):
		if !markRefused(certain(batch, given, refused), refused) {
			return nil, fmt.Errorf("handler refused events that it was not given: %w", failure)
		}
		return [][]*delivery{batch}, nil
	case postgres.DataFault(failure) && len(batch) > 1:
		forgetRefusals(batch)
		middle := len(batch) / 2
		return [][]*delivery{batch[:middle], batch[middle:]}, nil
	case postgres.DataFault(failure) && batch[0].fault == nil && batch[0].refusal == nil:
		batch[0].fault = &Fault{ClassData, failure.Error()}
		return [][]*delivery{batch}, nil
	default:
		return nil, failure
	}
}

// certain is the part of what the handler was given of which its refusals are
// final. That is all of it, unless an id stands for two events in the batch: then
// the handler was not given the second, and if it had to refuse the first, or what
// holds that back, it has judged the rest on a wrong assumption. So it judges the
// rest anew, with only its first refusal noted.
func certain(batch, given []*delivery, refused Rejections) []*delivery {
	content := make(map[uuid.UUID]string, len(batch))
	reused := false
	for _, d := range batch {
		other, known := content[d.event.ID]
		reused = reused || known && other != string(d.fingerprint)
		content[d.event.ID] = string(d.fingerprint)
	}
	if !reused {
		return given
	}
	first := slices.IndexFunc(given, func(d *delivery) bool {
		return slices.ContainsFunc(refused, func(r Rejection) bool { return r.EventID == d.event.ID })
	})
	return given[:first+1]
}

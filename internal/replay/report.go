package replay

import (
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/db"
)

// Report is what a replay did, or would do.
type Report struct {
	Rehearsed bool
	Records   int64
	Outcomes  map[Outcome]int64
	Notable   []Notable // of what the first reading left no trace of, the first few
	Joined    string    // who joined the group meanwhile

	Before, After db.ReplayCountsRow
}

// Notable is a record that somebody has to look at.
type Notable struct {
	Outcome   Outcome
	EventID   uuid.UUID // uuid.Nil of a record that cannot be read
	OrderID   uuid.UUID
	Version   int64
	Partition int32
	Offset    int64
}

// notableMost bounds the list; the counts are of all.
const notableMost = 100

func (r *Report) add(batch []sorted) {
	if r.Outcomes == nil {
		r.Outcomes = make(map[Outcome]int64)
	}
	for _, s := range batch {
		r.Records++
		r.Outcomes[s.outcome]++
		if s.outcome.notable() && len(r.Notable) < notableMost {
			one := Notable{Outcome: s.outcome, Partition: s.record.Partition, Offset: s.record.Offset}
			if s.isEvent {
				one.EventID, one.OrderID, one.Version = s.event.ID, s.event.AggregateID, s.event.AggregateVersion
			}
			r.Notable = append(r.Notable, one)
		}
	}
}

func (o Outcome) notable() bool {
	switch o {
	case WouldApply, WouldStore, WouldHold, Applied, NewDeadLetter, NotApplied, TooOld:
		return true
	case Duplicate, Skipped, HeldBack, Discarded, Undecodable, Reused:
	}
	return false
}

// Unchanged reports that everything was there already.
func (r *Report) Unchanged() bool {
	for outcome, n := range r.Outcomes {
		if n > 0 && outcome.notable() {
			return false
		}
	}
	return r.Joined != "" || r.Before == r.After
}

// WriteText writes the report for people.
func (r *Report) WriteText(w io.Writer) error {
	verb := "replayed"
	if r.Rehearsed {
		verb = "would be replayed"
	}
	text := fmt.Sprintf("%d records %s\n", r.Records, verb)
	for _, outcome := range slices.Sorted(maps.Keys(r.Outcomes)) {
		text += fmt.Sprintf("  %-20s %8d\n", outcome, r.Outcomes[outcome])
	}
	if !r.Rehearsed {
		text += fmt.Sprintf("\n%-18s %22s %22s\n", "", "before", "after")
		row := func(name string, before, after any) {
			mark := ""
			if before != after {
				mark = "  *"
			}
			text += fmt.Sprintf("%-18s %22v %22v%s\n", name, before, after, mark)
		}
		b, a := r.Before, r.After
		row("invoices", b.Invoices, a.Invoices)
		row("invoice lines", b.InvoiceLines, a.InvoiceLines)
		row("credit notes", b.CreditNotes, a.CreditNotes)
		row("ledger entries", b.LedgerEntries, a.LedgerEntries)
		row("ledger lines", b.LedgerLines, a.LedgerLines)
		row("processed events", b.ProcessedEvents, a.ProcessedEvents)
		row("dead letters", b.DeadLetters, a.DeadLetters)
		row("orders", b.Orders, a.Orders)
		row("orders' checksum", b.OrdersChecksum, a.OrdersChecksum)
	}
	if len(r.Notable) > 0 {
		text += "\n"
	}
	for _, n := range r.Notable {
		what := "a record that cannot be read"
		if n.EventID != uuid.Nil {
			what = fmt.Sprintf("event %s, version %d of order %s", n.EventID, n.Version, n.OrderID)
		}
		text += fmt.Sprintf("%s: %s, at partition %d offset %d\n", n.Outcome, what, n.Partition, n.Offset)
	}
	text += "\n" + r.conclusion() + "\n"
	_, err := io.WriteString(w, text)
	return err
}

func (r *Report) conclusion() string {
	joined := ""
	if r.Joined != "" {
		joined = " A worker ran meanwhile (" + r.Joined + "): what it did is in the counts."
	}
	o := r.Outcomes
	missing := o[WouldApply] + o[WouldStore] + o[WouldHold] + o[Applied] + o[NewDeadLetter] + o[NotApplied]
	switch {
	case missing > 0 && r.Rehearsed:
		return fmt.Sprintf("%d EVENTS ARE MISSING: the consumer has passed them and has no trace of them. "+
			"A replay would apply %d, as far as the rules allow, and store %d anew as dead letters.%s",
			missing, o[WouldApply], o[WouldStore], notApplied(o[WouldHold]))
	case missing > 0:
		return fmt.Sprintf("%d EVENTS WERE MISSING: %d are applied now, %d became dead letters.%s%s Find out how they were lost.",
			missing, o[Applied], o[NewDeadLetter], notApplied(o[NotApplied]), joined)
	case r.Outcomes[TooOld] > 0:
		return fmt.Sprintf("%d events are too old to be told from a repeat and were left out.%s", r.Outcomes[TooOld], joined)
	case r.Rehearsed:
		return "Nothing is missing: a replay would change nothing."
	case r.Unchanged():
		return "Unchanged: everything had been applied, once." + joined
	default:
		return "CHANGED, and not by an event of this replay: something else writes to these tables."
	}
}

func notApplied(n int64) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(" %d cannot be applied, and have a dead letter that is closed: see to the open ones of their orders "+
		"(onceledger dlq retry), and replay again.", n)
}

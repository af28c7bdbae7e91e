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
	EventID   uuid.UUID
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
			r.Notable = append(r.Notable, Notable{
				s.outcome, s.event.ID, s.event.AggregateID, s.event.AggregateVersion, s.record.Partition, s.record.Offset,
			})
		}
	}
}

func (o Outcome) notable() bool {
	return o == WouldApply || o == Applied || o == NewDeadLetter || o == TooOld
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
		text += fmt.Sprintf("%s: event %s, version %d of order %s, at partition %d offset %d\n",
			n.Outcome, n.EventID, n.Version, n.OrderID, n.Partition, n.Offset)
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
	missing := r.Outcomes[WouldApply] + r.Outcomes[Applied] + r.Outcomes[NewDeadLetter]
	switch {
	case missing > 0 && r.Rehearsed:
		return fmt.Sprintf("%d EVENTS ARE MISSING: the consumer has passed them and has no trace of them. A replay would apply them.", missing)
	case missing > 0:
		return fmt.Sprintf("%d EVENTS WERE MISSING: %d are applied now, %d became dead letters.%s Find out how they were lost.",
			missing, r.Outcomes[Applied], r.Outcomes[NewDeadLetter], joined)
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

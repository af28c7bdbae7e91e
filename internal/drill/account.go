package drill

import (
	"slices"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/verify"
)

// account adds up what became of the events: on the topics, at the consumer, and
// in the books of their orders. An event is lost that is not on its topic, or is
// an order's and not applied.
func (r *Report) account(events []db.DrillEventListRow, records map[uuid.UUID]int, books *verify.Report) {
	orders := make(map[uuid.UUID]bool)
	for _, e := range events {
		r.Events++
		orders[e.AggregateID] = true
		sent := records[e.ID]
		if e.InHole {
			r.InTheHole++
			if sent > 0 {
				r.HoleSent++
			}
		}
		r.Again += max(sent-1, 0)
		lost := sent == 0
		if e.AggregateType == event.AggregateOrder {
			r.Seen += sent
			if e.Applied {
				r.Applied++
				r.Suppressed += max(sent-1, 0)
			}
			lost = lost || !e.Applied
		}
		if lost {
			r.Lost++
		}
	}
	r.Orders = len(orders)
	r.Findings = slices.DeleteFunc(slices.Clone(books.Findings), func(f verify.Finding) bool { return !orders[f.OrderID] })
}

package inbox_test

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/ledger"
)

// said is a record of a generated stream, with what the generator did to it.
type said struct {
	event event.Event
	fault fault
}

// fault is what is wrong with a generated record.
type fault string

const (
	none        fault = ""
	tombstone   fault = "tombstone"
	notJSON     fault = "not JSON"
	wrongID     fault = "wrong id" // its class depends on the id
	newerSchema fault = "newer schema"
	wrongSums   fault = "wrong sums"
)

// model is billing as it would be if records came one at a time and nothing ever
// failed: a few maps, no batches, no retries.
type model struct {
	tenants        []uuid.UUID
	oldest, newest time.Time // what ids may say

	applied map[uuid.UUID]string // fingerprint by event id
	blocked map[uuid.UUID]bool   // aggregates
	classes []inbox.Class        // of each record, "" where it is no dead letter

	orders  map[uuid.UUID]*modelOrder
	refunds map[uuid.UUID]bool
	entries int
	lines   map[line]int64
}

type modelOrder struct {
	version     int64
	invoice     uuid.UUID
	left        int64 // of the invoice
	creditNotes int
}

type line struct {
	tenant                  uuid.UUID
	debit, credit, currency string
}

func newModel(tenants []uuid.UUID, oldest, newest time.Time) *model {
	return &model{
		tenants: tenants, oldest: oldest, newest: newest,
		applied: make(map[uuid.UUID]string), blocked: make(map[uuid.UUID]bool),
		orders: make(map[uuid.UUID]*modelOrder), refunds: make(map[uuid.UUID]bool), lines: make(map[line]int64),
	}
}

// take brings one record to its end.
func (m *model) take(s said, state event.Order) {
	class := m.judge(s, state)
	m.classes = append(m.classes, class)
	switch class {
	case "", inbox.ClassUndecodable, inbox.ClassBadID, inbox.ClassTooOld, inbox.ClassFutureID, inbox.ClassIDReused:
	default:
		m.blocked[s.event.AggregateID] = true
	}
}

func (m *model) judge(s said, state event.Order) inbox.Class {
	id := s.event.ID
	seconds, nanoseconds := id.Time().UnixTime()
	made := time.Unix(seconds, nanoseconds)
	fingerprint, isApplied := m.applied[id]
	switch {
	case s.fault == tombstone:
		return ""
	case s.fault == notJSON:
		return inbox.ClassUndecodable
	case id.Version() != 7:
		return inbox.ClassBadID
	case made.Before(m.oldest):
		return inbox.ClassTooOld
	case made.After(m.newest):
		return inbox.ClassFutureID
	case s.fault == newerSchema:
		return inbox.ClassUnknownSchema
	case isApplied && fingerprint == string(s.event.Fingerprint()):
		return ""
	case isApplied:
		return inbox.ClassIDReused
	case m.blocked[s.event.AggregateID]:
		return inbox.ClassParked
	case s.fault == wrongSums:
		return inbox.ClassRule
	case !slices.Contains(m.tenants, s.event.TenantID):
		return inbox.ClassData
	}

	order := m.orders[s.event.AggregateID]
	if order == nil {
		order = &modelOrder{}
	}
	switch s.event.Type {
	case event.OrderPaid:
		if order.invoice != uuid.Nil {
			return inbox.ClassRule
		}
		order.invoice, order.left = id, state.TotalAmount
		m.post(s.event.TenantID, state, ledger.Cash, ledger.Revenue, state.NetAmount)
		m.post(s.event.TenantID, state, ledger.Cash, ledger.TaxPayable, state.TaxAmount)
		m.entries++
	case event.OrderRefunded:
		if order.invoice == uuid.Nil {
			return inbox.ClassGap
		}
		if state.Refund.Amount > order.left {
			return inbox.ClassRule
		}
		if m.refunds[state.Refund.RefundID] {
			return inbox.ClassData // the database knows that it has a credit note
		}
		m.refunds[state.Refund.RefundID] = true
		order.left -= state.Refund.Amount
		order.creditNotes++
		m.post(s.event.TenantID, state, ledger.Revenue, ledger.Cash, state.Refund.NetAmount)
		m.post(s.event.TenantID, state, ledger.TaxPayable, ledger.Cash, state.Refund.TaxAmount)
		m.entries++
	default: // changes the version alone
	}
	order.version = max(order.version, s.event.AggregateVersion)
	m.orders[s.event.AggregateID] = order
	m.applied[id] = string(s.event.Fingerprint())
	return ""
}

func (m *model) post(tenant uuid.UUID, state event.Order, debit, credit string, amount int64) {
	if amount != 0 {
		m.lines[line{tenant, debit, credit, string(state.Currency)}] += amount
	}
}

// billed is one order as billing knows it.
type billed struct {
	OrderID     uuid.UUID
	Version     int64
	Invoice     uuid.UUID
	CreditNotes int
}

func (m *model) billed() []billed {
	var all []billed
	for id, order := range m.orders {
		all = append(all, billed{id, order.version, order.invoice, order.creditNotes})
	}
	slices.SortFunc(all, func(a, b billed) int { return cmp.Compare(a.OrderID.String(), b.OrderID.String()) })
	return all
}

// moved is the sum of the ledger's lines between two accounts.
type moved struct {
	TenantID                uuid.UUID
	Debit, Credit, Currency string
	Amount                  int64
}

func (m *model) moved() []moved {
	var all []moved
	for l, amount := range m.lines {
		all = append(all, moved{l.tenant, l.debit, l.credit, l.currency, amount})
	}
	return all
}

func (m *model) appliedIDs() []uuid.UUID { return slices.Collect(maps.Keys(m.applied)) }

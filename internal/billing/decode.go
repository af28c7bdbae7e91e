package billing

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/invoices"
	"github.com/onceledger/onceledger/internal/money"
)

// orderEvent is an order event with its payload.
type orderEvent struct {
	event.Event
	state event.Order
}

func (o orderEvent) key() invoices.OrderKey {
	return invoices.OrderKey{TenantID: o.TenantID, OrderID: o.AggregateID}
}

func (o orderEvent) refuse(class inbox.Class, format string, args ...any) inbox.Rejection {
	return inbox.Rejection{
		EventID: o.ID,
		Fault:   inbox.Fault{Class: class, Detail: fmt.Sprintf(format, args...)},
	}
}

// decode reads the payloads and checks the rules that need no database. It
// names every event that breaks one, so that the batch is tried again once.
func decode(events []event.Event, now time.Time) ([]orderEvent, error) {
	orders := make([]orderEvent, len(events))
	var refused inbox.Rejections
	for i, e := range events {
		o := orderEvent{Event: e}
		switch e.Type {
		case event.OrderCreated, event.OrderPaid, event.OrderCancelled, event.OrderRefunded:
			if err := json.Unmarshal(e.Payload, &o.state); err != nil {
				refused = append(refused, o.refuse(inbox.ClassRule, "payload: %v", err))
			} else if err := check(o, now); err != nil {
				refused = append(refused, o.refuse(inbox.ClassRule, "%v", err))
			}
		default:
			refused = append(refused, o.refuse(inbox.ClassUnknownSchema, "%s is not an order event that this build knows", e.Type))
		}
		orders[i] = o
	}
	if len(refused) > 0 {
		return nil, refused
	}
	return orders, nil
}

// check refuses a payload that contradicts its headers or itself. The numbers
// are the order's; billing copies them into documents and does no arithmetic of
// its own, so they have to agree here.
func check(o orderEvent, now time.Time) error {
	s := o.state
	_, currencyErr := money.ParseCurrency(string(s.Currency))
	switch {
	case s.OrderID != o.AggregateID:
		return fmt.Errorf("payload is of order %s, not %s", s.OrderID, o.AggregateID)
	case s.Version != o.AggregateVersion:
		return fmt.Errorf("payload is of version %d, not %d", s.Version, o.AggregateVersion)
	case currencyErr != nil:
		return currencyErr
	case s.CustomerID == "" || s.Status == "" || len(s.Lines) == 0:
		return errors.New("payload lacks customer, status or lines")
	case s.RefundedAmount < 0 || s.RefundedAmount > s.TotalAmount:
		return fmt.Errorf("refunded amount %d is not within the total %d", s.RefundedAmount, s.TotalAmount)
	}
	if err := plausible("event", o.OccurredAt, now); err != nil {
		return err
	}
	if err := checkSums("order", s.Taxes, s.NetAmount, s.TaxAmount, s.TotalAmount); err != nil {
		return err
	}
	var net int64
	for i, line := range s.Lines {
		product, err := money.Multiply(max(line.Quantity, 0), max(line.UnitAmount, 0))
		if err != nil || line.Quantity < 1 || line.UnitAmount < 0 || line.NetAmount != product {
			return fmt.Errorf("line %d: net amount %d is not %d times %d", i+1, line.NetAmount, line.Quantity, line.UnitAmount)
		}
		if net, err = money.Add(net, line.NetAmount); err != nil {
			return fmt.Errorf("lines: %w", err)
		}
	}
	if net != s.NetAmount {
		return fmt.Errorf("lines come to %d, the order's net amount is %d", net, s.NetAmount)
	}

	switch o.Type {
	case event.OrderPaid:
		if s.Payment == nil || s.Payment.Amount != s.TotalAmount {
			return fmt.Errorf("an order that is paid needs a payment of its total %d", s.TotalAmount)
		}
		return plausible("payment", s.Payment.PaidAt, now)
	case event.OrderRefunded:
		r := s.Refund
		if r == nil || r.Amount > s.RefundedAmount {
			return errors.New("an order that is refunded needs a refund within its refunded amount")
		}
		if err := checkSums("refund", r.Taxes, r.NetAmount, r.TaxAmount, r.Amount); err != nil {
			return err
		}
		return plausible("refund", r.RefundedAt, now)
	default:
		return nil
	}
}

func checkSums(what string, taxes []event.Tax, net, tax, total int64) error {
	if net < 0 || tax < 0 || total < 1 || net > money.MaxMinor || tax > money.MaxMinor || net+tax != total || total > money.MaxMinor {
		return fmt.Errorf("%s: net %d and tax %d do not make a total %d above zero", what, net, tax, total)
	}
	var sumNet, sumTax int64
	for _, rate := range taxes {
		if rate.NetAmount < 0 || rate.NetAmount > net || rate.TaxAmount < 0 || rate.TaxAmount > tax {
			return fmt.Errorf("%s: amounts at rate %s are out of range", what, rate.Rate)
		}
		sumNet += rate.NetAmount
		sumTax += rate.TaxAmount
		if sumNet > net || sumTax > tax {
			break
		}
	}
	if sumNet != net || sumTax != tax {
		return fmt.Errorf("%s: the tax rates come to net %d and tax %d, not %d and %d", what, sumNet, sumTax, net, tax)
	}
	return nil
}

// earliest is before any order of this system. A time before it is a wrong
// unit, as is one that is far ahead.
var earliest = time.Date(2020, time.January, 1, 0, 0, 0, 0, time.UTC)

func plausible(what string, at, now time.Time) error {
	if at.Before(earliest) || at.After(now.Add(24*time.Hour)) {
		return fmt.Errorf("%s at %s is not plausible", what, at.Format(time.RFC3339))
	}
	return nil
}

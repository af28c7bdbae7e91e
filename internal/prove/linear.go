package prove

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
)

// orderState is an order as a client may know it.
type orderState struct {
	exists   bool
	status   string
	version  int64
	total    int64
	refunded int64
}

// asked and outcome are a request about an order and its answer, as the model sees
// them.
type asked struct {
	action action
	amount int64
}

type outcome struct {
	status int
	code   string
	state  orderState // of an answer with the order in it
}

// orderModel is what an order does, one request after the other. A history of
// requests that overlap is linearizable if there is an order of them, each
// somewhere between its sending and its answer, in which the model answers as the
// service did.
var orderModel = porcupine.Model{
	Init: func() any { return orderState{} },
	Step: func(state, input, output any) (bool, any) {
		ok, next := step(state.(orderState), input.(asked), output.(outcome))
		return ok, next
	},
}

func step(s orderState, in asked, out outcome) (bool, orderState) {
	next := s
	switch in.action {
	case actPlace:
		next = orderState{exists: true, status: "created", version: 1, total: out.state.total}
		return out.status == 201 && !s.exists && out.state == next, next
	case actGet:
		return out.status == 200 && s.exists && out.state == s, s
	case actPay, actCancel:
		switch {
		case s.status == "paid":
			return out.code == "order-already-paid", s
		case s.status == "cancelled":
			return out.code == "order-cancelled", s
		}
		next.status, next.version = "paid", s.version+1
		if in.action == actCancel {
			next.status = "cancelled"
		}
		return out.status == 200 && s.exists && out.state == next, next
	case actRefund:
		switch {
		case s.status != "paid":
			return out.code == "order-not-paid", s
		case in.amount > s.total-s.refunded:
			return out.code == "refund-too-large", s
		}
		next.refunded, next.version = s.refunded+in.amount, s.version+1
		return out.status == 201, next
	default:
		return false, s // is never asked of it
	}
}

// operations are the requests about an order, with those of one key as one: it was
// done at some time between the first sending and the first answer.
func (k *knownOrder) operations() []porcupine.Operation {
	var history []porcupine.Operation
	for i, g := range k.groups {
		first := g.first()
		if first == nil {
			continue
		}
		called := first.called
		for _, o := range g.ops {
			called = min(called, o.called)
		}
		body := first.final.order
		history = append(history, porcupine.Operation{
			ClientId: i, Call: called, Return: first.returned,
			Input: asked{first.request.Action, first.request.Amount},
			Output: outcome{first.final.status, first.final.code, orderState{
				exists: body.ID != "", status: body.Status, version: body.Version, total: body.Total, refunded: body.Refunded,
			}},
			Metadata: first.id,
		})
	}
	return history
}

// longest bounds the search for one order; a dozen of requests take microseconds.
const longest = 20 * time.Second

// linearizable looks at the histories of the orders about which something was
// answered since the last time, and says how many there are in all.
func (k *known) linearizable() (histories int, violations []Violation) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	for id, order := range k.orders {
		histories++
		history := order.operations()
		if len(history) == order.examined || !order.wanted().certain {
			continue
		}
		order.examined = len(history)
		if porcupine.CheckOperationsTimeout(orderModel, history, longest) == porcupine.Ok {
			continue
		}
		slices.SortFunc(history, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
		var told []string
		for _, o := range history {
			in, out := o.Input.(asked), o.Output.(outcome)
			told = append(told, fmt.Sprintf("request %v %s %d: %d %s %s v%d", o.Metadata, in.action, in.amount, out.status, out.code, out.state.status, out.state.version))
		}
		violations = append(violations, Violation{
			Invariant: "I7", Kind: "not linearizable", Order: id,
			Detail: fmt.Sprintf("no order of the requests about order %s explains their answers: %s", id, strings.Join(told, "; ")),
		})
	}
	return histories, violations
}

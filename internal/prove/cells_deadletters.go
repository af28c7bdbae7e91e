package prove

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/operators"
)

// poisonedSchema is a version of the events' schema that no build knows.
const poisonedSchema = "99"

// deadLetterCells have an order's events wait behind one that nobody can read,
// until an operator decides.
func deadLetterCells() []Cell {
	return []Cell{{
		Name: "topic-poisoned-order", Groups: []string{"dead-letters"}, Bites: []Bite{BiteDeadLetters, BiteCrash},
		About: "an event that nobody can read comes before an order's payment: it and two refunds wait behind it, some in its batch and some in later ones, and an operator discards it",
		Run: func(ctx context.Context, w *World) error {
			key, err := operators.CreateKey(ctx, w.Sandbox.Owner, "prove")
			if err != nil {
				return err
			}
			if err := w.discardEarlier(ctx, key); err != nil {
				return err
			}
			tenant := w.Rand.IntN(len(w.run.load.clients))
			order, err := w.poisonedOrder(ctx, tenant)
			if err != nil {
				return err
			}
			w.Note("order %s is poisoned", order.ID)
			return w.waitBehind(ctx, tenant, order.ID, key)
		},
	}}
}

// discardEarlier sees to what an earlier run of prove that was broken off has left.
func (w *World) discardEarlier(ctx context.Context, key string) error {
	w.run.known.mutex.Lock()
	var orders []string
	for _, injection := range w.run.known.injections {
		if injection.want.Parks != "" {
			orders = append(orders, injection.want.Parks)
		}
	}
	w.run.known.mutex.Unlock()
	for _, order := range orders {
		if err := w.operate(ctx, key, "discard", map[string]any{"order_id": order, "classes": []string{"unknown-schema"}, "reason": "prove was broken off"}); err != nil {
			return err
		}
	}
	return nil
}

// poisonedOrder places an order, and once billing has it and is dead puts an event
// on the topic that says it is its next and that nobody can read, and has the order
// paid. When billing is back, it reads both at once.
func (w *World) poisonedOrder(ctx context.Context, tenant int) (*orderBody, error) {
	// What is on the topic by now is read first: the newest are kept alone, and of
	// much that is read at once, partition by partition, the order's might not be.
	if _, err := w.SentEvents(ctx, event.OrderEvents, 1); err != nil {
		return nil, err
	}
	line := lineBody{SKU: "poisoned", Description: "A poisoned book", Quantity: 1, UnitAmount: 1000, TaxRate: "0.19"}
	order, err := w.placeOne(ctx, tenant, placeBody{CustomerID: "probe", CustomerEmail: "probe@example.com", Currency: "EUR", Lines: []lineBody{line}})
	if err != nil {
		return nil, err
	}
	err = until(ctx, "billing knows the order", func() (is bool, err error) {
		err = w.Sandbox.Owner.QueryRow(ctx, "SELECT EXISTS (SELECT FROM order_billing WHERE order_id = $1)", order.ID).Scan(&is)
		return is, err
	})
	if err != nil {
		return nil, err
	}
	record, err := w.sentOf(ctx, order.ID, event.OrderCreated)
	if err != nil {
		return nil, err
	}
	record = withHeader(record, event.HeaderID, uuid.Must(uuid.NewV7()).String())
	record = withHeader(record, event.HeaderAggregateVersion, "2")
	record = withHeader(record, event.HeaderSchemaVersion, poisonedSchema)
	w.Begun()
	if err := w.Billing.Kill(); err != nil {
		return nil, err
	}
	err = w.put(ctx, Injected{DeadLetter: "unknown-schema", Parks: order.ID}, record)
	if err == nil {
		w.Bit(BiteDeadLetters, 1)
		err = w.changes(ctx, pay(-1, tenant, order.ID, "pi-"+order.ID))
	}
	if err == nil {
		_, err = w.sentOf(ctx, order.ID, event.OrderPaid)
	}
	return order, errors.Join(err, w.Billing.Start())
}

// sentOf waits for an order's event of a type on the topic.
func (w *World) sentOf(ctx context.Context, order string, kind event.Type) (found event.Record, err error) {
	err = until(ctx, "the order's event is sent", func() (bool, error) {
		sent, err := w.SentEvents(ctx, event.OrderEvents, newestKept)
		at := slices.IndexFunc(sent, func(r event.Record) bool {
			return string(r.Key) == order && headerValue(r, event.HeaderType) == string(kind)
		})
		if at >= 0 {
			found = sent[at]
		}
		return at >= 0, err
	})
	return found, err
}

// waitBehind has a poisoned order's payment wait, billing die, and refunds wait
// too; in the end the poisoned event is discarded. Whether they have waited is for
// the account to see.
func (w *World) waitBehind(ctx context.Context, tenant int, order, key string) error {
	poisoned := map[string]any{"order_id": order, "classes": []string{"unknown-schema"}}
	err := w.reached(ctx, order, 1, "open")
	if err == nil {
		err = w.Kill(w.Billing)
	}
	if err == nil {
		err = w.changes(ctx, refund(-1, tenant, order, 190), refund(-1, tenant, order, 1000))
	}
	if err == nil {
		err = w.reached(ctx, order, 3, "open")
	}
	if err == nil {
		err = w.othersFlow(ctx, tenant)
	}
	// To try it again changes nothing: it is no more readable than it was.
	if err == nil {
		err = w.operate(ctx, key, "retry", poisoned)
	}
	if err == nil {
		err = w.reached(ctx, order, 3, "open")
	}
	// Whatever was before: nothing is to be left waiting.
	poisoned["reason"] = "made by prove, and nobody can read it"
	err = errors.Join(err, w.operate(ctx, key, "discard", poisoned))
	w.Ended()
	if err != nil {
		return err
	}
	return w.reached(ctx, order, 3, "resolved")
}

// reached waits until billing has come to so many of an order's events after its
// first: each is applied, or is a letter in a state.
func (w *World) reached(ctx context.Context, order string, events int, state string) error {
	return until(ctx, "billing has come to the order's events", func() (bool, error) {
		var count int
		err := w.Sandbox.Owner.QueryRow(ctx, `
			SELECT count(*) FROM outbox_events AS o
			WHERE o.aggregate_id = $1 AND o.aggregate_type = 'order' AND o.aggregate_version > 1
			  AND (EXISTS (SELECT FROM processed_events AS done WHERE done.event_id = o.id)
			       OR EXISTS (SELECT FROM dead_letters AS l WHERE l.event_id = o.id AND l.state = $2))`, order, state).Scan(&count)
		return count >= events, err
	})
}

// othersFlow requires that another order is not held up.
func (w *World) othersFlow(ctx context.Context, tenant int) error {
	other, err := w.run.load.probe(ctx, tenant)
	if err != nil {
		return err
	}
	return until(ctx, "another order has its whole receipt", func() (bool, error) {
		return w.run.load.receiptComplete(ctx, tenant, other)
	})
}

// placeOne places an order of the cell's own, which the account knows like any.
func (w *World) placeOne(ctx context.Context, tenant int, body placeBody) (*orderBody, error) {
	text, _ := json.Marshal(body) // texts and numbers
	first := place(-1, tenant, string(text))
	first.Probe = true
	o, _, err := w.run.load.insist(ctx, w.run.load.lastOp.Add(1), &first)
	if err != nil {
		return nil, err
	}
	order := placed(o)
	if order == nil {
		return nil, fmt.Errorf("an order was refused with %d %s", o.final.status, o.final.code)
	}
	return order, nil
}

// changes sends requests about an order of the cell's own, one after the other.
func (w *World) changes(ctx context.Context, requests ...request) error {
	for _, r := range requests {
		r.Probe = true
		o, _, err := w.run.load.insist(ctx, w.run.load.lastOp.Add(1), &r)
		if err != nil {
			return err
		}
		if o.final.status >= http.StatusBadRequest {
			return fmt.Errorf("%s was refused with %d %s", r.Path, o.final.status, o.final.code)
		}
	}
	return nil
}

// operate does what an operator would, until billing's worker has answered: a
// second time changes nothing.
func (w *World) operate(ctx context.Context, key, act string, body map[string]any) error {
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	if err := w.Billing.WaitReady(); err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, w.Billing.URL()+operators.Path+"dead-letters/"+act, bytes.NewReader(text))
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+key)
	request.Header.Set("Content-Type", "application/json")
	return until(ctx, "the operator is answered", func() (bool, error) {
		request := request.Clone(ctx)
		request.Body = io.NopCloser(bytes.NewReader(text))
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return false, err
		}
		defer response.Body.Close()
		answer, err := io.ReadAll(response.Body)
		if err == nil && response.StatusCode != http.StatusOK {
			err = fmt.Errorf("%s was answered %d %.300s", act, response.StatusCode, answer)
		}
		return err == nil, err
	})
}

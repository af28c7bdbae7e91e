package httpapi

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/labstack/echo/v4"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/invoices"
	"github.com/onceledger/onceledger/internal/ledger"
	"github.com/onceledger/onceledger/internal/orders"
)

// receipt is an order's whole chain, as far as it has got. It is complete when it
// waits for nothing and nothing of it was discarded. What was discarded is not
// waited for, and never completes it.
type receipt struct {
	Order       orderResponse        `json:"order"`
	Complete    bool                 `json:"complete"`
	WaitsFor    []string             `json:"waits_for"`
	Discarded   []string             `json:"discarded,omitempty"`
	Events      []receiptEvent       `json:"events"`
	Invoice     *invoiceResponse     `json:"invoice"`
	CreditNotes []creditNoteResponse `json:"credit_notes"`
	Ledger      []entryResponse      `json:"ledger_entries"`
	DeadLetters []receiptDeadLetter  `json:"dead_letters"`
	Missing     []receiptMissing     `json:"missing_versions,omitempty"`
}

// receiptMissing is a version of the order that billing has not seen although it
// has seen a later one.
type receiptMissing struct {
	Version int64     `json:"version"`
	Since   time.Time `json:"missing_since"`
}

// receiptEvent is an event of the order, from the outbox, and where each
// consumer applied it from.
type receiptEvent struct {
	EventID  uuid.UUID        `json:"event_id"`
	Type     string           `json:"type"`
	Version  int64            `json:"version"`
	OutboxAt time.Time        `json:"outbox_at"`
	Topic    string           `json:"topic"`
	Applied  []receiptApplied `json:"applied"`
}

type receiptApplied struct {
	Consumer  string    `json:"consumer"`
	Topic     string    `json:"topic"`
	Partition int32     `json:"partition"`
	Offset    int64     `json:"offset"`
	AppliedAt time.Time `json:"applied_at"`
}

type receiptDeadLetter struct {
	ID        uuid.UUID  `json:"id"`
	Consumer  string     `json:"consumer"`
	EventID   *uuid.UUID `json:"event_id"`
	Class     string     `json:"class"`
	Detail    string     `json:"detail"`
	State     string     `json:"state"`
	Topic     string     `json:"topic"`
	Partition int32      `json:"partition"`
	Offset    int64      `json:"offset"`
	FailedAt  time.Time  `json:"failed_at"`
}

func (a *API) getReceipt(c echo.Context) error {
	id, err := pathID(c, orders.ErrNotFound)
	if err != nil {
		return err
	}
	return a.read(c, func(ctx context.Context, tx pgx.Tx, tenantID uuid.UUID) (any, error) {
		return readReceipt(ctx, tx, tenantID, id)
	})
}

// readReceipt reads everything in the one moment that tx sees.
func readReceipt(ctx context.Context, tx pgx.Tx, tenantID, id uuid.UUID) (receipt, error) {
	order, err := orders.GetTx(ctx, tx, tenantID, id)
	if err != nil {
		return receipt{}, err
	}
	answer := receipt{Order: orderBody(order), WaitsFor: []string{}}

	if answer.Events, err = receiptEvents(ctx, tx, tenantID, id); err != nil {
		return receipt{}, err
	}
	if answer.DeadLetters, err = receiptDeadLetters(ctx, tx, tenantID, id); err != nil {
		return receipt{}, err
	}
	missing, err := db.New().MissingVersionListByOrder(ctx, tx, tenantID, id)
	if err != nil {
		return receipt{}, fmt.Errorf("list missing versions: %w", err)
	}
	for _, row := range missing {
		answer.Missing = append(answer.Missing, receiptMissing{row.Version, row.NoticedAt.UTC()})
	}
	invoice, err := invoices.GetByOrderTx(ctx, tx, tenantID, id)
	switch {
	case err == nil:
		body := invoiceBody(invoice)
		answer.Invoice = &body
	case !errors.Is(err, invoices.ErrNotFound):
		return receipt{}, err
	}
	notes, err := invoices.CreditNotesByOrderTx(ctx, tx, tenantID, id)
	if err != nil {
		return receipt{}, err
	}
	answer.CreditNotes = creditNoteBodies(notes)
	entries, err := ledger.EntriesByOrderTx(ctx, tx, tenantID, id)
	if err != nil {
		return receipt{}, err
	}
	answer.Ledger = entryBodies(entries)

	answer.WaitsFor = waitsFor(answer)
	answer.Discarded = discarded(answer)
	answer.Complete = len(answer.WaitsFor)+len(answer.Discarded) == 0
	return answer, nil
}

func receiptEvents(ctx context.Context, tx pgx.Tx, tenantID, id uuid.UUID) ([]receiptEvent, error) {
	rows, err := db.New().OutboxListByAggregate(ctx, tx, tenantID, id)
	if err != nil {
		return nil, fmt.Errorf("list events: %w", err)
	}
	events := make([]receiptEvent, len(rows))
	ids := make([]uuid.UUID, len(rows))
	at := make(map[uuid.UUID]*receiptEvent, len(rows))
	for i, row := range rows {
		ids[i] = row.ID
		events[i] = receiptEvent{
			EventID: row.ID, Type: row.EventType, Version: row.AggregateVersion,
			OutboxAt: row.OccurredAt.UTC(), Topic: event.Topic(row.AggregateType), Applied: []receiptApplied{},
		}
		at[row.ID] = &events[i]
	}
	applied, err := db.New().ProcessedEventListByIDs(ctx, tx, tenantID, ids)
	if err != nil {
		return nil, fmt.Errorf("list applied events: %w", err)
	}
	for _, row := range applied {
		at[row.EventID].Applied = append(at[row.EventID].Applied, receiptApplied{
			Consumer: row.Consumer, Topic: row.Topic, Partition: row.Partition, Offset: row.Offset, AppliedAt: row.ProcessedAt.UTC(),
		})
	}
	return events, nil
}

func receiptDeadLetters(ctx context.Context, tx pgx.Tx, tenantID, id uuid.UUID) ([]receiptDeadLetter, error) {
	rows, err := db.New().DeadLetterListByAggregate(ctx, tx, &tenantID, &id)
	if err != nil {
		return nil, fmt.Errorf("list dead letters: %w", err)
	}
	letters := make([]receiptDeadLetter, len(rows))
	for i, row := range rows {
		letters[i] = receiptDeadLetter{
			ID: row.ID, Consumer: row.Consumer, EventID: row.EventID, Class: row.Class, Detail: row.Detail, State: row.State,
			Topic: row.Topic, Partition: row.Partition, Offset: row.Offset, FailedAt: row.FirstFailedAt.UTC(),
		}
	}
	return letters, nil
}

// waitsFor names what is still to come: order events that billing has not
// applied, versions that it has noticed to be missing, and dead letters that a
// person has to see to.
func waitsFor(r receipt) []string {
	waits := []string{}
	dead, gone := deadEvents(r, "open"), deadEvents(r, "discarded")
	missing := make(map[int64]time.Time, len(r.Missing))
	for _, m := range r.Missing {
		missing[m.Version] = m.Since
	}
	for _, e := range r.Events {
		if e.Topic != event.OrderEvents {
			continue
		}
		since, isMissing := missing[e.Version]
		delete(missing, e.Version)
		letter, isDead := dead[e.EventID]
		_, isGone := gone[e.EventID]
		switch {
		case len(e.Applied) > 0:
		case isDead:
			waits = append(waits, fmt.Sprintf("%s, version %d: dead letter %s (%s: %s)", e.Type, e.Version, letter.ID, letter.Class, letter.Detail))
		case isGone:
		case isMissing:
			waits = append(waits, fmt.Sprintf("%s, version %d: missing since %s, when billing saw a later version",
				e.Type, e.Version, since.Format(time.RFC3339)))
		default:
			waits = append(waits, fmt.Sprintf("%s, version %d: to be published and applied by billing", e.Type, e.Version))
		}
	}
	for _, m := range r.Missing { // no longer in the outbox
		if _, still := missing[m.Version]; still {
			waits = append(waits, fmt.Sprintf("version %d: missing since %s, when billing saw a later version", m.Version, m.Since.Format(time.RFC3339)))
		}
	}
	return waits
}

// discarded names the order's events of which an operator decided that they are not
// to be applied. What was discarded and is none of its events, such as a forged one,
// takes nothing from it. Who decided is the operators' business.
func discarded(r receipt) []string {
	var texts []string
	gone := deadEvents(r, "discarded")
	for _, e := range r.Events {
		if letter, isGone := gone[e.EventID]; isGone && len(e.Applied) == 0 {
			texts = append(texts, fmt.Sprintf("%s, version %d: discarded, and not applied: dead letter %s (%s: %s)",
				e.Type, e.Version, letter.ID, letter.Class, letter.Detail))
		}
	}
	return texts
}

// deadEvents is the dead letters in a state, by their events. One whose id was
// used again says nothing of the event that has the id by right.
func deadEvents(r receipt, state string) map[uuid.UUID]receiptDeadLetter {
	dead := make(map[uuid.UUID]receiptDeadLetter)
	for _, letter := range r.DeadLetters {
		if letter.EventID != nil && letter.State == state && (state == "open" || letter.Class != "id-reused") {
			dead[*letter.EventID] = letter
		}
	}
	return dead
}

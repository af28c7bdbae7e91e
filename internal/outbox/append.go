package outbox

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/failure"
)

// ErrPayloadTooLarge refuses an event that no broker would take, before it is
// in the log and stops the relay.
var ErrPayloadTooLarge = failure.New(failure.RuleViolated, "payload-too-large",
	"The event's payload is larger than a message may be.")

// Append writes an event in the caller's transaction: it is published if that
// commits, and never otherwise. Events of one aggregate are published in the
// order of their commits, so the caller holds the aggregate's row lock.
func Append(ctx context.Context, tx pgx.Tx, e event.Event) error {
	return AppendMany(ctx, tx, []event.Event{e})
}

// AppendMany is Append for many events, in their order, with one statement for
// each run of events of the same aggregate type, schema version and time.
func AppendMany(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	for len(events) > 0 {
		run := 1
		for run < len(events) && sameRun(events[0], events[run]) {
			run++
		}
		if err := appendRun(ctx, tx, events[:run]); err != nil {
			return err
		}
		events = events[run:]
	}
	return nil
}

func sameRun(a, b event.Event) bool {
	return a.AggregateType == b.AggregateType && a.SchemaVersion == b.SchemaVersion &&
		a.OccurredAt.Truncate(time.Microsecond).Equal(b.OccurredAt.Truncate(time.Microsecond))
}

func appendRun(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	n := len(events)
	params := db.OutboxInsertManyParams{
		Ids:               make([]uuid.UUID, n),
		TenantIds:         make([]uuid.UUID, n),
		AggregateType:     events[0].AggregateType,
		AggregateIds:      make([]uuid.UUID, n),
		AggregateVersions: make([]int64, n),
		EventTypes:        make([]string, n),
		SchemaVersion:     events[0].SchemaVersion,
		Payloads:          make([]string, n),
		Traceparents:      make([]string, n),
		OccurredAt:        events[0].OccurredAt,
	}
	for i, e := range events {
		if len(e.Payload) > event.MaxPayload {
			return ErrPayloadTooLarge.Withf("%s of %s has %d bytes; %d are allowed.",
				e.Type, e.AggregateID, len(e.Payload), event.MaxPayload)
		}
		params.Ids[i] = e.ID
		params.TenantIds[i] = e.TenantID
		params.AggregateIds[i] = e.AggregateID
		params.AggregateVersions[i] = e.AggregateVersion
		params.EventTypes[i] = string(e.Type)
		params.Payloads[i] = string(e.Payload)
		params.Traceparents[i] = e.Traceparent
	}
	if err := db.New().OutboxInsertMany(ctx, tx, params); err != nil {
		return fmt.Errorf("append %d events to the outbox: %w", n, err)
	}
	return nil
}

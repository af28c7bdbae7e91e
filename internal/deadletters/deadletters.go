// Package deadletters is what a person does with dead letters: find them, look at
// them, try them again, or decide that they are not to be applied.
//
// To try again is an ordinary delivery: the same gate, the same handler, the same
// event ids, so what was applied in the meantime is a duplicate and nothing
// happens twice. All open letters of an aggregate are tried together, in the order
// of their versions, in one transaction that holds all of them; what is stored
// behind them at that moment comes before that transaction or after it. To
// discard a letter closes it for good, and tries those that waited behind it in
// the same transaction. So no letter ever waits behind nothing.
//
// A preview does exactly the same and rolls it back.
//
// What was decided, by whom and why, is a row that nobody can change.
package deadletters

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/failure"
	"github.com/onceledger/onceledger/internal/inbox"
)

// The failures that a caller can act on.
var (
	ErrNotFound  = failure.New(failure.NotFound, "dead-letter-not-found", "There is no such dead letter.")
	ErrSelection = failure.New(failure.Invalid, "dead-letter-selection-invalid", "The dead letters asked for are not named rightly.")
	ErrReason    = failure.New(failure.Invalid, "discard-reason-missing", "To discard a dead letter needs a reason.")
	ErrBusy      = failure.New(failure.Conflict, "dead-letter-busy", "Somebody else works on these dead letters at the moment.")
)

// The states of a letter. What is resolved or discarded stays so.
const (
	StateOpen      = "open"
	StateResolved  = "resolved"
	StateDiscarded = "discarded"
)

// Service sees to dead letters.
type Service struct {
	pool    *pgxpool.Pool
	inboxes map[string]*inbox.Inbox
}

// New makes a service for the consumers of these inboxes, by their names.
func New(pool *pgxpool.Pool, inboxes map[string]*inbox.Inbox) *Service {
	return &Service{pool: pool, inboxes: inboxes}
}

// Filter says which letters. What is left empty does not matter.
type Filter struct {
	IDs      []uuid.UUID   `json:"ids,omitempty"`
	Consumer string        `json:"consumer,omitempty"`
	TenantID uuid.UUID     `json:"tenant_id,omitzero"`
	OrderID  uuid.UUID     `json:"order_id,omitzero"` // the aggregate, which is the records' key
	EventID  uuid.UUID     `json:"event_id,omitzero"`
	Classes  []inbox.Class `json:"classes,omitempty"`
	States   []string      `json:"states,omitempty"`
	Since    time.Time     `json:"since,omitzero"` // of the first failure
	Until    time.Time     `json:"until,omitzero"`
}

// Empty reports whether the filter leaves nothing out.
func (f Filter) Empty() bool {
	return len(f.IDs)+len(f.Classes)+len(f.States) == 0 && f.Consumer == "" && f.TenantID == uuid.Nil &&
		f.OrderID == uuid.Nil && f.EventID == uuid.Nil && f.Since.IsZero() && f.Until.IsZero()
}

func (f Filter) check() error {
	var faults []failure.Field
	for _, class := range f.Classes {
		if !slices.Contains(inbox.Classes(), class) {
			faults = append(faults, failure.Field{Field: "class", Detail: fmt.Sprintf("%q is none of %s", class, list(inbox.Classes()))})
		}
	}
	states := []string{StateOpen, StateResolved, StateDiscarded}
	for _, state := range f.States {
		if !slices.Contains(states, state) {
			faults = append(faults, failure.Field{Field: "state", Detail: fmt.Sprintf("%q is none of %s", state, list(states))})
		}
	}
	if !f.Since.IsZero() && !f.Until.IsZero() && !f.Since.Before(f.Until) {
		faults = append(faults, failure.Field{Field: "until", Detail: "must be after since"})
	}
	if slices.Contains(f.IDs, uuid.Nil) {
		faults = append(faults, failure.Field{Field: "id", Detail: "is empty"})
	}
	if strings.ContainsRune(f.Consumer, 0) || !utf8.ValidString(f.Consumer) {
		faults = append(faults, failure.Field{Field: "consumer", Detail: "is not a name"})
	}
	if len(faults) > 0 {
		return ErrSelection.WithFields(faults...)
	}
	return nil
}

func list[T ~string](names []T) string {
	texts := make([]string, len(names))
	for i, name := range names {
		texts[i] = string(name)
	}
	return strings.Join(texts, ", ")
}

// Letter is what is known of a dead letter besides its record.
type Letter struct {
	ID            uuid.UUID   `json:"id"`
	State         string      `json:"state"`
	Class         inbox.Class `json:"class"`
	Detail        string      `json:"detail"`
	Consumer      string      `json:"consumer"`
	Topic         string      `json:"topic"`
	Partition     int32       `json:"partition"`
	Offset        int64       `json:"offset"`
	EventID       *uuid.UUID  `json:"event_id"`
	EventType     *string     `json:"event_type"`
	TenantID      *uuid.UUID  `json:"tenant_id"`
	OrderID       *uuid.UUID  `json:"order_id"`
	Version       *int64      `json:"version"`
	Attempts      int32       `json:"attempts"`
	FirstFailedAt time.Time   `json:"first_failed_at"`
	LastFailedAt  time.Time   `json:"last_failed_at"`
}

func letterOf(row db.DeadLetter) Letter {
	return Letter{
		ID: row.ID, State: row.State, Class: inbox.Class(row.Class), Detail: row.Detail, Consumer: row.Consumer,
		Topic: row.Topic, Partition: row.Partition, Offset: row.Offset,
		EventID: row.EventID, EventType: row.EventType, TenantID: row.TenantID, OrderID: row.AggregateID, Version: row.AggregateVersion,
		Attempts: row.Attempts, FirstFailedAt: row.FirstFailedAt.UTC(), LastFailedAt: row.LastFailedAt.UTC(),
	}
}

// LargestPage is how many letters are listed at once at most.
const LargestPage = 1000

// List is the letters after one, the oldest first, and whether there are more.
func (s *Service) List(ctx context.Context, filter Filter, after uuid.UUID, limit int) (letters []Letter, more bool, err error) {
	if err := filter.check(); err != nil {
		return nil, false, err
	}
	if limit < 1 || limit > LargestPage {
		return nil, false, ErrSelection.WithFields(failure.Field{Field: "limit", Detail: fmt.Sprintf("must be a whole number from 1 to %d", LargestPage)})
	}
	letters, err = s.find(ctx, s.pool, filter, after, limit+1)
	if len(letters) > limit {
		return letters[:limit], true, err
	}
	return letters, false, err
}

func (s *Service) find(ctx context.Context, conn db.DBTX, f Filter, after uuid.UUID, limit int) ([]Letter, error) {
	params := db.DeadLetterListParams{
		After: after, Ids: f.IDs, States: f.States, Consumer: pointer(f.Consumer), TenantID: pointer(f.TenantID),
		AggregateID: pointer(f.OrderID), EventID: pointer(f.EventID), Since: pointer(f.Since), Until: pointer(f.Until), PageSize: int32(limit),
	}
	for _, class := range f.Classes {
		params.Classes = append(params.Classes, string(class))
	}
	// An array that is null has no number of elements.
	if params.Ids == nil {
		params.Ids = []uuid.UUID{}
	}
	if params.States == nil {
		params.States = []string{}
	}
	if params.Classes == nil {
		params.Classes = []string{}
	}
	rows, err := db.New().DeadLetterList(ctx, conn, params)
	if err != nil {
		return nil, fmt.Errorf("list dead letters: %w", err)
	}
	letters := make([]Letter, len(rows))
	for i, row := range rows {
		letters[i] = letterOf(db.DeadLetter{
			ID: row.ID, State: row.State, Class: row.Class, Detail: row.Detail, Consumer: row.Consumer,
			Topic: row.Topic, Partition: row.Partition, Offset: row.Offset,
			EventID: row.EventID, EventType: row.EventType, TenantID: row.TenantID, AggregateID: row.AggregateID, AggregateVersion: row.AggregateVersion,
			Attempts: row.Attempts, FirstFailedAt: row.FirstFailedAt, LastFailedAt: row.LastFailedAt,
		})
	}
	return letters, nil
}

// pointer is nil for what is not asked for.
func pointer[T comparable](value T) *T {
	var zero T
	if value == zero {
		return nil
	}
	return &value
}

// get reads a letter with its record.
func (s *Service) get(ctx context.Context, id uuid.UUID) (db.DeadLetter, error) {
	row, err := db.New().DeadLetterGet(ctx, s.pool, id)
	if errors.Is(err, pgx.ErrNoRows) {
		return row, ErrNotFound.Withf("No dead letter has the id %s.", id)
	}
	if err != nil {
		return row, fmt.Errorf("read dead letter: %w", err)
	}
	return row, nil
}

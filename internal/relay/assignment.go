package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceledger/onceledger/internal/db"
)

// Kind is one of the ways in which the outbox gets to Kafka.
type Kind string

// The kinds. KindNone is nobody: a switch from one to another is under way.
const (
	KindWAL      Kind = "wal"
	KindPoll     Kind = "poll"
	KindDebezium Kind = "debezium"
	KindNone     Kind = "none"
)

// ParseKind reads the name of a relay that can be switched to.
func ParseKind(name string) (Kind, error) {
	if kind := Kind(name); slices.Contains([]Kind{KindWAL, KindPoll, KindDebezium}, kind) {
		return kind, nil
	}
	return "", fmt.Errorf("there is no relay %q: choose wal, poll or debezium", name)
}

// Assigned is the relay whose job it is to carry the outbox.
func Assigned(ctx context.Context, conn db.DBTX, slot string) (Kind, error) {
	row, err := db.New().RelayAssignmentGet(ctx, conn, slot)
	if errors.Is(err, pgx.ErrNoRows) {
		return KindWAL, nil
	}
	if err != nil {
		return "", fmt.Errorf("read relay_assignment: %w", err)
	}
	return Kind(row.Relay), nil
}

// assignmentEvery is how often a relay looks whether the job is still its own.
const assignmentEvery = 500 * time.Millisecond

var errReassigned = errors.New("another relay is to carry the outbox")

// untilReassigned is done when the job is no longer that of a kind.
func (r *Relay) untilReassigned(ctx context.Context, pool *pgxpool.Pool, kind Kind) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		for ctx.Err() == nil {
			sleep(ctx, assignmentEvery)
			if now, err := Assigned(ctx, pool, r.config.Slot); err == nil && now != kind {
				cancel(errReassigned)
			}
		}
	}()
	return ctx, func() { cancel(nil) }
}

// standAside watches while the job is not ours, and says whether it gets done.
func (r *Relay) standAside(ctx context.Context, pool *pgxpool.Pool, kind Kind) error {
	for ctx.Err() == nil {
		now, err := Assigned(ctx, pool, r.config.Slot)
		if err != nil {
			return err
		}
		if now != kind {
			return errReassigned
		}
		row, err := db.New().RelayFault(ctx, pool, r.config.Publication, r.config.Slot)
		if err != nil {
			return fmt.Errorf("look after the other relay: %w", err)
		}
		r.setState(ctx, nil, StateDelegated, row)
		sleep(ctx, assignmentEvery)
	}
	return nil
}

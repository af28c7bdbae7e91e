package main

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceledger/onceledger/internal/config"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/janitor"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/pressure"
)

// retentionEvery is how often the brokers are asked until they have answered.
const retentionEvery = time.Second

// openRetention has the retention contract checked before billing or balances
// apply anything. Where it does not hold the worker ends: to go on would be to forget
// events that can still arrive. Brokers that do not answer are waited for; as
// long as they do not, there is nothing to apply.
func (w *worker) openRetention(context.Context) error {
	if !w.env.Has(config.RoleBilling) && !w.env.Has(config.RoleBalances) && !w.env.Has(config.RoleJanitor) {
		return nil
	}
	w.retentionHolds = make(chan struct{})
	var fault atomic.Pointer[string]
	fault.Store(new("not looked at yet"))
	w.roles = append(w.roles, func(ctx context.Context) error {
		for {
			err := w.checkRetention(ctx)
			if err == nil {
				fault.Store(new(""))
				close(w.retentionHolds)
				return nil
			}
			if errors.Is(err, janitor.ErrRetention) {
				return fmt.Errorf("the worker refuses to start: %w", err)
			}
			if text := err.Error(); ctx.Err() == nil && text != *fault.Swap(&text) {
				w.log.WarnContext(ctx, "the topics' retention is not known yet", "error", err)
			}
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(retentionEvery):
			}
		}
	})
	w.addCheck("retention", func() (bool, string) { return *fault.Load() == "", *fault.Load() })
	return nil
}

// afterRetention runs a role once the contract is known to hold.
func (w *worker) afterRetention(role func(context.Context) error) func(context.Context) error {
	return func(ctx context.Context) error {
		select {
		case <-ctx.Done():
			return nil
		case <-w.retentionHolds:
			return role(ctx)
		}
	}
}

// checkRetention holds what this worker is configured with against the topic
// whose events the dedupe table knows. janitor.ErrRetention is a contract that
// does not hold. billing.events may be kept for ever: who reads it has a memory of
// its own.
func (w *worker) checkRetention(ctx context.Context) error {
	topics, err := kafka.TopicRetention(ctx, w.env.Brokers, event.OrderEvents)
	if err != nil {
		return err
	}
	return janitor.Retention{
		Dedupe: w.env.DedupeWindow, Outbox: w.env.OutboxRetention, Replay: w.env.ReplayWindow, Topics: topics,
	}.Check()
}

// janitor is the janitor as this worker is configured, with the metrics of the
// relay's slots, which need no relay.
func (w *worker) janitor(pool *pgxpool.Pool) (janitor.Janitor, *pressure.Slots) {
	return janitor.Janitor{
		Pool: pool, Log: w.log, Now: w.now,
		Drop: janitor.DropPlan{
			Slot: w.env.Slot, Outbox: w.env.OutboxRetention, Dedupe: w.env.DedupeWindow, Contract: w.checkRetention,
		},
		KeepKey: w.env.KeyRetention,
		Metrics: janitor.NewMetrics(w.registry),
	}, pressure.NewSlots(pool, w.env.Slot, w.log, w.registry, w.now)
}

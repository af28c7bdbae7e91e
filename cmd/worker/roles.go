package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/onceledger/onceledger/internal/balances"
	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/config"
	"github.com/onceledger/onceledger/internal/crash"
	"github.com/onceledger/onceledger/internal/deadletters"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/janitor"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/operators"
	"github.com/onceledger/onceledger/internal/postgres"
	"github.com/onceledger/onceledger/internal/relay"
	"github.com/onceledger/onceledger/internal/telemetry"
)

// transactionTimeout bounds one batch. It is well below the time after which
// Kafka takes a silent consumer's partitions away.
const transactionTimeout = 30 * time.Second

// operatorLockTimeout is how long an operator waits for a batch that holds what is
// to be seen to. A batch takes milliseconds.
const operatorLockTimeout = 5 * time.Second

// worker is what the roles of one process share, and what each adds to it.
type worker struct {
	env      config.Worker
	log      *slog.Logger
	registry *prometheus.Registry
	now      func() time.Time

	roles   []func(context.Context) error
	checks  []telemetry.Check
	closers []func()

	operators func() http.Handler // what operators may ask; nil without the role billing

	retentionHolds chan struct{} // closed once the retention contract is known to hold
}

func (w *worker) close() {
	for _, closer := range slices.Backward(w.closers) {
		closer()
	}
}

// openPool connects to the address that a variable holds.
func (w *worker) openPool(ctx context.Context, variable, url, role string, maxConns int32) (*pgxpool.Pool, error) {
	pool, err := postgres.Open(ctx, url, postgres.Options{
		ApplicationName:    "onceledger-" + role,
		MaxConns:           maxConns,
		TransactionTimeout: transactionTimeout,
		LockTimeout:        transactionTimeout,
		Direct:             role == config.RoleJanitor, // which works under a lock of its session
		Wrap:               crash.AfterCommit(crash.WorkerCommitSentNotHeard),
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", variable, err)
	}
	w.closers = append(w.closers, pool.Close)
	return pool, nil
}

// openBilling reads order.events and applies them in batches, each one
// transaction; its offsets are committed after that.
func (w *worker) openBilling(ctx context.Context) error {
	if !w.env.Has(config.RoleBilling) {
		return nil
	}
	pool, err := w.openPool(ctx, "DATABASE_URL", w.env.DatabaseURL, config.RoleBilling, 4)
	if err != nil {
		return err
	}
	consumer, err := kafka.NewConsumer(kafka.ConsumerConfig{
		Brokers:      w.env.Brokers,
		Group:        billing.Consumer,
		InstanceID:   w.env.ID,
		ClientID:     "onceledger-billing",
		Topics:       []string{event.OrderEvents},
		MaxBatch:     w.env.Batch,
		DrainTimeout: w.env.ShutdownTimeout,
		Log:          w.log,
		Metrics:      w.registry,
	})
	if err != nil {
		return err
	}
	in := inbox.New(inbox.Config{
		Consumer: billing.Consumer,
		Pool:     pool,
		Handler:  billing.Handler{Now: w.now},
		Writers:  w.env.Writers,
		Log:      w.log,
		Metrics:  w.registry,
		Now:      w.now,
	})
	w.roles = append(w.roles, w.afterRetention(func(ctx context.Context) error { return consumer.Run(ctx, in.Process) }))
	w.addCheck(config.RoleBilling, consumer.Ready)
	return w.openDeadLetters(ctx, in)
}

// openDeadLetters shows the dead letters of billing, and has operators see to them
// over HTTP. Connections of their own leave billing its.
func (w *worker) openDeadLetters(ctx context.Context, in *inbox.Inbox) error {
	pool, err := postgres.Open(ctx, w.env.DatabaseURL, postgres.Options{
		ApplicationName:    "onceledger-operator",
		MaxConns:           3,
		TransactionTimeout: transactionTimeout,
		LockTimeout:        operatorLockTimeout,
	})
	if err != nil {
		return fmt.Errorf("DATABASE_URL: %w", err)
	}
	w.closers = append(w.closers, pool.Close)
	watch := deadletters.NewWatch(deadletters.WatchConfig{
		Pool: pool, Consumer: billing.Consumer, GapWait: w.env.GapWait, Log: w.log, Metrics: w.registry, Now: w.now,
	})
	w.roles = append(w.roles, watch.Run)
	w.checks = append(w.checks, telemetry.Check{Name: "dead-letters", Note: watch.Note})
	w.operators = func() http.Handler {
		return operators.Handler(pool, deadletters.New(pool, map[string]*inbox.Inbox{billing.Consumer: in}), w.log)
	}
	return nil
}

// handler is what the worker answers over HTTP.
func (w *worker) handler() http.Handler {
	own := telemetry.Handler(w.registry, w.checks)
	if w.operators == nil {
		return own
	}
	mux := http.NewServeMux()
	mux.Handle("/", own)
	mux.Handle(operators.Path, w.operators())
	return mux
}

// openBalances keeps the accounts' balances on a topic, from billing.events and
// in Kafka transactions.
func (w *worker) openBalances(context.Context) error {
	if !w.env.Has(config.RoleBalances) {
		return nil
	}
	skip := make(map[balances.Place]bool)
	for _, record := range w.env.Skip {
		skip[balances.Place(record)] = true
	}
	stage, err := balances.New(balances.Config{Window: w.env.DedupeWindow, Skip: skip, Log: w.log, Metrics: w.registry})
	if err != nil {
		return err
	}
	id := "onceledger-" + config.RoleBalances
	if w.env.ID != "" {
		id += "-" + w.env.ID
	}
	transactor, err := kafka.NewTransactor(kafka.TransactorConfig{
		ConsumerConfig: kafka.ConsumerConfig{
			Brokers:      w.env.Brokers,
			Group:        balances.Group,
			InstanceID:   w.env.ID,
			ClientID:     "onceledger-balances",
			Topics:       []string{event.BillingEvents},
			DrainTimeout: w.env.ShutdownTimeout,
			Log:          w.log,
			Metrics:      w.registry,
		},
		TransactionalID: id,
		State:           []string{event.LedgerBalances, event.LedgerBalanceOrders},
		Watch:           []string{event.OrderEvents},
	}, stage)
	if err != nil {
		return err
	}
	w.roles = append(w.roles, w.afterRetention(transactor.Run))
	w.addCheck(config.RoleBalances, transactor.Ready)
	return nil
}

// openRelay carries the outbox to Kafka.
func (w *worker) openRelay(context.Context) error {
	if !w.env.Has(config.RoleRelay) {
		return nil
	}
	if _, err := pgconn.ParseConfig(w.env.RelayDatabaseURL); err != nil {
		// The relay would wait for it to mend. What err quotes may be a password.
		return errors.New("RELAY_DATABASE_URL: want postgres://user:password@host:5432/name")
	}
	relay, err := relay.NewRelay(relay.Config{
		URL:  w.env.RelayDatabaseURL,
		Slot: w.env.Slot,
		NewPublisher: func(reports relay.Reports) (relay.Publisher, error) {
			return kafka.NewProducer(kafka.ProducerConfig{
				Brokers:   w.env.Brokers,
				ClientID:  "onceledger-relay",
				Log:       w.log,
				Delivered: reports.Delivered,
				Reachable: reports.Reachable,
			})
		},
		Log:         w.log,
		Registry:    w.registry,
		PollEvery:   w.env.PollEvery,
		StopTimeout: w.env.ShutdownTimeout / 2,
	})
	if err != nil {
		return fmt.Errorf("RELAY_SLOT: %w", err)
	}
	w.roles = append(w.roles, func(ctx context.Context) error {
		if err := relay.Run(ctx); err != nil {
			return fmt.Errorf("RELAY_DATABASE_URL: %w", err)
		}
		return nil
	})
	w.addCheck(config.RoleRelay, relay.Ready)
	return nil
}

// openJanitor makes partitions ahead of time and drops old ones.
func (w *worker) openJanitor(ctx context.Context) error {
	if !w.env.Has(config.RoleJanitor) {
		return nil
	}
	pool, err := w.openPool(ctx, "JANITOR_DATABASE_URL", w.env.JanitorDatabaseURL, config.RoleJanitor, 3)
	if err != nil {
		return err
	}
	j, slots := w.janitor(pool)
	w.roles = append(w.roles, j.Run, slots.Run)
	w.checks = append(w.checks, telemetry.Check{Name: config.RoleJanitor, Ask: func(ctx context.Context) error {
		return janitor.CheckPartitions(ctx, pool, w.now())
	}})
	return nil
}

// openTopics has the topics looked at until they are as they should be: a
// consumer of a topic that is not there waits without a word.
func (w *worker) openTopics(context.Context) error {
	wanted := []kafka.TopicSpec{{Name: event.OrderEvents, Partitions: 1}, {Name: event.BillingEvents, Partitions: 1}}
	if w.env.Has(config.RoleBalances) {
		for _, topic := range []string{event.LedgerBalances, event.LedgerBalanceOrders} {
			wanted = append(wanted, kafka.TopicSpec{Name: topic, Partitions: 1, Config: map[string]string{"cleanup.policy": "compact"}})
		}
	} else if !w.env.Has(config.RoleBilling) && !w.env.Has(config.RoleRelay) {
		return nil
	}
	var fault atomic.Pointer[string]
	fault.Store(new("not looked at yet"))
	w.roles = append(w.roles, func(ctx context.Context) error {
		for {
			err := kafka.CheckTopics(ctx, w.env.Brokers, wanted)
			if err == nil {
				fault.Store(new(""))
				return nil
			}
			if text := err.Error(); ctx.Err() == nil && text != *fault.Swap(&text) {
				w.log.WarnContext(ctx, "topics are not as they should be", "error", err)
			}
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(time.Second):
			}
		}
	})
	w.addCheck("topics", func() (bool, string) { return *fault.Load() == "", *fault.Load() })
	return nil
}

func (w *worker) addCheck(name string, ready func() (bool, string)) {
	w.checks = append(w.checks, telemetry.Check{Name: name, Ask: func(context.Context) error {
		if ok, why := ready(); !ok {
			return errors.New(why)
		}
		return nil
	}})
}

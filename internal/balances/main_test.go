package balances_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"github.com/onceledger/onceledger/internal/balances"
	"github.com/onceledger/onceledger/internal/crash"
	"github.com/onceledger/onceledger/internal/devstack"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/kafka"
)

// helperVariable turns this test program into an instance of the stage, to be
// killed by a test. Its value is the instance's name, or "broker" for an embedded
// broker.
const helperVariable = "BALANCES_HELPER"

func TestMain(m *testing.M) {
	name := os.Getenv(helperVariable)
	if name == "" {
		os.Exit(m.Run())
	}
	if err := runHelper(name); err != nil {
		fmt.Fprintln(os.Stderr, "fault:", err)
		os.Exit(1)
	}
}

func runHelper(name string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if name == "broker" {
		config := devstack.BrokerConfig{Dir: os.Getenv("BROKER_DIR"), Derived: []string{event.LedgerBalances, event.LedgerBalanceOrders}}
		config.Ready = func(addr string) { fmt.Println(addr) }
		config.Logf = func(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }
		return devstack.RunBroker(ctx, config)
	}
	if err := crash.Arm(os.Getenv("ONCELEDGER_CRASH")); err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	stage, err := balances.New(balances.Config{Log: log})
	if err != nil {
		return err
	}
	transactor, err := kafka.NewTransactor(kafka.TransactorConfig{
		ConsumerConfig: kafka.ConsumerConfig{
			Brokers: os.Getenv("BROKERS"), Group: balances.Group, Topics: []string{event.BillingEvents}, ClientID: name,
			MaxBatch: 20, SessionTimeout: helperTimeout, Log: log,
		},
		TransactionalID:    "balances-" + name,
		TransactionTimeout: helperTimeout,
		State:              []string{event.LedgerBalances, event.LedgerBalanceOrders},
	}, stage)
	if err != nil {
		return err
	}
	return transactor.Run(ctx)
}

// helperTimeout is after how long an instance that says nothing is given up, by
// its group and for its transaction. Kafka takes nothing below 6 s.
const helperTimeout = 6 * time.Second

// Command worker runs the parts of the service that are not answered over HTTP,
// each a role: relay (outbox to Kafka), billing (order events to invoices and
// ledger), balances (accounts' balances on a topic) and janitor (partitions). One process may have any set of them.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/onceledger/onceledger/internal/config"
	"github.com/onceledger/onceledger/internal/crash"
	"github.com/onceledger/onceledger/internal/telemetry"
)

const usage = `worker runs the roles relay, billing, balances and janitor of onceledger.

It is configured by its environment:
  WORKER_ROLES          some of relay,billing,balances,janitor; default all
  WORKER_ID             a name that is this worker's alone and stays the same when it
                        comes back; required where several workers run
  DATABASE_URL          for billing: the database, with the login onceledger_worker
  RELAY_DATABASE_URL    for relay: the same database, with the login onceledger_relay
  JANITOR_DATABASE_URL  for janitor: the same, with the login onceledger_janitor
  KAFKA_BROKERS         host:port, separated by commas
  WORKER_ADDR           where to serve /healthz, /readyz and /metrics, and for operators'
                        keys /v1/operator (role billing), default 127.0.0.1:8081
  RELAY_SLOT            the relay's replication slot, default onceledger_outbox
  RELAY_POLL_INTERVAL   how often the relay poll looks for events, default 100ms
  BILLING_BATCH         events in hand at most, default 2000
  BILLING_WRITERS       transactions that share out a large batch, default 2
  BALANCES_SKIP         records of billing.events that balances leaves out though it cannot
                        understand them, as partition:offset, separated by commas
  GAP_WAIT              how long a version of an order may be missing before the log says
                        so and an alert goes off, default 1m
  OUTBOX_RETENTION      how long the janitor keeps a day of the outbox at least, default 72h
  DEDUPE_WINDOW         how long an event is known as applied, default 720h
  REPLAY_WINDOW         how far back somebody may replay, default 168h
  IDEMPOTENCY_RETENTION how long an Idempotency-Key is known, default 168h
  SHUTDOWN_TIMEOUT      how long to finish what is in hand when asked to stop, default 10s
  LOG_LEVEL             debug, info, warn or error, default info
`

func main() {
	flag.Usage = func() { fmt.Fprint(os.Stderr, usage) }
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	if err := run(ctx, os.Getenv, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "worker:", err)
		os.Exit(1)
	}
}

// run is the program without the process: a test starts it, and stops it by
// cancelling ctx. A role that cannot go on ends the process, so that whoever
// keeps it running starts all of it afresh.
func run(ctx context.Context, getenv func(string) string, stderr io.Writer) error {
	env, err := config.LoadWorker(getenv)
	if err != nil {
		return err
	}
	if err := crash.Arm(env.Crash); err != nil {
		return fmt.Errorf("ONCELEDGER_CRASH: %w", err)
	}
	w := worker{
		env:      env,
		log:      telemetry.NewLogger(stderr, env.LogLevel, "worker"),
		registry: telemetry.NewRegistry(),
		now:      time.Now,
	}

	defer w.close()
	for _, open := range []func(context.Context) error{w.openRetention, w.openJanitor, w.openTopics, w.openBilling, w.openBalances, w.openRelay} {
		if err := open(ctx); err != nil {
			return err
		}
	}

	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", env.Addr)
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("%s is taken: set WORKER_ADDR to another address", env.Addr)
	}
	if err != nil {
		return fmt.Errorf("listen on WORKER_ADDR: %w", err)
	}
	w.log.Info("working", "roles", env.Roles, "address", listener.Addr().String())

	group, ctx := errgroup.WithContext(ctx)
	for _, role := range w.roles {
		group.Go(func() error { return role(ctx) })
	}
	group.Go(func() error {
		return telemetry.Serve(ctx, listener, w.handler(), env.ShutdownTimeout)
	})
	return group.Wait()
}

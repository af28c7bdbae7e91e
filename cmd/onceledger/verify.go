package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/onceledger/onceledger/internal/balances"
	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/postgres"
	"github.com/onceledger/onceledger/internal/verify"
)

// What verify ends with. 0 is for right books only.
const (
	exitBooksWrong exit = 1
	exitNotRun     exit = 2
)

func newVerifyCommand() *cobra.Command {
	var asJSON bool
	var wait time.Duration
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Check the books: recompute them from the orders and name each difference",
		Long: `Check the books: recompute them from the orders and name each difference.

It can run while everything works. What the pipeline has not come to yet is
counted as in flight and is not wrong; --wait is how long to give it. It changes
nothing.

It ends with 0 if the books are right, with 1 if they are not, and with 2 if it
could not find out.

Environment:
  DATABASE_URL     the database, with the login onceledger_verify. Unset: the one
                   that "onceledger up" runs
  KAFKA_BROKERS    asked how far billing is, and for the balances on the topic
                   ledger.balances, where DATABASE_URL is set. Unset: a missing
                   effect counts as in flight unless the database alone shows that
                   it is lost, and those balances are not compared
  ONCELEDGER_HOME  the folder of "onceledger up" (.onceledger)
`,
		Args: func(cmd *cobra.Command, args []string) error {
			return notUnderstood(cmd, cobra.NoArgs(cmd, args))
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			report, err := runVerify(cmd, wait)
			if err == nil && asJSON {
				encoder := json.NewEncoder(cmd.OutOrStdout())
				encoder.SetIndent("", "  ")
				err = encoder.Encode(report)
			} else if err == nil {
				err = report.WriteText(cmd.OutOrStdout())
			}
			if err == nil && !report.OK {
				return exitBooksWrong
			}
			return notRun(cmd, err)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document")
	cmd.Flags().DurationVar(&wait, "wait", 10*time.Second, "wait at most so long for what is in flight")
	cmd.SetFlagErrorFunc(notUnderstood)
	return cmd
}

// notRun says what was in the way, if anything was.
func notRun(cmd *cobra.Command, err error) error {
	if err == nil {
		return nil
	}
	cmd.PrintErrln("The books could not be checked:", err)
	return exitNotRun
}

// notUnderstood says what of the command line was in the way.
func notUnderstood(cmd *cobra.Command, err error) error {
	if err == nil {
		return nil
	}
	cmd.PrintErrf("The books could not be checked, for the command is wrong: %v. See %s --help\n", err, cmd.CommandPath())
	return exitNotRun
}

func runVerify(cmd *cobra.Command, wait time.Duration) (*verify.Report, error) {
	databaseURL, brokers, err := verifyTarget()
	if err != nil {
		return nil, err
	}
	pool, err := postgres.Open(cmd.Context(), databaseURL, postgres.Options{
		ApplicationName:    "onceledger verify",
		MaxConns:           2,
		TransactionTimeout: 2 * time.Minute,
	})
	if err != nil {
		return nil, unreached("DATABASE_URL", err)
	}
	defer pool.Close()

	config := verify.Config{DB: pool, Wait: wait}
	if brokers != "" {
		config.Lag = func(ctx context.Context) (committed, end map[int32]int64, err error) {
			return kafka.GroupProgress(ctx, brokers, billing.Consumer, event.OrderEvents)
		}
		config.Topic = &verify.Topic{
			Behind: func(ctx context.Context) (int64, error) {
				return kafka.Behind(ctx, brokers, balances.Group, event.BillingEvents)
			},
			Read: func(ctx context.Context) (balances.Totals, error) {
				ctx, cancel := context.WithTimeout(ctx, time.Minute)
				defer cancel()
				return balances.Collect(func(use func(event.Record) error) error {
					return kafka.ReadTopic(ctx, brokers, event.LedgerBalances, use)
				})
			},
		}
	}
	if stderr := cmd.ErrOrStderr(); stderr == os.Stderr && term.IsTerminal(int(os.Stderr.Fd())) {
		config.Progress = func(orders int64) { fmt.Fprintf(stderr, "\r%d orders", orders) }
		defer fmt.Fprint(stderr, "\r\033[K")
	}
	return verify.Run(cmd.Context(), config)
}

// verifyTarget is where the books are: what the environment says, or else what
// runs in the home folder.
func verifyTarget() (databaseURL, brokers string, err error) {
	if databaseURL = os.Getenv("DATABASE_URL"); databaseURL != "" {
		return databaseURL, os.Getenv("KAFKA_BROKERS"), nil
	}
	connections, err := homeConnections("DATABASE_URL")
	return connections.Databases.Verify, connections.KafkaBrokers, err
}

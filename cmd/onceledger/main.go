// Command onceledger is the operator's tool: it runs the whole system on one
// machine, migrates the database, makes API keys, and checks the books.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	root := &cobra.Command{
		Use:           "onceledger",
		Short:         "A ledger and billing service with exactly-once effects",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.AddCommand(newUpCommand(), newBrokerCommand(), newMigrateCommand(), newKeysCommand(), newRelayCommand(), newVerifyCommand(), newWALCommand(), newDrillCommand())
	if err := root.ExecuteContext(ctx); err != nil {
		if _, said := errors.AsType[exit](err); !said {
			fmt.Fprintln(os.Stderr, "onceledger:", err)
		}
		os.Exit(exitCode(err))
	}
}

// exit is an error that has said what it had to say and ends with a code.
type exit int

func (e exit) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

func exitCode(err error) int {
	if code, ok := errors.AsType[exit](err); ok {
		return int(code)
	}
	return 1
}

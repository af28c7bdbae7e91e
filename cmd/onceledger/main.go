// Command onceledger is the operator's tool: it runs the whole system on one
// machine, migrates the database, makes API keys, and checks the books.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	if err := newRootCommand().ExecuteContext(ctx); err != nil {
		if _, said := errors.AsType[exit](err); !said {
			fmt.Fprintln(os.Stderr, "onceledger:", err)
		}
		os.Exit(exitCode(err))
	}
}

func newRootCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:           "onceledger",
		Short:         "A ledger and billing service with exactly-once effects",
		SilenceUsage:  true,
		SilenceErrors: true,
	}, newUpCommand(), newBrokerCommand(), newMigrateCommand(), newKeysCommand(), newRelayCommand(), newVerifyCommand(), newWALCommand(), newDrillCommand(), newDLQCommand(), newLabCommand(), newLabConsumerCommand(), newReplayCommand(), newOutboxCommand(), newProveCommand())
}

// group makes a command of those below it. Without one of them it prints its
// help; with the name of none it fails, where cobra would print the help and end
// well.
func group(command *cobra.Command, below ...*cobra.Command) *cobra.Command {
	command.AddCommand(below...)
	command.DisableFlagsInUseLine = true
	command.SuggestionsMinimumDistance = 2
	command.Args = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		text := fmt.Sprintf("there is no command %q: ", cmd.CommandPath()+" "+args[0])
		if alike := cmd.SuggestionsFor(args[0]); len(alike) > 0 {
			return fmt.Errorf("%sis %s meant? See %s --help", text, strings.Join(alike, " or "), cmd.CommandPath())
		}
		return fmt.Errorf("%ssee %s --help", text, cmd.CommandPath())
	}
	command.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	return command
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

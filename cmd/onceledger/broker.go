package main

import (
	"fmt"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/onceledger/onceledger/internal/devstack"
	"github.com/onceledger/onceledger/internal/event"
)

// newBrokerCommand is the embedded broker as a process of its own, which `up`
// starts: whatever else is killed, the broker is stopped in order.
func newBrokerCommand() *cobra.Command {
	config := devstack.BrokerConfig{Derived: []string{event.LedgerBalances, event.LedgerBalanceOrders}}
	cmd := &cobra.Command{
		Use:    "broker",
		Short:  "Run the embedded broker (started by up)",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			config.Ready = func(addr string) { fmt.Fprintf(cmd.OutOrStdout(), "ready %s\n", addr) }
			config.Logf = func(format string, args ...any) { fmt.Fprintf(cmd.ErrOrStderr(), format+"\n", args...) }

			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			return devstack.RunBroker(ctx, config)
		},
	}
	cmd.Flags().StringVar(&config.Dir, "dir", "", "folder for the records")
	cmd.Flags().IntVar(&config.Port, "port", 0, "port to listen on; 0 is the one of last time, or a free one")
	_ = cmd.MarkFlagRequired("dir")
	return cmd
}

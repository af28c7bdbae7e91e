package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/drill"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/postgres"
	"github.com/onceledger/onceledger/internal/relay"
)

func newDrillCommand() *cobra.Command {
	command := &cobra.Command{
		Use:   "drill",
		Short: "Break a running system on purpose, and account for what becomes of it",
	}
	return group(command, newDrillSlotLossCommand())
}

func newDrillSlotLossCommand() *cobra.Command {
	config := drill.Config{Publication: relay.DefaultPublication, Consumer: billing.Consumer}
	cmd := &cobra.Command{
		Use:   "slot-loss",
		Short: "Drop the relay's replication slot under load, and see that nothing is lost",
		Long: `Drop the relay's replication slot under load, and see that nothing is lost.

It ends the relay's connection, drops its slot, keeps every relay away for a
moment while orders go on, and lets them come back. The relay has to notice, to
find what no slot will bring in the outbox, and to send it. The account says what
was in the hole, what was sent again, what the consumer dropped as a duplicate,
and what is lost: 0.

It makes orders itself, which stay in the books; their metadata says where they
are from. With --orders 0 others make them.

It ends with 0 if nothing is lost, and with 1 if anything is or it could not find
out.

Environment:
  RELAY_DATABASE_URL  the database, with the login onceledger_relay. Unset: all of
                      what "onceledger up" runs
  DATABASE_URL        the same, with the login onceledger_verify
  KAFKA_BROKERS       host:port, separated by commas
  ONCELEDGER_ADDR     where the API listens, as host:port. Unset: where that of
                      "onceledger up" does, or 127.0.0.1:8080 where
                      RELAY_DATABASE_URL is set
  ONCELEDGER_API_KEY  a key of the API; unset: the one in $ONCELEDGER_HOME/api-key
  RELAY_SLOT          the replication slot, as for the worker
  ONCELEDGER_HOME     the folder of "onceledger up" (.onceledger)
`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runSlotLoss(cmd, config)
		},
	}
	cmd.Flags().IntVar(&config.Orders, "orders", 500, "orders to make meanwhile; 0: others make them")
	cmd.Flags().DurationVar(&config.Away, "away", 2*time.Second, "keep relays away for so long after the slot is gone")
	cmd.Flags().DurationVar(&config.Wait, "wait", time.Minute, "wait at most so long for each step")
	return cmd
}

func runSlotLoss(cmd *cobra.Command, config drill.Config) error {
	ctx := cmd.Context()
	switch {
	case config.Orders < 0:
		return fmt.Errorf("--orders is %d: want 0 or more", config.Orders)
	case config.Away < 0:
		return fmt.Errorf("--away is %s: want 0 or more", config.Away)
	case config.Wait <= config.Away:
		return fmt.Errorf("--wait is %s: want more than --away, which is %s", config.Wait, config.Away)
	}
	target, err := relayTarget()
	if err != nil {
		return err
	}
	databaseURL, brokers, err := verifyTarget()
	if err != nil {
		return err
	}
	if brokers == "" {
		return errors.New("KAFKA_BROKERS is not set: want host:port, separated by commas")
	}
	if config.Key = os.Getenv("ONCELEDGER_API_KEY"); config.Key == "" && config.Orders > 0 {
		key, err := os.ReadFile(filepath.Join(homeFolder(), "api-key"))
		if err != nil {
			return fmt.Errorf("ONCELEDGER_API_KEY is not set, and there is none of onceledger up: %w", err)
		}
		config.Key = strings.TrimSpace(string(key))
	}
	if config.DB, err = postgres.Open(ctx, databaseURL, postgres.Options{
		ApplicationName: "onceledger drill", MaxConns: 2, TransactionTimeout: 2 * time.Minute,
	}); err != nil {
		return fmt.Errorf("DATABASE_URL: %w", err)
	}
	defer config.DB.Close()
	config.RelayURL, config.Slot, config.Brokers = target.url, target.slot, brokers
	config.API = cmp.Or(target.api, "http://127.0.0.1:8080")
	if addr := os.Getenv("ONCELEDGER_ADDR"); addr != "" {
		_, port, err := net.SplitHostPort(addr)
		if err == nil {
			_, err = strconv.ParseUint(port, 10, 16)
		}
		if err != nil {
			return fmt.Errorf("ONCELEDGER_ADDR is %q, want host:port: %w", addr, err)
		}
		config.API = "http://" + addr
	}
	config.Say = func(format string, args ...any) { cmd.PrintErrf(format+"\n", args...) }
	config.Lag = func(ctx context.Context) (committed, end map[int32]int64, err error) {
		return kafka.GroupLag(ctx, brokers, billing.Consumer, event.OrderEvents)
	}
	report, err := drill.SlotLoss(ctx, config)
	if err != nil {
		return err
	}
	if err := report.WriteText(cmd.OutOrStdout()); err != nil {
		return err
	}
	if !report.OK() {
		return exit(1)
	}
	return nil
}

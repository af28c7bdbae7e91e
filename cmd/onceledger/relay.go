package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/debezium"
	"github.com/onceledger/onceledger/internal/relay"
	"github.com/onceledger/onceledger/internal/supervisor"
	"github.com/onceledger/onceledger/internal/switchover"
)

const relayEnvironment = `
Environment:
  RELAY_DATABASE_URL  the database, with the login onceledger_relay. Unset: the one
                      that "onceledger up" runs
  CONNECT_URL         Kafka Connect's REST interface, where Debezium runs. Unset: the
                      one that "onceledger up --relay=debezium" runs
  CONNECTOR_DATABASE_URL
                      the database of RELAY_DATABASE_URL as Kafka Connect reaches it.
                      Unset: the same address
  RELAY_SLOT          the replication slot, as for the worker; default onceledger_outbox
  ONCELEDGER_HOME     the folder of "onceledger up" (.onceledger)
`

func newRelayCommand() *cobra.Command {
	command := &cobra.Command{
		Use:   "relay",
		Short: "Tell which relay carries the outbox to Kafka, and switch to another",
		Long: `Tell which relay carries the outbox to Kafka, and switch to another.

There are three: wal reads the write-ahead log, poll the table, and debezium is a
connector of Kafka Connect's. docs/relays.md says what each is good for.
` + relayEnvironment,
	}
	return group(command, newRelayStatusCommand(), newRelaySwitchCommand())
}

func newRelayStatusCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Tell which relay it is and how it does",
		Long:  "Tell which relay it is and how it does.\n" + relayEnvironment,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			target, err := relayTarget()
			if err != nil {
				return err
			}
			conn, err := pgx.Connect(cmd.Context(), target.url)
			if err != nil {
				return fmt.Errorf("RELAY_DATABASE_URL: reach database: %w", err)
			}
			defer conn.Close(cmd.Context())
			report, err := db.New().RelayReport(cmd.Context(), conn, relay.DefaultPublication, target.slot)
			if err != nil {
				return fmt.Errorf("ask for the relay: %w", err)
			}
			out := cmd.OutOrStdout()
			if report.Relay == string(relay.KindNone) {
				fmt.Fprintf(out, "relay          none: a switch to %s is under way\n", report.Target)
			} else {
				fmt.Fprintf(out, "relay          %s\n", report.Relay)
			}
			if report.Slot != "" {
				fmt.Fprintf(out, "slot           %s (%s, %d bytes of log kept)\n", report.Slot, report.WalStatus, report.RetainedBytes)
			}
			fmt.Fprintf(out, "not confirmed  %d events\n", report.UnconfirmedEvents)
			if report.Fault != "" {
				fmt.Fprintf(out, "fault          %s\n", report.Fault)
			}
			if report.Fault != "" || report.Relay == string(relay.KindNone) {
				return exit(1)
			}
			return nil
		},
	}
}

func newRelaySwitchCommand() *cobra.Command {
	var to string
	var abandon bool
	cmd := &cobra.Command{
		Use:   "switch --to wal|poll|debezium",
		Short: "Have another relay carry the outbox, while everything runs",
		Long: `Have another relay carry the outbox, while everything runs.

Nothing is lost. Some events may be published twice, with the same event ids, and
are dropped where they are consumed. Workers notice by themselves. A switch that
was interrupted is run again, to the same relay or another.
` + relayEnvironment,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			kind, err := relay.ParseKind(to)
			if err != nil {
				return fmt.Errorf("--to: %w", err)
			}
			target, err := relayTarget()
			if err != nil {
				return err
			}
			config := switchover.Config{
				URL:          target.url,
				Slot:         target.slot,
				Publication:  relay.DefaultPublication,
				ConnectorURL: os.Getenv("CONNECTOR_DATABASE_URL"),
				Abandon:      abandon,
				Say:          func(format string, args ...any) { cmd.PrintErrf(format+"\n", args...) },
			}
			if target.connect != "" {
				config.Connect, err = debezium.NewClient(debezium.ClientConfig{URL: target.connect})
				if err != nil {
					return fmt.Errorf("CONNECT_URL: %w", err)
				}
			} else if err := checkNoConnect(cmd.Context(), target, kind, abandon); err != nil {
				return err
			}
			report, err := switchover.Switch(cmd.Context(), config, kind)
			if err != nil {
				return err
			}
			if report.From == report.To {
				fmt.Fprintf(cmd.OutOrStdout(), "%s carries the outbox already\n", report.To)
				return nil
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s carries the outbox now, in place of %s; events of transactions from %d on may come twice\n",
				report.To, report.From, report.Since)
			return nil
		},
	}
	cmd.Flags().StringVar(&to, "to", "", "the relay: wal, poll or debezium")
	cmd.Flags().BoolVar(&abandon, "abandon-debezium", false,
		"leave Debezium though Kafka Connect does not answer; all it was given is published again")
	_ = cmd.MarkFlagRequired("to")
	return cmd
}

// checkNoConnect says so if the switch takes Kafka Connect, of which nobody said
// where it is.
func checkNoConnect(ctx context.Context, target relayAt, to relay.Kind, abandon bool) error {
	conn, err := pgx.Connect(ctx, target.url)
	if err != nil {
		return fmt.Errorf("RELAY_DATABASE_URL: reach database: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	from, err := relay.Assigned(ctx, conn, target.slot)
	if err != nil {
		return err
	}
	switch {
	case from == to:
		return nil
	case to == relay.KindDebezium:
		return errors.New("CONNECT_URL is not set: Debezium runs in Kafka Connect: want the address of its REST interface, http://host:8083")
	case from == relay.KindDebezium && !abandon:
		return errors.New("CONNECT_URL is not set: the relay is debezium, and Kafka Connect knows how far it is: " +
			"want the address of its REST interface, http://host:8083; or, if it is gone for good, --abandon-debezium")
	}
	return nil
}

// plainName is what a slot may be called, as the worker has it: it stands in
// replication commands, which have no parameters.
var plainName = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,62}$`)

// relaySlot is the relay's replication slot.
func relaySlot() (string, error) {
	slot := cmp.Or(os.Getenv("RELAY_SLOT"), relay.DefaultSlot)
	if !plainName.MatchString(slot) {
		return "", fmt.Errorf("RELAY_SLOT is %q: a slot is named with a-z, 0-9 and _ only", slot)
	}
	return slot, nil
}

// relayAt is what the commands work on.
type relayAt struct {
	url, slot, connect string
	api                string // of "onceledger up", if it is that database
}

func relayTarget() (relayAt, error) {
	slot, err := relaySlot()
	if err != nil {
		return relayAt{}, err
	}
	target := relayAt{url: os.Getenv("RELAY_DATABASE_URL"), slot: slot, connect: os.Getenv("CONNECT_URL")}
	if target.url != "" {
		return target, nil
	}
	connections, err := supervisor.ReadConnections(homeFolder())
	if err != nil || connections.Databases.Relay == "" {
		return relayAt{}, errors.Join(fmt.Errorf("RELAY_DATABASE_URL is not set, and nothing was started in %s (onceledger up): "+
			"want postgres://user:password@host:5432/name with the login onceledger_relay", homeFolder()), err)
	}
	target.url = connections.Databases.Relay
	target.connect = cmp.Or(target.connect, connections.Connect)
	target.api = connections.API
	return target, nil
}

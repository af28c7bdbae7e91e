package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/relay"
)

const outboxEnvironment = `
Environment:
  RELAY_DATABASE_URL  the database, with the login onceledger_relay. Unset: all of
                      what "onceledger up" runs
  DATABASE_URL        for --gaps and --unapplied: the same, with the login
                      onceledger_verify
  KAFKA_BROKERS       host:port, separated by commas; for resend
  RELAY_SLOT          the replication slot, as for the worker
  ONCELEDGER_HOME     the folder of "onceledger up" (.onceledger)
`

func newOutboxCommand() *cobra.Command {
	command := &cobra.Command{
		Use:   "outbox",
		Short: "Look at the events that the service has written, and publish some again",
	}
	return group(command, newOutboxListCommand(), newOutboxResendCommand())
}

func newOutboxListCommand() *cobra.Command {
	var order string
	cmd := &cobra.Command{
		Use:   "list --order ID",
		Short: "List the events of an order that the outbox still holds",
		Long:  "List the events of an order that the outbox still holds.\n" + outboxEnvironment,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			id, err := parseID("--order", order)
			if err != nil {
				return err
			}
			target, err := relayTarget()
			if err != nil {
				return err
			}
			conn, err := pgx.Connect(cmd.Context(), target.url)
			if err != nil {
				return unreached("RELAY_DATABASE_URL", fmt.Errorf("reach database: %w", err))
			}
			defer conn.Close(context.WithoutCancel(cmd.Context()))
			found, err := findOrder(cmd.Context(), conn, id)
			if err != nil {
				return err
			}
			for _, e := range found.events {
				fmt.Fprintf(cmd.OutOrStdout(), "%s  %-14s version %-4d %-16s %s\n", e.ID, event.Topic(e.AggregateType), e.AggregateVersion, e.EventType,
					e.OccurredAt.UTC().Format(time.RFC3339Nano))
			}
			found.sayGone(cmd.ErrOrStderr())
			return nil
		},
	}
	cmd.Flags().StringVar(&order, "order", "", "the order's id")
	_ = cmd.MarkFlagRequired("order")
	return cmd
}

type resendFlags struct {
	order, event    string
	gaps, unapplied bool
	dryRun          bool
}

func newOutboxResendCommand() *cobra.Command {
	var flags resendFlags
	cmd := &cobra.Command{
		Use:   "resend --order ID | --event ID | --gaps | --unapplied",
		Short: "Publish events of the outbox again, under their event ids",
		Long: `Publish events of the outbox again, under their event ids.

The records are those that the relay makes, byte for byte. Who has applied an event
recognises it by its id, so that what is sent needlessly changes nothing. The relay
may run meanwhile, whichever it is. Of each order the versions go in order.

--order sends all events of an order; --event one event; --gaps what billing has
noticed to be missing, because a later version of the order came; --unapplied what
the relay is known to have delivered and billing has neither applied nor kept as a
dead letter, gap or no gap: it may be asked for while billing is not behind.

What the outbox does not hold any more is named by its version; what is still on
the topic is read again with "onceledger replay".

It ends with 0 if everything asked for was sent, and with 1 if not.
` + outboxEnvironment,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return runResend(cmd, flags) },
	}
	cmd.Flags().StringVar(&flags.order, "order", "", "send all events of this order")
	cmd.Flags().StringVar(&flags.event, "event", "", "send this event")
	cmd.Flags().BoolVar(&flags.gaps, "gaps", false, "send what billing has noticed to be missing")
	cmd.Flags().BoolVar(&flags.unapplied, "unapplied", false, "send what was delivered and left no trace in billing")
	cmd.Flags().BoolVar(&flags.dryRun, "dry-run", false, "say what would be sent, and send nothing")
	cmd.MarkFlagsOneRequired("order", "event", "gaps", "unapplied")
	cmd.MarkFlagsMutuallyExclusive("order", "event", "gaps", "unapplied")
	return cmd
}

func runResend(cmd *cobra.Command, flags resendFlags) error {
	ctx := cmd.Context()
	target, err := relayTarget()
	if err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, target.url)
	if err != nil {
		return unreached("RELAY_DATABASE_URL", fmt.Errorf("reach database: %w", err))
	}
	defer conn.Close(context.WithoutCancel(ctx))
	brokers, err := outboxBrokers()
	if err != nil {
		return err
	}
	found, err := findToResend(ctx, conn, target, brokers, flags)
	if err != nil {
		return err
	}
	out := cmd.OutOrStdout()
	found.sayGone(cmd.ErrOrStderr())
	if flags.dryRun {
		for _, e := range found.events {
			fmt.Fprintln(out, "would send", e)
		}
		fmt.Fprintf(out, "%d events would be sent\n", len(found.events))
	} else {
		sent, err := resend(ctx, conn, brokers, found, func(e outboxEvent) { fmt.Fprintln(out, "sent", e) })
		fmt.Fprintf(out, "%d of %d events sent\n", sent, len(found.events))
		if err != nil {
			return fmt.Errorf("%w; what is not named above may be on the topic or not, and may be sent again", err)
		}
	}
	for _, order := range slices.SortedFunc(maps.Keys(found.awaited), func(a, b uuid.UUID) int { return bytes.Compare(a[:], b[:]) }) {
		fmt.Fprintf(out, "order %s has dead letters that wait for this: once it has come, onceledger dlq retry --order %[1]s --yes\n", order)
	}
	if len(found.gone)+len(found.never) > 0 {
		return exit(1)
	}
	return nil
}

func resend(ctx context.Context, conn db.DBTX, brokers string, found foundEvents, say func(outboxEvent)) (sent int, err error) {
	if len(found.events) == 0 {
		return 0, nil
	}
	ids := make([]uuid.UUID, len(found.events))
	byID := make(map[uuid.UUID]outboxEvent)
	for i, e := range found.events {
		ids[i], byID[e.ID] = e.ID, e
	}
	err = relay.Resend(ctx, conn, func(reports relay.Reports) (relay.Publisher, error) {
		return kafka.NewProducer(kafka.ProducerConfig{
			Brokers: brokers, ClientID: "onceledger-resend", Log: slog.New(slog.DiscardHandler),
			Delivered: reports.Delivered, Reachable: reports.Reachable,
		})
	}, ids, func(e event.Event) {
		sent++
		say(byID[e.ID])
	})
	return sent, err
}

// outboxEvent is an event as an operator sees it.
type outboxEvent db.OutboxFindByAggregateRow

func (e outboxEvent) String() string {
	return fmt.Sprintf("%s: %s version %d of %s %s", e.ID, e.EventType, e.AggregateVersion, e.AggregateType, e.AggregateID)
}

// foundEvents is what the outbox holds of what was asked for, and what it does not
// hold any more.
type foundEvents struct {
	events  []outboxEvent
	gone    []string
	never   []string           // as far as the outbox knows the order, it has no such version
	awaited map[uuid.UUID]bool // orders with dead letters that wait for them
}

func (f foundEvents) sayGone(w io.Writer) {
	for _, one := range f.gone {
		fmt.Fprintf(w, "%s is no longer in the outbox (OUTBOX_RETENTION)\n", one)
	}
	for _, one := range f.never {
		fmt.Fprintf(w, "%s was never written: the later one that skips it is not from this outbox (onceledger dlq gaps)\n", one)
	}
}

func findToResend(ctx context.Context, conn db.DBTX, target relayAt, brokers string, flags resendFlags) (foundEvents, error) {
	switch {
	case flags.order != "":
		id, err := parseID("--order", flags.order)
		if err != nil {
			return foundEvents{}, err
		}
		return findOrder(ctx, conn, id)
	case flags.event != "":
		id, err := parseID("--event", flags.event)
		if err != nil {
			return foundEvents{}, err
		}
		rows, err := db.New().OutboxFindByIDs(ctx, conn, []uuid.UUID{id})
		if err != nil {
			return foundEvents{}, fmt.Errorf("look for the event: %w", err)
		}
		if len(rows) == 0 {
			return foundEvents{}, fmt.Errorf("event %s is not in the outbox: it never was, or OUTBOX_RETENTION is over", id)
		}
		return foundEvents{events: []outboxEvent{outboxEvent(rows[0])}}, nil
	}
	books, err := connectBooks(ctx)
	if err != nil {
		return foundEvents{}, err
	}
	defer books.Close(context.WithoutCancel(ctx))
	if flags.gaps {
		return findGaps(ctx, conn, books)
	}
	return findUnapplied(ctx, books, brokers, target.slot)
}

// findOrder finds what the outbox holds of an order, and which versions it should
// hold and does not: those before the last.
func findOrder(ctx context.Context, conn db.DBTX, id uuid.UUID) (foundEvents, error) {
	rows, err := db.New().OutboxFindByAggregate(ctx, conn, id)
	if err != nil {
		return foundEvents{}, fmt.Errorf("look for the order's events: %w", err)
	}
	if len(rows) == 0 {
		return foundEvents{}, fmt.Errorf("the outbox holds no event of order %s: there is no such order, or OUTBOX_RETENTION is over", id)
	}
	var found foundEvents
	next := make(map[string]int64)
	for _, row := range rows {
		for key := row.TenantID.String() + row.AggregateType; next[key]+1 < row.AggregateVersion; {
			next[key]++
			found.gone = append(found.gone, fmt.Sprintf("version %d of %s %s", next[key], row.AggregateType, id))
		}
		next[row.TenantID.String()+row.AggregateType] = row.AggregateVersion
		found.events = append(found.events, outboxEvent(row))
	}
	return found, nil
}

func findGaps(ctx context.Context, conn, books db.DBTX) (foundEvents, error) {
	gaps, err := db.New().MissingVersionListAll(ctx, books)
	if err != nil {
		return foundEvents{}, fmt.Errorf("ask billing what is missing: %w", err)
	}
	var tenants, orders []uuid.UUID
	var versions []int64
	for _, gap := range gaps {
		tenants, orders, versions = append(tenants, gap.TenantID), append(orders, gap.OrderID), append(versions, gap.Version)
	}
	rows, err := db.New().OutboxFindByVersions(ctx, conn, tenants, orders, versions)
	if err != nil {
		return foundEvents{}, fmt.Errorf("look for the missing events: %w", err)
	}
	type order struct{ tenant, id uuid.UUID }
	written := make(map[order]int64)
	last, err := db.New().OutboxLastVersions(ctx, conn, tenants, orders)
	if err != nil {
		return foundEvents{}, fmt.Errorf("look for the orders' last events: %w", err)
	}
	for _, row := range last {
		written[order{row.TenantID, row.AggregateID}] = row.Version
	}
	found := foundEvents{awaited: make(map[uuid.UUID]bool)}
	type version struct {
		order
		version int64
	}
	there := make(map[version]bool)
	for _, row := range rows {
		there[version{order{row.TenantID, row.AggregateID}, row.AggregateVersion}] = true
		found.events = append(found.events, outboxEvent(row))
	}
	for _, gap := range gaps {
		if gap.Awaited {
			found.awaited[gap.OrderID] = true
		}
		of := order{gap.TenantID, gap.OrderID}
		one := fmt.Sprintf("version %d of order %s", gap.Version, gap.OrderID)
		switch {
		case there[version{of, gap.Version}]:
		case written[of] > 0 && written[of] < gap.Version:
			found.never = append(found.never, one)
		default:
			found.gone = append(found.gone, one)
		}
	}
	return found, nil
}

// settled is how long a delivered event is given to be applied.
const settled = time.Minute

func findUnapplied(ctx context.Context, books db.DBTX, brokers, slot string) (foundEvents, error) {
	behind, err := kafka.Behind(ctx, brokers, billing.Consumer, event.OrderEvents)
	if err != nil {
		return foundEvents{}, fmt.Errorf("ask how far billing is: %w", err)
	}
	if behind > 0 {
		return foundEvents{}, fmt.Errorf("billing is %d records behind: what it has not read is not missing; ask again once it has caught up", behind)
	}
	rows, err := db.New().OutboxFindUnapplied(ctx, books, slot, time.Now().Add(-settled), billing.Consumer)
	if err != nil {
		return foundEvents{}, fmt.Errorf("look for events without a trace: %w", err)
	}
	var found foundEvents
	for _, row := range rows {
		found.events = append(found.events, outboxEvent(row))
	}
	return found, nil
}

func parseID(flag, text string) (uuid.UUID, error) {
	id, err := uuid.Parse(text)
	if err != nil || len(text) != 36 {
		return uuid.Nil, fmt.Errorf("%s is %q: want an id such as 01a22d9f-52e7-714b-9566-208ed3287748", flag, text)
	}
	return id, nil
}

// connectBooks connects to the database as who may see what billing has.
func connectBooks(ctx context.Context) (*pgx.Conn, error) {
	url, _, err := verifyTarget()
	if err != nil {
		return nil, err
	}
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return nil, unreached("DATABASE_URL", fmt.Errorf("reach database: %w", err))
	}
	return conn, nil
}

// outboxBrokers is where to publish.
func outboxBrokers() (string, error) {
	if brokers := os.Getenv("KAFKA_BROKERS"); brokers != "" {
		return brokers, nil
	}
	if os.Getenv("RELAY_DATABASE_URL") != "" {
		return "", errors.New("KAFKA_BROKERS is not set: want host:port, separated by commas")
	}
	connections, err := homeConnections("KAFKA_BROKERS")
	return connections.KafkaBrokers, err
}

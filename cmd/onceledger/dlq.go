package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/user"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/deadletters"
	"github.com/onceledger/onceledger/internal/failure"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/postgres"
	"github.com/onceledger/onceledger/internal/supervisor"
)

const dlqEnvironment = `
Environment:
  DATABASE_URL     the database, with the login onceledger_worker. Unset: the one
                   that "onceledger up" runs
  ONCELEDGER_HOME  the folder of "onceledger up" (.onceledger)
`

func newDLQCommand() *cobra.Command {
	return group(&cobra.Command{
		Use:   "dlq",
		Short: "See to dead letters: list, show, retry, discard",
		Long: `See to dead letters: what could not be applied, and what waits behind it.

A worker may run meanwhile. What is tried again goes the way of any event: with
its own id, in the order of its order, and not a second time if it was applied.
` + dlqEnvironment,
	}, newDLQListCommand(), newDLQShowCommand(), newDLQActCommand(deadletters.Retry), newDLQActCommand(deadletters.Discard), newDLQGapsCommand())
}

// selection is the flags that name letters.
type selection struct {
	ids                    []string
	order, event, tenant   string
	classes, states        []string
	consumer, since, until string

	given func(flag string) bool
}

func (s *selection) flags(cmd *cobra.Command) {
	flags := cmd.Flags()
	s.given = flags.Changed
	flags.StringSliceVar(&s.ids, "id", nil, "dead letters, by their ids")
	flags.StringVar(&s.order, "order", "", "the order's, which is the records' key")
	flags.StringVar(&s.event, "event", "", "the event's")
	flags.StringVar(&s.tenant, "tenant", "", "a tenant's, by its id")
	flags.StringSliceVar(&s.classes, "class", nil, "of a class, such as rule or data")
	flags.StringVar(&s.consumer, "consumer", "", "a consumer's, such as "+billing.Consumer)
	flags.StringVar(&s.since, "since", "", "first failed at or after: a time (2026-01-31T12:00:00Z), or how long ago (2h)")
	flags.StringVar(&s.until, "until", "", "first failed before: a time, or how long ago")
}

func (s *selection) filter(args []string, now time.Time) (deadletters.Filter, error) {
	filter := deadletters.Filter{Consumer: s.consumer, States: s.states}
	var faults []error
	id := func(flag, text string) uuid.UUID {
		if text == "" {
			return uuid.Nil
		}
		id, err := uuid.Parse(text)
		if err != nil || id == uuid.Nil {
			faults = append(faults, fmt.Errorf("%s: %q is not an id", flag, text))
		}
		return id
	}
	at := func(flag, text string) time.Time {
		if text == "" {
			return time.Time{}
		}
		if ago, err := time.ParseDuration(text); err == nil && ago >= 0 {
			return now.Add(-ago)
		}
		at, err := time.Parse(time.RFC3339, text)
		if err != nil {
			faults = append(faults, fmt.Errorf("%s: %q is neither a time, such as 2026-01-31T12:00:00Z, nor how long ago, such as 2h", flag, text))
		}
		return at
	}
	// A variable that is not set would leave the choice to the other flags, and
	// choose more than was meant.
	for flag, empty := range map[string]bool{
		"id": blank(s.ids), "order": s.order == "", "event": s.event == "", "tenant": s.tenant == "", "class": blank(s.classes),
		"consumer": s.consumer == "", "since": s.since == "", "until": s.until == "",
	} {
		if empty && s.given(flag) {
			faults = append(faults, fmt.Errorf("--%s is empty: say which, or leave it out", flag))
		}
	}
	if blank(args) && len(args) > 0 {
		faults = append(faults, errors.New("the id of a dead letter is empty"))
	}
	for _, text := range append(s.ids, args...) {
		filter.IDs = append(filter.IDs, id("--id", text))
	}
	filter.OrderID, filter.EventID, filter.TenantID = id("--order", s.order), id("--event", s.event), id("--tenant", s.tenant)
	filter.Since, filter.Until = at("--since", s.since), at("--until", s.until)
	for _, class := range s.classes {
		filter.Classes = append(filter.Classes, inbox.Class(class))
	}
	return filter, errors.Join(faults...)
}

// blank reports whether texts say nothing, all of them or one.
func blank(texts []string) bool {
	return len(texts) == 0 || slices.ContainsFunc(texts, func(text string) bool { return strings.TrimSpace(text) == "" })
}

func newDLQListCommand() *cobra.Command {
	var s selection
	var limit int
	var after string
	var asJSON, all bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List dead letters, the oldest first: those that are open, unless asked for others",
		Long:  "List dead letters, the oldest first: those that are open, unless asked for others.\n" + dlqEnvironment,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			filter, err := s.filter(nil, time.Now())
			if err != nil {
				return err
			}
			if len(filter.States) == 0 && !all && len(filter.IDs) == 0 {
				filter.States = []string{deadletters.StateOpen}
			}
			last := uuid.Nil
			if after != "" {
				if last, err = uuid.Parse(after); err != nil {
					return fmt.Errorf("--after: %q is not the id of a dead letter", after)
				}
			}
			service, done, err := openDLQ(cmd)
			if err != nil {
				return err
			}
			defer done()
			letters, more, err := service.List(cmd.Context(), filter, last, limit)
			if err != nil {
				return said(err)
			}
			if asJSON {
				return printJSON(cmd, struct {
					Letters []deadletters.Letter `json:"dead_letters"`
					More    bool                 `json:"more"`
				}{letters, more})
			}
			if err := writeLetters(cmd.OutOrStdout(), letters); err != nil {
				return err
			}
			if more {
				cmd.PrintErrf("There are more: onceledger dlq list … --after %s\n", letters[len(letters)-1].ID)
			}
			return nil
		},
	}
	s.flags(cmd)
	cmd.Flags().StringSliceVar(&s.states, "state", nil, "open, resolved or discarded")
	cmd.Flags().BoolVar(&all, "all", false, "in whatever state")
	cmd.Flags().IntVar(&limit, "limit", 50, "so many at most")
	cmd.Flags().StringVar(&after, "after", "", "the last one of the page before")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document")
	return cmd
}

func writeLetters(out io.Writer, letters []deadletters.Letter) error {
	if len(letters) == 0 {
		_, err := fmt.Fprintln(out, "no dead letters")
		return err
	}
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "ID\tSTATE\tCLASS\tEVENT\tVERSION\tORDER\tPLACE\tATTEMPTS\tFIRST FAILED\tDETAIL")
	for _, l := range letters {
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\t%s\n", l.ID, l.State, l.Class, orDash(l.EventType), orDash(l.Version), orDash(l.OrderID),
			place(l), l.Attempts, l.FirstFailedAt.Format(time.RFC3339), oneLine(l.Detail, 160))
	}
	return table.Flush()
}

func place(l deadletters.Letter) string {
	return fmt.Sprintf("%s[%d]@%d", l.Topic, l.Partition, l.Offset)
}

func orDash[T any](value *T) string {
	if value == nil {
		return "-"
	}
	return oneLine(fmt.Sprint(*value), 40)
}

// oneLine is a text for a terminal: without what could move its cursor.
func oneLine(text string, longest int) string {
	var line strings.Builder
	for n, r := range []rune(text) {
		if n == longest {
			line.WriteRune('…')
			break
		}
		if r < ' ' || r >= 0x7f && r < 0xa0 {
			r = '·'
		}
		line.WriteRune(r)
	}
	return line.String()
}

func newDLQShowCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "show ID",
		Short: "Show a dead letter: its record as it came, what was wrong, what was decided, what waits for it",
		Long:  "Show a dead letter: its record as it came, what was wrong, what was decided, what waits for it.\n" + dlqEnvironment,
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := uuid.Parse(args[0])
			if err != nil {
				return fmt.Errorf("%q is not the id of a dead letter: see onceledger dlq list", args[0])
			}
			service, done, err := openDLQ(cmd)
			if err != nil {
				return err
			}
			defer done()
			details, err := service.Show(cmd.Context(), id)
			if err != nil {
				return said(err)
			}
			if asJSON {
				return printJSON(cmd, details)
			}
			return writeDetails(cmd.OutOrStdout(), details)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document")
	return cmd
}

func writeDetails(out io.Writer, d deadletters.Details) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, row := range [][2]string{
		{"dead letter", d.ID.String()},
		{"state", d.State},
		{"class", string(d.Class)},
		{"detail", oneLine(d.Detail, 500)},
		{"consumer", d.Consumer},
		{"place", place(d.Letter)},
		{"event", orDash(d.EventID)},
		{"type", orDash(d.EventType)},
		{"tenant", orDash(d.TenantID)},
		{"order", orDash(d.OrderID)},
		{"version", orDash(d.Version)},
		{"attempts", fmt.Sprint(d.Attempts)},
		{"first failed", d.FirstFailedAt.Format(time.RFC3339)},
		{"last failed", d.LastFailedAt.Format(time.RFC3339)},
		{"record time", d.Record.Time.Format(time.RFC3339Nano)},
	} {
		fmt.Fprintf(table, "%s\t%s\n", row[0], row[1])
	}
	if err := table.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(out, "\nkey (%d bytes)\n  %s\n", d.Record.Key.Size, show(d.Record.Key))
	fmt.Fprintf(out, "headers\n")
	for _, header := range d.Record.Headers {
		fmt.Fprintf(out, "  %s: %s\n", oneLine(header.Name, 100), show(header.Value))
	}
	fmt.Fprintf(out, "value (%d bytes)\n  %s\n", d.Record.Value.Size, show(d.Record.Value))
	fmt.Fprintf(out, "decisions\n")
	for _, decision := range d.Decisions {
		fmt.Fprintf(out, "  %s  %s by %s: %s%s\n", decision.DecidedAt.Format(time.RFC3339), decision.Action, oneLine(decision.DecidedBy, 200), decision.Outcome, because(decision))
	}
	if len(d.Decisions) == 0 {
		fmt.Fprintln(out, "  none")
	}
	fmt.Fprintf(out, "parked behind it: %d\n", d.BehindAll)
	if len(d.Behind) > 0 {
		return writeLetters(out, d.Behind)
	}
	return nil
}

func because(d deadletters.Decision) string {
	var text string
	if d.Class != nil {
		text += " as " + string(*d.Class)
	}
	if d.Detail != nil {
		text += ": " + oneLine(*d.Detail, 500)
	}
	if d.Reason != nil {
		text += ": " + oneLine(*d.Reason, 2000)
	}
	return text
}

func show(b deadletters.Bytes) string {
	var text string
	switch {
	case b.JSON != nil:
		pretty, err := json.MarshalIndent(b.JSON, "  ", "  ")
		if err != nil {
			return string(b.JSON)
		}
		return string(pretty)
	case b.Text != nil:
		lines := strings.Split(*b.Text, "\n")
		for i := range lines {
			lines[i] = oneLine(lines[i], len(lines[i]))
		}
		text = strings.Join(lines, "\n  ")
	case b.Hex != nil:
		text = "hex " + *b.Hex
	default:
		text = "(none)"
	}
	if b.Truncated {
		text += " … (the beginning alone)"
	}
	return text
}

func newDLQActCommand(action string) *cobra.Command {
	var s selection
	var act deadletters.Act
	var yes, asJSON bool
	short := map[string]string{
		deadletters.Retry:   "Try dead letters again, with all that waits in their orders; without --yes say what would become of each",
		deadletters.Discard: "Decide for good that dead letters are not to be applied, and try those behind them; without --yes say what would become of each",
	}[action]
	use := map[string]string{deadletters.Retry: "retry [ID]... [--yes]", deadletters.Discard: "discard [ID]... --reason TEXT [--yes]"}[action]
	cmd := &cobra.Command{
		Use:   use,
		Short: short,
		Long: short + `.

What would become of them is found out by doing it and taking it back: no number is
used up, and nothing is held for longer than it takes. An order's letters are tried
together, by version. One that fails holds back those behind it, which stay parked.
` + dlqEnvironment,
		RunE: func(cmd *cobra.Command, args []string) error {
			filter, err := s.filter(args, time.Now())
			if err != nil {
				return err
			}
			act.Preview = !yes
			if act.By == "" {
				act.By = "cli:" + whoever()
			}
			service, done, err := openDLQ(cmd)
			if err != nil {
				return err
			}
			defer done()
			do := service.Retry
			if action == deadletters.Discard {
				do = service.Discard
			}
			report, err := do(cmd.Context(), filter, act)
			if len(report.Letters) > 0 || err == nil { // what was done before it failed, too
				if asJSON {
					err = errors.Join(printJSON(cmd, report), err)
				} else {
					err = errors.Join(writeReport(cmd.OutOrStdout(), report), err)
				}
			}
			return said(err)
		},
	}
	s.flags(cmd)
	cmd.Flags().BoolVar(&yes, "yes", false, "do it; without, only say what would become of each")
	cmd.Flags().StringVar(&act.By, "as", "", "who decides; your login, unless said")
	cmd.Flags().IntVar(&act.Limit, "limit", 0, "so many named letters at once at most (100)")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document")
	if action == deadletters.Discard {
		cmd.Flags().StringVar(&act.Reason, "reason", "", "why, for those who come after")
	}
	return cmd
}

func whoever() string {
	if login, err := user.Current(); err == nil && login.Username != "" {
		return login.Username
	}
	return cmp.Or(os.Getenv("USER"), "unknown")
}

func writeReport(out io.Writer, report deadletters.Report) error {
	if len(report.Letters) == 0 {
		_, err := fmt.Fprintln(out, "nothing to do: no open dead letter is named by that")
		return err
	}
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "ID\tEVENT\tVERSION\tORDER\tOUTCOME")
	for _, r := range report.Letters {
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\n", r.ID, orDash(r.EventType), orDash(r.Version), orDash(r.OrderID), outcomeOf(report, r))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	if len(report.Orders) > 0 {
		fmt.Fprintln(table)
		fmt.Fprintln(table, "ORDER\tVIEW\tINVOICES\tCREDIT NOTES\tLEDGER ENTRIES\tOPEN\tPARKED")
		for _, o := range report.Orders {
			fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", o.OrderID, diff(o.Before.Version, o.After.Version),
				diff(o.Before.Invoices, o.After.Invoices), diff(o.Before.CreditNotes, o.After.CreditNotes),
				diff(o.Before.LedgerEntries, o.After.LedgerEntries), diff(o.Before.Open, o.After.Open), diff(o.Before.Parked, o.After.Parked))
		}
		if err := table.Flush(); err != nil {
			return err
		}
	}
	if report.More {
		fmt.Fprintln(out, "\nThere are more than may be named at once; these are the oldest. Do it again for the rest, or raise --limit.")
	}
	if report.Preview {
		fmt.Fprintln(out, "\nNothing was changed. Say --yes to do it.")
	}
	return nil
}

func diff(before, after int64) string {
	if before == after {
		return fmt.Sprint(before)
	}
	return fmt.Sprintf("%d -> %d", before, after)
}

// outcomeOf says what became of a letter, or would.
func outcomeOf(report deadletters.Report, r deadletters.Result) string {
	did := func(would, was string) string {
		if report.Preview {
			return "would " + would
		}
		return was
	}
	switch r.Outcome {
	case inbox.OutcomeApplied:
		if r.Stale {
			return did("apply", "applied") + fmt.Sprintf(", stale: the view is at version %d and stays; dedupe decides, and its document and entry are made", r.ViewVersion)
		}
		return did("apply", "applied")
	case inbox.OutcomeDuplicate:
		return did("be a duplicate", "duplicate") + ": its event was applied before"
	case inbox.OutcomeSkipped:
		return did("be skipped", "skipped") + ": it carries no event"
	case inbox.OutcomeDiscarded:
		if report.Action == deadletters.Discard && r.Named {
			return did("be discarded", "discarded")
		}
		return did("be discarded", "discarded") + ": its event was discarded as another dead letter"
	case inbox.OutcomeParked:
		return did("stay parked", "parked") + ": an earlier event of its order is a dead letter"
	case inbox.OutcomeFailed:
		return fmt.Sprintf("%s as %s: %s", did("fail again", "failed again"), r.NewClass, oneLine(r.NewDetail, 300))
	default:
		return fmt.Sprintf("nothing to do: it is %s", r.State)
	}
}

func newDLQGapsCommand() *cobra.Command {
	var asJSON, giveUp bool
	var order, reason, by string
	var version int64
	short := "List the versions of orders that billing misses: they have not come, and later ones have"
	cmd := &cobra.Command{
		Use:   "gaps [--order ID --give-up --reason TEXT]",
		Short: short,
		Long: short + `.

With --give-up, decide that what an order misses will not come, which ends the
alarm. It is applied if it comes all the same.
` + dlqEnvironment,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if order == "" && cmd.Flags().Changed("order") {
				return errors.New("--order is empty: say which, or leave it out")
			}
			orderID, err := uuid.Parse(order)
			if order != "" && (err != nil || orderID == uuid.Nil) {
				return fmt.Errorf("--order: %q is not an id", order)
			}
			if version < 1 && cmd.Flags().Changed("version") {
				return fmt.Errorf("--version is %d: versions begin at 1", version)
			}
			service, done, err := openDLQ(cmd)
			if err != nil {
				return err
			}
			defer done()
			if giveUp {
				gaps, err := service.GiveUp(cmd.Context(), orderID, version, cmp.Or(by, "cli:"+whoever()), reason)
				if err != nil {
					return said(err)
				}
				if len(gaps) > 0 {
					return writeGaps(cmd, gaps, false, asJSON, true)
				}
			}
			gaps, more, err := service.Gaps(cmd.Context())
			if err != nil {
				return said(err)
			}
			if order != "" {
				gaps = slices.DeleteFunc(gaps, func(gap deadletters.Gap) bool {
					return gap.OrderID != orderID || version != 0 && gap.Version != version
				})
			}
			if giveUp && len(gaps) > 0 {
				return fmt.Errorf("nothing was given up: a dead letter waits for version %d of order %s, and what becomes of it is decided there: onceledger dlq list --order %s",
					gaps[0].Version, orderID, orderID)
			}
			return writeGaps(cmd, gaps, more, asJSON, false)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document")
	cmd.Flags().StringVar(&order, "order", "", "of this order alone")
	cmd.Flags().Int64Var(&version, "version", 0, "this version of the order alone")
	cmd.Flags().BoolVar(&giveUp, "give-up", false, "decide that they will not come")
	cmd.Flags().StringVar(&reason, "reason", "", "why, for those who come after")
	cmd.Flags().StringVar(&by, "as", "", "who decides; your login, unless said")
	cmd.MarkFlagsRequiredTogether("give-up", "reason")
	cmd.PreRunE = func(cmd *cobra.Command, _ []string) error {
		if giveUp && order == "" {
			return errors.New("--give-up is for an order: say --order ID")
		}
		return nil
	}
	return cmd
}

func writeGaps(cmd *cobra.Command, gaps []deadletters.Gap, more, asJSON, gaveUp bool) error {
	if asJSON {
		return printJSON(cmd, struct {
			Gaps []deadletters.Gap `json:"missing_versions"`
			More bool              `json:"more"`
		}{append([]deadletters.Gap{}, gaps...), more})
	}
	if len(gaps) == 0 {
		_, err := fmt.Fprintln(cmd.OutOrStdout(), "no version is missing")
		return err
	}
	if gaveUp {
		fmt.Fprintln(cmd.OutOrStdout(), "given up:")
	}
	table := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "TENANT\tORDER\tVERSION\tMISSING SINCE")
	for _, gap := range gaps {
		fmt.Fprintf(table, "%s\t%s\t%d\t%s\n", gap.TenantID, gap.OrderID, gap.Version, gap.Since.Format(time.RFC3339))
	}
	if more {
		cmd.PrintErrln("There are more.")
	}
	return table.Flush()
}

// said is a failure in words for a terminal.
func said(err error) error {
	refusal, ok := errors.AsType[*failure.Error](err)
	if !ok {
		if postgres.Code(err) == "42501" {
			return fmt.Errorf("the login of DATABASE_URL may not do this; want onceledger_worker: %w", err)
		}
		return err
	}
	text := refusal.Title
	if refusal.Detail != "" {
		text += " " + refusal.Detail
	}
	for _, field := range refusal.Fields {
		text += fmt.Sprintf(" %s: %s.", field.Field, field.Detail)
	}
	return errors.New(strings.TrimSpace(text))
}

func printJSON(cmd *cobra.Command, document any) error {
	encoder := json.NewEncoder(cmd.OutOrStdout())
	encoder.SetIndent("", "  ")
	return encoder.Encode(document)
}

// openDLQ connects as the worker does, and gives letters to the same code.
func openDLQ(cmd *cobra.Command) (service *deadletters.Service, done func(), err error) {
	url := os.Getenv("DATABASE_URL")
	if url == "" {
		connections, err := supervisor.ReadConnections(homeFolder())
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil, fmt.Errorf("DATABASE_URL is not set, and nothing was ever started in %s (onceledger up)", homeFolder())
		}
		if err != nil {
			return nil, nil, err
		}
		url = connections.Databases.Worker
	}
	pool, err := postgres.Open(cmd.Context(), url, postgres.Options{
		ApplicationName:    "onceledger dlq",
		MaxConns:           2,
		TransactionTimeout: 30 * time.Second,
		LockTimeout:        5 * time.Second,
	})
	if err != nil {
		return nil, nil, fmt.Errorf("DATABASE_URL: %w", err)
	}
	in := inbox.New(inbox.Config{
		Consumer: billing.Consumer, Pool: pool, Handler: billing.Handler{Now: time.Now},
		Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry(), Now: time.Now,
	})
	return deadletters.New(pool, map[string]*inbox.Inbox{billing.Consumer: in}), pool.Close, nil
}

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/config"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/janitor"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/postgres"
	"github.com/onceledger/onceledger/internal/replay"
	"github.com/onceledger/onceledger/internal/supervisor"
)

// What replay ends with. 0 is: everything had been applied, nothing changed.
const (
	exitReplayFound  exit = 1
	exitReplayNotRun exit = 2
)

type replayFlags struct {
	from, to, group   string
	rate              int
	wait              time.Duration
	dryRun, yes, stop bool
}

func newReplayCommand() *cobra.Command {
	var flags replayFlags
	cmd := &cobra.Command{
		Use:   "replay --from PLACE --group billing",
		Short: "Read a stretch of order.events once more, and see that nothing changes",
		Long: `Read a stretch of order.events once more, and see that nothing changes.

Each record goes through the same inbox and the same rules as in the worker. What
was applied is recognised and dropped. What was not, though billing has passed it,
is applied now, and said loudly: it had been lost. At the end the tables are
counted against what they were before.

PLACE, for --from and --to, is an offset (1200), one for each partition
(0:1200,3:900; the others are left out), a time (2026-11-30T18:00:00Z), how long
ago (6h), or earliest. Without --to it goes to where the group is, and never
beyond.

The group must be stopped: its members are named if it is not. --stop has
"onceledger up" stop its worker meanwhile. The group's offsets are not touched, and
the command can be ended at any moment and run again. If a worker begins in the
middle, that is harmless.

Only what can be told from a repeat is replayed: the retention contract is checked
(OUTBOX_RETENTION, DEDUPE_WINDOW, REPLAY_WINDOW, retention.ms of the topic), and
what is older than REPLAY_WINDOW or than the oldest marks is refused.

It ends with 0 if everything had been applied, with 1 if something had not, and
with 2 if it could not find out.

Environment:
  DATABASE_URL      the database, with the login onceledger_worker. Unset: all of
                    what "onceledger up" runs
  KAFKA_BROKERS     host:port, separated by commas
  OUTBOX_RETENTION, DEDUPE_WINDOW, REPLAY_WINDOW
                    as for the worker
  ONCELEDGER_HOME   the folder of "onceledger up" (.onceledger)
`,
		Args: func(cmd *cobra.Command, args []string) error { return replayNotRun(cmd, cobra.NoArgs(cmd, args)) },
		RunE: func(cmd *cobra.Command, _ []string) error {
			report, err := runReplay(cmd, flags)
			if report == nil {
				return replayNotRun(cmd, err)
			}
			err = errors.Join(err, report.WriteText(cmd.OutOrStdout()))
			if errors.Is(err, context.Canceled) {
				err = errInterrupted
			}
			if err != nil {
				cmd.PrintErrf("Stopped in the middle: %v. The account above is of the part that was done. Run it again for the rest.\n", err)
				return exitReplayNotRun
			}
			if !report.Unchanged() {
				return exitReplayFound
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&flags.from, "from", "", "where to begin")
	cmd.Flags().StringVar(&flags.to, "to", "", "where to end (default where the group is)")
	cmd.Flags().StringVar(&flags.group, "group", "", "the consumer group: billing")
	cmd.Flags().IntVar(&flags.rate, "rate", 1000, "records a second at most; 0: as fast as it goes")
	cmd.Flags().DurationVar(&flags.wait, "wait", 30*time.Second, "wait at most so long for the group's members to leave")
	cmd.Flags().BoolVar(&flags.dryRun, "dry-run", false, "say what would become of each record, and change nothing; the group may run")
	cmd.Flags().BoolVar(&flags.yes, "yes", false, "do not ask")
	cmd.Flags().BoolVar(&flags.stop, "stop", false, `have "onceledger up" stop its worker until this is done`)
	cmd.SetFlagErrorFunc(replayNotRun)
	return cmd
}

// errInterrupted is a Ctrl-C.
var errInterrupted = errors.New("interrupted")

func replayNotRun(cmd *cobra.Command, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, context.Canceled) {
		err = errInterrupted
	}
	cmd.PrintErrln("Nothing was replayed:", err)
	return exitReplayNotRun
}

// runReplay returns a report, if it came to that, even with an error.
func runReplay(cmd *cobra.Command, flags replayFlags) (*replay.Report, error) {
	ctx := cmd.Context()
	say := func(format string, args ...any) { cmd.PrintErrf(format+"\n", args...) }
	if err := checkReplayFlags(flags); err != nil {
		return nil, err
	}
	from, err := replay.ParsePoint(flags.from, time.Now())
	if err != nil {
		return nil, fmt.Errorf("--from: %w", err)
	}
	var to replay.Point
	if flags.to != "" {
		if to, err = replay.ParsePoint(flags.to, time.Now()); err != nil {
			return nil, fmt.Errorf("--to: %w", err)
		}
	}
	retention, err := config.LoadRetention(os.Getenv)
	if err != nil {
		return nil, err
	}
	databaseURL, brokers, err := replayTarget()
	if err != nil {
		return nil, err
	}
	pool, err := postgres.Open(ctx, databaseURL, postgres.Options{
		ApplicationName: "onceledger replay", MaxConns: 4, TransactionTimeout: 2 * time.Minute, LockTimeout: 30 * time.Second,
	})
	if err != nil {
		return nil, unreached("DATABASE_URL", err)
	}
	defer pool.Close()
	topics, err := kafka.TopicRetention(ctx, brokers, event.OrderEvents)
	if err != nil {
		return nil, unreached("KAFKA_BROKERS", err)
	}
	progress, clear := replayProgress(cmd)
	r := replay.New(replay.Config{
		Consumer: billing.Consumer,
		Topic:    replayTopic{brokers: brokers, topic: event.OrderEvents, group: billing.Consumer},
		DB:       pool,
		Handler:  billing.Handler{Now: time.Now},
		Contract: janitor.Retention{Dedupe: retention.Dedupe, Outbox: retention.Outbox, Replay: retention.Replay, Topics: topics},
		From:     from,
		To:       to,
		Rate:     flags.rate,
		Log:      slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil)),
		Now:      time.Now,
		Say:      func(format string, args ...any) { clear(); say(format, args...) },
		Progress: progress,
	})
	plan, err := r.Plan(ctx)
	if err != nil {
		return nil, err
	}
	describePlan(cmd, plan)
	if flags.dryRun {
		report, err := r.Rehearse(ctx, plan)
		clear()
		return &report, err
	}
	if err := confirmReplay(cmd, flags, plan); err != nil {
		return nil, err
	}
	if flags.stop {
		release, err := supervisor.HoldWorker(ctx, homeFolder())
		if err != nil {
			return nil, fmt.Errorf("--stop: %w", err)
		}
		defer release()
		say("the worker of %s is stopped until this is done", homeFolder())
	}
	if err := r.WaitStopped(ctx, flags.wait); err != nil {
		if errors.Is(err, replay.ErrRunning) && !flags.stop && os.Getenv("DATABASE_URL") == "" {
			err = fmt.Errorf(`%w; or have "onceledger up" stop its worker meanwhile: --stop`, err)
		}
		return nil, err
	}
	// What the group had in hand when it stopped is its own by now.
	if plan, err = r.Plan(ctx); err != nil {
		return nil, err
	}
	report, err := r.Run(ctx, plan)
	clear()
	return &report, err
}

func checkReplayFlags(flags replayFlags) error {
	switch {
	case flags.group == "":
		return errors.New("--group is not set: want billing")
	case flags.group == "balances":
		return errors.New("--group balances: it keeps its sums and its offsets in Kafka, in one transaction, and has no marks of single events; " +
			"to have it compute everything again see docs/runbook.md, \"The balances are not the ledger's\"")
	case flags.group != billing.Consumer:
		return fmt.Errorf("--group %s: there is no such consumer here: want billing", flags.group)
	case flags.from == "":
		return errors.New("--from is not set: want an offset, a time, how long ago, or earliest")
	case flags.rate < 0:
		return fmt.Errorf("--rate is %d: want 0 or more", flags.rate)
	case flags.wait < 0:
		return fmt.Errorf("--wait is %s: want 0 or more", flags.wait)
	}
	return nil
}

// replayTarget is the worker's database and the brokers: what the environment
// says, or else what runs in the home folder.
func replayTarget() (databaseURL, brokers string, err error) {
	if databaseURL = os.Getenv("DATABASE_URL"); databaseURL != "" {
		if brokers = os.Getenv("KAFKA_BROKERS"); brokers == "" {
			return "", "", errors.New("KAFKA_BROKERS is not set: want host:port, separated by commas")
		}
		return databaseURL, brokers, nil
	}
	connections, err := homeConnections("DATABASE_URL")
	return connections.Databases.Worker, connections.KafkaBrokers, err
}

func describePlan(cmd *cobra.Command, plan replay.Plan) {
	for _, partition := range slices.Sorted(maps.Keys(plan.Ranges)) {
		r := plan.Ranges[partition]
		cmd.PrintErrf("partition %-3d offsets %d to %d\n", partition, r.From, r.To)
	}
	cmd.PrintErrf("%d records at the most; nothing from before %s could be replayed\n", plan.Records, plan.Earliest.Format(time.RFC3339))
}

// confirmReplay asks, where somebody can answer.
func confirmReplay(cmd *cobra.Command, flags replayFlags, plan replay.Plan) error {
	if flags.yes {
		return nil
	}
	if !term.IsTerminal(int(os.Stdin.Fd())) {
		return errors.New("nobody is there to be asked: --yes does it, --dry-run shows what it would do")
	}
	cmd.PrintErrf("Replay %d records to %s? [y/N] ", plan.Records, flags.group)
	answer, _ := bufio.NewReader(cmd.InOrStdin()).ReadString('\n')
	if answer = strings.ToLower(strings.TrimSpace(answer)); answer != "y" && answer != "yes" {
		return errors.New("not confirmed, nothing was done")
	}
	return nil
}

// replayProgress shows how far it is: on a terminal in place, elsewhere now and
// then a line.
func replayProgress(cmd *cobra.Command) (progress func(done, of int64), clear func()) {
	stderr := cmd.ErrOrStderr()
	inPlace := stderr == os.Stderr && term.IsTerminal(int(os.Stderr.Fd()))
	var began, shown time.Time
	every := 5 * time.Second
	if inPlace {
		every = 200 * time.Millisecond
	}
	progress = func(done, of int64) {
		if began.IsZero() {
			began = time.Now() // after the first batch
		}
		if time.Since(shown) < every {
			return
		}
		shown = time.Now()
		line := fmt.Sprintf("%d of %d records (%d %%), %s", done, of, done*100/of, time.Since(began).Round(time.Second))
		if inPlace {
			fmt.Fprintf(stderr, "\r\033[K%s", line)
		} else {
			fmt.Fprintln(stderr, line)
		}
	}
	clear = func() {
		if inPlace {
			fmt.Fprint(stderr, "\r\033[K")
		}
	}
	return progress, clear
}

// replayTopic is a topic and a group on the brokers.
type replayTopic struct{ brokers, topic, group string }

func (t replayTopic) Members(ctx context.Context) ([]string, error) {
	members, err := kafka.GroupMembers(ctx, t.brokers, t.group)
	var names []string
	for _, member := range members {
		names = append(names, member.String())
	}
	return names, err
}

func (t replayTopic) First(ctx context.Context) (map[int32]int64, error) {
	return kafka.FirstOffsets(ctx, t.brokers, t.topic)
}

func (t replayTopic) Committed(ctx context.Context) (map[int32]int64, error) {
	committed, _, err := kafka.GroupLag(ctx, t.brokers, t.group, t.topic)
	return committed, err
}

func (t replayTopic) At(ctx context.Context, moment time.Time) (map[int32]int64, error) {
	return kafka.OffsetsAt(ctx, t.brokers, t.topic, moment)
}

func (t replayTopic) Read(ctx context.Context, ranges map[int32]replay.Range, most int, use func([]event.Record) error) error {
	wanted := make(map[int32]kafka.Range, len(ranges))
	for partition, r := range ranges {
		wanted[partition] = kafka.Range(r)
	}
	return kafka.ReadRanges(ctx, t.brokers, t.topic, wanted, most, use)
}

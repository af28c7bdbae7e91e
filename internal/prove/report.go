package prove

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"
)

// ReportSchema is the version of the report's JSON and of the journal.
const ReportSchema = 1

// Report is what a run comes to.
type Report struct {
	Schema  int    `json:"schema"`
	OK      bool   `json:"ok"`
	Partial bool   `json:"partial"`       // fewer faults than asked for
	Why     string `json:"why,omitempty"` // it is partial
	Command string `json:"command"`       // that runs the same schedule again

	Seed     uint64   `json:"seed"`
	Cells    []string `json:"cells"`
	LeftOut  []string `json:"cells_left_out,omitempty"`
	Faults   int      `json:"faults"`
	Done     int      `json:"faults_done"`
	Schedule string   `json:"schedule_sha256"`
	Clients  int      `json:"clients"`
	Resumed  int      `json:"resumed"` // how often the run was broken off and went on

	Account     Conservation     `json:"account"`
	Accounts    int              `json:"accounts_made"`
	Counts      map[string]int   `json:"violation_counts"`
	Violations  []Violation      `json:"violations"`
	Bites       map[Bite]int64   `json:"bites"`
	Wanted      []Bite           `json:"bites_wanted"`
	Unbitten    []Bite           `json:"bites_missing"`
	Recoveries  []CellReport     `json:"recoveries"`
	RetainedWAL int64            `json:"retained_wal_bytes_at_most"`
	Memory      map[string]int64 `json:"memory_bytes_at_most"`

	Journal       string            `json:"journal"`
	JournalDigest string            `json:"journal_sha256"`
	JournalBytes  int64             `json:"journal_bytes"`
	Versions      map[string]string `json:"versions"`
	Took          time.Duration     `json:"took_ns"`
	Folder        string            `json:"folder"`
}

// CellReport is how the service recovered from one kind of fault, in seconds from
// the end of the fault.
type CellReport struct {
	Cell   string  `json:"cell"`
	Times  int     `json:"times"`
	Median float64 `json:"p50_s"`
	P99    float64 `json:"p99_s"`
	Max    float64 `json:"max_s"`
	// FromBegin is the longest time from the begin of the fault.
	FromBegin float64 `json:"max_from_begin_s"`
}

// report makes the report. interrupted says that the run can go on.
func (r *run) report(ctx context.Context, interrupted bool) (*Report, error) {
	path := filepath.Join(r.options.Dir, journalName)
	sum, size, err := digest(path)
	if err != nil {
		return nil, fmt.Errorf("read the journal: %w", err)
	}
	r.monitor.look(ctx)
	memory, retained := r.monitor.peaks()
	report := &Report{
		Schema: ReportSchema, Command: r.options.Command(), Seed: r.options.Seed, LeftOut: r.leftOut,
		Faults: r.options.Faults, Done: r.known.fault, Schedule: ScheduleDigest(r.schedule), Clients: r.options.Clients, Resumed: r.known.resumed,
		Account: r.account, Accounts: r.accounts, Violations: sorted(r.violations), Counts: tally(r.violations), Bites: r.counted(),
		Recoveries: cellReports(r.known.recoveries), RetainedWAL: retained, Memory: memory,
		Journal: path, JournalDigest: sum, JournalBytes: size, Took: time.Since(r.began), Folder: r.options.Dir,
	}
	for _, cell := range r.cells {
		report.Cells = append(report.Cells, cell.Name)
	}
	report.Partial = report.Done < report.Faults
	switch {
	case interrupted:
		report.Why = "it was interrupted; it goes on with: onceledger prove --resume --dir " + r.options.Dir
	case report.Partial && r.broken != nil:
		report.Why = r.broken.Error()
	}
	report.Wanted, report.Unbitten = bitesWanted(r.cells, r.known.recoveries, report.Bites)
	report.Versions = r.versions(ctx)
	report.OK = len(report.Violations) == 0 && (len(report.Unbitten) == 0 || interrupted) && (!report.Partial || interrupted)
	return report, nil
}

// bitesWanted are what the cells that were run are there to cause, and what of it
// was never seen.
func bitesWanted(cells []Cell, done []recovery, bites map[Bite]int64) (wanted, missing []Bite) {
	ran := make(map[string]bool)
	for _, recovery := range done {
		ran[recovery.Cell] = true
	}
	set := make(map[Bite]bool)
	for _, cell := range cells {
		for _, bite := range cell.Bites {
			if ran[cell.Name] {
				set[bite] = true
			}
		}
	}
	for _, bite := range slices.Sorted(maps.Keys(set)) {
		wanted = append(wanted, bite)
		if bites[bite] == 0 {
			missing = append(missing, bite)
		}
	}
	return wanted, missing
}

func cellReports(recoveries []recovery) []CellReport {
	byCell := make(map[string][]recovery)
	for _, recovery := range recoveries {
		byCell[recovery.Cell] = append(byCell[recovery.Cell], recovery)
	}
	var reports []CellReport
	for name, of := range byCell {
		report := CellReport{Cell: name, Times: len(of)}
		var times []float64
		for _, recovery := range of {
			times = append(times, recovery.Since.Seconds())
			report.FromBegin = max(report.FromBegin, recovery.FromBegin.Seconds())
		}
		slices.Sort(times)
		report.Median, report.P99, report.Max = quantile(times, 0.50), quantile(times, 0.99), times[len(times)-1]
		reports = append(reports, report)
	}
	slices.SortFunc(reports, func(a, b CellReport) int { return cmp.Compare(a.Cell, b.Cell) })
	return reports
}

// quantile is the smallest of some sorted numbers that so many of them do not
// exceed.
func quantile(sorted []float64, q float64) float64 {
	at := int(float64(len(sorted))*q + 0.999999)
	return sorted[min(max(at-1, 0), len(sorted)-1)]
}

// versions are those of what was run.
func (r *run) versions(ctx context.Context) map[string]string {
	versions := map[string]string{"go": runtime.Version()}
	var postgres string
	if err := r.sandbox.Owner.QueryRow(ctx, "SHOW server_version").Scan(&postgres); err == nil {
		versions["postgres"] = postgres
	}
	module := func(path string) string {
		info, _ := debug.ReadBuildInfo()
		if info != nil {
			for _, dependency := range info.Deps {
				if dependency.Path == path {
					return dependency.Version
				}
			}
		}
		return "?"
	}
	switch {
	case r.sandbox.Kafka != nil:
		versions["broker"] = fmt.Sprintf("Apache Kafka %s, %d of it", r.topics.version(ctx), r.sandbox.Kafka.Brokers())
	case r.options.KafkaBrokers != "":
		versions["broker"] = r.topics.version(ctx) + " at " + r.options.KafkaBrokers
	default:
		versions["broker"] = "embedded (kfake " + module("github.com/twmb/franz-go/pkg/kfake") + ")"
	}
	for _, program := range []string{"api", "worker"} {
		if sum, _, err := digest(filepath.Join(r.options.Programs, program)); err == nil {
			versions[program] = "sha256:" + sum[:16]
		}
	}
	return versions
}

func (r *Report) save(path string) error {
	text, err := json.MarshalIndent(r, "", "  ")
	if err == nil {
		err = os.WriteFile(path, append(text, '\n'), 0o600)
	}
	if err != nil {
		return fmt.Errorf("save the report: %w", err)
	}
	return nil
}

// mostShown is how many violations the text tells of; the JSON has all.
const mostShown = 20

// WriteText prints the report for people.
func (r *Report) WriteText(w io.Writer) error {
	var text strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&text, format+"\n", args...) }
	a := r.Account
	line("onceledger prove: %d faults of %d kinds, seed %d, in %s", r.Done, len(r.Recoveries), r.Seed, r.Took.Round(time.Second))
	if r.Partial {
		line("PARTIAL: %d of %d faults were done: %s", r.Done, r.Faults, r.Why)
	}
	line("")
	line("%-24s %10s %10s %10s %10s", "", "orders", "payments", "refunds", "cancelled")
	row := func(name string, of func(Flow) int, posted bool) {
		orders, cancelled := fmt.Sprint(of(a.Orders)), fmt.Sprint(of(a.Cancellations))
		if posted {
			orders, cancelled = "", ""
		}
		line("%s", strings.TrimRight(fmt.Sprintf("%-24s %10s %10d %10d %10s", name, orders, of(a.Payments), of(a.Refunds), cancelled), " "))
	}
	row("attempted", func(f Flow) int { return f.Attempted }, false)
	row("acknowledged", func(f Flow) int { return f.Acknowledged }, false)
	row("committed", func(f Flow) int { return f.Committed }, false)
	row("emitted", func(f Flow) int { return f.Emitted }, false)
	row("applied", func(f Flow) int { return f.Applied }, false)
	row("posted to the ledger", func(f Flow) int { return f.Posted }, true)
	line("")
	line("requests                 %8d  of which %d were refused with good reason", a.Requests, a.Refused)
	line("  outcome unknown        %8d  sent again with the same key: %d had been done, %d had not, %d were refused, %d unresolved", a.Unknown, a.HadDone, a.HadNot, a.WasRefuse, a.Unsolved)
	unless := func(fine string) string { // with violations, what is fine is not for this line to say
		if len(r.Violations) > 0 {
			return "as far as the violations do not say otherwise: " + fine
		}
		return fine
	}
	line("  sent once more         %8d  %s", a.Answers, unless("answered as the first time, and nothing changed"))
	line("histories of orders      %8d  %s", a.Histories, unless("linearizable"))
	line("events                   %8d  as %d records, %d of them sent again", a.Events, a.Records, a.Again)
	line("invoices, credit notes   %8d  and %d", a.Invoices, a.CreditNotes)
	line("dead letters             %8d  %s", a.DeadLetters, unless("each of them asked for by a fault"))
	line("")
	// Nothing seen in n: with 95 % confidence it happens at most in 3 of n.
	bound := func(n int) string {
		if n == 0 || !r.OK {
			return ""
		}
		return fmt.Sprintf("  of %d; at most %.2g of each with 95 %% confidence (3/n)", n, min(1, 3/float64(n)))
	}
	effects := a.Payments.Posted + a.Refunds.Posted
	line("lost                     %8d%s", r.Counts["lost"], bound(a.Events))
	line("duplicated               %8d%s", r.Counts["duplicated"], bound(a.Events))
	line("phantom                  %8d%s", r.Counts["phantom"], bound(a.Events))
	line("unbalanced               %8d%s", r.Counts["unbalanced"], bound(effects))
	line("other violations         %8d%s", r.Counts["other"], bound(r.Done))
	line("")
	line("that the faults bit:")
	for _, bite := range bites(r.Bites, r.Unbitten) {
		note := ""
		if slices.Contains(r.Unbitten, bite) {
			note = "  WANTED, and never seen"
		}
		line("  %-32s %8d%s", bite, r.Bites[bite], note)
	}
	line("")
	line("recovery, seconds from the end of the fault until a new order has its whole receipt:")
	line("  %-36s %6s %8s %8s %8s %14s", "", "times", "p50", "p99", "max", "from its begin")
	for _, c := range r.Recoveries {
		line("  %-36s %6d %8.2f %8.2f %8.2f %14.2f", c.Cell, c.Times, c.Median, c.P99, c.Max, c.FromBegin)
	}
	line("")
	var memory []string
	for _, name := range slices.Sorted(maps.Keys(r.Memory)) {
		memory = append(memory, fmt.Sprintf("%s %d MB", name, r.Memory[name]>>20))
	}
	line("retained WAL at most     %.1f MB", float64(r.RetainedWAL)/(1<<20))
	line("memory at most           %s", strings.Join(memory, ", "))
	line("")
	if len(r.Violations) > 0 {
		line("VIOLATIONS: %d", len(r.Violations))
		for _, v := range r.Violations[:min(mostShown, len(r.Violations))] {
			line("  %-3s %-13s %s: %s", v.Invariant, "("+Invariants[v.Invariant]+")", v.Kind, v.Detail)
			line("      found after fault %d%s", v.Fault, optional(" (", v.Cell, ")"))
		}
		if more := len(r.Violations) - mostShown; more > 0 {
			line("  and %d more: see %s", more, filepath.Join(r.Folder, reportName))
		}
		line("")
	}
	for _, left := range r.LeftOut {
		line("left out: %s", left)
	}
	line("journal   %s (%.1f MB)", r.Journal, float64(r.JournalBytes)/(1<<20))
	line("          sha256 %s", r.JournalDigest)
	line("schedule  sha256 %s", r.Schedule)
	line("run on    Postgres %s, broker %s, %s", r.Versions["postgres"], r.Versions["broker"], r.Versions["go"])
	line("again     %s", r.Command)
	line("")
	line("%s", r.sentence())
	_, err := io.WriteString(w, text.String())
	return err
}

// bites are those that were seen, or should have been, in the order in which they
// are told.
func bites(seen map[Bite]int64, wanted []Bite) []Bite {
	order := []Bite{
		BiteCrash, BiteUnknown, BiteDone, BiteDuplicates, BiteRedelivery, BiteRebalance, BiteServer, BiteBroker,
		BiteCommit, BiteRetry, BiteDeadLetters, BiteStale,
	}
	for _, more := range slices.Sorted(maps.Keys(seen)) {
		if !slices.Contains(order, more) {
			order = append(order, more)
		}
	}
	return slices.DeleteFunc(order, func(bite Bite) bool { return seen[bite] == 0 && !slices.Contains(wanted, bite) })
}

func optional(before, text, after string) string {
	if text == "" {
		return ""
	}
	return before + text + after
}

// sentence is the last line.
func (r *Report) sentence() string {
	switch {
	case len(r.Violations) > 0:
		return fmt.Sprintf("NOT PROVED: %d violations. The data is in %s.", len(r.Violations), r.Folder)
	case len(r.Unbitten) > 0 && !r.Partial:
		return "NOT PROVED: some faults did not bite, so they have shown nothing."
	case r.Partial && !r.OK:
		return "NOT PROVED: " + r.Why + "."
	case r.Partial:
		return "As far as it went, everything is accounted for."
	default:
		return "Everything is accounted for: nothing lost, nothing twice, nothing made up."
	}
}

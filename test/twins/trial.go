package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

var afterSeeds = regexp.MustCompile(`\[rapid\] (?:failed|panic) after (\d+) tests`)

// simulation runs a test on a twin. It has failed only where the test itself says
// so: a twin that does not compile, or a test that is not there, is an error.
func (s settings) simulation(ctx context.Context, overlay, which string) (failed bool, seeds int, err error) {
	dir, test, _ := strings.Cut(which, " ")
	command := exec.CommandContext(ctx, "go", "test", "-overlay", overlay, "-vet=off", "-count=1", "-v",
		"-run", "^"+test+"$", dir, "-rapid.nofailfile", "-rapid.shrinktime=1s", "-rapid.seed="+strconv.FormatUint(s.seed, 10))
	command.Dir = s.root
	out, err := command.CombinedOutput()
	if _, ended := errors.AsType[*exec.ExitError](err); err != nil && !ended {
		return false, 0, err
	}
	switch found := afterSeeds.FindSubmatch(out); {
	case bytes.Contains(out, []byte("--- FAIL: "+test+" ")) && found != nil:
		seeds, err = strconv.Atoi(string(found[1]))
		return true, seeds, err
	case bytes.Contains(out, []byte("--- PASS: "+test+" ")):
		return false, 0, nil
	default:
		return false, 0, fmt.Errorf("go test %s neither passed nor failed:\n%s", which, out)
	}
}

// report is what is read of prove's.
type report struct {
	OK         bool          `json:"ok"`
	Faults     int           `json:"faults_done"`
	Cells      []string      `json:"cells"`
	Violations []violation   `json:"violations"`
	Took       time.Duration `json:"took_ns"`
}

type violation struct {
	Invariant string `json:"invariant"`
	Kind      string `json:"kind"`
	Detail    string `json:"detail"`
	Fault     int    `json:"found_after_fault"`
}

// counts is false for a fault that could not be done: that may be the fault's own
// fault, and is no catch.
func (v violation) counts() bool { return v.Kind != "fault not undone" }

func (r *report) invariants() []string {
	var all []string
	for _, v := range r.Violations {
		if v.counts() {
			all = append(all, v.Invariant)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// caught is by which invariants, the first violation of one that it was to be,
// and after how many faults that was found; "" if there is none.
func (r *report) caught(expected []string) (by []string, first string, faults int) {
	for _, v := range r.Violations {
		if slices.Contains(expected, v.Invariant) && v.counts() {
			detail, _, _ := strings.Cut(v.Detail, "\n")
			return r.invariants(), v.Kind + ": " + detail, v.Fault
		}
	}
	return r.invariants(), "", r.Faults
}

func (r *report) String() string {
	if r.OK {
		return fmt.Sprintf("The product as it is: nothing found, after %d faults of the same %d kinds.", r.Faults, len(r.Cells))
	}
	text := fmt.Sprintf("The product as it is: NOT OK after %d faults, so the table above means nothing.", r.Faults)
	for _, v := range r.Violations {
		text += fmt.Sprintf("\n  %s %s: %s", v.Invariant, v.Kind, v.Detail)
	}
	return text
}

// prove runs `onceledger prove` on programs. Violations are no error.
func (s settings) prove(ctx context.Context, name, programs string, cells []string, faults int, more []string) (*report, error) {
	dir := filepath.Join(s.scratch, name, "run")
	arguments := append([]string{
		"prove", "--programs", programs, "--dir", dir, "--cells", strings.Join(cells, ","),
		"--faults", strconv.Itoa(faults), "--seed", strconv.FormatUint(s.seed, 10), "--json",
	}, more...)
	if !strings.HasPrefix(name, "control") {
		arguments = append(arguments, "--stop-at-first", "--check-every", "1", "--settle", "8s", "--recover-within", "45s")
	}
	command := exec.CommandContext(ctx, s.onceledger, arguments...)
	command.Cancel = func() error { return command.Process.Signal(syscall.SIGTERM) }
	command.WaitDelay = 2 * time.Minute
	var out, progress bytes.Buffer
	command.Stdout, command.Stderr = &out, &progress
	if s.verbose {
		command.Stderr = io.MultiWriter(&progress, os.Stderr)
	}
	runErr := command.Run()
	var r report
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		return nil, fmt.Errorf("onceledger %s: %w, and no report: %w\n%s", strings.Join(arguments, " "), cmp.Or(runErr, errors.New("it ended well")), err, tail(progress.String()))
	}
	return &r, ctx.Err()
}

// tail is the end of a long text.
func tail(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}

func (r result) String() string {
	if r.Survived != "" {
		return fmt.Sprintf("%-34s SURVIVED %s (%s)", r.Twin, r.Survived, r.Took.Round(time.Second))
	}
	return fmt.Sprintf("%-34s caught %s %s (%s)", r.Twin, strings.Join(r.CaughtBy, " "), r.Violation, r.Took.Round(time.Second))
}

// table is for people, and for docs/twins.md.
func table(results []result) string {
	var text strings.Builder
	text.WriteString("| twin | what it breaks | caught by | after | simulation | took |\n|---|---|---|---|---|---|\n")
	for _, r := range results {
		by, after, simulation := "—", "—", "—"
		if len(r.CaughtBy) > 0 {
			by, after = strings.Join(r.CaughtBy, ", "), plural(r.Faults, "fault")
		}
		if r.Simulation != "" {
			_, test, _ := strings.Cut(r.Simulation, " ")
			simulation = fmt.Sprintf("%s, after %s", test, plural(r.Seeds, "seed"))
		}
		if r.Survived != "" {
			by = "**survived** " + r.Survived
		}
		fmt.Fprintf(&text, "| %s | %s | %s | %s | %s | %s |\n", r.Twin, r.Breaks, by, after, simulation, r.Took.Round(time.Second))
	}
	return text.String()
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

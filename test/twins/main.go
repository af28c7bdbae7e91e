// Command twins shows that the proof has teeth. Each patch beside it puts one
// mistake into the product that people have really made. The programs that come
// of it, its twins, are run through `onceledger prove`, which must find them out;
// where the mistake is in a decision that has a simulation, that must fail too.
// The product as it is goes through the same faults and must pass, or a catch
// would mean nothing.
//
//	go run ./test/twins [flags] [twin ...]
//	go run ./test/twins control
//
// docs/twins.md says how a twin is made and how to read the table.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ok, err := run(ctx, os.Args[1:])
	switch {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "twins:", err)
		os.Exit(1)
	case !ok:
		os.Exit(1)
	}
}

// settings are the flags.
type settings struct {
	root       string // of the repository
	onceledger string // the program that proves
	scratch    string
	results    string
	seed       uint64
	faults     int
	check      bool
	simulate   bool
	control    bool
	verbose    bool
}

func run(ctx context.Context, arguments []string) (ok bool, err error) {
	var s settings
	flags := flag.NewFlagSet("twins", flag.ContinueOnError)
	flags.StringVar(&s.onceledger, "onceledger", "bin/onceledger", "the program whose prove is tried")
	flags.StringVar(&s.results, "json", "", "a file to write the results to as well")
	flags.Uint64Var(&s.seed, "seed", 1, "of each run")
	flags.IntVar(&s.faults, "faults", 12, "after so many faults a twin has survived, unless its patch says otherwise")
	flags.BoolVar(&s.check, "check", false, "only see that every patch applies and compiles")
	flags.BoolVar(&s.simulate, "simulations", false, "only run the simulations")
	flags.BoolVar(&s.control, "control", true, "run the product as it is through the same faults")
	flags.BoolVar(&s.verbose, "v", false, "show what prove says meanwhile")
	flags.Usage = func() {
		fmt.Fprintln(flags.Output(), "usage: go run ./test/twins [flags] [twin ...]")
		flags.PrintDefaults()
	}
	if err := flags.Parse(arguments); err != nil {
		return false, err
	}
	if s.root, err = os.Getwd(); err != nil {
		return false, err
	}
	names := flags.Args()
	onlyControl := slices.Equal(names, []string{"control"})
	if onlyControl {
		names = nil
	}
	twins, err := readTwins(filepath.Join(s.root, "test", "twins"), names)
	if err != nil {
		return false, err
	}
	if s.scratch, err = os.MkdirTemp("", "twins-"); err != nil {
		return false, err
	}
	defer os.RemoveAll(s.scratch)
	switch {
	case s.check:
		return true, s.checkAll(ctx, twins)
	case onlyControl:
		control, err := s.tryControl(ctx, twins)
		if err != nil {
			return false, fmt.Errorf("the product as it is: %w", err)
		}
		fmt.Println(control)
		return control.OK, s.write(map[string]any{"control": control})
	}
	return s.proveAll(ctx, twins)
}

// checkAll sees that every patch applies and that what it changes compiles.
func (s settings) checkAll(ctx context.Context, twins []twin) error {
	var faults []error
	for _, t := range twins {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		overlay, err := s.overlay(ctx, t)
		if err == nil {
			err = s.compile(ctx, overlay, t.packages())
		}
		if err != nil {
			faults = append(faults, fmt.Errorf("%s: %w", t.Name, err))
		}
	}
	if len(faults) == 0 {
		fmt.Printf("%d twins: each patch applies and compiles\n", len(twins))
	}
	return errors.Join(faults...)
}

// result is what became of a twin.
type result struct {
	Twin      string        `json:"twin"`
	Breaks    string        `json:"breaks"`
	SeenIn    string        `json:"seen_in"`
	CaughtBy  []string      `json:"caught_by"` // invariants
	Violation string        `json:"violation,omitempty"`
	Faults    int           `json:"after_faults"`
	Cells     []string      `json:"cells"`
	Took      time.Duration `json:"took_ns"`
	// Simulation is the test that failed, and after how many seeds; "" if the
	// twin is not in what is simulated.
	Simulation string `json:"simulation,omitempty"`
	Seeds      int    `json:"after_seeds,omitempty"`
	Survived   string `json:"survived,omitempty"` // what it was not caught by
}

func (s settings) proveAll(ctx context.Context, twins []twin) (ok bool, err error) {
	started := time.Now()
	if !s.simulate {
		if _, err := os.Stat(s.onceledger); err != nil {
			return false, fmt.Errorf("there is no %s: run make build first, or name another with -onceledger", s.onceledger)
		}
	}
	var results []result
	ok = true
	for _, t := range twins {
		r, err := s.tryTwin(ctx, t)
		if err != nil {
			return false, fmt.Errorf("%s: %w", t.Name, err)
		}
		fmt.Println(r)
		results = append(results, r)
		ok = ok && r.Survived == ""
	}
	var control *report
	if s.control && !s.simulate {
		if control, err = s.tryControl(ctx, twins); err != nil {
			return false, fmt.Errorf("the product as it is: %w", err)
		}
		ok = ok && control.OK
	}

	fmt.Printf("\n%s", table(results))
	caught := len(slices.DeleteFunc(slices.Clone(results), func(r result) bool { return r.Survived != "" }))
	fmt.Printf("\n%d of %d twins caught, in %s.\n", caught, len(results), time.Since(started).Round(time.Second))
	if control != nil {
		fmt.Println(control)
	}
	return ok, s.write(map[string]any{
		"caught": caught, "twins": results, "control": control, "seed": s.seed, "took_ns": time.Since(started),
	})
}

// write writes results to a file, if there is to be one.
func (s settings) write(results map[string]any) error {
	if s.results == "" {
		return nil
	}
	encoded, err := json.MarshalIndent(results, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(s.results, append(encoded, '\n'), 0o644)
}

// tryTwin makes a twin and lets the simulation and the proof have a go at it.
func (s settings) tryTwin(ctx context.Context, t twin) (result, error) {
	started := time.Now()
	r := result{Twin: t.Name, Breaks: t.Breaks, SeenIn: t.SeenIn, Cells: t.Cells}
	overlay, err := s.overlay(ctx, t)
	if err != nil {
		return r, err
	}
	var survived []string
	if t.Simulation != "" {
		failed, seeds, err := s.simulation(ctx, overlay, t.Simulation)
		if err != nil {
			return r, err
		}
		r.Simulation, r.Seeds = t.Simulation, seeds
		if !failed {
			survived = append(survived, "the simulation "+t.Simulation)
		}
	}
	if !s.simulate {
		programs, err := s.build(ctx, t.Name, overlay)
		if err != nil {
			return r, err
		}
		report, err := s.prove(ctx, t.Name, programs, t.Cells, t.faults(s.faults), t.Arguments)
		if err != nil {
			return r, err
		}
		r.CaughtBy, r.Violation, r.Faults = report.caught(t.CaughtBy)
		if r.Violation == "" {
			survived = append(survived, fmt.Sprintf("prove, by %s (found: %s)", strings.Join(t.CaughtBy, " or "), strings.Join(r.CaughtBy, " ")))
		}
	}
	r.Survived = strings.Join(survived, "; ")
	r.Took = time.Since(started)
	return r, nil
}

// tryControl runs the product as it is through all the cells of the twins: once
// for each way in which prove is told to run.
func (s settings) tryControl(ctx context.Context, twins []twin) (*report, error) {
	programs, err := s.build(ctx, "control", "")
	if err != nil {
		return nil, err
	}
	cells := make(map[string][]string)
	for _, t := range twins {
		way := strings.Join(t.Arguments, " ")
		cells[way] = append(cells[way], t.Cells...)
	}
	whole := &report{OK: true}
	for n, way := range slices.Sorted(maps.Keys(cells)) {
		slices.Sort(cells[way])
		of := slices.Compact(cells[way])
		r, err := s.prove(ctx, fmt.Sprint("control-", n), programs, of, max(s.faults, 2*len(of)), strings.Fields(way))
		if err != nil {
			return nil, err
		}
		whole.OK = whole.OK && r.OK
		whole.Faults += r.Faults
		whole.Took += r.Took
		whole.Cells = append(whole.Cells, r.Cells...)
		whole.Violations = append(whole.Violations, r.Violations...)
	}
	slices.Sort(whole.Cells)
	whole.Cells = slices.Compact(whole.Cells)
	return whole, nil
}

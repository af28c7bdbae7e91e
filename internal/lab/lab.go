// Package lab is `onceledger lab`: the sentences of the textbook about delivery and idempotency, each as an
// experiment that anyone can run.
//
// An experiment starts from nothing: a Postgres and a broker of its own in a folder that is removed afterwards.
// What it kills is a process (the hidden command `onceledger lab-consumer`), what it reads is a topic, what it
// counts are rows. Its file here holds the wrong way and the right way beside each other and is meant to be read;
// room.go, child.go, consumer.go and print.go hold what all of them need. The SQL of an experiment stands in its
// file: its tables are made for it and are nobody else's.
//
// What an experiment prints is the same each time, but for times, ports and the like, so that docs/lab can show it
// and a test can compare.
package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
)

// Config says what to run and with what.
type Config struct {
	// Kafka is which broker to start: embedded or apache. "" is embedded, or what the experiment needs.
	Kafka string
	// Keep leaves the experiment's folder where it is.
	Keep bool
	// Events and CrashAfter are for the experiments that take them: so many events, and the one in whose
	// middle the consumer is killed. 0 means the usual five and the third.
	Events, CrashAfter int

	// Command is this program: the experiments start `lab-consumer` and `broker` of it.
	Command string
	// Programs is the folder with api and worker.
	Programs string
	// PostgresBin is a folder with Postgres' programs; "" means to look for one.
	PostgresBin string
	// JavaHome is where Java is, for what needs it; "" means to look on PATH.
	JavaHome string
	// Environ is what the children's environment begins with.
	Environ []string

	// Stdout gets what the experiment shows, Stderr what goes on beside it.
	Stdout, Stderr io.Writer
}

// The brokers to choose from.
const (
	KafkaEmbedded = "embedded"
	KafkaApache   = "apache"
)

// Experiment is one of the lab's.
type Experiment struct {
	Name    string
	Summary string // one line, for the list
	// NeedsJava says that the embedded broker cannot show it: it runs on Apache Kafka.
	NeedsJava bool
	// Counted says that it takes --events and --crash-after.
	Counted bool

	run func(ctx context.Context, r *room) error
}

// Experiments are all of them, in the order in which to read them.
var Experiments = []Experiment{
	{Name: "at-most-once", Counted: true, run: runAtMostOnce,
		Summary: "the offset first, then the work: a crash between loses an invoice, without a word"},
	{Name: "naive", Counted: true, run: runNaive,
		Summary: "the work first, then the offset: a crash between makes a second invoice"},
	{Name: "dedupe", Counted: true, run: runDedupe,
		Summary: "the same crash with the event's id in the work's own transaction: one invoice each"},
	{Name: "split-transaction", run: runSplitTransaction,
		Summary: "the mark in another transaction, or in Redis: lost or twice, by where it crashes"},
	{Name: "event-id", run: runEventID,
		Summary: "an id made at each send, the offset, a hash of the payload: three ids that are none"},
	{Name: "increment", run: runIncrement,
		Summary: "balance = balance - 100, delivered twice; with dedupe; and as a line in the ledger"},
	{Name: "version-guard", run: runVersionGuard,
		Summary: "INSERT 0 1, 0 0, 0 0: one statement against duplicates and late versions; and why not updated_at"},
	{Name: "parallel", run: runParallel,
		Summary: "two consumers on one event: one waits on the index, or both write"},
	{Name: "early-cleanup", run: runEarlyCleanup,
		Summary: "marks kept for 3 days, records for 7: a replay from 5 days ago; and the worker that refuses"},
	{Name: "dual-write", run: runDualWrite,
		Summary: "database and Kafka, killed between: an order without event, an event without order; the outbox"},
	{Name: "kafka-transaction", NeedsJava: true, run: runKafkaTransaction,
		Summary: "aborted records, who sees them, and a hanging transaction that holds everybody up (Apache Kafka)"},
	{Name: "shutdown", run: runShutdown,
		Summary: "deploys by kill and by draining: fewer duplicates, and what makes the rest harmless"},
}

// Find returns the experiment of a name; the error for an unknown one says which are like it.
func Find(name string) (Experiment, error) {
	for _, experiment := range Experiments {
		if experiment.Name == name {
			return experiment, nil
		}
	}
	text := fmt.Sprintf("there is no experiment %q", name)
	if alike := near(name); len(alike) > 0 {
		text += ": is " + strings.Join(alike, " or ") + " meant?"
	}
	return Experiment{}, errors.New(text + " (onceledger lab list has all of them)")
}

// near are the names that a few changed letters, or a missing part, make of name.
func near(name string) (names []string) {
	for _, experiment := range Experiments {
		if known := experiment.Name; distance(name, known) <= 1+len(known)/4 ||
			len(name) > 2 && (strings.Contains(known, name) || strings.Contains(name, known)) {
			names = append(names, known)
		}
	}
	return names
}

// distance counts the letters to change, add or take away to make a of b.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before := row[0]
		row[0] = i + 1
		for j := range len(b) {
			changed := before
			if a[i] != b[j] {
				changed++
			}
			before = row[j+1]
			row[j+1] = min(changed, row[j]+1, before+1)
		}
	}
	return row[len(b)]
}

// Run runs one experiment. An error is an experiment that could not be made; what it shows, however bad, is none.
func Run(ctx context.Context, experiment Experiment, config Config) error {
	if err := config.check(&experiment); err != nil {
		return err
	}
	r, err := newRoom(config)
	if err != nil {
		return err
	}
	defer r.close(ctx)
	if err = r.open(ctx); err == nil {
		r.line("%s", wrap("", "", experiment.Name+": "+experiment.Summary))
		r.line("")
		err = experiment.run(ctx, r)
	}
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("%s was stopped in the middle; what it started is ended", experiment.Name)
	case err != nil:
		return fmt.Errorf("%s: %w", experiment.Name, err)
	}
	return nil
}

// RunAll runs all that need no Java, one after the other, and goes on after one that fails.
func RunAll(ctx context.Context, config Config) error {
	var faults []error
	ran := 0
	for _, experiment := range Experiments {
		if experiment.NeedsJava && config.Kafka != KafkaApache {
			fmt.Fprintf(config.Stdout, "%s: left out, it needs --kafka=apache\n\n", experiment.Name)
			continue
		}
		if ctx.Err() != nil {
			break
		}
		its := config
		if !experiment.Counted {
			its.Events, its.CrashAfter = 0, 0
		}
		faults = append(faults, Run(ctx, experiment, its))
		ran++
		fmt.Fprintln(config.Stdout)
	}
	if err := errors.Join(faults...); err != nil {
		return err
	}
	fmt.Fprintf(config.Stdout, "%d experiments ran\n", ran)
	return nil
}

const (
	maxEvents         = 100
	defaultEvents     = 5
	defaultCrashAfter = 3
)

// check looks at what was asked for, and fills in what was not.
func (c *Config) check(experiment *Experiment) error {
	var faults []error
	if !experiment.Counted && (c.Events != 0 || c.CrashAfter != 0) {
		faults = append(faults, fmt.Errorf("%s takes neither --events nor --crash-after", experiment.Name))
	}
	if c.Events == 0 {
		c.Events = defaultEvents
	}
	if c.Events < 1 || c.Events > maxEvents {
		faults = append(faults, fmt.Errorf("--events is %d: want 1 to %d", c.Events, maxEvents))
	} else {
		if c.CrashAfter == 0 {
			c.CrashAfter = min(defaultCrashAfter, c.Events)
		}
		if c.CrashAfter < 1 || c.CrashAfter > c.Events {
			faults = append(faults, fmt.Errorf("--crash-after is %d: want 1 to %d, one of the events", c.CrashAfter, c.Events))
		}
	}
	switch {
	case c.Kafka == "" && experiment.NeedsJava:
		c.Kafka = KafkaApache
	case c.Kafka == "":
		c.Kafka = KafkaEmbedded
	case c.Kafka != KafkaEmbedded && c.Kafka != KafkaApache:
		faults = append(faults, fmt.Errorf("--kafka is %q: want embedded or apache", c.Kafka))
	case c.Kafka == KafkaEmbedded && experiment.NeedsJava:
		faults = append(faults, fmt.Errorf("%s cannot be seen on the embedded broker: leave --kafka away; it needs Java 17 or later", experiment.Name))
	}
	return errors.Join(faults...)
}

package prove

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/onceledger/onceledger/internal/devstack"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/faults"
	"github.com/onceledger/onceledger/internal/sandbox"
)

// recovery is a fault that is over.
type recovery struct {
	Cell string `json:"cell"`
	// Since is how long it took until a new order had its whole receipt, counted
	// from the fault's end, and FromBegin from its begin.
	Since     time.Duration `json:"since_end_ns"`
	FromBegin time.Duration `json:"since_begin_ns"`
	Fault     string        `json:"fault,omitempty"` // what was wrong, if anything
	Notes     []string      `json:"notes,omitempty"`
}

// run is one Run.
type run struct {
	options  Options
	cells    []Cell
	leftOut  []string
	schedule []Cell
	say      func(format string, args ...any)

	sandbox             *sandbox.Sandbox
	tenants             []string // ids
	journal             *journal
	known               *known
	load                *load
	topics              *topics
	monitor             *monitor
	bites               counter
	before              map[Bite]int64 // those of an earlier run that this one goes on with
	api, relay, billing *sandbox.Process

	mutex      sync.Mutex
	violations []Violation
	told       map[string]bool
	injections atomic.Int64
	account    Conservation
	accounts   int
	answers    int
	broken     error // why no more faults are done, though there are some
	began      time.Time
	stopLook   context.CancelFunc // ends the monitor
}

const (
	journalName = "journal.jsonl"
	reportName  = "report.json"
	lockName    = "prove.lock"
)

// cellTimeout bounds one fault; those that wait for time-outs take a minute.
const cellTimeout = 6 * time.Minute

// Run proves. When ctx is done, no further fault begins, and the account of what
// was done is made; the report then says that it is partial. An error is that
// nothing could be proved; what is wrong with the service is in the report.
func Run(ctx context.Context, options Options) (_ *Report, err error) {
	if err := options.validate(); err != nil {
		return nil, err
	}
	r := &run{options: options, told: make(map[string]bool), bites: counter{counts: make(map[Bite]int64)}, known: newKnown(), began: time.Now()}
	var terminal sync.Mutex
	r.say = func(format string, args ...any) {
		terminal.Lock()
		defer terminal.Unlock()
		fmt.Fprintf(options.Stderr, format+"\n", args...)
	}
	if err := r.prepare(); err != nil {
		return nil, err
	}
	if err := r.options.checkGiven(ctx); err != nil {
		return nil, err
	}
	if err := checkFolder(r.options.Dir); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(r.options.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the run's folder: %w", err)
	}
	lock, err := devstack.Lock(filepath.Join(r.options.Dir, lockName))
	if errors.Is(err, devstack.ErrLocked) {
		return nil, fmt.Errorf("another prove is at work in this folder: %w", err)
	}
	if err != nil {
		return nil, err
	}
	defer lock.Unlock()
	if err := r.openFolder(); err != nil {
		return nil, err
	}

	// From here on things run that have to be ended in order: ctx only says when
	// to stop.
	return r.inFolder(ctx, context.WithoutCancel(ctx))
}

// prepare settles what is run: in a resumed run, what was run before.
func (r *run) prepare() error {
	if r.options.Resume {
		if err := r.options.goOn(); err != nil {
			return err
		}
	} else if r.options.Seed == 0 {
		r.options.Seed = 1 + rand.Uint64N(1_000_000_000)
	}
	r.options = r.options.withDefaults()
	var err error
	if r.cells, r.leftOut, err = r.options.pick(Cells()); err != nil {
		return err
	}
	r.schedule = Schedule(r.cells, r.options.Faults, r.options.Seed)
	return nil
}

// goOn finds the run that is to go on, and takes over what it was run with.
// Anything else that was asked for has to be the same.
func (o *Options) goOn() error {
	if o.Dir == "" && o.Seed != 0 {
		o.Dir = filepath.Join(o.Home, "prove", fmt.Sprint(o.Seed))
	}
	if o.Dir == "" {
		dir, err := unfinished(filepath.Join(o.Home, "prove"))
		if err != nil {
			return err
		}
		o.Dir = dir
	}
	first, err := firstEntry(filepath.Join(o.Dir, journalName))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("there is nothing to go on with in %s: it has no %s", o.Dir, journalName)
	}
	if err != nil {
		return err
	}
	b := first.Begin
	var differences []error
	keep := func(name string, asked, was any, zero bool) {
		if !zero && fmt.Sprint(asked) != fmt.Sprint(was) {
			differences = append(differences, fmt.Errorf("%s is %v, and the run in %s has %v: leave it away", name, asked, o.Dir, was))
		}
	}
	keep("--seed", o.Seed, b.Seed, o.Seed == 0)
	keep("--faults", o.Faults, b.Faults, o.Faults == 0)
	keep("--clients", o.Clients, b.Clients, o.Clients == 0)
	keep("--kafka", o.Kafka, b.Kafka, o.Kafka == "")
	keep("--brokers", o.Brokers, b.Brokers, o.Brokers == 0)
	keep("--relay", o.Relay, b.Relay, o.Relay == "")
	if b.Kafka == "given" && o.DatabaseURL == "" {
		differences = append(differences, fmt.Errorf("the run in %s is on services from outside: say --database and --kafka-brokers again", o.Dir))
	}
	if err := errors.Join(differences...); err != nil {
		return err
	}
	o.Seed, o.Faults, o.Clients, o.Brokers, o.Relay = b.Seed, b.Faults, b.Clients, b.Brokers, b.Relay
	if b.Kafka != "given" {
		o.Kafka = b.Kafka
	}
	if o.Tmpfs == 0 {
		o.Tmpfs = b.Tmpfs
	}
	if len(o.Cells) == 0 {
		o.Cells = b.Cells
	}
	return nil
}

// unfinished finds the one run below a folder that was broken off.
func unfinished(home string) (string, error) {
	journals, err := filepath.Glob(filepath.Join(home, "*", journalName))
	if err != nil {
		return "", err
	}
	var open []string
	for _, path := range journals {
		if ended, err := hasEnded(path); err == nil && !ended {
			open = append(open, filepath.Dir(path))
		}
	}
	switch len(open) {
	case 0:
		return "", fmt.Errorf("there is nothing to go on with: no run in %s was broken off", home)
	case 1:
		return open[0], nil
	default:
		return "", fmt.Errorf("several runs in %s were broken off: say which with --dir or --seed: %v", home, open)
	}
}

func hasEnded(path string) (bool, error) {
	file, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer file.Close()
	ended := false
	_, _, err = readJournal(file, func(e entry) error {
		ended = e.Kind == entryEnd
		return nil
	})
	return ended, err
}

// checkFolder refuses a folder in which somebody else keeps something: what an
// earlier run has left there is removed.
func checkFolder(dir string) error {
	there, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(there) == 0 {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look at the run's folder: %w", err)
	}
	for _, name := range []string{journalName, lockName} {
		if _, err := os.Stat(filepath.Join(dir, name)); err == nil {
			return nil
		}
	}
	return fmt.Errorf("%s is not empty, and no run of prove: choose another folder with --dir", dir)
}

// openFolder looks at what is in the folder from earlier.
func (r *run) openFolder() error {
	path := filepath.Join(r.options.Dir, journalName)
	_, err := os.Stat(path)
	switch {
	case r.options.Resume && err != nil:
		return fmt.Errorf("there is nothing to go on with in %s: %w", r.options.Dir, err)
	case r.options.Resume:
		ended, err := hasEnded(path)
		if err == nil && ended {
			err = fmt.Errorf("the run in %s has ended: its report is %s; run it again without --resume", r.options.Dir, filepath.Join(r.options.Dir, reportName))
		}
		return err
	case errors.Is(err, fs.ErrNotExist):
		return r.clearFolder() // of a start that came to nothing
	case err != nil:
		return err
	}
	ended, err := hasEnded(path)
	if err != nil {
		return fmt.Errorf("%w; remove %s to begin anew", err, r.options.Dir)
	}
	if !ended {
		return fmt.Errorf("the run in %s was broken off: go on with it with --resume, or remove the folder to begin anew", r.options.Dir)
	}
	return r.clearFolder()
}

// clearFolder removes what an earlier run has left, and nothing that prove did
// not put there.
func (r *run) clearFolder() error {
	for _, name := range []string{journalName, reportName, "postgres", "kafka", "broker", "logs", "lock"} {
		if err := os.RemoveAll(filepath.Join(r.options.Dir, name)); err != nil {
			return fmt.Errorf("clear the run's folder: %w", err)
		}
	}
	return nil
}

// inFolder has the folder, and gives it back as it should be left. interrupt is
// done when the run is to end early.
func (r *run) inFolder(interrupt, ctx context.Context) (_ *Report, err error) {
	r.say("onceledger prove: %d faults of %d kinds, seed %d (%s)", r.options.Faults, len(r.cells), r.options.Seed, r.options.Dir)
	for _, left := range r.leftOut {
		r.say("left out: %s", left)
	}
	config := sandbox.Config{
		Dir: r.options.Dir, Programs: r.options.Programs, Kafka: r.options.Kafka, Brokers: r.options.Brokers,
		BrokerCommand: r.options.BrokerCommand, PostgresBin: r.options.PostgresBin, JavaHome: r.options.JavaHome,
		DatabaseURL: r.options.DatabaseURL, KafkaBrokers: r.options.KafkaBrokers,
		Environ: r.options.Environ, Logf: r.say,
	}
	if config.KafkaBrokers != "" {
		config.Kafka, config.Brokers = "", 0
	}
	if r.options.Tmpfs > 0 {
		unmount, err := r.mount(&config)
		if err != nil {
			return nil, err
		}
		defer unmount()
	}
	if r.sandbox, err = sandbox.Start(ctx, config); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.sandbox.Stop(ctx)) }()
	if err := r.open(ctx); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	if err := r.start(ctx); err != nil {
		return nil, err
	}
	r.breakThings(interrupt, ctx)
	return r.finish(interrupt, ctx)
}

// mount puts Postgres' folder on a small file system.
func (r *run) mount(config *sandbox.Config) (func(), error) {
	config.PostgresDir = filepath.Join(r.options.Dir, "postgres")
	if err := os.MkdirAll(config.PostgresDir, 0o700); err != nil {
		return nil, err
	}
	if r.options.Resume {
		return nil, errors.New("a run with --tmpfs cannot be gone on with: its database was in memory")
	}
	disk, err := faults.MountDisk(config.PostgresDir, r.options.Tmpfs)
	if err != nil {
		return nil, fmt.Errorf("--tmpfs: %w", err)
	}
	config.PostgresSettings = map[string]string{"max_wal_size": "128MB", "wal_recycle": "off"}
	return func() { _ = disk.Unmount() }, nil
}

// open opens what the account is made of: journal, topics, tenants.
func (r *run) open(ctx context.Context) error {
	names := make([]string, tenantCount)
	for i := range names {
		names[i] = fmt.Sprintf("prove-%d-%c", r.options.Seed, 'a'+i)
	}
	keys := make([]string, len(names))
	for i, name := range names {
		key, err := r.sandbox.CreateKey(ctx, name)
		if err != nil {
			return fmt.Errorf("make an API key: %w", err)
		}
		keys[i] = key
	}
	var err error
	if r.tenants, err = tenantIDs(ctx, r.sandbox.Owner, names); err != nil {
		return err
	}
	if err := r.refuseUsed(ctx); err != nil {
		return err
	}
	if r.topics, err = newTopics(r.sandbox.KafkaAddr()); err != nil {
		return err
	}
	for _, id := range r.tenants {
		r.topics.tenants[id] = true
	}
	if err := r.openJournal(names); err != nil {
		return err
	}
	r.before = maps.Clone(r.known.bites)
	r.injections.Store(int64(len(r.known.injections)))
	r.load = &load{
		journal: r.journal, known: r.known, seed: r.options.Seed, count: r.options.Clients, tenants: r.tenants,
		posted: postedIn(r.sandbox.Owner), pause: time.Duration(float64(time.Second) * float64(r.options.Clients) / r.options.Rate),
	}
	r.api = r.sandbox.API("api")
	r.relay = r.sandbox.Worker("relay", "relay")
	r.billing = r.sandbox.Worker("billing", "billing,balances,janitor")
	for _, key := range keys {
		r.load.clients = append(r.load.clients, sandbox.NewClient(r.api.URL, key))
	}
	r.monitor = newMonitor(r.sandbox.Owner, r.billing, r.api, r.relay, r.billing)
	return nil
}

// refuseUsed refuses tenants that have orders of another run: on a database from
// outside, a second run with one seed would take them for its own.
func (r *run) refuseUsed(ctx context.Context) error {
	if r.options.Resume {
		return nil
	}
	var used bool
	if err := r.sandbox.Owner.QueryRow(ctx, "SELECT EXISTS (SELECT FROM orders WHERE tenant_id = ANY ($1::uuid[]))", r.tenants).Scan(&used); err != nil {
		return fmt.Errorf("look for orders of earlier runs: %w", err)
	}
	if used {
		return fmt.Errorf("the database has orders of an earlier run with seed %d: take another --seed", r.options.Seed)
	}
	return nil
}

func (r *run) openJournal(tenants []string) (err error) {
	path := filepath.Join(r.options.Dir, journalName)
	var patterns []string
	for _, cell := range r.cells {
		patterns = append(patterns, cell.Name)
	}
	begin := beginning{
		Schema: ReportSchema, Seed: r.options.Seed, Cells: patterns, Faults: r.options.Faults, Schedule: ScheduleDigest(r.schedule),
		Clients: r.options.Clients, Kafka: r.options.Kafka, Brokers: r.options.Brokers, Relay: r.options.Relay, Tmpfs: r.options.Tmpfs, Tenants: tenants,
	}
	line := entry{Kind: entryBegin, Begin: &begin}
	if r.options.Resume {
		var torn bool
		if r.journal, torn, err = openJournal(path, r.known.learn); err != nil {
			return err
		}
		if torn {
			r.say("the journal's last line was not whole, and is left away: nothing was done after it")
		}
		if was := r.known.begin.Schedule; was != begin.Schedule {
			return fmt.Errorf("the run in %s has another schedule (%.12s) than what is asked for (%.12s): the cells or this program have changed", r.options.Dir, was, begin.Schedule)
		}
		for _, v := range r.known.earlier {
			r.told[v.key()] = true
			r.violations = append(r.violations, v)
		}
		line = entry{Kind: entryResume}
		r.say("going on after fault %d of %d, with %d violations found", r.known.fault, r.options.Faults, len(r.violations))
	} else if r.journal, err = createJournal(path); err != nil {
		return err
	}
	_, err = r.write(line)
	return err
}

// write puts a line into the journal and learns from it.
func (r *run) write(line entry) (entry, error) {
	line, err := r.journal.add(line)
	if err == nil {
		err = r.known.learn(line)
	}
	return line, err
}

func (r *run) close() error {
	if r.stopLook != nil {
		r.stopLook()
	}
	r.topics.close()
	return r.journal.close()
}

// start starts the programs, settles what an earlier run has left open, and lets
// the clients begin.
func (r *run) start(ctx context.Context) error {
	if r.options.Relay != "wal" {
		_, err := r.sandbox.Owner.Exec(ctx, `
			INSERT INTO relay_assignment (slot_name, relay, target, changed_at) VALUES ('onceledger_outbox', $1, $1, now() - interval '1 hour')
			ON CONFLICT (slot_name) DO NOTHING`, r.options.Relay)
		if err != nil {
			return fmt.Errorf("choose the relay: %w", err)
		}
	}
	for _, process := range []*sandbox.Process{r.api, r.relay, r.billing} {
		if err := process.Start(); err != nil {
			return err
		}
	}
	for _, process := range []*sandbox.Process{r.relay, r.billing, r.api} {
		if err := process.WaitReady(); err != nil {
			return err
		}
	}
	if open := len(r.known.open); open > 0 {
		r.say("%d requests were under way when the run was broken off: sending them again", open)
		resolveCtx, cancel := context.WithTimeout(ctx, r.options.RecoverWithin)
		defer cancel()
		r.load.lastOp.Store(r.known.lastOp)
		if err := r.load.resolve(resolveCtx); err != nil && resolveCtx.Err() == nil {
			return err
		}
	}
	r.load.start(ctx)
	var look context.Context
	look, r.stopLook = context.WithCancel(ctx)
	go r.monitor.run(look)
	return nil
}

// breakThings does the faults that are left.
func (r *run) breakThings(interrupt, ctx context.Context) {
	failures := 0
	for number := r.known.fault + 1; number <= r.options.Faults; number++ {
		if interrupt.Err() != nil {
			r.say("stopping before fault %d of %d: the account of what was done is made", number, r.options.Faults)
			return
		}
		ok, err := r.breakOne(ctx, number)
		if err != nil {
			r.broken = err
			return
		}
		if !ok {
			failures++
		}
		if failures == 3 {
			r.broken = errors.New("three faults could not be done or undone: no more are begun")
			return
		}
		if number%r.options.CheckEvery == 0 && number < r.options.Faults && interrupt.Err() == nil {
			if err := r.check(ctx, false); err != nil {
				r.broken = err
				return
			}
		}
		if r.options.StopAtFirst && r.found() > 0 {
			r.broken = fmt.Errorf("stopped at the first violation, after fault %d", number)
			return
		}
	}
}

// breakOne does one fault and waits until the service has recovered. It reports
// whether the cell did what it was to do; an error is that it makes no sense to
// go on.
func (r *run) breakOne(ctx context.Context, number int) (bool, error) {
	cell := r.schedule[number-1]
	if _, err := r.write(entry{Kind: entryFault, Fault: number, Cell: cell.Name}); err != nil {
		return false, err
	}
	w := &World{
		Sandbox: r.sandbox, API: r.api, Relay: r.relay, Billing: r.billing, Rand: faultRandom(r.options.Seed, number),
		Fault: number, Options: r.options, run: r,
	}
	began := time.Now()
	cellCtx, cancel := context.WithTimeout(ctx, cellTimeout)
	fault := cell.Run(cellCtx, w)
	cancel()
	w.mutex.Lock()
	if w.begun.IsZero() {
		w.begun = began
	}
	if w.done.IsZero() {
		w.done = time.Now()
	}
	begun, ended := w.begun, w.done
	w.mutex.Unlock()
	if fault != nil {
		r.violate(Violation{Invariant: "I8", Kind: "fault not undone", Detail: fmt.Sprintf("fault %d, %s: %v", number, cell.Name, fault)}, number)
	}
	restarted := r.restart()
	lost := r.recover(ctx, number)
	result := recovery{Cell: cell.Name, Since: time.Since(ended), FromBegin: time.Since(begun), Notes: w.Notes()}
	r.monitor.look(ctx)
	for _, trouble := range []error{fault, restarted, lost} {
		if trouble != nil && result.Fault == "" {
			result.Fault = trouble.Error()
		}
	}
	if lost != nil { // before the fault counts as over: a run that goes on has to know
		r.violate(Violation{Invariant: "I8", Kind: "no recovery", Detail: fmt.Sprintf("fault %d, %s: %v", number, cell.Name, lost)}, number)
	}
	if _, err := r.write(entry{Kind: entryRecovery, Fault: number, Cell: cell.Name, Recovery: &result, Bites: r.counted()}); err != nil {
		return false, err
	}
	r.noteViolations(number)
	r.progress(number, cell, result)
	if lost != nil {
		return false, fmt.Errorf("the service does not recover from fault %d (%s)", number, cell.Name)
	}
	return fault == nil, nil
}

// restart starts again what a cell has left dead.
func (r *run) restart() error {
	var faults []error
	for _, process := range []*sandbox.Process{r.api, r.relay, r.billing} {
		if !process.Alive() {
			faults = append(faults, process.Start())
		}
	}
	return errors.Join(faults...)
}

// recover waits until a new order has its whole receipt and every process is
// ready.
func (r *run) recover(ctx context.Context, number int) error {
	ctx, cancel := context.WithTimeout(ctx, r.options.RecoverWithin)
	defer cancel()
	tenant := number % len(r.load.clients)
	order, err := r.load.probe(ctx, tenant)
	if err != nil {
		return fmt.Errorf("an order cannot be placed and paid within %s: %w", r.options.RecoverWithin, err)
	}
	err = sandbox.WaitAtMost(ctx, r.options.RecoverWithin, func() (bool, error) { return r.load.receiptComplete(ctx, tenant, order) })
	if err != nil {
		return fmt.Errorf("a new order has no whole receipt within %s: %w", r.options.RecoverWithin, err)
	}
	for _, process := range []*sandbox.Process{r.api, r.relay, r.billing} {
		err := sandbox.WaitAtMost(ctx, r.options.RecoverWithin, func() (bool, error) {
			status, body, err := process.Get("/readyz")
			if err == nil && status != http.StatusOK {
				err = fmt.Errorf("%d %s", status, body)
			}
			return err == nil, err
		})
		if err != nil {
			return fmt.Errorf("%s is not ready within %s: %w", process.Name, r.options.RecoverWithin, err)
		}
	}
	return nil
}

// counted are all bites so far.
func (r *run) counted() map[Bite]int64 {
	all := maps.Clone(r.before)
	add := func(from map[Bite]int64) {
		for bite, times := range from {
			all[bite] += times
		}
	}
	add(r.bites.all())
	add(r.monitor.bites())
	for _, process := range []*sandbox.Process{r.api, r.relay, r.billing} {
		all[BiteCrash] += int64(process.Deaths())
	}
	// What the journal and the topics tell is told of all runs.
	var unknown, done int64
	r.known.mutex.Lock()
	for _, o := range r.known.ops {
		if o.unknown > 0 && o.request.Method == http.MethodPost {
			unknown++
			if o.final != nil && o.final.replayed && o.final.status < 400 {
				done++
			}
		}
	}
	again := -r.known.repeats() // which are nobody's but prove's
	r.known.mutex.Unlock()
	r.topics.mutex.Lock()
	for _, seen := range r.topics.seen {
		again += seen.again
	}
	r.topics.mutex.Unlock()
	all[BiteUnknown], all[BiteDone], all[BiteDuplicates] = unknown, done, max(again, r.before[BiteDuplicates])
	return all
}

func (r *run) progress(number int, cell Cell, result recovery) {
	r.known.mutex.Lock()
	orders := len(r.known.orders)
	r.known.mutex.Unlock()
	trouble := ""
	if result.Fault != "" {
		trouble = "  " + result.Fault
	}
	r.say("%4d/%d  %-36s recovered in %6.2f s  %6d orders  %d violations%s", number, r.options.Faults, cell.Name, result.Since.Seconds(), orders, r.found(), trouble)
}

// violate notes a violation, once, and for a run that goes on later too.
func (r *run) violate(v Violation, fault int) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if r.told[v.key()] {
		return
	}
	r.told[v.key()] = true
	v.Fault = fault
	if fault > 0 && fault <= len(r.schedule) {
		v.Cell = r.schedule[fault-1].Name
	}
	r.violations = append(r.violations, v)
	if _, err := r.journal.add(entry{Kind: entryViolated, Violation: &v}); err != nil {
		r.say("a violation is not in the journal: %v", err)
	}
	if len(r.violations) <= 20 {
		r.say("VIOLATION %s", v)
	}
}

// noteViolations takes over what was seen as answers came in.
func (r *run) noteViolations(fault int) {
	r.known.mutex.Lock()
	found := slices.Clone(r.known.violations)
	r.known.mutex.Unlock()
	for _, v := range found {
		r.violate(v, fault)
	}
}

func (r *run) found() int {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return len(r.violations)
}

// quiet holds the clients back and waits until all that they have done has come
// to its end, or does not come any further.
func (r *run) quiet(ctx context.Context) (resume func(), err error) {
	resume = r.load.hold()
	ctx, cancel := context.WithTimeout(ctx, r.options.RecoverWithin)
	defer cancel()
	if err := r.load.waitIdle(ctx); err != nil {
		resume()
		return nil, err
	}
	if err := r.settle(ctx); err != nil {
		resume()
		return nil, err
	}
	return resume, nil
}

// errUnsettled says that the pipeline has come to a rest before its end.
var errUnsettled = errors.New("the pipeline does not get to its end")

// settle waits until every event is on its topic and applied and every offset
// committed. When nothing has changed for a while before that, it gives up.
func (r *run) settle(ctx context.Context) error {
	type state struct {
		progress
		emitted      int
		lag, balance int64
	}
	var last state
	var fault error
	since := time.Now()
	for {
		now, err := func() (now state, err error) {
			if now.progress, err = readProgress(ctx, r.sandbox.Owner, r.tenants); err != nil {
				return now, err
			}
			if err = r.topics.drain(ctx); err != nil {
				return now, err
			}
			now.emitted = r.emitted()
			if now.lag, err = r.topics.lag(ctx, "billing", event.OrderEvents); err != nil {
				return now, err
			}
			now.balance, err = r.topics.lag(ctx, "balances", event.BillingEvents)
			return now, err
		}()
		if err == nil && now.applied >= now.orderEvents && int64(now.emitted) >= now.orderEvents+now.billingEvents && now.lag == 0 && now.balance == 0 {
			return nil
		}
		if err == nil {
			fault = fmt.Errorf("of %d events of orders and %d of billing %d are on the topics, %d are applied; billing has %d offsets left, balances %d",
				now.orderEvents, now.billingEvents, now.emitted, now.applied, now.lag, now.balance)
		} else {
			fault = err
		}
		if now != last {
			last, since = now, time.Now()
		}
		if time.Since(since) > r.options.Settle {
			return fmt.Errorf("%w: %w", errUnsettled, fault)
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", errUnsettled, fault)
		}
	}
}

// emitted counts the events that were seen on their topics.
func (r *run) emitted() int {
	r.known.mutex.Lock()
	defer r.known.mutex.Unlock()
	r.topics.mutex.Lock()
	defer r.topics.mutex.Unlock()
	count := 0
	for topic, seen := range r.topics.seen {
		count += len(seen.first)
		for id := range r.known.remade[topic] {
			if seen.first[id] == nil {
				count++
			}
		}
	}
	return count
}

// patience is for what is under way at the end: short where it is known already
// that something is wrong, and nobody wants to know more.
func (r *run) patience() time.Duration {
	if r.options.StopAtFirst && r.found() > 0 {
		return min(20*time.Second, r.options.RecoverWithin)
	}
	return r.options.RecoverWithin
}

// check makes the account. In the end it asks more.
func (r *run) check(ctx context.Context, last bool) error {
	fault := r.known.fault
	resume := r.load.hold()
	defer resume()
	idleCtx, cancel := context.WithTimeout(ctx, r.patience())
	defer cancel()
	if err := r.load.waitIdle(idleCtx); err != nil {
		r.say("%v", err) // which ones is in the account
	}
	most := 100
	if last {
		most = 1000
	}
	againCtx, cancelAgain := context.WithTimeout(ctx, min(time.Minute, r.patience()))
	defer cancelAgain()
	compared, err := r.load.again(againCtx, most)
	if err != nil && againCtx.Err() == nil {
		return err
	}
	r.answers += compared
	settleCtx, cancelSettle := context.WithTimeout(ctx, 5*time.Minute)
	defer cancelSettle()
	if err := r.settle(settleCtx); errors.Is(err, errUnsettled) {
		r.say("%v", err)
	}
	e := evidence{known: r.known, tenants: r.tenants, topics: r.topics.seen, lag: make(map[string]int64)}
	if e.books, err = readBooks(ctx, r.sandbox.Owner, r.tenants); err != nil {
		return err
	}
	if r.options.DatabaseURL != "" { // those of somebody else, before this run
		e.books.letters = slices.DeleteFunc(e.books.letters, func(l bookLetter) bool { return l.Since.Before(time.Unix(0, r.known.began)) })
	}
	for group, topic := range map[string]string{"billing": event.OrderEvents, "balances": event.BillingEvents} {
		if e.lag[group], err = r.topics.lag(ctx, group, topic); err != nil {
			return err
		}
	}
	if e.balances, err = r.topics.balances(ctx); err != nil {
		return err
	}
	if last {
		if e.answered, err = r.askAccounts(ctx, e.books); err != nil {
			return err
		}
	}
	account, violations := audit(e)
	var unlinear []Violation
	account.Histories, unlinear = r.known.linearizable()
	account.Answers = r.answers
	for _, v := range append(violations, unlinear...) {
		r.violate(v, fault)
	}
	if last {
		for _, v := range r.refusedWrites(ctx) {
			r.violate(v, fault)
		}
		r.verify(ctx, fault)
	}
	r.account = account
	r.accounts++
	return nil
}

// askAccounts asks the API for each account that the ledger has.
func (r *run) askAccounts(ctx context.Context, b *books) (map[account]int64, error) {
	answered := make(map[account]int64)
	for of := range b.accounts {
		tenant := slices.Index(r.tenants, of.Tenant)
		got, err := r.load.clients[tenant].Send(ctx, http.MethodGet, "/v1/ledger/accounts/"+of.Code+"/balance?currency="+of.Currency, "", "")
		if err != nil {
			return nil, fmt.Errorf("ask for account %s: %w", of.Code, err)
		}
		var body struct {
			Debit  json.Number `json:"debit_amount"`
			Credit json.Number `json:"credit_amount"`
		}
		err = json.Unmarshal([]byte(got.Body), &body)
		debit, debitErr := strconv.ParseInt(body.Debit.String(), 10, 64)
		credit, creditErr := strconv.ParseInt(body.Credit.String(), 10, 64)
		if err := errors.Join(err, debitErr, creditErr); err != nil || got.Status != http.StatusOK {
			return nil, fmt.Errorf("account %s in %s was answered %d %.200s: %w", of.Code, of.Currency, got.Status, got.Body, err)
		}
		answered[of] = debit - credit
	}
	return answered, nil
}

// verify asks the product's own check.
func (r *run) verify(ctx context.Context, fault int) {
	if r.options.Verify == nil {
		return
	}
	found, err := r.options.Verify(ctx, r.sandbox.URL("verify"), r.sandbox.KafkaAddr())
	if err != nil {
		found = append(found, fmt.Sprintf("it could not look: %v", err))
	}
	for _, text := range found {
		r.violate(Violation{Invariant: "V", Kind: "finding", Detail: "the product's own verify says: " + text}, fault)
	}
}

// inject is World.Inject.
func (r *run) inject(ctx context.Context, fault int, record event.Record, want Injected) (Place, error) {
	number := int(r.injections.Add(1))
	var ids []string
	for _, header := range record.Headers {
		if header.Key == event.HeaderID {
			ids = []string{string(header.Value)}
		}
	}
	if !want.Again {
		record.Headers = append(slices.Clone(record.Headers), event.Header{Key: injectedHeader, Value: []byte(strconv.Itoa(number))})
	}
	cell := r.schedule[fault-1].Name
	if _, err := r.write(entry{Kind: entryInject, Number: number, Fault: fault, Cell: cell, Injected: &want, Events: ids}); err != nil {
		return Place{}, err
	}
	place, err := r.topics.produce(ctx, record)
	if err != nil {
		return Place{}, err
	}
	_, err = r.write(entry{Kind: entryInjected, Number: number, Place: &place})
	return place, err
}

// topicRemade is World.TopicRemade.
func (r *run) topicRemade(topic string) {
	ids := r.topics.ids(topic)
	r.topics.remade(topic)
	if _, err := r.write(entry{Kind: entryRemade, Topic: topic, Events: ids}); err != nil {
		r.say("%v", err) // the journal fails for the next one too, who ends the run
	}
}

// finish makes the last account and the report, and leaves the folder as it
// should be.
func (r *run) finish(interrupt, ctx context.Context) (*Report, error) {
	if err := r.load.drain(ctx, r.patience()); err != nil {
		r.violate(Violation{Invariant: "I10", Kind: "unresolved", Detail: err.Error()}, r.known.fault)
	}
	r.say("making the account")
	if err := r.check(ctx, true); err != nil {
		if r.broken == nil {
			r.broken = err
		}
		r.violate(Violation{Invariant: "I8", Kind: "no account", Detail: fmt.Sprintf("the account could not be made to its end: %v", err)}, r.known.fault)
	}
	if err := r.load.finish(); err != nil {
		return nil, err
	}
	r.noteViolations(r.known.fault)
	partial := r.known.fault < r.options.Faults
	interrupted := partial && interrupt.Err() != nil && r.broken == nil
	if !interrupted {
		if _, err := r.write(entry{Kind: entryEnd}); err != nil {
			return nil, err
		}
	}
	report, err := r.report(ctx, interrupted)
	if err != nil {
		return nil, err
	}
	if err := report.save(filepath.Join(r.options.Dir, reportName)); err != nil {
		return nil, err
	}
	return report, r.tidy(ctx, report, interrupted)
}

// tidy removes the data of a run that has nothing more to show.
func (r *run) tidy(ctx context.Context, report *Report, interrupted bool) error {
	if interrupted || !report.OK || r.options.Keep {
		return nil
	}
	if err := r.sandbox.Stop(ctx); err != nil {
		return err
	}
	for _, name := range []string{"postgres", "kafka", "broker"} {
		_ = os.RemoveAll(filepath.Join(r.options.Dir, name))
	}
	return nil
}

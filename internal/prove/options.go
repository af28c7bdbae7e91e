package prove

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"context"

	"github.com/onceledger/onceledger/internal/faults"
	"github.com/onceledger/onceledger/internal/sandbox"
)

// Options say what is to be proved, and how hard. What is 0 or "" has a default.
type Options struct {
	// Seed decides the schedule of faults and what the clients do. 0 means one by
	// chance, which is said.
	Seed uint64
	// Faults is how many there are: 100.
	Faults int
	// Cells are patterns for Choose; none are all cells that can be run here.
	Cells []string
	// Clients is how many there are at once: 8. Together they begin about Rate
	// orders a second: 10; in a burst, as many as they can.
	Clients int
	Rate    float64
	// CheckEvery is after how many faults an account is made besides the one at
	// the end: 10, or 2 with StopAtFirst.
	CheckEvery int
	// StopAtFirst ends the run with the first violation that is found.
	StopAtFirst bool
	// RecoverWithin is how long the service may take after a fault until a new
	// order has its whole receipt: 90 s. Longer is a violation.
	RecoverWithin time.Duration
	// Settle is for how long nothing may change before what is missing counts as
	// lost: 15 s.
	Settle time.Duration

	// Home is where the folders of runs are: Home/prove/<seed>. Dir is the run's
	// folder itself.
	Home, Dir string
	// Resume goes on with a run that was broken off.
	Resume bool
	// Keep leaves the data in the folder, also when all is well.
	Keep bool

	Programs      string
	BrokerCommand []string
	Kafka         string // embedded or apache
	Brokers       int
	Relay         string // wal or poll
	PostgresBin   string
	JavaHome      string
	Environ       []string
	// Tmpfs is the size in bytes of a file system in memory on which Postgres'
	// data lies, for the cells that fill it; 0 is none.
	Tmpfs int64

	// DatabaseURL and KafkaBrokers are services that run already. OnRealData says
	// that the database may hold other tenants' data.
	DatabaseURL, KafkaBrokers string
	OnRealData                bool

	// Verify is the product's own check, with a login that may read: what it finds.
	Verify func(ctx context.Context, databaseURL, brokers string) ([]string, error)
	// Stderr gets the progress.
	Stderr io.Writer
}

const (
	defaultFaults  = 100
	defaultClients = 8
	defaultRate    = 10
)

// tenantCount is how many tenants the clients work for.
const tenantCount = 3

func (o Options) validate() error {
	var faults []error
	check := func(wrong bool, format string, args ...any) {
		if wrong {
			faults = append(faults, fmt.Errorf(format, args...))
		}
	}
	check(o.Faults < 0, "--faults is %d: want 1 or more", o.Faults)
	check(o.Faults > 1_000_000, "--faults is %d: want at most 1000000", o.Faults)
	check(o.Clients < 0 || o.Clients > 200, "--clients is %d: want 1 to 200", o.Clients)
	check(o.Rate < 0 || o.Rate > 1000, "--rate is %g: want more than 0 and at most 1000", o.Rate)
	check(o.CheckEvery < 0, "--check-every is %d: want 1 or more", o.CheckEvery)
	check(o.RecoverWithin < 0, "--recover-within is %s: want more than 0", o.RecoverWithin)
	check(o.Settle < 0, "--settle is %s: want more than 0", o.Settle)
	check(!slices.Contains([]string{"", "wal", "poll"}, o.Relay), "--relay is %q: want wal or poll", o.Relay)
	check(!slices.Contains([]string{"", sandbox.KafkaEmbedded, sandbox.KafkaApache}, o.Kafka), "--kafka is %q: want embedded or apache", o.Kafka)
	check(o.Kafka != sandbox.KafkaApache && o.Brokers > 1, "--brokers=%d needs --kafka=apache: the embedded broker is one", o.Brokers)
	check(o.Brokers != 0 && o.Brokers != 1 && o.Brokers != 3, "--brokers is %d: want 1 or 3", o.Brokers)
	check((o.DatabaseURL == "") != (o.KafkaBrokers == ""), "--database and --kafka-brokers belong together: want both, or neither")
	check(o.KafkaBrokers != "" && (o.Kafka != "" || o.Brokers != 0), "--kafka-brokers is given, so no broker is started: leave --kafka and --brokers away")
	check(o.DatabaseURL != "" && o.Tmpfs != 0, "--database is given, so no Postgres is started: leave --tmpfs away")
	check(o.OnRealData && o.DatabaseURL == "", "--on-real-data is for --database: without it there is no data but that of this run")
	check(o.Tmpfs < 0 || o.Tmpfs > 0 && o.Tmpfs < 256<<20, "--tmpfs is %d MB: want 256 or more", o.Tmpfs>>20)
	return errors.Join(faults...)
}

func (o Options) withDefaults() Options {
	set := func(to *int, value int) {
		if *to == 0 {
			*to = value
		}
	}
	set(&o.Faults, defaultFaults)
	set(&o.Clients, defaultClients)
	set(&o.Brokers, 1)
	every := 10
	if o.StopAtFirst {
		every = 2
	}
	set(&o.CheckEvery, every)
	if o.Rate == 0 {
		o.Rate = defaultRate
	}
	if o.RecoverWithin == 0 {
		o.RecoverWithin = 90 * time.Second
	}
	if o.Settle == 0 {
		o.Settle = 15 * time.Second
	}
	if o.Relay == "" {
		o.Relay = "wal"
	}
	if o.Kafka == "" {
		o.Kafka = sandbox.KafkaEmbedded
		if o.KafkaBrokers != "" {
			o.Kafka = "given"
		}
	}
	if o.Dir == "" {
		o.Dir = filepath.Join(o.Home, "prove", fmt.Sprint(o.Seed))
	}
	return o
}

// has says which needs of cells are met here.
func (o Options) has() map[Need]bool {
	own := o.DatabaseURL == ""
	return map[Need]bool{
		NeedPostgres: own,
		NeedApache:   o.Kafka == sandbox.KafkaApache,
		NeedThree:    o.Kafka == sandbox.KafkaApache && o.Brokers == 3,
		NeedWAL:      o.Relay == "wal",
		NeedTmpfs:    o.Tmpfs > 0,
		NeedGo:       faults.CanBuild(module),
		NeedRoot:     own && faults.CanMount(),
	}
}

// pick chooses the cells of a run. What cannot be run here is left out, and said
// in left.
func (o Options) pick(cells []Cell) (chosen []Cell, left []string, err error) {
	picked, err := Choose(cells, o.Cells)
	if err != nil {
		return nil, nil, err
	}
	has := o.has()
	for _, cell := range picked {
		if missing := cell.missing(has); len(missing) > 0 {
			left = append(left, fmt.Sprintf("%s (needs %s)", cell.Name, strings.Join(missing, ", ")))
			continue
		}
		chosen = append(chosen, cell)
	}
	if len(chosen) == 0 {
		return nil, left, fmt.Errorf("no cell can be run here: left out %s; see onceledger prove --list", strings.Join(left, ", "))
	}
	return chosen, left, nil
}

// Command is what runs the same schedule again.
func (o Options) Command() string {
	words := []string{"onceledger prove", fmt.Sprintf("--faults %d --seed %d", o.Faults, o.Seed)}
	for _, pattern := range o.Cells {
		words = append(words, fmt.Sprintf("--cells '%s'", pattern))
	}
	if o.Kafka == sandbox.KafkaApache {
		words = append(words, "--kafka apache")
	}
	if o.Brokers > 1 {
		words = append(words, fmt.Sprintf("--brokers %d", o.Brokers))
	}
	if o.Relay != "wal" {
		words = append(words, "--relay "+o.Relay)
	}
	if o.Clients != defaultClients {
		words = append(words, fmt.Sprintf("--clients %d", o.Clients))
	}
	if o.Tmpfs > 0 {
		words = append(words, fmt.Sprintf("--tmpfs %d", o.Tmpfs>>20))
	}
	return strings.Join(words, " ")
}

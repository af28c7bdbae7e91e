// Package balances keeps the balance of every account on a topic: it reads
// billing.events and writes the running sums by tenant, account and currency to
// the compacted topic ledger.balances, in Kafka transactions. It knows no
// database. What it promises: once it has caught up, the sums on the topic are
// the ledger's, whatever died or came twice on the way.
//
// billing.events is keyed by order, so every partition of it has a share in
// every account. The sums are therefore kept by partition of the source, and the
// state of partition p is in partition p of two compacted topics: the sums in
// ledger.balances, and what is remembered of each order, with the position that
// goes with all of it, in ledger.balances.orders. Any number of instances share
// the partitions.
//
// An event may come twice (the relay delivers at least once, and a replay has
// other offsets). The versions of an order's billing have no gaps, so the last
// one applied tells a repeat from news. An order is forgotten after a time
// without news (Window) that is longer than a repeat can take: that bounds the
// memory, some 300 bytes for each order with a document in that time.
//
// A version that is missing is counted, is an alarm, and is applied if it comes
// after all. It does not stop the partition: what is known is right as far as it
// goes, waiting would not bring the event, and verify names the difference. A
// record that cannot be understood stops its partition: it may move money, and
// leaving it out is for a person to decide (Skip).
package balances

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/transact"
)

// Group is the consumer group.
const Group = "balances"

// sweepSize bounds the keys that one transaction removes for a partition.
const sweepSize = 1000

// maxMissing is the most versions that one event may be ahead of the last.
const maxMissing = 1000

// Place is a record of billing.events.
type Place struct {
	Partition int32
	Offset    int64
}

// Config says how balances are kept. Log is required.
type Config struct {
	// Window is how long an order is remembered after its last document.
	// Default 30 days. It has to be longer than outbox retention, retention of
	// billing.events and replay window together.
	Window time.Duration
	// Skip are records that are left out though they could not be understood.
	Skip map[Place]bool
	Log  *slog.Logger
	// Metrics may be nil.
	Metrics prometheus.Registerer
}

// Stage keeps the balances of the partitions that it is given. It is a
// transact.Stage.
type Stage struct {
	config     Config
	metrics    *metrics
	partitions map[int32]*partition
}

var _ transact.Stage = (*Stage)(nil)

// New makes a stage that has no partition yet.
func New(config Config) (*Stage, error) {
	config.Window = cmp.Or(config.Window, 30*24*time.Hour)
	metrics, err := newMetrics(config.Metrics)
	if err != nil {
		return nil, fmt.Errorf("metrics of balances: %w", err)
	}
	return &Stage{config: config, metrics: metrics, partitions: make(map[int32]*partition)}, nil
}

// partition is the state of one partition of the source.
type partition struct {
	position
	number   int32
	accounts map[Account]*sum
	orders   map[orderKey]remembered
	queue    []deadline // orders by when they can be forgotten, with old entries left in
	missing  int

	// What an earlier build has left: sums, which must go at once, and orders,
	// which are not counted and go by and by.
	stale  []stateKey
	litter []orderKey

	// What cannot be read, and why. The state is not to be trusted then.
	damage map[stateKey]string
}

// stateKey is a key in one of the topics that hold the state.
type stateKey struct{ topic, key string }

// deadline is an order as of one of its documents.
type deadline struct {
	key orderKey
	at  time.Time
}

// Begin starts a partition with nothing known.
func (s *Stage) Begin(number int32) {
	s.partitions[number] = &partition{number: number, accounts: make(map[Account]*sum), orders: make(map[orderKey]remembered), damage: make(map[stateKey]string)}
}

// Forget drops all that is known of a partition.
func (s *Stage) Forget(number int32) {
	delete(s.partitions, number)
	s.tell()
}

// Load takes a record of the state. What cannot be read is no error: the state is
// thrown away for it, unless a later record of the key makes up for it.
func (s *Stage) Load(record event.Record) error {
	p := s.partitions[record.Partition]
	if p == nil {
		return fmt.Errorf("record of partition %d, which was not asked for", record.Partition)
	}
	key := stateKey{record.Topic, string(record.Key)}
	delete(p.damage, key)
	if err := p.load(record); err != nil && record.Value != nil {
		p.damage[key] = fmt.Sprintf("%s[%d] at offset %d: %v", record.Topic, record.Partition, record.Offset, err)
	}
	return nil
}

func (p *partition) load(record event.Record) error {
	key := string(record.Key)
	switch {
	case record.Topic == event.LedgerBalances:
		account, err := parseKey(key)
		if err != nil {
			return err
		}
		delete(p.accounts, account)
		if record.Value == nil {
			return nil
		}
		account, balance, _, err := parseBalance(record)
		if err != nil {
			return err
		}
		p.accounts[account] = balance
	case strings.HasPrefix(key, positionPrefix):
		p.position = position{}
		if record.Value != nil {
			return json.Unmarshal(record.Value, &p.position)
		}
	case strings.HasPrefix(key, orderPrefix):
		order, err := parseOrderKey(key)
		if err != nil {
			return fmt.Errorf("key %.100q: %w", key, err)
		}
		delete(p.orders, order)
		if record.Value == nil {
			return nil
		}
		var known remembered
		if err := json.Unmarshal(record.Value, &known); err != nil {
			return err
		}
		p.orders[order] = known
	default:
		return fmt.Errorf("key %.100q is none of this topic's", key)
	}
	return nil
}

// Resume goes on where the state says, if the state is whole. Otherwise it
// begins anew with the oldest event that is left, and says so: state and offsets
// move in one transaction, so they differ only when somebody removed one of the
// topics, set the offsets back (which is how to ask for a new beginning), or the
// embedded broker was killed. Where the source was made anew, the sums stay, and
// it is read from its beginning: what is there again is known by its versions.
func (s *Stage) Resume(number int32, source transact.Source) (int64, error) {
	p := s.partitions[number]
	for key, known := range p.orders {
		if known.Build != p.Build {
			delete(p.orders, key)
			p.litter = append(p.litter, key)
		}
	}
	why := ""
	remade := p.Topic != "" && source.Topic != "" && p.Topic != source.Topic
	if remade {
		source.Committed = -1 // it is of the earlier one
	}
	switch {
	case len(p.damage) > 0:
		for _, damage := range p.damage {
			why = "the state cannot be read: " + damage
		}
	case p.Build == uuid.Nil && source.Committed < 0 && len(p.accounts) == 0 && len(p.litter) == 0:
		s.config.Log.Info("balances begin with the oldest event", "partition", number, "offset", source.First)
	case p.Build == uuid.Nil:
		why = "there is no state, though offsets are committed or balances are there"
	case source.Committed >= 0 && source.Committed != p.Offset:
		why = fmt.Sprintf("the state reaches offset %d, the group has committed %d", p.Offset, source.Committed)
	case len(p.accounts) != p.Accounts:
		why = fmt.Sprintf("%d accounts are there, there must be %d", len(p.accounts), p.Accounts)
	case remade:
		s.config.Log.Error("the topic was made anew and is read from its beginning; what was not read of the earlier one is not in the balances unless it is sent again",
			"partition", number, "was", p.Topic, "is", source.Topic, "reached", p.Offset, "offset", source.First)
		p.Topic, p.Offset, p.First = source.Topic, source.First, max(p.First, source.First)
		s.restored(p)
		return p.Offset, nil
	default:
		p.Topic = cmp.Or(source.Topic, p.Topic)
		if source.Committed < 0 {
			s.config.Log.Warn("the group's offset is gone; going on where the state says", "partition", number, "offset", p.Offset)
		}
		if p.Offset < source.First {
			s.config.Log.Error("the balances will not be the ledger's: events that were not read yet are gone by the topic's retention",
				"partition", number, "from", p.Offset, "to", source.First)
			p.Offset, p.First = source.First, source.First
		}
		s.restored(p)
		return p.Offset, nil
	}
	if why != "" {
		s.metrics.rebuilds.Inc()
		s.config.Log.Error("balances are rebuilt from the oldest event", "partition", number, "because", why, "offset", source.First)
	}
	for account := range p.accounts {
		p.stale = append(p.stale, stateKey{event.LedgerBalances, string(account.key(number))})
	}
	for key := range p.damage {
		p.stale = append(p.stale, key)
	}
	for key := range p.orders {
		p.litter = append(p.litter, key)
	}
	p.accounts, p.orders = make(map[Account]*sum), make(map[orderKey]remembered)
	p.position = position{Build: uuid.Must(uuid.NewV7()), Offset: source.First, First: source.First, Topic: source.Topic}
	if source.First > 0 {
		s.config.Log.Error("the balances will not be the ledger's: events before the oldest one that is left are gone by the topic's retention",
			"partition", number, "offset", source.First)
	}
	s.restored(p)
	return p.Offset, nil
}

func (s *Stage) restored(p *partition) {
	for key, known := range p.orders {
		p.queue = append(p.queue, deadline{key, known.At})
		p.missing += len(known.Missing)
	}
	slices.SortFunc(p.queue, func(a, b deadline) int { return a.at.Compare(b.at) })
	s.tell()
}

func (s *Stage) tell() {
	var orders, missing, begun int
	for _, p := range s.partitions {
		orders += len(p.orders)
		missing += p.missing
		if p.First > 0 {
			begun++
		}
	}
	s.metrics.orders.Set(float64(orders))
	s.metrics.missing.Set(float64(missing))
	s.metrics.incomplete.Set(float64(begun))
}

// Process says what a batch comes to.
func (s *Stage) Process(batch []event.Record) (transact.Output, error) {
	output := transact.Output{Stops: make(map[int32]transact.Stop)}
	changes := make(map[int32]*change)
	for _, record := range batch {
		p := s.partitions[record.Partition]
		if p == nil {
			return transact.Output{}, fmt.Errorf("record of partition %d, which was not asked for", record.Partition)
		}
		if _, stopped := output.Stops[record.Partition]; stopped {
			continue
		}
		c := changes[record.Partition]
		if c == nil {
			c = newChange(p)
			changes[record.Partition] = c
		}
		err := s.apply(c, record)
		if err != nil && s.config.Skip[Place{record.Partition, record.Offset}] {
			c.outcomes["skipped"]++
			c.notes = append(c.notes, fmt.Sprintf("record left out as BALANCES_SKIP says: partition %d, offset %d: %v", record.Partition, record.Offset, err))
			err = nil
		}
		if err != nil {
			output.Stops[record.Partition] = transact.Stop{Offset: record.Offset, Reason: fmt.Sprintf(
				"%v; a build that understands it goes on, or BALANCES_SKIP=%d:%d leaves it out", err, record.Partition, record.Offset)}
			continue
		}
		c.position.Offset = record.Offset + 1
	}
	for _, c := range changes {
		if c.position.Offset == c.base.Offset {
			continue // stopped at its first record
		}
		records, err := c.records(s.config.Window)
		if err != nil {
			return transact.Output{}, err
		}
		output.Records = append(output.Records, records...)
	}
	output.Committed = func() {
		for _, c := range changes {
			c.commit()
			for outcome, count := range c.outcomes {
				s.metrics.records.WithLabelValues(outcome).Add(float64(count))
			}
			for _, note := range c.notes {
				s.config.Log.Error(note)
			}
		}
		s.tell()
	}
	return output, nil
}

// apply adds what a record does to a change. An error says why it cannot be.
func (s *Stage) apply(c *change, record event.Record) error {
	d, err := decode(record)
	switch {
	case errors.Is(err, event.ErrNoEvent):
		c.outcomes["no-event"]++
		return nil
	case err != nil:
		return err
	case d.happened.After(time.Now().Add(24 * time.Hour)):
		return fmt.Errorf("event %s is from the future", d.ID) // it would make all orders old
	}
	clock := c.position.Clock
	if d.happened.After(clock) {
		clock = d.happened
	}
	oldest := clock.Add(-s.config.Window)
	known, isKnown := c.order(d.order())
	version := d.AggregateVersion
	switch {
	case isKnown && version <= known.Last:
		at := slices.Index(known.Missing, version)
		if at < 0 {
			c.outcomes["duplicate"]++
			return nil
		}
		known.Missing = slices.Delete(slices.Clone(known.Missing), at, at+1)
		c.outcomes["late"]++
	case !isKnown && d.happened.Before(oldest):
		return fmt.Errorf("event %s is older than orders are remembered (%s), so it could be a repeat", d.ID, s.config.Window)
	case !isKnown && version > 1 && d.paid.Before(oldest):
		known.Last = version // forgotten since
	default:
		if version-known.Last > maxMissing {
			return fmt.Errorf("version %d of order %s follows version %d", version, d.AggregateID, known.Last)
		}
		known.Missing = slices.Clone(known.Missing)
		for v := known.Last + 1; v < version; v++ {
			known.Missing = append(known.Missing, v)
			c.notes = append(c.notes, fmt.Sprintf("a billing event is missing: order %s, version %d, before partition %d, offset %d",
				d.AggregateID, v, record.Partition, record.Offset))
		}
		known.Last = version
	}
	if d.happened.After(known.At) {
		known.At = d.happened
	}
	c.position.Clock = clock
	c.outcomes["applied"]++
	c.remember(d.order(), known)
	c.post(d, record.Offset)
	return nil
}

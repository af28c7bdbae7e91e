package prove

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/event"
)

// injectedHeader marks a record that a cell made: its value is the injection's
// number.
const injectedHeader = "prove-injected"

// topics reads the topics of events, record by record, from where it was the last
// time. It uses another client than the product does, and decodes nothing but the
// headers that it compares.
type topics struct {
	brokers string
	tenants map[string]bool // whose events count; others' are passed over
	client  *kgo.Client     // to produce and to ask
	admin   *kadm.Client

	reading sync.Mutex // one drain at a time
	mutex   sync.Mutex
	at      map[string]map[int32]int64
	seen    map[string]*topicSeen
}

// topicSeen is what a topic has held.
type topicSeen struct {
	records  int64
	first    map[string]*firstSeen // by event id
	order    []string              // ids as they were seen first
	again    int64                 // records beyond the first of each event
	injected map[int][]Place       // by number
	newest   []event.Record
	faults   []Violation
	versions map[string]map[int32]int64 // by aggregate and partition: the last version of a first occurrence
}

// firstSeen is an event where it lay first. Place is where each record of it lay,
// for the dedupe mark may name any of them.
type firstSeen struct {
	id, aggregate, tenant, kind string
	version                     int64
	occurred                    int64 // microseconds since 1970
	content                     [sha256.Size]byte
	value                       [sha256.Size]byte
	places                      []Place
}

// newestKept is how many records of a topic are kept whole, for cells that send
// some of them again.
const newestKept = 500

func newTopics(brokers string) (*topics, error) {
	client, err := kgo.NewClient(
		kgo.SeedBrokers(strings.Split(brokers, ",")...),
		kgo.ClientID("onceledger-prove"),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.ProducerLinger(0),
		kgo.RequestTimeoutOverhead(10*time.Second),
		kgo.RetryTimeout(30*time.Second),
	)
	if err != nil {
		return nil, fmt.Errorf("reach the brokers: %w", err)
	}
	return &topics{
		brokers: brokers, tenants: make(map[string]bool), client: client, admin: kadm.NewClient(client),
		at: make(map[string]map[int32]int64), seen: make(map[string]*topicSeen),
	}, nil
}

func (t *topics) close() { t.client.Close() }

func (t *topics) of(topic string) *topicSeen {
	seen := t.seen[topic]
	if seen == nil {
		seen = &topicSeen{
			first: make(map[string]*firstSeen), injected: make(map[int][]Place),
			versions: make(map[string]map[int32]int64),
		}
		t.seen[topic] = seen
	}
	return seen
}

// drain reads what the topics of events hold at this moment.
func (t *topics) drain(ctx context.Context) error {
	t.reading.Lock()
	defer t.reading.Unlock()
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for _, topic := range []string{event.OrderEvents, event.BillingEvents} {
		err := t.readOn(ctx, topic, func(record *kgo.Record) {
			t.mutex.Lock()
			defer t.mutex.Unlock()
			t.take(record)
		})
		if err != nil {
			return fmt.Errorf("read topic %s: %w", topic, err)
		}
	}
	return nil
}

// readOn reads a topic from where it was read to, up to its present end.
func (t *topics) readOn(ctx context.Context, topic string, use func(*kgo.Record)) error {
	ends, err := t.admin.ListEndOffsets(ctx, topic)
	if err == nil {
		err = ends.Error()
	}
	if err != nil {
		return err
	}
	if t.at[topic] == nil {
		t.at[topic] = make(map[int32]int64)
	}
	at := t.at[topic]
	assigned := make(map[int32]kgo.Offset)
	left := make(map[int32]int64)
	ends.Each(func(end kadm.ListedOffset) {
		if from := at[end.Partition]; from < end.Offset {
			assigned[end.Partition] = kgo.NewOffset().At(from)
			left[end.Partition] = end.Offset
		}
	})
	if len(left) == 0 {
		return nil
	}
	reader, err := kgo.NewClient(
		kgo.SeedBrokers(strings.Split(t.brokers, ",")...), kgo.ClientID("onceledger-prove-reader"),
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: assigned}),
		kgo.KeepControlRecords(), // they have offsets too
		kgo.FetchMaxWait(100*time.Millisecond),
	)
	if err != nil {
		return err
	}
	defer reader.Close()
	for len(left) > 0 {
		fetches := reader.PollFetches(ctx)
		if ctx.Err() != nil {
			return fmt.Errorf("it is not read to its end: %w", ctx.Err())
		}
		var fault error
		fetches.EachError(func(_ string, partition int32, err error) {
			fault = errors.Join(fault, fmt.Errorf("partition %d: %w", partition, err))
		})
		fetches.EachRecord(func(record *kgo.Record) {
			end, wanted := left[record.Partition]
			if !wanted || record.Offset < at[record.Partition] || record.Offset >= end {
				return
			}
			if !record.Attrs.IsControl() {
				use(record)
			}
			at[record.Partition] = record.Offset + 1
			if record.Offset+1 >= end {
				delete(left, record.Partition)
			}
		})
		if fault != nil {
			return fault
		}
	}
	return nil
}

func header(record *kgo.Record, name string) string {
	for _, header := range record.Headers {
		if header.Key == name {
			return string(header.Value)
		}
	}
	return ""
}

// take adds a record to what was seen.
func (t *topics) take(record *kgo.Record) {
	seen := t.of(record.Topic)
	place := Place{record.Topic, record.Partition, record.Offset}
	if number := header(record, injectedHeader); number != "" {
		n, _ := strconv.Atoi(number)
		seen.injected[n] = append(seen.injected[n], place)
		return
	}
	if tenant := header(record, event.HeaderTenant); len(t.tenants) > 0 && tenant != "" && !t.tenants[tenant] {
		return // somebody else's
	}
	seen.records++
	seen.newest = append(seen.newest, toRecord(record))
	if len(seen.newest) > 2*newestKept {
		seen.newest = slices.Clone(seen.newest[len(seen.newest)-newestKept:])
	}
	id := header(record, event.HeaderID)
	content := contentOf(record)
	if first := seen.first[id]; first != nil {
		seen.again++
		first.places = append(first.places, place)
		if first.content != content {
			seen.faults = append(seen.faults, Violation{
				Invariant: "I2", Kind: "two contents", Events: []string{id},
				Detail: fmt.Sprintf("event %s lies at %s with one content and at %s with another", id, first.places[0], place),
			})
		}
		return
	}
	version, _ := strconv.ParseInt(header(record, event.HeaderAggregateVersion), 10, 64)
	occurred, _ := time.Parse(time.RFC3339Nano, header(record, event.HeaderTime)) // what is no time is none of the outbox's
	first := &firstSeen{
		id: id, aggregate: header(record, event.HeaderSubject), tenant: header(record, event.HeaderTenant),
		kind: header(record, event.HeaderType), version: version, occurred: micro(occurred), content: content, value: sha256.Sum256(record.Value), places: []Place{place},
	}
	seen.first[id] = first
	seen.order = append(seen.order, id)
	last := seen.versions[first.aggregate]
	if last == nil {
		last = make(map[int32]int64)
		seen.versions[first.aggregate] = last
	}
	if version <= last[record.Partition] {
		seen.faults = append(seen.faults, Violation{
			Invariant: "I6", Kind: "out of order", Order: first.aggregate, Events: []string{id},
			Detail: fmt.Sprintf("version %d of %s (%s) is at %s, after version %d", version, first.aggregate, id, place, last[record.Partition]),
		})
	}
	last[record.Partition] = max(last[record.Partition], version)
	if string(record.Key) != first.aggregate {
		seen.faults = append(seen.faults, Violation{
			Invariant: "I6", Kind: "wrong key", Order: first.aggregate, Events: []string{id},
			Detail: fmt.Sprintf("event %s at %s is of %s, and its key is %q", id, place, first.aggregate, record.Key),
		})
	}
}

// contentOf is a digest of all that a consumer gets to see of a record.
func contentOf(record *kgo.Record) [sha256.Size]byte {
	hash := sha256.New()
	add := func(text []byte) {
		var size [8]byte
		binary.BigEndian.PutUint64(size[:], uint64(len(text)))
		hash.Write(size[:])
		hash.Write(text)
	}
	add(record.Key)
	add(record.Value)
	for _, header := range record.Headers {
		add([]byte(header.Key))
		add(header.Value)
	}
	return [sha256.Size]byte(hash.Sum(nil))
}

func (p Place) String() string { return fmt.Sprintf("%s[%d]@%d", p.Topic, p.Partition, p.Offset) }

func toRecord(record *kgo.Record) event.Record {
	r := event.Record{
		Topic: record.Topic, Partition: record.Partition, Offset: record.Offset, Time: record.Timestamp,
		Key: record.Key, Value: record.Value,
	}
	for _, header := range record.Headers {
		r.Headers = append(r.Headers, event.Header{Key: header.Key, Value: header.Value})
	}
	return r
}

// newest are records that were read last.
func (t *topics) newest(topic string, most int) []event.Record {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	kept := t.of(topic).newest
	return slices.Clone(kept[max(0, len(kept)-most):])
}

// remade begins at the beginning of a topic again.
func (t *topics) remade(topic string) {
	t.reading.Lock()
	defer t.reading.Unlock()
	t.mutex.Lock()
	defer t.mutex.Unlock()
	delete(t.at, topic)
	t.client.PurgeTopicsFromClient(topic) // it knows the topic by an id that is gone
	seen := t.of(topic)
	seen.versions = make(map[string]map[int32]int64)
	for _, first := range seen.first {
		first.places = nil // they are gone
	}
	clear(seen.injected)
}

// ids are the events that were seen on a topic.
func (t *topics) ids(topic string) []string {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	return slices.Clone(t.of(topic).order)
}

// produce puts a record where it says.
func (t *topics) produce(ctx context.Context, record event.Record) (Place, error) {
	r := &kgo.Record{Topic: record.Topic, Partition: record.Partition, Key: record.Key, Value: record.Value}
	for _, header := range record.Headers {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: header.Key, Value: header.Value})
	}
	if err := t.client.ProduceSync(ctx, r).FirstErr(); err != nil {
		return Place{}, fmt.Errorf("put a record on %s: %w", record.Topic, err)
	}
	return Place{r.Topic, r.Partition, r.Offset}, nil
}

// lag is how many records of a topic a group has not committed.
func (t *topics) lag(ctx context.Context, group, topic string) (int64, error) {
	ends, err := t.admin.ListCommittedOffsets(ctx, topic)
	if err == nil {
		err = ends.Error()
	}
	if err != nil {
		return 0, fmt.Errorf("read the end of %s: %w", topic, err)
	}
	committed, err := t.admin.FetchOffsets(ctx, group)
	if err != nil {
		return 0, fmt.Errorf("read the offsets of %s: %w", group, err)
	}
	var behind int64
	ends.Each(func(end kadm.ListedOffset) {
		at, ok := committed.Lookup(topic, end.Partition)
		switch {
		case !ok || at.At < 0:
			behind += end.Offset
		default:
			behind += max(0, end.Offset-at.At)
		}
	})
	return behind, nil
}

// version is what the brokers' answers say of their version.
func (t *topics) version(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	brokers, err := t.admin.ApiVersions(ctx)
	if err != nil {
		return "of no version that is known"
	}
	for _, broker := range brokers.Sorted() {
		if broker.Err == nil {
			return broker.VersionGuess()
		}
	}
	return "of no version that is known"
}

// balances are what the topic ledger.balances says of each account, over all
// partitions: debit less credit.
func (t *topics) balances(ctx context.Context) (map[account]*big.Int, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	t.reading.Lock()
	defer t.reading.Unlock()
	delete(t.at, event.LedgerBalances) // it is compacted, and small
	latest := make(map[string][]byte)
	if err := t.readCommitted(ctx, event.LedgerBalances, latest); err != nil {
		return nil, err
	}
	sums := make(map[account]*big.Int)
	for key, value := range latest {
		var b struct {
			Tenant   string `json:"tenant_id"`
			Account  string `json:"account"`
			Currency string `json:"currency"`
			Debit    string `json:"debit"`
			Credit   string `json:"credit"`
		}
		debit, credit := new(big.Int), new(big.Int)
		err := json.Unmarshal(value, &b)
		_, isDebit := debit.SetString(b.Debit, 10)
		_, isCredit := credit.SetString(b.Credit, 10)
		if err != nil || !isDebit || !isCredit {
			return nil, fmt.Errorf("record %s of %s is no balance: %.200s", key, event.LedgerBalances, value)
		}
		of := account{b.Tenant, b.Account, b.Currency}
		if sums[of] == nil {
			sums[of] = new(big.Int)
		}
		sums[of].Add(sums[of], debit.Sub(debit, credit))
	}
	return sums, nil
}

// readCommitted reads the last value of each key, of transactions that are
// committed.
func (t *topics) readCommitted(ctx context.Context, topic string, latest map[string][]byte) error {
	ends, err := t.admin.ListCommittedOffsets(ctx, topic)
	if err == nil {
		err = ends.Error()
	}
	if err != nil {
		return fmt.Errorf("read the end of %s: %w", topic, err)
	}
	assigned := make(map[int32]kgo.Offset)
	left := make(map[int32]int64)
	ends.Each(func(end kadm.ListedOffset) {
		if end.Offset > 0 {
			assigned[end.Partition], left[end.Partition] = kgo.NewOffset().AtStart(), end.Offset
		}
	})
	if len(left) == 0 {
		return nil
	}
	reader, err := kgo.NewClient(
		kgo.SeedBrokers(strings.Split(t.brokers, ",")...), kgo.ClientID("onceledger-prove-reader"),
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: assigned}),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.KeepControlRecords(),
		kgo.FetchMaxWait(100*time.Millisecond),
	)
	if err != nil {
		return err
	}
	defer reader.Close()
	for len(left) > 0 {
		fetches := reader.PollFetches(ctx)
		if ctx.Err() != nil {
			return fmt.Errorf("%s is not read to its end: %w", topic, ctx.Err())
		}
		fetches.EachRecord(func(record *kgo.Record) {
			if !record.Attrs.IsControl() {
				if record.Value == nil {
					delete(latest, string(record.Key))
				} else {
					latest[string(record.Key)] = record.Value
				}
			}
			if record.Offset+1 >= left[record.Partition] {
				delete(left, record.Partition)
			}
		})
		if err := fetches.Err(); err != nil {
			return fmt.Errorf("read %s: %w", topic, err)
		}
	}
	return nil
}

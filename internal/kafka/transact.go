package kafka

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/confluentinc/confluent-kafka-go/v2/kafka"

	"github.com/onceledger/onceledger/internal/crash"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/transact"
)

// TransactorConfig says what a Transactor reads and under which names. Of
// ConsumerConfig, Topics is the one topic that it reads.
type TransactorConfig struct {
	ConsumerConfig

	// TransactionalID is this instance's alone and stays the same when it comes
	// back: its first act is then to fence whoever had it before and to end the
	// transaction that was left open. Required.
	TransactionalID string

	// TransactionTimeout is how long a transaction may stay open before the
	// broker aborts it, and so how long readers of committed records can be
	// held up by an instance that hangs. The broker looks every ten seconds.
	// Default 15 s; a transaction here takes milliseconds.
	TransactionTimeout time.Duration

	// State are the compacted topics that hold the stage's state. What the stage
	// knows from partition p of its source is in partition p of each.
	State []string

	// Watch are more topics whose last stable offset is to be measured.
	Watch []string

	// WatchEvery is how often offsets are looked at. Default 5 s.
	WatchEvery time.Duration
}

// Transactor runs a stage between Kafka and Kafka, exactly once: what a batch
// comes to and the offsets of the batch are one Kafka transaction. Whoever reads
// committed records sees both or neither.
//
// It is a member of a consumer group like any other (see member), so partitions
// go only between two transactions. A transaction of a member that the group has
// gone on without cannot be committed: it carries the group's generation.
type Transactor struct {
	config   TransactorConfig
	consumer *Consumer
	stage    transact.Stage
	source   string
	metrics  *transactMetrics
	writer   *writer
	loader   *loader

	// Only the member's goroutine touches these.
	next    map[int32]int64 // partitions that are restored, and where each goes on
	stopped map[int32]transact.Stop

	mutex   sync.Mutex
	ends    map[place]int64 // how far the state topics reach, by what we read and wrote
	reached map[int32]int64 // up to where the partitions of the source are done, also while they are restored

	truncated atomic.Bool            // a state topic reaches less far than it did
	halted    atomic.Pointer[string] // for Ready
	restoring atomic.Pointer[string]
	silent    atomic.Pointer[string]

	abandoned atomic.Int32  // writers that a call has not come back from
	grace     time.Duration // how much longer than its deadline a call may take
	around    func(call string, do func() error) error
}

// NewTransactor makes a transactor for a stage.
func NewTransactor(config TransactorConfig, stage transact.Stage) (*Transactor, error) {
	config.TransactionTimeout = cmp.Or(config.TransactionTimeout, 15*time.Second)
	config.WatchEvery = cmp.Or(config.WatchEvery, 5*time.Second)
	if len(config.Topics) != 1 || config.TransactionalID == "" {
		return nil, errors.New("a transactor reads one topic and needs a transactional id")
	}
	consumer, err := NewConsumer(config.ConsumerConfig)
	if err != nil {
		return nil, err
	}
	metrics, err := newTransactMetrics(config.Metrics, config.Group)
	if err != nil {
		return nil, fmt.Errorf("metrics of transactor %s: %w", config.TransactionalID, err)
	}
	config.ConsumerConfig = consumer.config
	t := &Transactor{
		config: config, consumer: consumer, stage: stage, source: config.Topics[0], metrics: metrics,
		next: make(map[int32]int64), stopped: make(map[int32]transact.Stop), ends: make(map[place]int64),
		reached: make(map[int32]int64), grace: patience, around: func(_ string, do func() error) error { return do() },
	}
	consumer.transactor = t
	return t, nil
}

// Run works until ctx is done, and then returns nil: after the transaction that
// is open is committed or aborted.
func (t *Transactor) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	watching := make(chan struct{})
	go func() {
		defer close(watching)
		t.watch(ctx)
	}()
	defer func() {
		cancel()
		select {
		case <-watching:
		case <-time.After(patience): // nobody answers it
		}
		t.closeLoader()
		t.dropWriter()
	}()
	return t.consumer.runMembers(ctx, func(m *member) Handler {
		t.forgetAll() // what an earlier membership knew is another's by now
		t.mutex.Lock()
		clear(t.reached)
		t.mutex.Unlock()
		return func(handlerCtx context.Context, _ []event.Record) error {
			err := t.work(ctx, handlerCtx, m)
			if err != nil && m.end == nil {
				m.end = t.tooManyAbandoned()
			}
			return err
		}
	})
}

// Ready says if all that is assigned moves, and if not, why.
func (t *Transactor) Ready() (bool, string) {
	if reason := t.halted.Load(); reason != nil {
		return false, *reason
	}
	if reason := t.silent.Load(); reason != nil {
		return false, *reason
	}
	if reason := t.restoring.Load(); reason != nil {
		return false, *reason
	}
	return t.consumer.Ready()
}

// idle tells whether there is nothing to restore.
func (t *Transactor) idle(m *member) bool {
	return !t.truncated.Load() && len(t.unrestored(m)) == 0
}

func (t *Transactor) unrestored(m *member) []int32 {
	var waiting []int32
	for _, at := range m.tracker.partitions() {
		if _, known := t.next[at.partition]; !known {
			waiting = append(waiting, at.partition)
		}
	}
	slices.Sort(waiting)
	return waiting
}

// released is told that partitions are no longer this member's.
func (t *Transactor) released(partitions []place) {
	for _, at := range partitions {
		t.forget(at.partition)
		t.mutex.Lock()
		delete(t.reached, at.partition)
		t.mutex.Unlock()
	}
}

func (t *Transactor) forget(partition int32) {
	delete(t.next, partition)
	delete(t.stopped, partition)
	t.stage.Forget(partition)
	t.mutex.Lock()
	for _, topic := range t.config.State {
		delete(t.ends, place{topic, partition})
	}
	t.mutex.Unlock()
	t.tellStopped()
}

func (t *Transactor) forgetAll() {
	t.closeLoader()
	for partition := range maps.Clone(t.next) {
		t.forget(partition)
	}
}

// halts tells whether a partition stands still.
func (t *Transactor) halts(at kafka.TopicPartition) bool {
	_, halted := t.stopped[at.Partition]
	return halted
}

func (t *Transactor) tellStopped() {
	t.metrics.stopped.Set(float64(len(t.stopped)))
	if len(t.stopped) == 0 {
		t.halted.Store(nil)
		return
	}
	partition := slices.Min(slices.Collect(maps.Keys(t.stopped)))
	stop := t.stopped[partition]
	t.halted.Store(new(fmt.Sprintf("%d partitions stand still; %s[%d] at offset %d: %s",
		len(t.stopped), t.source, partition, stop.Offset, stop.Reason)))
}

// work restores what is to be restored and takes the batch in hand through one
// transaction. After an error the batch is still in hand: nothing of it was
// committed, or it is found out at the next attempt, from the state topics, that
// all of it was.
func (t *Transactor) work(ctx, handlerCtx context.Context, m *member) error {
	if t.truncated.Swap(false) {
		t.config.Log.Error("a state topic ends before what this instance has read of it: it was made anew; starting over from it",
			"topics", t.config.State)
		t.forgetAll()
	}
	// The writer first: it ends what an earlier self has left open, which
	// restore would otherwise wait for.
	if err := t.ensureWriter(handlerCtx); err != nil {
		return err
	}
	if err := errors.Join(t.restore(ctx, handlerCtx, m), m.end); err != nil {
		return err
	}

	var batch []event.Record
	for _, record := range m.tracker.batch() {
		next, known := t.next[record.Partition]
		_, halted := t.stopped[record.Partition]
		if known && !halted && record.Offset >= next {
			batch = append(batch, record)
		}
	}
	if len(batch) == 0 {
		return nil
	}
	output, err := t.stage.Process(batch)
	if err != nil {
		return err
	}
	offsets := make(map[int32]int64)
	for _, record := range batch {
		if stop, halts := output.Stops[record.Partition]; !halts || record.Offset < stop.Offset {
			offsets[record.Partition] = record.Offset + 1
		}
	}
	if len(offsets) > 0 {
		if err := t.transact(handlerCtx, m, output.Records, offsets); err != nil {
			return err
		}
		maps.Copy(t.next, offsets)
		t.mutex.Lock()
		maps.Copy(t.reached, offsets)
		t.mutex.Unlock()
		if output.Committed != nil {
			output.Committed()
		}
		crash.Point(crash.BalancesCommittedNotPolled)
	}
	for partition, stop := range output.Stops {
		t.stopped[partition] = stop
		t.config.Log.Error("partition stopped", "topic", t.source, "partition", partition, "offset", stop.Offset, "reason", stop.Reason)
		if err := m.client.Pause([]kafka.TopicPartition{{Topic: &t.source, Partition: partition}}); err != nil {
			t.config.Log.Warn("stopped partition is read on, to no purpose", "error", err)
		}
	}
	t.tellStopped()
	return nil
}

// transact writes records and offsets in one transaction. An error means that it
// is aborted, or that the writer is dropped and all state with it: then what
// became of the transaction shows when the state is restored.
func (t *Transactor) transact(ctx context.Context, m *member, records []event.Record, offsets map[int32]int64) error {
	ctx, cancel := context.WithTimeout(ctx, t.config.TransactionTimeout)
	defer cancel()
	started := time.Now()
	err := t.attempt(ctx, m, records, offsets)
	if err == nil {
		t.metrics.committed.Observe(time.Since(started).Seconds())
		return nil
	}

	if errors.Is(err, errNoMember) || errors.Is(err, errNotBegun) {
		return err
	}
	fault, isKafka := errors.AsType[kafka.Error](err)
	if isKafka && fault.Code() == kafka.ErrUnknownMemberID {
		m.expelled.Store(true)
	}
	// An unknown outcome is not to be aborted: it may be a commit.
	unknown := errors.Is(err, errUnknownOutcome) || errors.Is(err, errUnanswered)
	if !unknown && !(isKafka && fault.IsFatal()) {
		abortCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), t.config.TransactionTimeout)
		defer cancel()
		abortErr := t.call(abortCtx, "AbortTransaction", func(client *kafka.Producer) error { return client.AbortTransaction(abortCtx) })
		if abortErr == nil {
			t.metrics.aborted.Inc()
			if errors.Is(err, errTruncated) {
				t.truncated.Store(true)
			}
			return fmt.Errorf("transaction aborted: %w", err)
		}
		err = errors.Join(err, fmt.Errorf("abort: %w", abortErr))
	}
	t.metrics.fenced.Inc()
	t.dropWriter()
	t.forgetAll()
	return fmt.Errorf("transaction given up; its outcome will show in the state topics: %w", err)
}

var (
	errUnknownOutcome = errors.New("no answer to the commit")
	errTruncated      = errors.New("a state topic ends before what was written to it")
	errNotBegun       = errors.New("transaction not begun")
	errNoMember       = errors.New("not a member of the group any more")
)

func (t *Transactor) attempt(ctx context.Context, m *member, records []event.Record, offsets map[int32]int64) error {
	membership, err := m.membership() // before anything is written
	if err != nil {
		return err
	}
	if err := t.call(ctx, "BeginTransaction", (*kafka.Producer).BeginTransaction); err != nil {
		if fault, ok := errors.AsType[kafka.Error](err); ok && fault.IsFatal() || errors.Is(err, errUnanswered) {
			return fmt.Errorf("begin: %w", err)
		}
		return fmt.Errorf("%w: %w", errNotBegun, err)
	}
	written, err := t.writer.write(ctx, records)
	if err != nil {
		return err
	}
	if err := t.advance(written); err != nil {
		return err
	}
	var positions []kafka.TopicPartition
	for partition, offset := range offsets {
		positions = append(positions, kafka.TopicPartition{Topic: &t.source, Partition: partition, Offset: kafka.Offset(offset)})
	}
	err = t.call(ctx, "SendOffsetsToTransaction", func(client *kafka.Producer) error {
		return client.SendOffsetsToTransaction(ctx, positions, membership)
	})
	if err != nil {
		return fmt.Errorf("send offsets to the transaction: %w", err)
	}
	crash.Point(crash.BalancesProducedNotCommitted)
	for {
		err := t.call(ctx, "CommitTransaction", func(client *kafka.Producer) error { return client.CommitTransaction(ctx) })
		if err == nil {
			return nil
		}
		fault, isKafka := errors.AsType[kafka.Error](err)
		switch {
		case isKafka && (fault.TxnRequiresAbort() || fault.IsFatal()):
			return fmt.Errorf("commit: %w", err)
		case ctx.Err() != nil || !isKafka || !fault.IsRetriable():
			return fmt.Errorf("commit: %w: %w", errUnknownOutcome, err)
		}
	}
}

// membership is what fences this member's offsets in a transaction. One that
// names no member is refused: Kafka lets offsets pass that come without any, so a
// member that the group has expelled could commit what is another's by now, in
// the moment before it is told. (A static member's always names its instance, and
// Kafka does not let that pass.)
func (m *member) membership() (*kafka.ConsumerGroupMetadata, error) {
	membership, err := m.client.GetConsumerGroupMetadata()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNoMember, err)
	}
	nobody, err := kafka.NewTestConsumerGroupMetadata(m.config.Group)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNoMember, err)
	}
	// They show what is in them in no other way.
	if m.client.AssignmentLost() || reflect.DeepEqual(membership, nobody) {
		return nil, errNoMember
	}
	return membership, nil
}

// advance keeps account of how far the state topics reach. A record that comes
// to lie before that shows that a topic was made anew under us: what it lacks
// would never be written again.
func (t *Transactor) advance(written []writtenAt) error {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	for _, w := range written {
		end, known := t.ends[w.place]
		if known && w.offset < end {
			return fmt.Errorf("%w: %s[%d] ended at %d, and a record was written at %d", errTruncated, w.topic, w.partition, end, w.offset)
		}
		if known {
			t.ends[w.place] = w.offset + 1
		}
	}
	return nil
}

// restore brings the stage the state of each partition that is new here, and
// puts the partition to where its state says that it goes on. The group is
// polled meanwhile, and nothing else is read.
func (t *Transactor) restore(ctx, handlerCtx context.Context, m *member) error {
	defer t.restoring.Store(nil)
	for {
		waiting := t.unrestored(m)
		if len(waiting) == 0 || m.end != nil {
			t.closeLoader()
			if m.tracker.isPaused() && m.end == nil {
				m.setPaused(false)
			}
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if t.loader == nil || !slices.Equal(t.loader.partitions, waiting) {
			t.closeLoader()
			loader, err := t.openLoader(handlerCtx, m, waiting)
			if err != nil {
				return fmt.Errorf("restore state: %w", err)
			}
			t.loader = loader
		}
		done, err := t.loader.read(time.Second, t.stage.Load)
		if err != nil {
			t.closeLoader()
			return fmt.Errorf("restore state: %w", err)
		}
		if !done {
			t.restoring.Store(new(t.loader.describe()))
			if !m.tracker.isPaused() {
				m.setPaused(true)
			}
			m.poll(0)
			continue
		}
		if err := t.resume(m, t.loader); err != nil {
			t.closeLoader()
			return fmt.Errorf("restore state: %w", err)
		}
	}
}

func (t *Transactor) resume(m *member, done *loader) error {
	if m.tracker.isPaused() {
		m.setPaused(false) // a partition that is paused does not take a new position
	}
	for _, partition := range done.partitions {
		source := done.sources[partition]
		next, err := t.stage.Resume(partition, source)
		if err != nil {
			return err
		}
		if err := m.rewind(place{t.source, partition}, next, source); err != nil {
			return err
		}
		t.next[partition] = next
		t.mutex.Lock()
		t.reached[partition] = next
		for _, topic := range t.config.State {
			t.ends[place{topic, partition}] = done.ends[place{topic, partition}]
		}
		t.mutex.Unlock()
	}
	return nil
}

// rewind drops what is in hand of a partition and goes on reading at an offset.
func (m *member) rewind(at place, next int64, source transact.Source) error {
	m.tracker.drop(at)
	begins := source.Committed
	if begins < 0 {
		begins = source.First
	}
	partition := kafka.TopicPartition{Topic: &at.topic, Partition: at.partition}
	read, err := m.client.Position([]kafka.TopicPartition{partition})
	if err != nil {
		return fmt.Errorf("position in %s[%d]: %w", at.topic, at.partition, err)
	}
	if read[0].Offset < 0 && next == begins {
		return nil // nothing was read yet, and reading begins there anyway
	}
	partition.Offset = kafka.Offset(next)
	sought, err := m.client.SeekPartitions([]kafka.TopicPartition{partition})
	if err == nil {
		err = sought[0].Error
	}
	if err != nil {
		return fmt.Errorf("go to offset %d of %s[%d]: %w", next, at.topic, at.partition, err)
	}
	return nil
}

// ensureWriter has a writer that may begin a transaction.
//
// One that lost an answer on the way is replaced. The client speaks the first
// version of Kafka's transaction protocol, in which all transactions of a writer
// look alike (KIP-890): a request that was sent again may arrive late and be taken
// for one of the next transaction. A new writer has another epoch, and what is
// still under way of the old one is refused.
func (t *Transactor) ensureWriter(ctx context.Context) error {
	if t.writer != nil && t.writer.initialised && t.writer.doubtful.Load() {
		t.config.Log.Warn("Kafka left a request unanswered; going on with a new transactional producer")
		t.metrics.replaced.Inc()
		t.dropWriter()
	}
	if t.writer == nil {
		opened, err := newWriter(t.config)
		if err != nil {
			return err
		}
		t.writer = opened
	}
	if t.writer.initialised {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, t.config.TransactionTimeout)
	defer cancel()
	err := t.call(ctx, "InitTransactions", func(client *kafka.Producer) error { return client.InitTransactions(ctx) })
	if err != nil {
		if fault, ok := errors.AsType[kafka.Error](err); !ok || !fault.IsRetriable() {
			t.dropWriter()
		}
		return fmt.Errorf("begin as transactional id %s: %w", t.config.TransactionalID, err)
	}
	t.writer.initialised = true
	t.writer.doubtful.Store(false)
	t.silent.Store(nil)
	return nil
}

func (t *Transactor) dropWriter() {
	if t.writer != nil {
		if !t.writer.abandoned {
			t.writer.close()
		}
		t.writer = nil
	}
}

func (t *Transactor) closeLoader() {
	if t.loader != nil {
		t.loader.close()
		t.loader = nil
	}
}

package kafka_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/kafkatest"
)

const group = "billing"

var errOutage = errors.New("the database is away")

// patience is for what must happen; nothing waits so long when all is well.
const patience = time.Minute

// world is a broker with one topic, and the database that the members of one
// group apply records to.
type world struct {
	broker     *kafkatest.Broker
	topic      string
	partitions int32
	produced   int64 // records in each partition

	mutex    sync.Mutex
	database []event.Record
}

func newWorld(t testing.TB, partitions int32) *world {
	t.Helper()
	broker := kafkatest.New(t)
	return &world{broker: broker, topic: broker.Topic(t, partitions), partitions: partitions}
}

// produce writes count records to each partition.
func (w *world) produce(t testing.TB, count int64) {
	t.Helper()
	var records []kafkatest.Record
	for partition := range w.partitions {
		for range count {
			records = append(records, kafkatest.Record{
				Partition: partition,
				Value:     []byte("{}"),
				Headers:   []kgo.RecordHeader{{Key: "ce_id", Value: []byte("id")}, {Key: "empty", Value: []byte{}}, {Key: "null"}},
			})
		}
	}
	w.broker.Produce(t, w.topic, records...)
	w.produced += count
}

// applied is what the database holds, in the order in which it came.
func (w *world) applied() []event.Record {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return slices.Clone(w.database)
}

// appliedOffsets is what the database holds of a partition; once says to leave
// out what came again.
func (w *world) appliedOffsets(partition int32, once bool) []int64 {
	var found []int64
	for _, record := range w.applied() {
		if record.Partition == partition && !(once && slices.Contains(found, record.Offset)) {
			found = append(found, record.Offset)
		}
	}
	return found
}

func (w *world) timesApplied(record event.Record) int {
	times := 0
	for _, other := range w.applied() {
		if other.Partition == record.Partition && other.Offset == record.Offset {
			times++
		}
	}
	return times
}

func (w *world) allOffsets() []int64 {
	var all []int64
	for offset := range w.produced {
		all = append(all, offset)
	}
	return all
}

func (w *world) requireEachOnceInOrder(t testing.TB) {
	t.Helper()
	for partition := range w.partitions {
		require.Equal(t, w.allOffsets(), w.appliedOffsets(partition, false), "partition %d", partition)
	}
}

// requireAllInOrder allows for records that came again.
func (w *world) requireAllInOrder(t testing.TB) {
	t.Helper()
	for partition := range w.partitions {
		require.Equal(t, w.allOffsets(), w.appliedOffsets(partition, true), "partition %d", partition)
	}
}

// committed is what Kafka knows, by partition.
func (w *world) committed() map[int32]int64 {
	return commits(w.broker.GroupInfo(group), w.topic)
}

func commits(info *kfake.GroupInfo, topic string) map[int32]int64 {
	committed := make(map[int32]int64)
	if info != nil {
		for partition, commit := range info.Commits[topic] {
			committed[partition] = commit.Offset
		}
	}
	return committed
}

// waitGroup waits until the group is as wanted.
func (w *world) waitGroup(t testing.TB, wanted func(*kfake.GroupInfo) bool) *kfake.GroupInfo {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	info, err := w.broker.WaitGroupInfo(ctx, group, func(info *kfake.GroupInfo) bool { return info != nil && wanted(info) })
	require.NoError(t, err, "group is %+v", info)
	return info
}

// waitBehind waits until exactly so many partitions hold more than is committed.
func (w *world) waitBehind(t testing.TB, partitions int) {
	t.Helper()
	w.waitGroup(t, func(info *kfake.GroupInfo) bool {
		behind := int(w.partitions)
		for _, offset := range commits(info, w.topic) {
			if offset == w.produced {
				behind--
			}
		}
		return behind == partitions
	})
}

// waitShared waits until the group has settled with so many partitions for each
// of its members, the fewest first.
func (w *world) waitShared(t testing.TB, shares ...int) *kfake.GroupInfo {
	t.Helper()
	return w.waitGroup(t, func(info *kfake.GroupInfo) bool {
		var found []int
		for _, member := range info.Members {
			found = append(found, member.NumAssigned())
		}
		slices.Sort(found)
		return info.State == "Stable" && slices.Equal(found, shares)
	})
}

// assignments are the partitions of each static member.
func (w *world) assignments(info *kfake.GroupInfo) map[string][]int32 {
	found := make(map[string][]int32)
	for _, member := range info.Members {
		found[*member.InstanceID] = slices.Sorted(slices.Values(member.Assignment[w.topic]))
	}
	return found
}

// member is a running consumer whose handler waits for a test's answers.
type member struct {
	*kafka.Consumer
	world    *world
	registry *prometheus.Registry
	cancel   context.CancelFunc
	batches  chan batch
	failing  atomic.Bool // for serve
	log      *logBuffer
	ended    chan struct{}
	err      error // of Run, when ended
}

// batch is a call of the handler.
type batch struct {
	ctx     context.Context
	records []event.Record
	member  *member
	answers chan error
}

// join starts a member. It ends with the test at the latest, without draining.
func (w *world) join(t testing.TB, config kafka.ConsumerConfig) *member {
	t.Helper()
	registry := prometheus.NewRegistry()
	log := &logBuffer{}
	config.Brokers = w.broker.Brokers()
	config.Group = group
	config.Topics = []string{w.topic}
	config.Log = slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	config.Metrics = registry
	consumer, err := kafka.NewConsumer(config)
	require.NoError(t, err)

	ctx, cancel := context.WithCancel(t.Context())
	m := &member{
		Consumer: consumer, world: w, registry: registry, cancel: cancel,
		batches: make(chan batch), log: log, ended: make(chan struct{}),
	}
	go func() {
		defer close(m.ended)
		m.err = consumer.Run(ctx, func(ctx context.Context, records []event.Record) error {
			b := batch{ctx: ctx, records: records, member: m, answers: make(chan error, 1)}
			select {
			case m.batches <- b:
			case <-ctx.Done():
				return ctx.Err()
			}
			select {
			case err := <-b.answers:
				return err
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	t.Cleanup(func() {
		cancel()
		m.failing.Store(true) // whatever is still served is given up
		go m.serve()
		<-m.ended
		if t.Failed() {
			t.Logf("log of a member:\n%s", log)
		}
	})
	return m
}

// receive waits for the handler to be called.
func (m *member) receive(t testing.TB) batch {
	t.Helper()
	select {
	case b := <-m.batches:
		return b
	case <-m.ended:
		require.FailNow(t, "the member has ended", "%v", m.err)
	case <-time.After(patience):
		require.FailNow(t, "no batch comes")
	}
	return batch{}
}

// answer lets the handler return; nil also puts the records in the database.
func (b batch) answer(err error) {
	if err == nil {
		b.member.world.mutex.Lock()
		b.member.world.database = append(b.member.world.database, b.records...)
		b.member.world.mutex.Unlock()
	}
	b.answers <- err
}

func (b batch) partitions() int {
	found := make(map[int32]bool)
	for _, record := range b.records {
		found[record.Partition] = true
	}
	return len(found)
}

// serve answers every batch until the member ends.
func (m *member) serve() {
	for {
		select {
		case b := <-m.batches:
			if m.failing.Load() {
				b.answer(errOutage)
			} else {
				b.answer(nil)
			}
		case <-m.ended:
			return
		}
	}
}

// wait is for the end of Run.
func (m *member) wait(t testing.TB) error {
	t.Helper()
	select {
	case <-m.ended:
		return m.err
	case <-time.After(patience):
		require.FailNow(t, "the member does not end")
		return nil
	}
}

func (m *member) stop(t testing.TB) error {
	t.Helper()
	m.cancel()
	return m.wait(t)
}

func (m *member) waitReady(t testing.TB, wanted bool) {
	t.Helper()
	require.Eventually(t, func() bool {
		ready, _ := m.Ready()
		return ready == wanted
	}, patience, 5*time.Millisecond)
}

// waitLog waits for words of the client library, which says some things nowhere
// else.
func (m *member) waitLog(t testing.TB, words string) {
	t.Helper()
	require.Eventually(t, func() bool { return strings.Contains(m.log.String(), words) }, patience, 5*time.Millisecond)
}

// metric is the value of one of the member's metrics; kind is its only label,
// or "".
func (m *member) metric(t testing.TB, name, kind string) float64 {
	t.Helper()
	families, err := m.registry.Gather()
	require.NoError(t, err)
	for _, family := range families {
		for _, metric := range family.GetMetric() {
			for _, label := range metric.GetLabel() {
				if family.GetName() == "onceledger_consumer_"+name && (kind == "" || label.GetValue() == kind) {
					return metric.GetCounter().GetValue() + metric.GetGauge().GetValue()
				}
			}
		}
	}
	return 0
}

// logBuffer keeps a log until it is known whether anybody needs it.
type logBuffer struct {
	mutex  sync.Mutex
	buffer bytes.Buffer
}

var _ io.Writer = (*logBuffer)(nil)

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	return l.buffer.Write(p)
}

func (l *logBuffer) String() string {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	return l.buffer.String()
}

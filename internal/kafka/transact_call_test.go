package kafka

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/kafkatest"
	"github.com/onceledger/onceledger/internal/transact"
)

// copying is a stage that writes each record's value to a topic, under the
// record's offset. It goes on behind the highest offset that is there.
type copying struct {
	topic string
	next  map[int32]int64
}

func (s *copying) Begin(partition int32)  { s.next[partition] = 0 }
func (s *copying) Forget(partition int32) { delete(s.next, partition) }

func (s *copying) Load(record event.Record) error {
	offset, err := strconv.ParseInt(string(record.Key), 10, 64)
	s.next[record.Partition] = max(s.next[record.Partition], offset+1)
	return err
}

func (s *copying) Resume(partition int32, source transact.Source) (int64, error) {
	if next := s.next[partition]; next != max(0, source.Committed) {
		return 0, fmt.Errorf("the state reaches to %d, the offsets to %d", next, source.Committed)
	}
	return s.next[partition], nil
}

func (s *copying) Process(batch []event.Record) (transact.Output, error) {
	var output transact.Output
	for _, record := range batch {
		output.Records = append(output.Records, event.Record{
			Topic: s.topic, Partition: record.Partition, Key: strconv.AppendInt(nil, record.Offset, 10), Value: record.Value,
		})
	}
	return output, nil
}

// transacting is a running transactor, some of whose calls do not come back.
type transacting struct {
	*Transactor
	broker         *kafkatest.Broker
	source, copies string
	produced       int
	registry       *prometheus.Registry
	log            *lockedBuffer
	end            chan error
}

func startTransacting(t *testing.T, hang func(call string, do func() error) error) *transacting {
	t.Helper()
	broker := kafkatest.New(t)
	w := &transacting{
		broker: broker, source: broker.Topic(t, 1), copies: broker.Topic(t, 1),
		registry: prometheus.NewRegistry(), log: new(lockedBuffer), end: make(chan error, 1),
	}
	var err error
	w.Transactor, err = NewTransactor(TransactorConfig{
		ConsumerConfig: ConsumerConfig{
			Brokers: broker.Brokers(), Group: "copies", Topics: []string{w.source},
			Log: slog.New(slog.NewTextHandler(w.log, nil)), Metrics: w.registry,
		},
		TransactionalID: "copies", TransactionTimeout: time.Second, State: []string{w.copies}, WatchEvery: 50 * time.Millisecond,
	}, &copying{topic: w.copies, next: make(map[int32]int64)})
	require.NoError(t, err)
	w.grace = 200 * time.Millisecond
	w.consumer.longInHand = 100 * time.Millisecond
	w.around = hang
	w.produce(t)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		w.end <- w.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
		if t.Failed() {
			t.Logf("log:\n%s", w.log)
		}
	})
	return w
}

func (w *transacting) produce(t *testing.T) {
	t.Helper()
	records := make([]kafkatest.Record, 20)
	for i := range records {
		records[i].Value = []byte("value")
	}
	w.broker.Produce(t, w.source, records...)
	w.produced += len(records)
}

// waitCopied waits until the group has read all, and requires each record to be
// there once for readers of committed records.
func (w *transacting) waitCopied(t *testing.T) {
	t.Helper()
	w.wait(t, "all to be read", func() bool {
		info := w.broker.GroupInfo("copies")
		return info != nil && info.Commits[w.source][0].Offset == int64(w.produced)
	})
	var want, got []string
	for offset := range w.produced {
		want = append(want, strconv.Itoa(offset))
	}
	for _, record := range w.broker.Records(t, w.copies) {
		got = append(got, string(record.Key))
	}
	require.Equal(t, want, got)
}

func (w *transacting) wait(t *testing.T, what string, met func() bool) {
	t.Helper()
	require.Eventually(t, met, time.Minute, time.Millisecond, "waited for %s", what)
}

func (w *transacting) metric(t *testing.T, name string) float64 {
	t.Helper()
	families, err := w.registry.Gather()
	require.NoError(t, err)
	sum := 0.0
	for _, family := range families {
		if family.GetName() == name {
			for _, metric := range family.GetMetric() {
				sum += metric.GetGauge().GetValue() + metric.GetCounter().GetValue()
			}
		}
	}
	return sum
}

// lockedBuffer can be read while it is written.
type lockedBuffer struct {
	mutex  sync.Mutex
	buffer bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return b.buffer.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return b.buffer.String()
}

// Goal: a call that the client library does not come back from holds up a batch
// for a bounded time, is told of, and doubles nothing, also when it comes back
// long after. Method: each of the calls hangs once, before it is made and after.
func TestCallThatDoesNotComeBack(t *testing.T) {
	t.Parallel()

	for _, name := range []string{"InitTransactions", "BeginTransaction", "SendOffsetsToTransaction", "CommitTransaction", "AbortTransaction"} {
		for _, made := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s,made=%t", name, made), func(t *testing.T) {
				t.Parallel()

				released := make(chan struct{})
				release := sync.OnceFunc(func() { close(released) })
				defer release()
				var hung, refused atomic.Bool
				w := startTransacting(t, func(call string, do func() error) error {
					if name == "AbortTransaction" && call == "SendOffsetsToTransaction" && !refused.Swap(true) {
						return errors.New("refused, so that there is something to abort")
					}
					if call != name || hung.Swap(true) {
						return do()
					}
					if !made {
						<-released
						return do()
					}
					err := do()
					<-released
					return err
				})
				w.wait(t, "a batch in hand to show", func() bool { return w.metric(t, "onceledger_consumer_in_hand_seconds") > 0.1 })
				w.wait(t, "not being ready", func() bool { ready, _ := w.Ready(); return !ready })
				w.wait(t, "the metric", func() bool { return w.metric(t, "onceledger_transact_unanswered_calls_total") == 1 })
				w.waitCopied(t)
				w.wait(t, "being ready", func() bool { ready, _ := w.Ready(); return ready })
				require.Equal(t, 1.0, w.metric(t, "onceledger_transact_abandoned_producers"))
				require.Contains(t, w.log.String(), "call="+name)
				w.wait(t, "no lag", func() bool { return w.metric(t, "onceledger_consumer_lag_records") == 0 })

				release()
				w.produce(t)
				w.wait(t, "the late call", func() bool { return w.metric(t, "onceledger_transact_abandoned_producers") == 0 })
				w.produce(t)
				w.waitCopied(t)
				require.Equal(t, 1.0, w.metric(t, "onceledger_transact_unanswered_calls_total"))
			})
		}
	}
}

// Goal: while a call hangs, Ready and the metrics tell of it before anything is
// given up; a process in which such calls pile up ends, and says why.
func TestCallsThatDoNotComeBackPileUp(t *testing.T) {
	t.Parallel()

	released := make(chan struct{})
	t.Cleanup(func() { close(released) })
	w := startTransacting(t, func(call string, do func() error) error {
		if call == "SendOffsetsToTransaction" {
			<-released
		}
		return do()
	})
	w.wait(t, "its readiness to tell", func() bool {
		ready, why := w.Ready()
		return !ready && why == "a batch of consumer group copies has been in hand for 0s"
	})
	w.wait(t, "the lag to show", func() bool { return w.metric(t, "onceledger_consumer_lag_records") == float64(w.produced) })
	w.wait(t, "its readiness to tell why", func() bool {
		ready, why := w.Ready()
		return !ready && strings.Contains(why, "did not come back from SendOffsetsToTransaction")
	})
	select {
	case err := <-w.end:
		require.ErrorContains(t, err, "has not come back from calls of 3 transactional producers of group copies")
		require.Equal(t, 3.0, w.metric(t, "onceledger_transact_abandoned_producers"))
	case <-time.After(time.Minute):
		require.FailNow(t, "it goes on")
	}
	require.Empty(t, w.broker.Records(t, w.copies))
}

// TestFences: a few of them are put up with, many at once are somebody else, and
// old ones are forgotten.
func TestFences(t *testing.T) {
	t.Parallel()

	cause := errors.New("fenced")
	c := &Consumer{config: ConsumerConfig{Group: "billing", InstanceID: "worker-1"}}
	now := time.Now()
	for i := range 10 {
		require.ErrorIs(t, c.fencedAs(cause, now.Add(time.Duration(i)*31*time.Second)), errExpelled)
	}
	now = now.Add(time.Hour)
	require.ErrorIs(t, c.fencedAs(cause, now), errExpelled)
	require.ErrorIs(t, c.fencedAs(cause, now.Add(20*time.Second)), errExpelled)
	err := c.fencedAs(cause, now.Add(40*time.Second))
	require.NotErrorIs(t, err, errExpelled)
	require.ErrorIs(t, err, cause)
	require.ErrorContains(t, err, `another process has joined group billing as instance "worker-1", and this one must stop`)
}

package kafka

import (
	"context"
	"strconv"
	"time"

	"github.com/confluentinc/confluent-kafka-go/v2/kafka"
	"github.com/prometheus/client_golang/prometheus"
)

// transactMetrics are one transactor's, told apart by its group.
type transactMetrics struct {
	committed prometheus.Histogram // counts the transactions too
	aborted   prometheus.Counter
	fenced    prometheus.Counter
	replaced  prometheus.Counter
	stopped   prometheus.Gauge
	abandoned prometheus.Gauge
	unstable  *prometheus.GaugeVec
	age       *prometheus.GaugeVec

	unanswered *prometheus.CounterVec
}

func newTransactMetrics(registerer prometheus.Registerer, group string) (*transactMetrics, error) {
	labels := prometheus.Labels{"group": group}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help, ConstLabels: labels})
	}
	m := &transactMetrics{
		committed: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "onceledger_transact_seconds",
			Help: "Time from begin to commit of a Kafka transaction.", ConstLabels: labels, Buckets: prometheus.ExponentialBuckets(0.001, 2, 15)}),
		aborted:  counter("onceledger_transact_aborted_total", "Kafka transactions aborted; their records were tried again."),
		fenced:   counter("onceledger_transact_given_up_total", "Kafka transactions given up with their producer, and the state restored."),
		replaced: counter("onceledger_transact_producers_replaced_total", "Producers replaced because an answer was lost on the way."),
		stopped: prometheus.NewGauge(prometheus.GaugeOpts{Name: "onceledger_transact_stopped_partitions",
			Help: "Partitions that stand still until somebody does something.", ConstLabels: labels}),
		abandoned: prometheus.NewGauge(prometheus.GaugeOpts{Name: "onceledger_transact_abandoned_producers",
			Help: "Producers that a call has not come back from and that are left to themselves.", ConstLabels: labels}),
		unanswered: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "onceledger_transact_unanswered_calls_total",
			Help: "Calls that the Kafka client did not come back from in time; their producer was abandoned.", ConstLabels: labels}, []string{"call"}),
		unstable: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "onceledger_kafka_unstable_records",
			Help: "End offset less last stable offset: records that readers of committed records wait for."}, []string{"topic", "partition"}),
		age: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "onceledger_kafka_unstable_seconds",
			Help: "How long the last stable offset has stood still before the end of its partition."}, []string{"topic", "partition"}),
	}
	for _, call := range []string{"InitTransactions", "BeginTransaction", "SendOffsetsToTransaction", "CommitTransaction", "AbortTransaction"} {
		m.unanswered.WithLabelValues(call) // from zero on, so that the first one is seen to be one more
	}
	if registerer == nil {
		return m, nil
	}
	for _, collector := range []prometheus.Collector{m.committed, m.aborted, m.fenced, m.replaced, m.stopped, m.abandoned, m.unanswered, m.unstable, m.age} {
		if err := registerer.Register(collector); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// stability is since when a last stable offset has been seen where it is.
type stability struct {
	stable int64
	since  time.Time
}

// watch measures, for every partition of the topics, how far the last stable
// offset is behind the end and for how long it has not moved, and finds out when
// a state topic is made anew under a running instance. It measures the lag too:
// it goes on when the member's goroutine does not.
func (t *Transactor) watch(ctx context.Context) {
	seen := make(map[place]stability)
	ticker := time.NewTicker(t.config.WatchEvery)
	defer ticker.Stop()
	for {
		err := withAdmin(t.config.Brokers, func(admin *kafka.AdminClient) error {
			for ctx.Err() == nil {
				if err := t.look(ctx, admin, seen); err != nil {
					return err // with a new client next time
				}
				select {
				case <-ctx.Done():
				case <-ticker.C:
				}
			}
			return nil
		})
		if ctx.Err() != nil {
			return
		}
		t.config.Log.Debug("last stable offsets not read", "error", err)
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

func (t *Transactor) look(ctx context.Context, admin *kafka.AdminClient, seen map[place]stability) error {
	// What is asked is seen through, so that the client is not closed with a
	// question open. It gives up by itself before this.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
	defer cancel()
	var specs []TopicSpec
	for _, topics := range [][]string{t.config.Topics, t.config.State, t.config.Watch} {
		for _, topic := range topics {
			specs = append(specs, TopicSpec{Name: topic})
		}
	}
	counts, err := countPartitions(ctx, admin, specs)
	if err != nil {
		return err
	}
	var places []place
	for topic, count := range counts {
		for partition := range int32(count) {
			places = append(places, place{topic, partition})
		}
	}
	// The stable ones first: a gap that is seen was there.
	stable, err := askOffsets(ctx, admin, places, kafka.LatestOffsetSpec, kafka.IsolationLevelReadCommitted)
	if err != nil {
		return err
	}
	t.mutex.Lock()
	known := make(map[place]int64, len(t.ends))
	for at, end := range t.ends {
		known[at] = end
	}
	t.consumer.metrics.lag.Reset()
	for partition, reached := range t.reached {
		at := place{t.source, partition}
		t.consumer.metrics.setLag(at, stable[at]-reached)
	}
	t.mutex.Unlock()
	ends, err := askOffsets(ctx, admin, places, kafka.LatestOffsetSpec, kafka.IsolationLevelReadUncommitted)
	if err != nil {
		return err
	}
	now := time.Now()
	for _, at := range places {
		if ends[at] < known[at] {
			t.truncated.Store(true)
		}
		gap := ends[at] - stable[at]
		last, before := seen[at]
		if gap <= 0 || !before || last.stable != stable[at] {
			last = stability{stable: stable[at], since: now}
		}
		if gap <= 0 {
			last.since = now
		}
		seen[at] = last
		labels := []string{at.topic, strconv.Itoa(int(at.partition))}
		t.metrics.unstable.WithLabelValues(labels...).Set(float64(max(0, gap)))
		t.metrics.age.WithLabelValues(labels...).Set(now.Sub(last.since).Seconds())
	}
	return nil
}

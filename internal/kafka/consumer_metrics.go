package kafka

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// consumerMetrics are one consumer's, told apart by its group.
type consumerMetrics struct {
	records        prometheus.Counter
	batchRecords   prometheus.Histogram // counts the batches too
	batchSeconds   prometheus.Histogram
	retries        prometheus.Counter
	commitFailures prometheus.Counter
	remade         prometheus.Counter
	rebalances     *prometheus.CounterVec
	paused         prometheus.Gauge
	lag            *prometheus.GaugeVec
	inHand         prometheus.GaugeFunc
}

func newConsumerMetrics(registerer prometheus.Registerer, group string, inHand func() float64) (*consumerMetrics, error) {
	labels := prometheus.Labels{"group": group}
	counter := func(name, help string) prometheus.CounterOpts {
		return prometheus.CounterOpts{Name: name, Help: help, ConstLabels: labels}
	}
	gauge := func(name, help string) prometheus.GaugeOpts {
		return prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: labels}
	}
	histogram := func(name, help string, buckets []float64) prometheus.HistogramOpts {
		return prometheus.HistogramOpts{Name: name, Help: help, ConstLabels: labels, Buckets: buckets}
	}
	m := &consumerMetrics{
		records:        prometheus.NewCounter(counter("onceledger_consumer_records_total", "Records whose effects are durable, duplicates included.")),
		batchRecords:   prometheus.NewHistogram(histogram("onceledger_consumer_batch_records", "Records per applied batch.", prometheus.ExponentialBuckets(1, 4, 7))),
		batchSeconds:   prometheus.NewHistogram(histogram("onceledger_consumer_batch_seconds", "Time the handler took for an applied batch.", prometheus.ExponentialBuckets(0.001, 2, 16))),
		retries:        prometheus.NewCounter(counter("onceledger_consumer_retries_total", "Attempts at a batch that failed and were put off.")),
		commitFailures: prometheus.NewCounter(counter("onceledger_consumer_commit_failures_total", "Commits of offsets that failed; the records may be read again.")),
		remade:         prometheus.NewCounter(counter("onceledger_consumer_topics_remade_total", "Topics found to have been deleted and made again; they are read from their beginning.")),
		rebalances:     prometheus.NewCounterVec(counter("onceledger_consumer_rebalances_total", "Partitions assigned, revoked (in order) or lost (without a say)."), []string{"kind"}),
		paused:         prometheus.NewGauge(gauge("onceledger_consumer_paused", "1 while a batch waits for another attempt and nothing else is read.")),
		lag:            prometheus.NewGaugeVec(gauge("onceledger_consumer_lag_records", "Records after the last applied one, as of the last fetch."), []string{"topic", "partition"}),
		inHand:         prometheus.NewGaugeFunc(gauge("onceledger_consumer_in_hand_seconds", "How long the batch in hand has been in hand; 0 when there is none."), inHand),
	}
	if registerer == nil {
		return m, nil
	}
	for _, collector := range []prometheus.Collector{
		m.records, m.batchRecords, m.batchSeconds, m.retries, m.commitFailures, m.remade, m.rebalances, m.paused, m.lag, m.inHand,
	} {
		if err := registerer.Register(collector); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *consumerMetrics) applied(records int, took time.Duration) {
	m.records.Add(float64(records))
	m.batchRecords.Observe(float64(records))
	m.batchSeconds.Observe(took.Seconds())
}

func (m *consumerMetrics) setPaused(paused bool) {
	m.paused.Set(0)
	if paused {
		m.paused.Set(1)
	}
}

func (m *consumerMetrics) setLag(at place, records int64) {
	m.lag.WithLabelValues(at.topic, strconv.Itoa(int(at.partition))).Set(float64(max(0, records)))
}

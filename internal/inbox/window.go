package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/onceledger/onceledger/internal/db"
)

// Config is what an inbox is made of.
type Config struct {
	Consumer string // names the effects: events are deduplicated per consumer
	Pool     *pgxpool.Pool
	Handler  Handler
	Writers  int // transactions side by side, for batches that are worth it; 0 means 1
	Log      *slog.Logger
	Metrics  prometheus.Registerer
	Now      func() time.Time
}

// New makes an inbox.
func New(config Config) *Inbox {
	return &Inbox{
		consumer: config.Consumer,
		conn:     config.Pool,
		handler:  config.Handler,
		writers:  max(1, config.Writers),
		log:      config.Log,
		metrics:  newMetrics(config.Metrics, config.Consumer),
		window:   &window{conn: config.Pool, now: config.Now},
	}
}

// window knows how far back the dedupe table reaches. It is used by one
// goroutine, the one that processes batches.
type window struct {
	conn   db.DBTX
	now    func() time.Time
	since  time.Time
	readAt time.Time
}

const windowFresh = time.Minute // partitions come and go by the day

// oldest is the first moment that the dedupe table covers.
func (w *window) oldest(ctx context.Context) (time.Time, error) {
	if w.now().Sub(w.readAt) < windowFresh {
		return w.since, nil
	}
	days, err := db.New().PartitionDays(ctx, w.conn, "processed_events")
	if err != nil {
		return time.Time{}, fmt.Errorf("read dedupe partitions: %w", err)
	}
	if len(days) == 0 {
		return time.Time{}, errors.New("processed_events has no partition: is a worker with the role janitor running?")
	}
	w.since, w.readAt = days[0], w.now()
	return w.since, nil
}

type metrics struct {
	records *prometheus.CounterVec
	retried *prometheus.CounterVec
	delay   prometheus.Histogram
}

func newMetrics(registerer prometheus.Registerer, consumer string) *metrics {
	labels := prometheus.Labels{"consumer": consumer}
	m := &metrics{
		records: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "onceledger_inbox_records_total", ConstLabels: labels,
			Help: "Records by what became of them: applied, duplicate, skipped, discarded, or the class of their new dead letter.",
		}, []string{"outcome"}),
		retried: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "onceledger_inbox_retried_letters_total", ConstLabels: labels,
			Help: "Dead letters that were tried again in this process, by what became of them.",
		}, []string{"outcome"}),
		delay: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "onceledger_inbox_delay_seconds", ConstLabels: labels,
			Help:    "From an event's occurrence to the commit of its effects, for the newest event of each batch.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 60, 600, 3600},
		}),
	}
	registerer.MustRegister(m.records, m.retried, m.delay)
	return m
}

func (m *metrics) count(outcome string, n int) {
	m.records.WithLabelValues(outcome).Add(float64(n))
}

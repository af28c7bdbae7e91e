package janitor

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Metrics are what the janitor of this process did and could not do.
type Metrics struct {
	kept    *prometheus.GaugeVec
	dropped *prometheus.CounterVec
	keys    prometheus.Counter
	done    prometheus.Gauge
}

// NewMetrics registers them; a nil registry is for nobody.
func NewMetrics(registry prometheus.Registerer) *Metrics {
	auto := promauto.With(registry)
	return &Metrics{
		kept: auto.NewGaugeVec(prometheus.GaugeOpts{
			Name: "onceledger_janitor_kept_partitions",
			Help: "Partitions past their time that could not be dropped in the last round, by what keeps the oldest of them.",
		}, []string{"table", "reason"}),
		dropped: auto.NewCounterVec(prometheus.CounterOpts{
			Name: "onceledger_janitor_dropped_partitions_total",
			Help: "Partitions dropped.",
		}, []string{"table"}),
		keys: auto.NewCounter(prometheus.CounterOpts{
			Name: "onceledger_janitor_deleted_keys_total",
			Help: "Idempotency keys deleted.",
		}),
		done: auto.NewGauge(prometheus.GaugeOpts{
			Name: "onceledger_janitor_last_round_timestamp_seconds",
			Help: "When the janitor last did a round without an error.",
		}),
	}
}

func (m *Metrics) partitions(dropped []string, kept []Kept) {
	for _, table := range Tables {
		for _, reason := range reasons {
			m.kept.WithLabelValues(table, reason).Set(0)
		}
		for _, name := range dropped {
			if strings.HasPrefix(name, table) {
				m.dropped.WithLabelValues(table).Inc()
			}
		}
	}
	for _, k := range kept {
		m.kept.WithLabelValues(k.Table, k.Reason).Set(float64(k.Count))
	}
}

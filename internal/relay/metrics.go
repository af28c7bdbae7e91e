package relay

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// metrics are those of the relay in this process, as of its last tick.
type metrics struct {
	published prometheus.Counter
	resent    prometheus.Counter
	gaps      prometheus.Counter
	failures  *prometheus.CounterVec
	inFlight  prometheus.Gauge
	lag       prometheus.Gauge
	oldest    prometheus.Gauge
	state     *prometheus.GaugeVec
}

// newMetrics registers them; a nil registry is for nobody.
func newMetrics(registry prometheus.Registerer) *metrics {
	auto := promauto.With(registry)
	return &metrics{
		published: auto.NewCounter(prometheus.CounterOpts{
			Name: "onceledger_relay_events_published_total",
			Help: "Events that the broker has acknowledged, sent again or not.",
		}),
		resent: auto.NewCounter(prometheus.CounterOpts{
			Name: "onceledger_relay_gap_events_total",
			Help: "Events sent from the outbox table because the slot would not bring them.",
		}),
		gaps: auto.NewCounter(prometheus.CounterOpts{
			Name: "onceledger_relay_gaps_total",
			Help: "Slots made: at the first start, or because one was lost.",
		}),
		failures: auto.NewCounterVec(prometheus.CounterOpts{
			Name: "onceledger_relay_delivery_errors_total",
			Help: "Events that were not delivered, by whether the broker refuses them for good.",
		}, []string{"refused"}),
		inFlight: auto.NewGauge(prometheus.GaugeOpts{
			Name: "onceledger_relay_in_flight_events",
			Help: "Events from the first that is not acknowledged to the last that was read.",
		}),
		lag: auto.NewGauge(prometheus.GaugeOpts{
			Name: "onceledger_relay_lag_bytes",
			Help: "Log that Postgres keeps for the relay: from the confirmed position to the end.",
		}),
		oldest: auto.NewGauge(prometheus.GaugeOpts{
			Name: "onceledger_relay_oldest_unpublished_timestamp_seconds",
			Help: "When the oldest event was committed that was read and is not acknowledged; 0 if there is none.",
		}),
		state: auto.NewGaugeVec(prometheus.GaugeOpts{
			Name: "onceledger_relay_state",
			Help: "1 for the state that the relay is in.",
		}, []string{"state"}),
	}
}

func (m *metrics) setState(now State) {
	for _, state := range states {
		m.state.WithLabelValues(string(state)).Set(0)
	}
	m.state.WithLabelValues(string(now)).Set(1)
}

package balances

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	records    *prometheus.CounterVec
	rebuilds   prometheus.Counter
	orders     prometheus.Gauge
	missing    prometheus.Gauge
	incomplete prometheus.Gauge
}

func newMetrics(registerer prometheus.Registerer) (*metrics, error) {
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	m := &metrics{
		records: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "onceledger_balances_records_total",
			Help: "Records of billing.events by what became of them in committed transactions; late is one of those applied."}, []string{"outcome"}),
		rebuilds: prometheus.NewCounter(prometheus.CounterOpts{Name: "onceledger_balances_rebuilds_total",
			Help: "Partitions whose balances were begun anew because state and offsets did not agree."}),
		orders:     gauge("onceledger_balances_orders", "Orders that are remembered."),
		missing:    gauge("onceledger_balances_missing_events", "Versions of an order's billing that never came, of the partitions of this instance."),
		incomplete: gauge("onceledger_balances_incomplete_partitions", "Partitions of this instance whose first events were gone when their balances were begun."),
	}
	if registerer == nil {
		return m, nil
	}
	for _, collector := range []prometheus.Collector{m.records, m.rebuilds, m.orders, m.missing, m.incomplete} {
		if err := registerer.Register(collector); err != nil {
			return nil, err
		}
	}
	return m, nil
}

//go:build apache

package conformance_test

import (
	"testing"

	"github.com/onceledger/onceledger/internal/relay"
)

// TestConformanceAtApacheKafka runs the suite on each relay at Apache Kafka.
func TestConformanceAtApacheKafka(t *testing.T) {
	t.Parallel()

	var results []*result
	printTable(t, &results)
	s := startApache(t)
	for _, kind := range []relay.Kind{relay.KindWAL, relay.KindPoll, relay.KindDebezium} {
		of := &result{relay: string(kind), broker: "Apache Kafka", backlog: 100_000}
		results = append(results, of)
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel() // Debezium's cases go one by one, and these beside them
			runCases(t, of, kind != relay.KindDebezium, func(t *testing.T) *bench {
				if kind == relay.KindDebezium {
					return debeziumBench(t, s)
				}
				return workerBench(t, s.bootstrap, kind)
			})
		})
	}
}

// TestConformanceOfDebeziumEmbedded runs the suite on Debezium at the embedded
// broker.
func TestConformanceOfDebeziumEmbedded(t *testing.T) {
	t.Parallel()

	of := &result{relay: string(relay.KindDebezium), broker: "embedded", backlog: 20_000}
	printTable(t, &[]*result{of})
	s := startOnEmbedded(t)
	runCases(t, of, false, func(t *testing.T) *bench { return debeziumBench(t, s) })
}

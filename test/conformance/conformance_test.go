// Package conformance_test holds the relays against one contract. The suite is
// written once, against internal/event, and runs on each relay at each broker:
// wal and poll at the embedded broker in `make test`; at Apache Kafka, and with
// Debezium, in `make test-kafka`. Relays are processes that are killed.
//
// Beside it are the switches from each relay to each other one, under load.
package conformance_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/kafkatest"
	"github.com/onceledger/onceledger/internal/relay"
	"github.com/onceledger/onceledger/test/stack"
)

func TestMain(m *testing.M) { stack.Main(m) }

func TestConformance(t *testing.T) {
	t.Parallel()

	var results []*result
	printTable(t, &results)
	for _, kind := range []relay.Kind{relay.KindWAL, relay.KindPoll} {
		of := &result{relay: string(kind), broker: "embedded", backlog: 20_000}
		results = append(results, of)
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()

			runCases(t, of, true, func(t *testing.T) *bench { return workerBench(t, embedded(t), kind) })
		})
	}
}

// embedded starts an embedded broker with the topics, for one test.
func embedded(t *testing.T) (bootstrap string) {
	t.Helper()
	broker := kafkatest.New(t)
	for _, topic := range []string{event.OrderEvents, event.BillingEvents} {
		require.NoError(t, broker.CreateTopic(topic, partitions, nil))
	}
	return broker.Brokers()
}

// workerBench is a bench of wal or poll.
func workerBench(t *testing.T, bootstrap string, kind relay.Kind) *bench {
	t.Helper()
	w := newWorld(t, bootstrap)
	w.assign(t, kind)
	return &bench{world: w, kind: kind, carrier: func(t *testing.T, name string) carrier {
		t.Helper()
		return newWorker(t, w, kind, name)
	}}
}

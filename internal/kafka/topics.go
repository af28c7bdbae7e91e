package kafka

import "github.com/onceledger/onceledger/internal/event"

// ServiceTopics are the topics that the service writes and reads, as they are
// made. All have the same number of partitions: who keeps the balances finds
// those of one partition of events in the partition of the same number.
// Replication 0 is the brokers' default.
func ServiceTopics(partitions, replication int) []TopicSpec {
	spec := func(name string, config map[string]string) TopicSpec {
		return TopicSpec{Name: name, Partitions: partitions, ReplicationFactor: replication, Config: config}
	}
	events := map[string]string{"cleanup.policy": "delete", "retention.ms": weekInMilliseconds}
	state := map[string]string{"cleanup.policy": "compact"}
	return []TopicSpec{
		spec(event.OrderEvents, events),
		spec(event.BillingEvents, events),
		spec(event.LedgerBalances, state),
		spec(event.LedgerBalanceOrders, state),
	}
}

// weekInMilliseconds is part of the retention contract: events are remembered
// longer than a topic can bring them again.
const weekInMilliseconds = "604800000"

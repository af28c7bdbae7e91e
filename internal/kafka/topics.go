package kafka

import "github.com/onceledger/onceledger/internal/event"

// ServiceTopics are the topics that the service writes and reads, as they are
// made. All have the same number of partitions: who keeps the balances finds
// those of one partition of events in the partition of the same number.
// Replication 0 is the brokers' default.
func ServiceTopics(partitions, replication int) []TopicSpec {
	spec := func(name, policy string) TopicSpec {
		return TopicSpec{
			Name: name, Partitions: partitions, ReplicationFactor: replication,
			Config: map[string]string{"cleanup.policy": policy},
		}
	}
	return []TopicSpec{
		spec(event.OrderEvents, "delete"),
		spec(event.BillingEvents, "delete"),
		spec(event.LedgerBalances, "compact"),
		spec(event.LedgerBalanceOrders, "compact"),
	}
}

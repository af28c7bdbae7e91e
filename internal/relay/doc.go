// Package relay carries the outbox to Kafka: what is committed to outbox_events
// is published, each event at least once, with the event id that it was written
// with, the events of an aggregate in the order of their versions. It may
// publish an event twice and never leaves one out; whoever consumes the topic
// deduplicates by event id.
//
// There are two relays here, one at a time: wal reads the write-ahead log, poll
// the table. Debezium is a third, in a process of its own. Which of them it is
// stands in relay_assignment and can be changed while everything runs (package
// switchover).
package relay

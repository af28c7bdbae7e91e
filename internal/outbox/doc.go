// Package outbox carries events from the transaction they happen in to Kafka.
//
// Append writes an event into outbox_events in the caller's own transaction.
// Relay reads the write-ahead log and publishes what was committed: in commit
// order, each event at least once, with the event id it was written with. It
// may publish an event twice and never leaves one out; whoever consumes the
// topic deduplicates by event id.
package outbox

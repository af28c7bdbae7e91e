// Package outbox writes events into outbox_events, in the transaction they
// happen in: both are committed, or neither. Package relay publishes them.
package outbox

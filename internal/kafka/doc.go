// Package kafka reads and writes event records. It is the only package that
// knows the Kafka client; the others see event.Record.
//
// Consumer promises at least once: an offset is committed after the function
// that got the record has returned nil, never before, and nothing is skipped.
// Exactly once is made of that by the function, which drops in its database
// transaction what it has seen before.
package kafka

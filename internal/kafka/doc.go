// Package kafka reads and writes event records. It is the only package that
// knows the Kafka client; the others see event.Record.
//
// Consumer and Producer both promise at least once. An offset is committed
// after the handler of its record has returned nil, and not before; a record is
// delivered once the broker has said so. Exactly once is made of that by the
// handler, which leaves out in its database transaction what it has seen
// before.
//
// Transactor goes from Kafka to Kafka and needs no such handler: what it writes
// and the offsets of what it has read are one Kafka transaction.
//
// To see why no record is lost on the way in, read member.go (when offsets move
// and what becomes of partitions that go) and offsets.go (the account of it).
// Why a transactor does nothing twice is in transact.go; how it comes by the state
// of a partition is in replay.go.
package kafka

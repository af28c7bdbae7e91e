// Package devstack runs Postgres 18 and a Kafka-protocol broker on this
// machine, with nothing installed beforehand.
//
// It is for development, tests and demonstrations. What it promises: the
// servers listen on 127.0.0.1 only, live in one folder each, keep their data
// over restarts and crashes, never run twice on the same folder, and never
// outlive the process that started them. What it leaves to others: what is in
// the databases and topics, and restarting a server that died (Postgres.Done
// tells; package supervisor acts).
package devstack

// Logf is told what is going on: downloads, recoveries, a port that moved. A
// testing.T's Logf is one. nil means silence.
type Logf func(format string, args ...any)

func (l Logf) printf(format string, args ...any) {
	if l != nil {
		l(format, args...)
	}
}

// Package sandbox is a throw-away onceledger on this machine, for proofs: a
// Postgres and a broker of its own in one folder, and the programs of cmd/ as
// processes, which may be killed, stopped, started with a crash point, and asked
// for what they log, serve and measure.
//
// Nothing it started outlives it, even when the program that runs it is killed
// with -9. The folder is locked while it is in use, and can be opened again: what
// Postgres and the broker hold is then as it was.
package sandbox

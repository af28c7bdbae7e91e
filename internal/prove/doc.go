// Package prove is `onceledger prove`: it breaks a onceledger of its own while
// clients use it, and then accounts for every request, event and amount.
//
// What it believes is a journal. Before a client sends anything, a line that says
// so is on the disk, and after each answer another one, so that nothing the
// clients were told can be forgotten, by a kill -9 of prove itself least of all. A
// request without an answer is sent again with the same Idempotency-Key until its
// outcome is known. The account at the end holds three things against each other:
// what the clients were answered (the journal), what is in the tables (plain SQL),
// and what is on the topics (read record by record). It owes nothing to the
// product's own verify, which is asked too.
//
// The same seed, cells and number of faults make the same schedule of faults, to
// the byte. What the scheduler and the network do in between is not repeated.
package prove

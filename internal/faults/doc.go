// Package faults does to the service's surroundings what production does to
// them: connections that break at the worst moment, servers that refuse, disks
// that are full, clocks that are wrong. It is a library without a test in it:
// prove and tests use it alike.
//
// Every injector says how often it struck. Whoever uses one waits for that
// count: a fault that did not happen proves nothing.
package faults

// Package crash kills the process at named points, so that a test can show what
// a crash there leaves behind. Without Arm, a point does nothing.
package crash

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
)

// The points, each named by what lies on either side of it.
const (
	// A request is read and good, the database has not heard of it.
	APIReceivedNotBegun = "api.received-not-begun"
	// The order and its event are written, nothing is committed yet.
	APIBeforeCommit = "api.before-commit"
	// COMMIT is on its way to the server, nothing has been heard of it.
	APICommitSentNotHeard = "api.commit-sent-not-heard"
	// The order is committed, the client has no answer.
	APICommittedNotAnswered = "api.committed-not-answered"

	// An event is read from the log, the broker has not been given it.
	RelayDecodedNotProduced = "relay.decoded-not-produced"
	// An event is on its way to the broker, which has not acknowledged it.
	RelayProducedNotAcked = "relay.produced-not-acked"
	// The broker has an event, Postgres has not been told.
	RelayAckedNotConfirmed = "relay.acked-not-confirmed"

	// A batch is read from Kafka, the database has not heard of it.
	WorkerPolledNotBegun = "worker.polled-not-begun"
	// A batch's effects are written, nothing is committed yet.
	WorkerBeforeCommit = "worker.before-commit"
	// COMMIT is on its way to the server, nothing has been heard of it.
	WorkerCommitSentNotHeard = "worker.commit-sent-not-heard"
	// A batch's effects are committed, its offsets are not.
	WorkerCommittedNotStored = "worker.committed-not-stored"
	// The group takes partitions away, their last offsets are not committed and
	// the group has not been told that they are free.
	WorkerRevokedNotReleased = "worker.revoked-not-released"
	// The worker ends, its last offsets are not committed and its group not left.
	WorkerEndingNotLeft = "worker.ending-not-left"

	// A batch's balances and offsets are with Kafka, their transaction is open.
	BalancesProducedNotCommitted = "balances.produced-not-committed"
	// The transaction is committed, nothing else has been asked for yet.
	BalancesCommittedNotPolled = "balances.committed-not-polled"

	// An old partition is taken out of its table, and still there by itself.
	JanitorDetachedNotDropped = "janitor.detached-not-dropped"
)

var points = []string{
	APIReceivedNotBegun, APIBeforeCommit, APICommitSentNotHeard, APICommittedNotAnswered,
	RelayDecodedNotProduced, RelayProducedNotAcked, RelayAckedNotConfirmed,
	WorkerPolledNotBegun, WorkerBeforeCommit, WorkerCommitSentNotHeard, WorkerCommittedNotStored,
	WorkerRevokedNotReleased, WorkerEndingNotLeft,
	BalancesProducedNotCommitted, BalancesCommittedNotPolled,
	JanitorDetachedNotDropped,
}

// Points is the name of each point, along the way of an event.
func Points() []string { return slices.Clone(points) }

type target struct {
	name string
	left atomic.Int64
}

var armed atomic.Pointer[target]

// Arm sets the point at which this process dies: "name", or "name:n" for the
// n-th time it is reached. Empty means never. An unknown name is an error, since
// a test that waits for a crash that cannot come proves nothing.
func Arm(value string) error {
	if value == "" {
		armed.Store(nil)
		return nil
	}
	name, count, counted := strings.Cut(value, ":")
	n := 1
	if counted {
		var err error
		if n, err = strconv.Atoi(count); err != nil || n < 1 {
			return fmt.Errorf("crash point %q: %q is not a count from 1", value, count)
		}
	}
	for _, point := range points {
		if point == name {
			t := &target{name: name}
			t.left.Store(int64(n))
			armed.Store(t)
			return nil
		}
	}
	return fmt.Errorf("crash point %q: unknown, want one of %s", value, strings.Join(points, ", "))
}

// Point kills this process with SIGKILL if it is armed for name and this is the
// time: no deferred call runs, nothing is flushed.
func Point(name string) {
	if t := armed.Load(); t != nil && t.name == name && t.left.Add(-1) == 0 {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // until the signal arrives
	}
}

package conformance_test

import (
	"fmt"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/crash"
	"github.com/onceledger/onceledger/internal/relay"
	"github.com/onceledger/onceledger/test/stack"
)

// carrier is a relay under test: processes that carry one world's outbox.
type carrier interface {
	// start starts it, and returns at once.
	start(t *testing.T)
	// waitCarrying waits until it reads what is committed.
	waitCarrying(t *testing.T)
	// stop ends it in order.
	stop(t *testing.T)
	// kill ends it with SIGKILL.
	kill(t *testing.T)
	// signal sends a signal to its process.
	signal(t *testing.T, signal syscall.Signal)
	// dieAt starts it so that it is killed at a point of its way, and says
	// whether it has been. Where a relay has no such points, n is how much of the
	// load it survives.
	dieAt(t *testing.T, point string, l *load)
	// points are what dieAt knows.
	points() []string
}

// worker is wal or poll, as a process of cmd/worker.
type worker struct {
	*stack.Process

	kind relay.Kind
}

// newWorker makes a worker that carries the outbox of a world; it begins when it
// is started. More may be made for one world.
func newWorker(t *testing.T, w *world, kind relay.Kind, name string) *worker {
	t.Helper()
	return &worker{kind: kind, Process: stack.NewProcess(t, name, "worker",
		"WORKER_ROLES=relay", "WORKER_ID="+name, "WORKER_ADDR=127.0.0.1:0",
		"RELAY_DATABASE_URL="+w.database.URL("relay"), "RELAY_SLOT="+w.slot, "KAFKA_BROKERS="+w.bootstrap)}
}

func (r *worker) start(t *testing.T) {
	t.Helper()
	require.NoError(t, r.Start())
}

func (r *worker) waitCarrying(t *testing.T) {
	t.Helper()
	r.waitState(t, relay.StateStreaming)
}

func (r *worker) waitState(t *testing.T, state relay.State) {
	t.Helper()
	require.NoError(t, r.WaitFor("be "+string(state), func() (bool, error) {
		is, err := r.Metric("onceledger_relay_state", fmt.Sprintf(`state=%q`, state))
		return is == 1, err
	}))
}

func (r *worker) stop(t *testing.T) {
	t.Helper()
	require.NoError(t, r.Stop())
}

func (r *worker) kill(t *testing.T) {
	t.Helper()
	require.NoError(t, r.Kill())
}

func (r *worker) signal(t *testing.T, signal syscall.Signal) {
	t.Helper()
	require.NoError(t, r.Signal(signal))
}

func (r *worker) points() []string {
	return []string{
		crash.RelayDecodedNotProduced + ":1", crash.RelayDecodedNotProduced + ":157",
		crash.RelayProducedNotAcked + ":1", crash.RelayProducedNotAcked + ":157",
		crash.RelayAckedNotConfirmed + ":1", crash.RelayAckedNotConfirmed + ":2",
	}
}

func (r *worker) dieAt(t *testing.T, point string, _ *load) {
	t.Helper()
	require.NoError(t, r.Start("ONCELEDGER_CRASH="+point))
	require.NoError(t, r.WaitKilled())
}

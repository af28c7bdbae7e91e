package crash_test

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/prove"
	"github.com/onceledger/onceledger/test/stack"
)

// Goal: wherever a process dies, nothing is lost and nothing happens twice.
// Method: prove, with each crash point that is reached in moments: under load,
// kill -9 there, the first time it is reached and a later one; start the process
// again; account for every request, event and amount. Each kind of evidence that
// the points are to leave has to be there.
func TestEachPoint(t *testing.T) {
	t.Parallel()
	proveEach(t, prove.Options{}, "points", "!at-worker-revoked-not-released") // ten seconds: the dead member's session
}

// Goal and method as in TestEachPoint, with other faults that are over in moments
// and that no other test here has. CI does all of them, with the program itself
// (.ci/run).
func TestFaults(t *testing.T) {
	t.Parallel()
	proveEach(t, prove.Options{},
		"postgres-commit-unheard-*", "postgres-40001", "postgres-max-connections",
		"network-cut-postgres-billing", "network-unheard-acks", "term-billing",
		"topic-reordered", "topic-stale-state", "topic-undecodable", "topic-poisoned-order",
	)
}

// proveEach does each of some faults once, in an order by chance.
func proveEach(t *testing.T, options prove.Options, patterns ...string) {
	t.Helper()
	cells, err := prove.Choose(prove.Cells(), patterns)
	require.NoError(t, err)
	options.Seed, options.Cells, options.Faults = seedOf(), patterns, len(cells)**rounds
	options.Dir, options.Stderr = t.TempDir(), t.Output()
	options.Programs = filepath.Dir(stack.Program(t, "api"))
	options.BrokerCommand = []string{stack.Program(t, "onceledger"), "broker"}
	report, err := prove.Run(t.Context(), options)
	require.NoError(t, err)
	if !report.OK {
		t.Errorf("again with: %s", report.Command)
	}
	require.Empty(t, report.Violations)
	require.Empty(t, report.Unbitten, "these have not been seen, and so nothing is proved")
	require.Empty(t, report.LeftOut)
	require.False(t, report.Partial, report.Why)
	require.True(t, report.OK)
	t.Logf("%d faults, %s; seen: %v", report.Done, report.Took, report.Bites)
}

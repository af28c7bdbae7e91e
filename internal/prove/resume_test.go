package prove

import (
	"io"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestViolationsOutliveTheRun: what was found before a run was broken off is found,
// whatever the rest of it comes to.
func TestViolationsOutliveTheRun(t *testing.T) {
	t.Parallel()

	dir := t.TempDir()
	open := func(resume bool) *run {
		r := &run{
			options: Options{Dir: dir, Seed: 1, Resume: resume, Stderr: io.Discard}, known: newKnown(),
			told: make(map[string]bool), say: func(string, ...any) {},
		}
		require.NoError(t, r.openJournal([]string{"prove-1-a"}))
		return r
	}
	found := Violation{Invariant: "I8", Kind: "fault not undone", Detail: "api did not end in order"}
	first := open(false)
	first.violate(found, 2)
	first.violate(found, 3)
	require.NoError(t, first.journal.close())

	second := open(true)
	require.Len(t, second.violations, 1, "told once")
	require.Equal(t, 2, second.violations[0].Fault)
	second.violate(found, 4)
	require.Len(t, second.violations, 1)
	require.NoError(t, second.journal.close())
	require.FileExists(t, filepath.Join(dir, journalName))
}

// TestGoesOnWhereItWas: a run on services from outside goes on there, and not on an
// empty Postgres of its own, where everything would seem to be lost.
func TestGoesOnWhereItWas(t *testing.T) {
	t.Parallel()

	dir := t.TempDir()
	r := &run{options: Options{Dir: dir, Seed: 1, Kafka: "given", Stderr: io.Discard}, known: newKnown(), say: func(string, ...any) {}}
	require.NoError(t, r.openJournal([]string{"prove-1-a"}))
	require.NoError(t, r.journal.close())

	own := Options{Dir: dir}
	require.ErrorContains(t, own.goOn(), "is on services from outside: say --database and --kafka-brokers again")
	given := Options{Dir: dir, DatabaseURL: "postgres://127.0.0.1/x", KafkaBrokers: "127.0.0.1:9092"}
	require.NoError(t, given.goOn())
}

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	source = "package p\n\nfunc f() int {\n\treturn 1\n}\n"
	header = "Breaks: it\nSeen in: a/b#1\nCaught by: I4 or I10\nCells: one,two\nFaults: 3\nArguments: --relay poll\nSimulation: ./p TestF\n"
	change = "\n--- a/p/f.go\n+++ b/p/f.go\n@@ -1,5 +1,5 @@\n package p\n \n func f() int {\n-\treturn 1\n+\treturn 2\n }\n"
)

// inRepository makes a repository of one package, and a twin of it.
func inRepository(t *testing.T, code, patch string) (settings, string) {
	t.Helper()
	s := settings{root: t.TempDir(), scratch: t.TempDir(), seed: 1}
	path := filepath.Join(s.root, "it.patch")
	for name, text := range map[string]string{"go.mod": "module example.test/m\n\ngo 1.26\n", "p/f.go": code, "it.patch": patch} {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(s.root, name)), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(s.root, name), []byte(text), 0o644))
	}
	return s, path
}

func TestTwin(t *testing.T) {
	t.Parallel()

	t.Run("IsReadWithItsHeader", func(t *testing.T) {
		t.Parallel()

		_, path := inRepository(t, source, header+change)
		got, err := readTwin(path)
		require.NoError(t, err)
		require.Equal(t, twin{
			Name: "it", Breaks: "it", SeenIn: "a/b#1", CaughtBy: []string{"I4", "I10"}, Cells: []string{"one", "two"}, Faults: 3,
			Arguments: []string{"--relay", "poll"}, Simulation: "./p TestF", patch: path, files: []string{"p/f.go"},
		}, got)
		require.Equal(t, []string{"./p"}, got.packages())
	})

	t.Run("IsRefusedWithoutWhatItHasToSay", func(t *testing.T) {
		t.Parallel()

		for _, missing := range []string{"Breaks: it\n", "Seen in: a/b#1\n", "Caught by: I4 or I10\n", "Cells: one,two\n"} {
			_, path := inRepository(t, source, strings.Replace(header, missing, "", 1)+change)
			_, err := readTwin(path)
			require.ErrorContains(t, err, "its header must say", missing)
		}
		for _, wrong := range []string{"Caught by: I11\n", "Caught by: V\n", "Colour: red\n", "Faults: many\n"} {
			_, path := inRepository(t, source, header+wrong+change)
			_, err := readTwin(path)
			require.Error(t, err, wrong)
		}
	})

	t.Run("ReplacesTheFileAndLeavesItAlone", func(t *testing.T) {
		t.Parallel()

		s, path := inRepository(t, source, header+change)
		read, err := readTwin(path)
		require.NoError(t, err)
		overlay, err := s.overlay(t.Context(), read)
		require.NoError(t, err)
		changed, err := os.ReadFile(filepath.Join(s.scratch, "it", "source", "p", "f.go"))
		require.NoError(t, err)
		require.Equal(t, strings.Replace(source, "1", "2", 1), string(changed))
		original, err := os.ReadFile(filepath.Join(s.root, "p", "f.go"))
		require.NoError(t, err)
		require.Equal(t, source, string(original))
		require.NoError(t, s.compile(t.Context(), overlay, read.packages()))
	})

	t.Run("IsAnErrorWhereThePatchDoesNotApply", func(t *testing.T) {
		t.Parallel()

		s, path := inRepository(t, strings.Replace(source, "1", "3", 1), header+change)
		read, err := readTwin(path)
		require.NoError(t, err)
		_, err = s.overlay(t.Context(), read)
		require.ErrorContains(t, err, "does not apply any more")
	})

	t.Run("IsAnErrorWhereItDoesNotCompile", func(t *testing.T) {
		t.Parallel()

		s, path := inRepository(t, source, header+strings.Replace(change, "+\treturn 2", "+\treturn two", 1))
		read, err := readTwin(path)
		require.NoError(t, err)
		overlay, err := s.overlay(t.Context(), read)
		require.NoError(t, err)
		require.ErrorContains(t, s.compile(t.Context(), overlay, read.packages()), "undefined: two")
		_, _, err = s.simulation(t.Context(), overlay, "./p TestF")
		require.ErrorContains(t, err, "neither passed nor failed")
	})
}

// TestReport: a fault that could not be done is no catch.
func TestReport(t *testing.T) {
	t.Parallel()

	r := report{Faults: 5, Violations: []violation{
		{Invariant: "I8", Kind: "fault not undone", Fault: 1},
		{Invariant: "I4", Kind: "wrong lines", Detail: "of an entry", Fault: 3},
	}}
	by, first, after := r.caught([]string{"I8"})
	require.Equal(t, []string{"I4"}, by)
	require.Empty(t, first)
	require.Equal(t, 5, after)
	by, first, after = r.caught([]string{"I8", "I4"})
	require.Equal(t, []string{"I4"}, by)
	require.Equal(t, "wrong lines: of an entry", first)
	require.Equal(t, 3, after)
}

// TestPatches reads all that are there, so that a header that is wrong shows in
// any run of the tests.
func TestPatches(t *testing.T) {
	t.Parallel()

	twins, err := readTwins(".", nil)
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(twins), 22)
	_, err = readTwins(".", []string{"no-such-twin"})
	require.ErrorContains(t, err, "no-such-twin")
}

package main

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/verify"
)

// What verify ends with is what scripts go by. The environment is the process's,
// so these do not run in parallel.
func TestVerifyCommand(t *testing.T) {
	run := func(t *testing.T, args ...string) (stdout, stderr string, err error) {
		t.Helper()
		var out, errOut bytes.Buffer
		cmd := newVerifyCommand()
		cmd.SilenceErrors, cmd.SilenceUsage = true, true
		cmd.SetArgs(args)
		cmd.SetOut(&out)
		cmd.SetErr(&errOut)
		err = cmd.ExecuteContext(t.Context())
		return out.String(), errOut.String(), err
	}
	database := pgtest.New(t)

	t.Run("EndsWith0WhenTheBooksAreRight", func(t *testing.T) {
		t.Setenv("DATABASE_URL", database.URL("verify"))
		stdout, stderr, err := run(t)
		require.NoError(t, err)
		require.Contains(t, stdout, "There are no orders yet")
		require.Empty(t, stderr)
	})

	t.Run("EndsWith1WhenTheyAreNot", func(t *testing.T) {
		t.Setenv("DATABASE_URL", database.URL("verify"))
		_, err := database.Pool(t, "").Exec(t.Context(), `
			WITH tenant AS (INSERT INTO tenants (id, name) VALUES (uuidv7(), 'a') RETURNING id)
			INSERT INTO document_numbers (tenant_id, kind, year, last_number) SELECT id, 'invoice', 2026, 1 FROM tenant`)
		require.NoError(t, err)

		stdout, _, err := run(t, "--json")
		require.ErrorIs(t, err, exitBooksWrong)
		require.Equal(t, 1, exitCode(err))
		var report verify.Report
		require.NoError(t, json.Unmarshal([]byte(stdout), &report))
		require.EqualValues(t, 1, report.Violations[verify.NumberGap])
		require.Len(t, report.Findings, 1)
	})

	t.Run("EndsWith2WhenItCannotTell", func(t *testing.T) {
		t.Setenv("DATABASE_URL", "")
		t.Setenv("ONCELEDGER_HOME", t.TempDir())
		for _, args := range [][]string{nil, {"--wait", "long"}, {"everything"}} {
			stdout, stderr, err := run(t, args...)
			require.Equal(t, 2, exitCode(err), args)
			require.Contains(t, stderr, "could not be checked")
			require.Empty(t, stdout)
			if args != nil {
				require.Contains(t, stderr, "the command is wrong")
				require.Contains(t, stderr, "--help")
			}
		}

		t.Setenv("DATABASE_URL", database.URL("verify")+"&dbname=no_such_database")
		_, stderr, err := run(t)
		require.Equal(t, 2, exitCode(err))
		require.Contains(t, stderr, "no_such_database")
	})
}

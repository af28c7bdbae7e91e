package main

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/walreport"
)

// The environment is the process's, so these do not run in parallel.
func TestWALReportCommand(t *testing.T) {
	run := func(t *testing.T, args ...string) (string, error) {
		t.Helper()
		var out bytes.Buffer
		cmd := newWALReportCommand()
		cmd.SilenceErrors, cmd.SilenceUsage = true, true
		cmd.SetArgs(args)
		cmd.SetOut(&out)
		err := cmd.ExecuteContext(t.Context())
		return out.String(), err
	}
	database := pgtest.New(t)

	t.Run("PrintsATableOrJSON", func(t *testing.T) {
		t.Setenv("DATABASE_URL", database.URL(""))
		text, err := run(t, "--orders", "2")
		require.NoError(t, err)
		require.Contains(t, text, "2 orders of one line")
		text, err = run(t, "--orders", "2", "--json")
		require.NoError(t, err)
		var report walreport.Report
		require.NoError(t, json.Unmarshal([]byte(text), &report))
		require.Equal(t, 2, report.Orders)
		require.Positive(t, report.OutboxShare)
	})

	t.Run("SaysWhatItNeeds", func(t *testing.T) {
		t.Setenv("DATABASE_URL", database.URL("verify"))
		_, err := run(t)
		require.ErrorContains(t, err, "no superuser")
		t.Setenv("DATABASE_URL", "")
		t.Setenv("ONCELEDGER_HOME", t.TempDir())
		_, err = run(t)
		require.ErrorContains(t, err, "DATABASE_URL is not set")
	})
}

package walreport_test

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/walreport"
)

// TestRun measures a few orders on a server of its own and holds the sums against
// the log itself, which a second connection reads with another query.
func TestRun(t *testing.T) {
	t.Parallel()

	server := pgtest.Server(t)
	admin, err := pgx.Connect(t.Context(), server.AdminURL("postgres"))
	require.NoError(t, err)
	defer admin.Close(t.Context())
	for _, statement := range []string{
		"ALTER SYSTEM SET autovacuum = off", "SELECT pg_reload_conf()", "CREATE EXTENSION pg_walinspect",
	} {
		_, err = admin.Exec(t.Context(), statement)
		require.NoError(t, err)
	}
	const orders = 50
	report, err := walreport.Run(t.Context(), walreport.Config{URL: server.AdminURL("postgres"), Orders: orders, Batch: 20})
	require.NoError(t, err)

	var all walreport.Side
	byName := make(map[string]walreport.Table)
	for _, table := range report.Tables {
		byName[table.Name] = table
		all.Records += table.API.Records + table.Worker.Records
		all.Images += table.API.Images + table.Worker.Images
	}
	require.Equal(t, report.API.Records+report.Worker.Records, all.Records, "the tables come to the sides")
	require.Equal(t, report.API.Images+report.Worker.Images, all.Images)
	for name, side := range map[string]walreport.Side{"api": report.API, "worker": report.Worker} {
		// Everything but the server's own housekeeping is ours here: nobody else writes.
		logged := pgtest.Column[int64](t, admin, `
			SELECT sum(record_length)::bigint FROM pg_get_wal_records_info($1::text::pg_lsn, $2::text::pg_lsn)
			WHERE resource_manager NOT IN ('Standby') AND NOT (resource_manager = 'XLOG' AND record_type LIKE 'CHECKPOINT%')`,
			side.From.String(), side.To.String())[0]
		require.Equal(t, logged, side.Records+side.Images, "%s: each byte of the log once", name)
		require.LessOrEqual(t, logged, int64(side.To-side.From), name)
		require.Greater(t, logged, int64(side.To-side.From)*8/10, "%s: the rest is alignment and page headers", name)
	}
	require.EqualValues(t, 2*orders, report.API.Transactions, "one to place, one to pay")
	require.EqualValues(t, 2*orders/20, report.Worker.Transactions, "one for each batch")

	for _, name := range []string{"orders", "order_lines", "payments", "idempotency_keys"} {
		require.Positive(t, byName[name].API.Records, name)
		require.Zero(t, byName[name].Worker.Records, name)
	}
	for _, name := range []string{"invoices", "ledger_entries", "ledger_lines", "processed_events", "order_billing"} {
		require.Positive(t, byName[name].Worker.Records, name)
		require.Zero(t, byName[name].API.Records, name)
	}
	outbox := byName["outbox_events"]
	require.Positive(t, outbox.API.Records)
	require.Positive(t, outbox.Worker.Records, "billing's own events")
	require.Equal(t, outbox.API.Records+outbox.Worker.Records, report.OutboxBytes)
	require.InDelta(t, float64(report.OutboxBytes)/float64(all.Records), report.OutboxShare, 1e-9)
	require.Contains(t, byName, "(transaction commit)")
	require.NotContains(t, byName, "(other)", "a relation without a name")
	for name := range byName {
		require.NotContains(t, name, "_20", "a partition counts as its table")
		require.NotContains(t, name, "toast")
	}
	require.Equal(t, "logical", report.Settings["wal_level"])
	require.Empty(t, pgtest.Column[string](t, admin, "SELECT datname::text FROM pg_database WHERE datname LIKE 'onceledger_wal_report%'"), "it cleans up")

	var text bytes.Buffer
	require.NoError(t, report.WriteText(&text))
	for _, words := range []string{"50 orders", "outbox_events", "page images", "The outbox adds", "wal_level=logical", "100.0%"} {
		require.Contains(t, text.String(), words)
	}
	encoded, err := json.Marshal(report)
	require.NoError(t, err)
	require.Contains(t, string(encoded), `"outbox_share":`)
	t.Logf("\n%s", text.String())
}

func TestRunRefuses(t *testing.T) {
	t.Parallel()

	database := pgtest.New(t)
	_, err := walreport.Run(t.Context(), walreport.Config{URL: database.URL("verify"), Orders: 1, Batch: 1})
	require.ErrorContains(t, err, "no superuser")
	_, err = walreport.Run(t.Context(), walreport.Config{URL: database.URL(""), Orders: 0, Batch: 1})
	require.ErrorContains(t, err, "1 at least")
	_, err = walreport.Run(t.Context(), walreport.Config{URL: strings.Replace(database.URL(""), database.Name, "nowhere", 1), Orders: 1, Batch: 1})
	require.ErrorContains(t, err, "reach database")
}

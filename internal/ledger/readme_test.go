package ledger_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/pgtest"
)

// TestReadme checks that README.md names each thing in the database that holds
// an invariant of the ledger, and nothing that is not there.
func TestReadme(t *testing.T) {
	t.Parallel()

	text, err := os.ReadFile("README.md")
	require.NoError(t, err)
	holders := regexp.MustCompile("`([a-z_]+)`")
	var named, granted []string
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(line, "|")
		switch {
		case len(cells) != 4:
		case strings.HasPrefix(cells[1], " `onceledger_"):
			granted = append(granted, strings.Trim(cells[1], " `")+": "+strings.TrimSpace(cells[2]))
		default:
			for _, match := range holders.FindAllStringSubmatch(cells[2], -1) {
				named = append(named, match[1])
			}
		}
	}

	tx := pgtest.Tx(t)
	const tables = "('ledger_accounts'::regclass, 'ledger_entries'::regclass, 'ledger_lines'::regclass)"
	require.ElementsMatch(t, pgtest.Column[string](t, tx, `
		SELECT conname FROM pg_constraint WHERE conrelid IN `+tables+` AND contype NOT IN ('n', 't')
		UNION ALL
		SELECT tgname FROM pg_trigger WHERE tgrelid IN `+tables+` AND NOT tgisinternal AND tgenabled = 'O'
		UNION ALL
		SELECT polname FROM pg_policy WHERE polrelid IN `+tables+` AND polname NOT LIKE '%_services'`), named)
	require.ElementsMatch(t, pgtest.Column[string](t, tx, `
		SELECT DISTINCT grantee || ': ' || privileges FROM (
			SELECT grantee, table_name, string_agg(privilege_type, ', ' ORDER BY privilege_type) AS privileges
			FROM information_schema.role_table_grants
			WHERE table_name LIKE 'ledger_%' AND grantee LIKE 'onceledger_%'
			GROUP BY grantee, table_name) AS granted`), granted, "the same on each of the tables")
}

package migrate_test

import (
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	gomigrate "github.com/golang-migrate/migrate/v4"
	"github.com/golang-migrate/migrate/v4/source/iofs"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/db/migrations"
	"github.com/onceledger/onceledger/internal/pgtest"
)

var update = flag.Bool("update", false, "write the golden files anew")

// requireGolden compares lines with a file in testdata.
func requireGolden(t *testing.T, name string, lines []string) {
	t.Helper()
	path, got := filepath.Join("testdata", name), strings.Join(lines, "\n")+"\n"
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(got), 0o600))
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), got, "if it is meant: go test ./internal/migrate -update")
}

// count is how many migrations there are.
func count(t *testing.T) int {
	t.Helper()
	ups, err := filepath.Glob("../../db/migrations/*.up.sql")
	require.NoError(t, err)
	require.NotEmpty(t, ups)
	return len(ups)
}

// step applies n migrations, or takes -n back.
func step(t *testing.T, database *pgtest.Database, n int) {
	t.Helper()
	source, err := iofs.New(migrations.FS, ".")
	require.NoError(t, err)
	m, err := gomigrate.NewWithSourceInstance("iofs", source, strings.Replace(database.URL(""), "postgres://", "pgx5://", 1))
	require.NoError(t, err)
	require.NoError(t, m.Steps(n))
	require.NoError(t, errors.Join(m.Close()))
}

// schema describes everything that the migrations make in a database, a line
// for each thing. Partitions are the janitor's and left out.
func schema(t *testing.T, database *pgtest.Database) []string {
	t.Helper()
	return pgtest.Column[string](t, database.Pool(t, ""), `
		WITH relation AS (
			SELECT oid, relname AS name, relkind AS kind, relowner AS owner, relrowsecurity AS secured, relforcerowsecurity AS forced,
				relacl AS acl, pg_get_partkeydef(oid) AS partitioned
			FROM pg_class
			WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'S', 'v', 'm')
				AND NOT relispartition AND relname <> 'schema_migrations'
		)
		SELECT format('relation %s: kind %s, owner %s, row security %s/%s, partitioned by %s, %s',
			name, kind, owner::regrole, secured, forced, partitioned, acl) FROM relation
		UNION ALL
		SELECT format('column %s.%s: %s %s default %s, %s', name, attname, format_type(atttypid, atttypmod),
			CASE WHEN attnotnull THEN 'not null' END, pg_get_expr(adbin, adrelid), attacl)
		FROM relation
		JOIN pg_attribute ON attrelid = relation.oid AND attnum > 0 AND NOT attisdropped
		LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
		UNION ALL
		SELECT format('constraint %s.%s: %s', name, conname, pg_get_constraintdef(pg_constraint.oid))
		FROM relation JOIN pg_constraint ON conrelid = relation.oid
		UNION ALL
		SELECT format('index %s', pg_get_indexdef(indexrelid)) FROM relation JOIN pg_index ON indrelid = relation.oid
		UNION ALL
		SELECT format('trigger %s, %s', pg_get_triggerdef(pg_trigger.oid), tgenabled)
		FROM relation JOIN pg_trigger ON tgrelid = relation.oid AND NOT tgisinternal
		UNION ALL
		SELECT format('policy %s.%s: %s to %s using %s check %s', tablename, policyname, cmd, roles, qual, with_check) FROM pg_policies
		UNION ALL
		SELECT format('function %s, owner %s, %s', pg_get_functiondef(oid), proowner::regrole, proacl)
		FROM pg_proc WHERE pronamespace = 'public'::regnamespace
		UNION ALL
		SELECT format('type %s', typname) FROM pg_type
		WHERE typnamespace = 'public'::regnamespace AND typtype IN ('e', 'd', 'r')
		UNION ALL
		SELECT format('publication %s: insert %s, update %s, delete %s, truncate %s, via root %s, %s',
			pubname, pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot,
			(SELECT string_agg(tablename, ', ') FROM pg_publication_tables AS published WHERE published.pubname = pg_publication.pubname))
		FROM pg_publication
		UNION ALL
		SELECT format('schema %s: %s', nspname, (SELECT string_agg(item::text, ', ' ORDER BY item::text) FROM unnest(nspacl) AS item))
		FROM pg_namespace WHERE nspname = 'public'
		ORDER BY 1`)
}

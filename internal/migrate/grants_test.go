package migrate_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
)

// TestGrants holds what each role may do against testdata/grants.golden, so that
// a wider grant is seen in review. It is everything: attributes, memberships,
// tables, single columns, functions, the schema, and row security.
func TestGrants(t *testing.T) {
	t.Parallel()

	requireGolden(t, "grants.golden", pgtest.Column[string](t, pgtest.Tx(t), `
		WITH relation AS (
			SELECT oid, relname AS name, relowner AS owner, coalesce(relacl, acldefault('r', relowner)) AS acl FROM pg_class
			WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'v', 'm', 'S')
				AND NOT relispartition AND relname <> 'schema_migrations'
		), granted AS (
			SELECT 1 AS part, grantee, 'table ' || name AS what, privilege_type AS privilege
			FROM relation, aclexplode(acl) WHERE grantee <> owner
			UNION ALL
			SELECT 2, grantee, 'columns of ' || name || ' (' || string_agg(attname, ', ' ORDER BY attnum) || ')', privilege_type
			FROM relation JOIN pg_attribute ON attrelid = relation.oid, aclexplode(attacl)
			GROUP BY grantee, name, privilege_type
			UNION ALL
			SELECT 3, grantee, 'function ' || proname, privilege_type
			FROM pg_proc, aclexplode(coalesce(proacl, acldefault('f', proowner)))
			WHERE pronamespace = 'public'::regnamespace AND grantee <> proowner
			UNION ALL
			SELECT 4, grantee, 'schema ' || nspname, privilege_type
			FROM pg_namespace, aclexplode(nspacl) WHERE nspname = 'public' AND grantee <> nspowner
			UNION ALL
			SELECT 5, owner, 'table ' || name, 'owner' FROM relation WHERE owner::regrole::text LIKE 'onceledger_%'
		)
		SELECT line FROM (
			SELECT 0 AS part, rolname::text AS role, rolname || ' is' || CASE WHEN rolcanlogin THEN ' a login' END
				|| CASE WHEN rolsuper THEN ', superuser' ELSE '' END
				|| CASE WHEN rolcreaterole THEN ', maker of roles' ELSE '' END
				|| CASE WHEN rolcreatedb THEN ', maker of databases' ELSE '' END
				|| CASE WHEN rolreplication THEN ', replication' ELSE '' END
				|| CASE WHEN rolbypassrls THEN ', above row security' ELSE '' END
				|| coalesce((SELECT ', member of ' || string_agg(roleid::regrole::text, ', ') FROM pg_auth_members WHERE member = pg_roles.oid), '') AS line
			FROM pg_roles WHERE rolname LIKE 'onceledger_%'
			UNION ALL
			SELECT part, CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END,
				CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END || ': ' || what || ': ' || string_agg(privilege, ', ' ORDER BY privilege)
			FROM granted WHERE grantee = 0 OR grantee::regrole::text LIKE 'onceledger_%'
			GROUP BY part, grantee, what
			UNION ALL
			SELECT 6, role::text, role || ': rows of ' || tablename || ' for ' || cmd || ': ' || coalesce(qual, '') || coalesce(', check ' || with_check, '')
			FROM pg_policies, unnest(roles) AS role
		) AS lines ORDER BY role, part, line`))

	t.Run("NoRoleCanPutAnObjectBeforeAnother", func(t *testing.T) {
		t.Parallel()

		tx := pgtest.Tx(t)
		require.Empty(t, pgtest.Column[string](t, tx, `
			SELECT rolname || ' in ' || nspname FROM pg_roles, pg_namespace
			WHERE rolname LIKE 'onceledger_%' AND has_schema_privilege(pg_roles.oid, pg_namespace.oid, 'CREATE')`))
		require.Empty(t, pgtest.Column[string](t, tx, `
			SELECT rolname::text FROM pg_roles
			WHERE rolname LIKE 'onceledger_%' AND has_database_privilege(oid, current_database(), 'TEMPORARY, CREATE')`))
		require.Empty(t, pgtest.Column[string](t, tx, `
			SELECT proname::text FROM pg_proc
			WHERE pronamespace = 'public'::regnamespace AND prosqlbody IS NULL
			  AND NOT coalesce(proconfig::text LIKE '%search_path=pg_catalog%', false)`), "functions that look wherever their caller looks")
	})

	t.Run("RowSecurityIsOnWhereThereIsATenant", func(t *testing.T) {
		t.Parallel()

		require.Empty(t, pgtest.Column[string](t, pgtest.Tx(t), `
			SELECT relname FROM pg_class
			JOIN pg_attribute ON attrelid = pg_class.oid AND attname = 'tenant_id'
			WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition AND NOT relrowsecurity`))
	})
}

// TestPartitionsAreNoWayIn checks that what is refused on a partitioned table is
// refused on its partitions, where grants and row security are those of the leaf.
func TestPartitionsAreNoWayIn(t *testing.T) {
	t.Parallel()

	database := pgtest.New(t)
	leaves := pgtest.Column[string](t, database.Pool(t, ""), `
		SELECT relname FROM pg_class WHERE relispartition AND relkind = 'r' AND relnamespace = 'public'::regnamespace`)
	require.NotEmpty(t, leaves)
	for _, role := range []string{"api", "relay", "worker", "verify"} {
		pool := database.Pool(t, role)
		for _, leaf := range leaves {
			for _, statement := range []string{"SELECT FROM ", "DELETE FROM ", "TRUNCATE ", "DROP TABLE "} {
				_, err := pool.Exec(t.Context(), statement+leaf)
				require.Equal(t, "42501", postgres.Code(err), "%s: %s%s: %v", role, statement, leaf, err)
			}
		}
	}
}

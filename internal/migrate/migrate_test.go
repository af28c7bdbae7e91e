package migrate_test

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/janitor"
	"github.com/onceledger/onceledger/internal/migrate"
	"github.com/onceledger/onceledger/internal/pgtest"
)

func TestMigrations(t *testing.T) {
	t.Parallel()

	// Down from the newest to nothing, up and down again: at each version the
	// schema is what it was there before.
	t.Run("TakeBackExactlyWhatTheyMake", func(t *testing.T) {
		t.Parallel()

		database := pgtest.New(t)
		newest := count(t)
		at := make([][]string, newest+1)
		at[newest] = schema(t, database)
		for version := newest - 1; version >= 0; version-- {
			step(t, database, -1)
			at[version] = schema(t, database)
			require.NotEqual(t, at[version+1], at[version], "migration %d makes nothing", version+1)
		}
		require.Len(t, at[0], 1, "the schema public and nothing in it: %s", at[0])

		for version := 1; version <= newest; version++ {
			step(t, database, 1)
			require.Equal(t, at[version], schema(t, database), "after migration %d up", version)
		}
		for version := newest - 1; version >= 0; version-- {
			step(t, database, -1)
			require.Equal(t, at[version], schema(t, database), "after migration %d down", version+1)
		}
	})

	t.Run("NameEveryConstraintByThemselves", func(t *testing.T) {
		t.Parallel()

		// A name that Postgres chose ends in _check, _fkey1 or a number; errors show names.
		for _, name := range pgtest.Column[string](t, pgtest.Tx(t), `
			SELECT conname FROM pg_constraint JOIN pg_class ON pg_class.oid = conrelid
			WHERE connamespace = 'public'::regnamespace AND contype IN ('c', 'x', 'u', 'f')
				AND NOT relispartition AND conparentid = 0`) {
			require.NotRegexp(t, `(_check|\d)$`, name)
		}
	})
}

func TestUp(t *testing.T) {
	t.Parallel()

	t.Run("MakesSchemaAndPartitionsFromNothing", func(t *testing.T) {
		t.Parallel()

		database := pgtest.New(t)
		want := schema(t, database)
		require.NoError(t, migrate.Down(database.URL(""), count(t)))
		status, err := migrate.ReadStatus(database.URL(""))
		require.NoError(t, err)
		require.Equal(t, migrate.Status{Version: 0, Newest: uint(count(t))}, status)

		require.NoError(t, migrate.Up(t.Context(), database.URL("")))
		require.Equal(t, want, schema(t, database))
		require.NoError(t, janitor.CheckPartitions(t.Context(), database.Pool(t, "api"), time.Now()))
		status, err = migrate.ReadStatus(database.URL(""))
		require.NoError(t, err)
		require.Equal(t, migrate.Status{Version: uint(count(t)), Newest: uint(count(t))}, status)
	})

	t.Run("ChangesNothingTheSecondTime", func(t *testing.T) {
		t.Parallel()

		database := pgtest.New(t)
		want := schema(t, database)
		require.NoError(t, migrate.Up(t.Context(), database.URL("")))
		require.Equal(t, want, schema(t, database))
	})

	t.Run("RunsTwiceAtOnce", func(t *testing.T) {
		t.Parallel()

		database := pgtest.New(t)
		want := schema(t, database)
		require.NoError(t, migrate.Down(database.URL(""), count(t)))

		var both sync.WaitGroup
		errs := make([]error, 2)
		for i := range errs {
			both.Go(func() { errs[i] = migrate.Up(t.Context(), database.URL("")) })
		}
		both.Wait()
		require.NoError(t, errs[0])
		require.NoError(t, errs[1])
		require.Equal(t, want, schema(t, database))
	})

	t.Run("GoesOnFromWhereAnEarlierBuildStopped", func(t *testing.T) {
		t.Parallel()

		database := pgtest.New(t)
		want := schema(t, database)
		require.NoError(t, migrate.Down(database.URL(""), 2))
		status, err := migrate.ReadStatus(database.URL(""))
		require.NoError(t, err)
		require.Equal(t, uint(count(t)-2), status.Version)
		require.NoError(t, migrate.Up(t.Context(), database.URL("")))
		require.Equal(t, want, schema(t, database))
	})

	t.Run("SaysWhatToDoAfterAMigrationFailedHalfWay", func(t *testing.T) {
		t.Parallel()

		database := pgtest.New(t)
		_, err := database.Pool(t, "").Exec(t.Context(), "UPDATE schema_migrations SET dirty = true")
		require.NoError(t, err)
		err = migrate.Up(t.Context(), database.URL(""))
		require.ErrorContains(t, err, "schema_migrations.dirty")
		status, err := migrate.ReadStatus(database.URL(""))
		require.NoError(t, err)
		require.True(t, status.Dirty)
	})

	t.Run("IsRefusedToTheServicesRoles", func(t *testing.T) {
		t.Parallel()

		database := pgtest.New(t)
		before := schema(t, database)
		for _, role := range []string{"api", "relay", "worker", "janitor", "verify"} {
			require.Error(t, migrate.Down(database.URL(role), 1), role)
		}
		require.Equal(t, before, schema(t, database))
	})

	t.Run("NeverShowsThePassword", func(t *testing.T) {
		t.Parallel()

		database := pgtest.New(t)
		for _, address := range []string{
			strings.Replace(database.URL("api"), database.Name, "nowhere", 1),
			strings.Replace(database.URL("api"), "127.0.0.1", "127.0.0.1:secret", 1),
			strings.TrimPrefix(database.URL("api"), "postgres://"),
		} {
			err := migrate.Up(t.Context(), address)
			require.Error(t, err)
			require.NotContains(t, err.Error(), "onceledger-test")
		}
	})
}

// TestOrdinaryOwner migrates as what a hosted Postgres gives: no superuser, but
// an owner of the database that may make roles.
func TestOrdinaryOwner(t *testing.T) {
	t.Parallel()

	server := pgtest.Server(t)
	admin, err := pgx.Connect(t.Context(), server.AdminURL("postgres"))
	require.NoError(t, err)
	defer admin.Close(t.Context())
	const password = "of-the-test"
	for _, statement := range []string{
		"DROP DATABASE onceledger_template",
		"DROP ROLE onceledger_api, onceledger_relay, onceledger_worker, onceledger_janitor, onceledger_verify",
		"CREATE ROLE app_owner LOGIN CREATEROLE REPLICATION PASSWORD '" + password + "'",
		"CREATE DATABASE app OWNER app_owner",
	} {
		_, err := admin.Exec(t.Context(), statement)
		require.NoError(t, err, statement)
	}

	owner := server.URL("app", "app_owner", password)
	require.NoError(t, migrate.Up(t.Context(), owner))
	require.NoError(t, migrate.Up(t.Context(), owner), "a second time, the roles being there")

	conn, err := pgx.Connect(t.Context(), owner)
	require.NoError(t, err)
	defer conn.Close(t.Context())
	_, err = conn.Exec(t.Context(), "ALTER ROLE onceledger_janitor PASSWORD '"+password+"'")
	require.NoError(t, err)
	janitors, err := pgx.Connect(t.Context(), server.URL("app", "onceledger_janitor", password))
	require.NoError(t, err)
	defer janitors.Close(t.Context())
	made, err := janitor.MakePartitions(t.Context(), janitors, time.Now().AddDate(0, 0, 7))
	require.NoError(t, err, "the janitor goes on with what the owner began")
	require.NotEmpty(t, made)

	require.NoError(t, migrate.Down(owner, count(t)))
	require.NoError(t, migrate.Up(t.Context(), owner))
}

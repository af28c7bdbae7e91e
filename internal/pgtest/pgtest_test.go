package pgtest_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/pgtest"
)

func TestNew(t *testing.T) {
	t.Parallel()

	t.Run("GivesEachTestAnEmptyMigratedDatabase", func(t *testing.T) {
		t.Parallel()

		first, second := pgtest.New(t), pgtest.New(t)
		require.NotEqual(t, first.Name, second.Name)

		_, err := first.Pool(t, "").Exec(t.Context(), "INSERT INTO tenants (id, name) VALUES (uuidv7(), 'a')")
		require.NoError(t, err)
		var tenants int
		require.NoError(t, second.Pool(t, "").QueryRow(t.Context(), "SELECT count(*) FROM tenants").Scan(&tenants))
		require.Zero(t, tenants)
	})

	t.Run("LogsInAsEachRole", func(t *testing.T) {
		t.Parallel()

		database := pgtest.New(t)
		for _, role := range []string{"api", "relay", "worker", "janitor", "verify"} {
			var user string
			require.NoError(t, database.Pool(t, role).QueryRow(t.Context(), "SELECT current_user").Scan(&user))
			require.Equal(t, "onceledger_"+role, user)
		}
	})

	t.Run("HasPartitionsForToday", func(t *testing.T) {
		t.Parallel()

		var covered bool
		err := pgtest.New(t).Pool(t, "").QueryRow(t.Context(), `
			SELECT count(*) >= 2 FROM pg_inherits
			WHERE inhparent = 'outbox_events'::regclass`).Scan(&covered)
		require.NoError(t, err)
		require.True(t, covered)
	})

	t.Run("DropsTheDatabaseWithAnActiveSlotAndAnOpenSession", func(t *testing.T) {
		t.Parallel()

		admin := pgtest.New(t).Pool(t, "")
		var name string
		t.Run("Inner", func(t *testing.T) {
			database := pgtest.New(t)
			name = database.Name

			// Sessions that the test forgets to close.
			_, err := pgx.Connect(t.Context(), database.URL("api"))
			require.NoError(t, err)
			relay, err := pgconn.Connect(t.Context(), database.URL("relay")+"&replication=database")
			require.NoError(t, err)
			_, err = pglogrepl.CreateReplicationSlot(t.Context(), relay, name, "pgoutput", pglogrepl.CreateReplicationSlotOptions{})
			require.NoError(t, err)
			err = pglogrepl.StartReplication(t.Context(), relay, name, 0, pglogrepl.StartReplicationOptions{
				PluginArgs: []string{"proto_version '1'", "publication_names 'onceledger_outbox'"},
			})
			require.NoError(t, err)
		})

		var left int
		require.NoError(t, admin.QueryRow(t.Context(), `
			SELECT (SELECT count(*) FROM pg_replication_slots WHERE database = $1)
			     + (SELECT count(*) FROM pg_database WHERE datname = $1)`, name).Scan(&left))
		require.Zero(t, left)
	})
}

func TestTx(t *testing.T) {
	t.Parallel()

	for _, name := range []string{"First", "Second"} {
		t.Run(name+"SeesNothingOfTheOther", func(t *testing.T) {
			tx := pgtest.Tx(t)
			var tenants int
			require.NoError(t, tx.QueryRow(t.Context(), `
				WITH added AS (INSERT INTO tenants (id, name) VALUES (uuidv7(), 'same name') RETURNING id)
				SELECT (SELECT count(*) FROM tenants) FROM added`).Scan(&tenants))
			require.Zero(t, tenants)
		})
	}
}

func TestServer(t *testing.T) {
	t.Parallel()

	server := pgtest.Server(t)
	database := server.New(t)
	pool := database.Pool(t, "")
	_, err := pool.Exec(t.Context(), "INSERT INTO tenants (id, name) VALUES (uuidv7(), 'kept')")
	require.NoError(t, err)

	server.Kill()
	for err == nil { // a session outlives the server by the moment in which it notices
		_, err = pool.Exec(t.Context(), "SELECT 1")
	}

	require.NoError(t, server.Restart(t.Context()))
	var name string
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT name FROM tenants").Scan(&name))
	require.Equal(t, "kept", name)
}

// TestFolderIsRemoved runs a test program that is killed with its server
// running, and waits until neither is left.
func TestFolderIsRemoved(t *testing.T) {
	t.Parallel()

	const inner = "PGTEST_INNER"
	if os.Getenv(inner) != "" {
		pgtest.New(t)
		_, _ = os.Stdout.WriteString("up\n")
		select {}
	}

	temp := t.TempDir()
	cmd := exec.Command(os.Args[0], "-test.run=^TestFolderIsRemoved$")
	cmd.Env = append(os.Environ(), inner+"=1", "TMPDIR="+temp)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line := make([]byte, 64)
	n, err := stdout.Read(line)
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(string(line[:n]), "up"))
	require.Len(t, folders(t, temp), 1)

	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	require.Eventually(t, func() bool { return len(folders(t, temp)) == 0 }, 30*time.Second, 20*time.Millisecond)
}

func folders(t *testing.T, temp string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(temp, "onceledger-pgtest-*"))
	require.NoError(t, err)
	return found
}

package faults_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/faults"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
)

func TestEndSessions(t *testing.T) {
	t.Parallel()

	database := pgtest.New(t)
	owner := database.Pool(t, "")
	name := "ends-" + database.Name
	pool := database.Pool(t, "api", func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["application_name"] = name
	})
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	ended, err := faults.EndSessions(t.Context(), owner, name, "state = 'idle'")
	require.NoError(t, err)
	require.Zero(t, ended)
	ended, err = faults.EndSessions(t.Context(), owner, name, "")
	require.NoError(t, err)
	require.Equal(t, 1, ended)
	require.Equal(t, "57P01", postgres.Code(tx.Commit(t.Context())))
}

func TestConnections(t *testing.T) {
	t.Parallel()

	server := pgtest.Server(t)
	database := server.New(t)
	var connections faults.Connections
	require.Error(t, connections.Fill(t.Context(), database.URL("api"), 1), "there are more")
	require.NoError(t, connections.Fill(t.Context(), database.URL("api"), 10_000))
	require.Positive(t, connections.Held())
	_, err := pgx.Connect(t.Context(), database.URL("worker"))
	require.Equal(t, "53300", postgres.Code(err))
	connections.Release(t.Context())
	require.Eventually(t, func() bool {
		conn, err := pgx.Connect(t.Context(), database.URL("worker"))
		return err == nil && conn.Close(t.Context()) == nil
	}, 30*time.Second, 10*time.Millisecond)
}

// TestRaise has the outbox refuse what is written to it, by the hand of a role
// that may do nothing but write.
func TestRaise(t *testing.T) {
	t.Parallel()

	database := pgtest.New(t)
	owner, api := database.Pool(t, ""), database.Pool(t, "worker")
	_, err := faults.Raise(t.Context(), owner, "dead_letters", "'); DROP", 1)
	require.Error(t, err)
	for _, code := range []string{"40001", "40P01"} {
		raiser, err := faults.Raise(t.Context(), owner, "processed_events", code, 2)
		require.NoError(t, err)
		write := func() error {
			_, err := api.Exec(t.Context(), `
				INSERT INTO processed_events (consumer, event_id, tenant_id, fingerprint, topic, partition, "offset")
				SELECT 'c', uuidv7(), uuidv7(), sha256('x'), 't', 0, 0 WHERE false`)
			return err
		}
		failed := 0
		for range 50 {
			if err := write(); err != nil {
				require.Equal(t, code, postgres.Code(err))
				failed++
			}
		}
		struck, err := raiser.Struck(t.Context())
		require.NoError(t, err)
		require.Equal(t, failed, struck)
		require.Positive(t, struck)
		require.Less(t, struck, 50)
		require.NoError(t, raiser.Remove(t.Context()))
		for range 10 {
			require.NoError(t, write())
		}
	}
}

// TestSmallDisk fills the disk under a table. Where there is no root, the fault
// says that it cannot be had, and nothing else happens.
func TestSmallDisk(t *testing.T) {
	t.Parallel()

	server := pgtest.Server(t)
	database := server.New(t)
	owner := database.Pool(t, "")
	_, err := owner.Exec(t.Context(), "CREATE TABLE filling (text text)")
	require.NoError(t, err)
	dir, err := os.MkdirTemp(filepath.Dir(server.LogFile()), "disk-")
	require.NoError(t, err)
	disk, err := faults.MoveToSmallDisk(t.Context(), owner, dir, 4<<20, "filling")
	if os.Getuid() != 0 {
		require.ErrorIs(t, err, faults.ErrNeedsRoot)
		return
	}
	if errors.Is(err, faults.ErrNeedsRoot) {
		t.Logf("this root may not mount: %v", err)
		return
	}
	require.NoError(t, err)
	const write = "INSERT INTO filling SELECT string_agg(md5(i::text), '') FROM generate_series(1, 5000) AS i"
	_, err = owner.Exec(t.Context(), write)
	require.NoError(t, err)
	taken, err := disk.Fill()
	require.NoError(t, err)
	require.Positive(t, taken)
	for err == nil {
		_, err = owner.Exec(t.Context(), write)
	}
	require.Equal(t, "53100", postgres.Code(err))
	require.NoError(t, disk.Clear())
	_, err = owner.Exec(t.Context(), write)
	require.NoError(t, err)
	require.NoError(t, disk.MoveBack(t.Context()))
	var rows int
	require.NoError(t, owner.QueryRow(t.Context(), "SELECT count(*) FROM filling").Scan(&rows))
	require.GreaterOrEqual(t, rows, 2)
}

// TestBuildWithClock builds a program that says what time it is.
func TestBuildWithClock(t *testing.T) {
	t.Parallel()

	dir := t.TempDir()
	source := filepath.Join(dir, "main.go")
	require.NoError(t, os.WriteFile(source, []byte(`package main

import (
	"os"
	"time"
)

func main() {
	began := time.Now()
	<-time.After(10 * time.Millisecond)
	if took := time.Since(began); took < 10*time.Millisecond || took > time.Minute {
		panic(took)
	}
	os.Stdout.WriteString(began.UTC().Format(time.RFC3339))
}
`), 0o600))
	program := filepath.Join(dir, "clock")
	require.NoError(t, faults.BuildWithClock(t.Context(), -time.Hour, dir, source, program))
	out, err := exec.CommandContext(t.Context(), program).Output()
	require.NoError(t, err)
	said, err := time.Parse(time.RFC3339, strings.TrimSpace(string(out)))
	require.NoError(t, err)
	require.WithinDuration(t, time.Now().Add(-time.Hour), said, time.Minute)
}

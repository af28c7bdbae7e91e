package devstack

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/deploy"
)

func TestPostgres(t *testing.T) {
	t.Parallel()

	t.Run("KeepsRowsOverACrash", func(t *testing.T) {
		t.Parallel()

		server := startServer(t, PostgresConfig{Dir: t.TempDir()})
		put(t, server.AdminURL("postgres"), 1)
		server.Kill()
		<-server.Done()
		require.NoError(t, server.Restart(t.Context()))
		require.Equal(t, 1, get(t, server.AdminURL("postgres")), "same URL, same row")

		require.NoError(t, server.Stop(t.Context()))
		server = startServer(t, server.config)
		require.Equal(t, 1, get(t, server.AdminURL("postgres")))
	})

	t.Run("KeepsRowsOverAnImmediateShutdown", func(t *testing.T) {
		t.Parallel()

		server := startServer(t, PostgresConfig{Dir: t.TempDir()})
		put(t, server.AdminURL("postgres"), 1)
		require.NoError(t, server.StopImmediately(t.Context()))
		<-server.Done()
		require.NoError(t, server.Restart(t.Context()))
		require.Equal(t, 1, get(t, server.AdminURL("postgres")))
		log, err := os.ReadFile(server.LogFile())
		require.NoError(t, err)
		require.Contains(t, string(log), "received immediate shutdown request")
	})

	t.Run("IsSetUpAsTheProductNeedsIt", func(t *testing.T) {
		t.Parallel()

		dir := t.TempDir()
		server := startServer(t, PostgresConfig{Dir: dir, ReplicationSlots: 33, Settings: map[string]string{"fsync": "off"}})
		conn := connect(t, server.AdminURL("postgres"))
		for setting, want := range map[string]string{
			"wal_level": "logical", "max_replication_slots": "33", "max_wal_senders": "33", "wal_sender_timeout": "5s",
			"listen_addresses": "127.0.0.1", "data_checksums": "on", "password_encryption": "scram-sha-256", "fsync": "off",
			"max_slot_wal_keep_size": "4GB", "idle_replication_slot_timeout": "1d", "TimeZone": "UTC",
		} {
			var got string
			require.NoError(t, conn.QueryRow(t.Context(), "SELECT current_setting($1)", setting).Scan(&got))
			require.Equal(t, want, got, setting)
		}
		var fault, file string
		require.NoError(t, conn.QueryRow(t.Context(),
			"SELECT coalesce(string_agg(name || ': ' || error, '; '), ''), pg_read_file(current_setting('config_file')) FROM pg_file_settings WHERE error <> 'setting could not be applied'"). // which is told of one that the command line has, too
			Scan(&fault, &file))
		require.Empty(t, fault)
		require.Equal(t, string(deploy.PostgresSettings), file, "the file that docker-compose.yml mounts")
		var locale string
		require.NoError(t, conn.QueryRow(t.Context(),
			"SELECT datlocprovider::text || datlocale FROM pg_database WHERE datname = 'template1'").Scan(&locale))
		require.Equal(t, "bC.UTF-8", locale)

		info, err := os.Stat(filepath.Join(dir, "password"))
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
		_, err = pgx.Connect(t.Context(), server.URL("postgres", superuser, "guess"))
		require.ErrorContains(t, err, "password authentication failed")
	})

	t.Run("RefusesASecondStarter", func(t *testing.T) {
		t.Parallel()

		server := startServer(t, PostgresConfig{Dir: t.TempDir()})
		_, err := StartPostgres(t.Context(), server.config)
		require.ErrorIs(t, err, ErrLocked)
		put(t, server.AdminURL("postgres"), 1) // and the first is none the worse
	})

	t.Run("StartsPastAForeignPid", func(t *testing.T) {
		t.Parallel()

		server := startServer(t, PostgresConfig{Dir: t.TempDir()})
		put(t, server.AdminURL("postgres"), 1)
		server.Kill()
		foreign := exec.Command("sleep", "600")
		require.NoError(t, foreign.Start())
		t.Cleanup(func() { _ = foreign.Process.Kill(); _ = foreign.Wait() })
		reusePid(t, server, foreign.Process.Pid)

		require.NoError(t, server.Restart(t.Context()))
		require.Equal(t, 1, get(t, server.AdminURL("postgres")))
		require.NoError(t, foreign.Process.Signal(syscall.Signal(0)), "the foreign process lives")
	})

	t.Run("StopsAServerNobodySupervises", func(t *testing.T) {
		t.Parallel()

		server := startServer(t, PostgresConfig{Dir: t.TempDir()})
		put(t, server.AdminURL("postgres"), 1)
		require.NoError(t, server.Stop(t.Context()))
		orphan := server.who.command(t.Context(), filepath.Join(server.config.BinDir, "postgres"), server.arguments()...)
		require.NoError(t, orphan.Start())
		ended := make(chan error)
		go func() { ended <- orphan.Wait() }()
		t.Cleanup(func() { _ = orphan.Process.Kill() })
		for { // until it has taken the folder
			conn, err := pgx.Connect(t.Context(), server.AdminURL("postgres"))
			if err == nil {
				require.NoError(t, conn.Close(t.Context()))
				break
			}
			require.NoError(t, t.Context().Err())
		}

		server = startServer(t, server.config)
		require.NoError(t, <-ended, "stopped in order")
		require.Equal(t, 1, get(t, server.AdminURL("postgres")))
	})

	t.Run("EndsWithItsParent", func(t *testing.T) {
		t.Parallel()

		dir := t.TempDir()
		parent := startHelper(t, "postgres", dir)
		put(t, parent.ready, 1)
		parent.end(t, syscall.SIGKILL)
		requireServerGone(t, dir)

		server := startServer(t, PostgresConfig{Dir: dir})
		require.Equal(t, 1, get(t, server.AdminURL("postgres")))
	})

	t.Run("StartsWhileADeadParentsServerIsStopping", func(t *testing.T) {
		t.Parallel()

		dir := t.TempDir()
		parent := startHelper(t, "postgres", dir)
		put(t, parent.ready, 1)
		parent.end(t, syscall.SIGKILL)

		server := startServer(t, PostgresConfig{Dir: dir})
		require.Equal(t, 1, get(t, server.AdminURL("postgres")))
	})

	t.Run("MakesAHalfMadeFolderAnew", func(t *testing.T) {
		t.Parallel()

		dir := t.TempDir()
		half := filepath.Join(dir, "data.new")
		require.NoError(t, os.MkdirAll(filepath.Join(half, "base"), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(half, "PG_VERSION"), []byte("18\n"), 0o600))
		startServer(t, PostgresConfig{Dir: dir})
		require.NoDirExists(t, half)
	})

	t.Run("ChoosesAnotherPortWhenItsOwnIsTaken", func(t *testing.T) {
		t.Parallel()

		server := startServer(t, PostgresConfig{Dir: t.TempDir()})
		put(t, server.AdminURL("postgres"), 1)
		first := server.Port()
		require.NoError(t, server.Stop(t.Context()))
		occupy(t, first)

		server = startServer(t, server.config)
		second := server.Port()
		require.NotEqual(t, first, second)
		require.Equal(t, 1, get(t, server.AdminURL("postgres")))
		require.NoError(t, server.Stop(t.Context()))
		server = startServer(t, server.config)
		require.Equal(t, second, server.Port(), "remembered")
	})

	t.Run("FailsWhenTheConfiguredPortIsTaken", func(t *testing.T) {
		t.Parallel()

		port, err := FreePort(t.Context())
		require.NoError(t, err)
		occupy(t, port)
		config := PostgresConfig{Dir: t.TempDir(), BinDir: findBinDir(t), Port: port}
		_, err = StartPostgres(t.Context(), config)
		require.ErrorIs(t, err, errPortTaken)

		config.Port = 0 // the failed start let go of the folder
		startServer(t, config)
	})

	t.Run("SaysWhyItCannotStart", func(t *testing.T) {
		t.Parallel()

		_, err := StartPostgres(t.Context(), PostgresConfig{
			Dir: t.TempDir(), BinDir: findBinDir(t), Settings: map[string]string{"max_connections": "none"},
		})
		require.ErrorContains(t, err, `invalid value for parameter "max_connections"`)
	})

	t.Run("RefusesAnotherVersionsData", func(t *testing.T) {
		t.Parallel()

		server := startServer(t, PostgresConfig{Dir: t.TempDir()})
		require.NoError(t, server.Stop(t.Context()))
		require.NoError(t, os.WriteFile(filepath.Join(server.dataDir(), "PG_VERSION"), []byte("17\n"), 0o600))
		_, err := StartPostgres(t.Context(), server.config)
		require.ErrorContains(t, err, "was made by Postgres 17")
	})

	t.Run("RefusesDataWithoutItsPassword", func(t *testing.T) {
		t.Parallel()

		server := startServer(t, PostgresConfig{Dir: t.TempDir()})
		require.NoError(t, server.Stop(t.Context()))
		require.NoError(t, os.Remove(server.passwordFile()))
		_, err := StartPostgres(t.Context(), server.config)
		require.ErrorContains(t, err, server.passwordFile()+" is missing")
	})

	t.Run("KillsItWhenStoppingTakesTooLong", func(t *testing.T) {
		t.Parallel()

		server := startServer(t, PostgresConfig{Dir: t.TempDir()})
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, server.Stop(ctx), context.Canceled)
		<-server.Done()
	})
}

// TestPostgresWaysToBeRoot moves one folder between the ways a server can run
// for root: what one wrote, the other reads.
func TestPostgresWaysToBeRoot(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Log("not root: there is one way only, and the other tests use it")
		return
	}

	config := PostgresConfig{Dir: filepath.Join(t.TempDir(), "server"), BinDir: findBinDir(t)}
	require.NoError(t, os.Chmod(filepath.Dir(config.Dir), 0o700), "as below /root")
	for round, who := range []identity{setuidNobody, userNamespace, setuidNobody} {
		if err := who.command(t.Context(), filepath.Join(config.BinDir, "postgres"), "--version").Run(); err != nil {
			t.Logf("not possible on this machine: %s: %v", who.name, err)
			continue
		}
		server, err := startPostgresAs(t.Context(), who, config)
		require.NoError(t, err, who.name)
		put(t, server.AdminURL("postgres"), round)
		require.Equal(t, round, get(t, server.AdminURL("postgres")))
		require.NoError(t, server.Stop(t.Context()))

		parent := startHelper(t, "postgres as "+who.name, config.Dir)
		parent.end(t, syscall.SIGKILL)
		requireServerGone(t, config.Dir)
	}
}

// TestPostgresAsAnotherUser runs tests of this file once more as nobody,
// without a home folder, when they were started as root.
func TestPostgresAsAnotherUser(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Log("not root: the other tests have shown it")
		return
	}

	// Root's folders are closed to nobody: the programs need another place.
	dir, err := os.MkdirTemp("", "devstack-nobody-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	program, postgres := filepath.Join(dir, "devstack.test"), filepath.Join(dir, "postgres")
	for from, to := range map[string]string{os.Args[0]: program, filepath.Dir(findBinDir(t)): postgres} {
		out, err := exec.Command("cp", "-a", from, to).CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	require.NoError(t, os.Chown(dir, nobody, nobody))

	cmd := exec.Command(program, "-test.v",
		"-test.run=^TestPostgres$/^(KeepsRowsOverACrash|StartsPastAForeignPid|StopsAServerNobodySupervises|EndsWithItsParent)$")
	cmd.Dir = dir
	cmd.Env = []string{"PATH=/usr/bin:/bin", "TMPDIR=" + dir, "ONCELEDGER_POSTGRES_BIN=" + filepath.Join(postgres, "bin")}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "--- PASS: TestPostgres/KeepsRowsOverACrash")
}

func startServer(t *testing.T, config PostgresConfig) *Postgres {
	t.Helper()
	config.BinDir = findBinDir(t)
	config.Logf = t.Logf
	server, err := StartPostgres(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() {
		server.Kill()
		_ = server.lock.Unlock() // unless the test did
	})
	return server
}

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

// put commits a number, get reads the one committed last.
func put(t *testing.T, url string, number int) {
	t.Helper()
	_, err := connect(t, url).Exec(t.Context(), fmt.Sprintf(`
		CREATE TABLE IF NOT EXISTS kept (number integer);
		DELETE FROM kept;
		INSERT INTO kept VALUES (%d)`, number))
	require.NoError(t, err)
}

func get(t *testing.T, url string) (number int) {
	t.Helper()
	require.NoError(t, connect(t, url).QueryRow(t.Context(), "SELECT number FROM kept").Scan(&number))
	return number
}

// requireServerGone waits until the server that ran in dir has stopped in order.
func requireServerGone(t *testing.T, dir string) {
	t.Helper()
	require.Eventually(t, func() bool {
		_, err := os.Stat(filepath.Join(dir, "data", "postmaster.pid"))
		return os.IsNotExist(err)
	}, 30*time.Second, 10*time.Millisecond)
}

// occupy listens on a port for the rest of the test.
func occupy(t *testing.T, port int) {
	t.Helper()
	listener, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	require.NoError(t, err)
	t.Cleanup(func() { _ = listener.Close() })
}

// reusePid makes a dead server's pid file name another process, as happens
// when the kernel hands the pid out again.
func reusePid(t *testing.T, server *Postgres, pid int) {
	t.Helper()
	path := filepath.Join(server.dataDir(), "postmaster.pid")
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	_, rest, _ := strings.Cut(string(text), "\n")
	require.NoError(t, os.WriteFile(path, []byte(strconv.Itoa(pid)+"\n"+rest), 0o600))
}

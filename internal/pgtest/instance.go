package pgtest

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/db/migrations"
	"github.com/onceledger/onceledger/internal/devstack"
	"github.com/onceledger/onceledger/internal/migrate"
)

// templateDatabase is migrated once and cloned for each test.
const templateDatabase = "onceledger_template"

// folderPrefix names the servers' folders in baseDir.
const folderPrefix = "onceledger-pgtest-"

// startTimeout allows for a first start, which downloads Postgres.
const startTimeout = 5 * time.Minute

// Instance is a Postgres server with the migrated template.
type Instance struct {
	*devstack.Postgres

	private bool
}

// Server starts a server for this test alone, to be killed (Kill) and
// restarted (Restart) in the test. It goes when the test ends.
func Server(t testing.TB) *Instance {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	instance, dir, err := start(ctx)
	require.NoError(t, err, "start a Postgres for this test")
	instance.private = true
	t.Cleanup(func() {
		instance.Kill()
		_ = instance.Stop(context.WithoutCancel(t.Context())) // dead; lets the lock go
		_ = os.RemoveAll(dir)
	})
	return instance
}

func startShared() (*Instance, error) {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	sweep()
	instance, _, err := start(ctx)
	return instance, err
}

// start copies the prepared cluster into a new folder and runs it there.
func start(ctx context.Context) (*Instance, string, error) {
	binDir, err := devstack.FindPostgres(ctx, devstack.BinariesConfig{
		BinDir:      os.Getenv("ONCELEDGER_POSTGRES_BIN"),
		FallbackDir: fallbackDir(),
		Logf:        logf,
	})
	if err != nil {
		return nil, "", err
	}
	prepared, err := preparedCluster(ctx, binDir)
	if err != nil {
		return nil, "", fmt.Errorf("prepare a migrated server: %w", err)
	}

	dir, err := os.MkdirTemp(baseDir(), folderPrefix)
	if err != nil {
		return nil, "", err
	}
	if err := removeAfterUs(dir); err != nil {
		return nil, "", err
	}
	if err := copyTree(prepared, dir); err != nil {
		return nil, "", fmt.Errorf("copy the prepared server: %w", err)
	}
	server, err := run(ctx, binDir, dir)
	if err != nil {
		return nil, "", err
	}
	// Partitions are made by code, which may have changed since the cluster
	// was prepared; with nothing to do this takes a few milliseconds.
	if err := migrate.Up(ctx, server.AdminURL(templateDatabase)); err != nil {
		return nil, "", err
	}
	return &Instance{Postgres: server}, dir, nil
}

func run(ctx context.Context, binDir, dir string) (*devstack.Postgres, error) {
	return devstack.StartPostgres(ctx, devstack.PostgresConfig{
		Dir:              dir,
		BinDir:           binDir,
		ReplicationSlots: 100,
		Settings: map[string]string{
			"fsync":            "off",
			"full_page_writes": "off",
			"max_connections":  "300",
			"max_wal_size":     "256MB", // the folder may be in memory
		},
	})
}

// preparedCluster returns the folder of a stopped server with roles and the
// template in it. It is kept in the user's cache, since initdb and migrations
// take seconds for each test program; its name says what it was made from.
func preparedCluster(ctx context.Context, binDir string) (string, error) {
	cache, err := devstack.CacheDir(fallbackDir())
	if err != nil {
		return "", err
	}
	key, err := clusterKey(binDir)
	if err != nil {
		return "", err
	}
	target := filepath.Join(cache, "pgtest-"+key)
	lock, err := devstack.WaitLock(ctx, filepath.Join(cache, "pgtest.lock"))
	if err != nil {
		return "", err
	}
	defer lock.Unlock()
	if _, err := os.Stat(target); err == nil {
		return target, nil
	}

	old, _ := filepath.Glob(filepath.Join(cache, "pgtest-*"))
	for _, dir := range old {
		// Another checkout may be copying one that is not so old.
		if info, err := os.Stat(dir); err == nil && time.Since(info.ModTime()) > 48*time.Hour {
			_ = os.RemoveAll(dir)
		}
	}

	work := target + ".tmp"
	if err := os.RemoveAll(work); err != nil {
		return "", err
	}
	server, err := run(ctx, binDir, work)
	if err != nil {
		return "", err
	}
	err = prepare(ctx, server)
	if err := errors.Join(err, server.Stop(ctx)); err != nil {
		return "", err
	}
	// A copy is to choose a port of its own.
	if err := os.Remove(filepath.Join(work, "port")); err != nil {
		return "", err
	}
	return target, os.Rename(work, target)
}

// clusterKey names everything that goes into a prepared cluster: the server,
// the migrations, and the day for which partitions are made.
func clusterKey(binDir string) (string, error) {
	hash := sha256.New()
	fmt.Fprintln(hash, binDir, time.Now().UTC().Format(time.DateOnly))
	err := fs.WalkDir(migrations.FS, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := fs.ReadFile(migrations.FS, path)
		fmt.Fprintln(hash, path, len(text))
		hash.Write(text)
		return err
	})
	return fmt.Sprintf("%x", hash.Sum(nil)[:8]), err
}

func prepare(ctx context.Context, server *devstack.Postgres) error {
	conn, err := pgx.Connect(ctx, server.AdminURL("postgres"))
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	if _, err := conn.Exec(ctx, "CREATE DATABASE "+templateDatabase); err != nil {
		return err
	}
	if err := migrate.Up(ctx, server.AdminURL(templateDatabase)); err != nil {
		return err
	}
	for _, role := range []string{"api", "relay", "worker", "janitor", "verify"} {
		if _, err := conn.Exec(ctx, "ALTER ROLE onceledger_"+role+" PASSWORD '"+rolePassword+"'"); err != nil {
			return err
		}
	}
	return nil
}

// copyTree copies folders and regular files; all a stopped server has.
func copyTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, relative)
		if entry.IsDir() {
			return os.MkdirAll(target, 0o700)
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		return os.WriteFile(target, content, 0o600)
	})
}

// removers keeps the pipes of removeAfterUs open for as long as we live.
var removers struct {
	sync.Mutex
	pipes []*os.File
}

// removeAfterUs removes dir once this process has ended, however it ends: a
// test program has no place to clean up after a panic or kill -9, and TestMain
// is the tests' own. The shell reads from a pipe that closes with us.
func removeAfterUs(dir string) error {
	read, write, err := os.Pipe()
	if err != nil {
		return err
	}
	defer read.Close()
	cmd := exec.Command("/bin/sh", "-c", `
		cat
		i=0
		while [ -e "$1/data/postmaster.pid" ] && [ $i -lt 100 ]; do sleep 0.1; i=$((i+1)); done
		rm -rf "$1"`, "sh", dir)
	cmd.Stdin = read
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is not for it
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the remover of %s: %w", dir, err)
	}
	removers.Lock()
	defer removers.Unlock()
	removers.pipes = append(removers.pipes, write)
	return nil
}

// sweep removes folders that even the remover left behind: those with nobody
// holding their lock, unless they are being made just now.
func sweep() {
	dirs, _ := filepath.Glob(filepath.Join(baseDir(), folderPrefix+"*"))
	for _, dir := range dirs {
		info, err := os.Stat(dir)
		if err != nil || time.Since(info.ModTime()) < 10*time.Minute {
			continue
		}
		if lock, err := devstack.Lock(filepath.Join(dir, "lock")); err == nil {
			_ = os.RemoveAll(dir)
			_ = lock.Unlock()
		}
	}
}

// baseDir is where servers get their folders: in memory if there is plenty, for
// a clone is some hundreds of small files and takes 15 ms there instead of up to
// 300 ms on disk. TMPDIR overrides it.
func baseDir() string {
	const memory = "/dev/shm"
	const plenty = 4 << 30
	if os.Getenv("TMPDIR") != "" {
		return os.TempDir()
	}
	var shm syscall.Statfs_t
	if err := syscall.Statfs(memory, &shm); err != nil || shm.Bavail*uint64(shm.Bsize) < plenty/2 || availableMemory() < plenty {
		return os.TempDir()
	}
	return memory
}

// availableMemory is what the kernel would give to programs now, in bytes.
func availableMemory() uint64 {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(text), "MemAvailable:")
	var kilobytes uint64
	_, _ = fmt.Sscan(rest, &kilobytes)
	return kilobytes << 10
}

// fallbackDir stands in for a user cache folder, one for each user.
func fallbackDir() string {
	return filepath.Join(os.TempDir(), fmt.Sprintf("onceledger-%d", os.Getuid()))
}

// logf shows what may take long, such as a download.
func logf(format string, args ...any) {
	fmt.Fprintln(os.Stderr, "pgtest: "+strings.TrimSpace(fmt.Sprintf(format, args...)))
}

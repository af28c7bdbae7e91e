package devstack

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/deploy"
)

// superuser is the role initdb makes; its password is random and stays in the
// server's folder.
const superuser = "postgres"

// PostgresConfig describes a server.
type PostgresConfig struct {
	// Dir is the server's folder: data, password, port and log. Absent, it is
	// made.
	Dir string
	// BinDir is what FindPostgres returned.
	BinDir string
	// Port to listen on. 0 means the one of last time, or a free one; then a
	// taken port is replaced by another.
	Port int
	// ReplicationSlots is the number of slots, and of walsenders. 0 means that of
	// deploy/postgres/postgresql.conf.
	ReplicationSlots int
	// Settings are further server settings, over those of
	// deploy/postgres/postgresql.conf, such as {"fsync": "off"}.
	Settings map[string]string

	Logf Logf
}

// Postgres is a running server. Its methods are for one goroutine at a time,
// except Done and the URLs.
type Postgres struct {
	config   PostgresConfig
	who      identity
	lock     *FileLock
	password string
	port     int
	process  *Process
}

// StartPostgres starts a server and returns when it answers queries. The first
// start in a folder makes the database cluster; one that was interrupted is
// made again. After a crash, of the server or of the process that ran it, the
// server recovers what was committed.
//
// The server ends when this process does. A second start on a folder in use
// fails with ErrLocked.
func StartPostgres(ctx context.Context, config PostgresConfig) (*Postgres, error) {
	who, err := serverIdentity(ctx, config.BinDir)
	if err != nil {
		return nil, err
	}
	return startPostgresAs(ctx, who, config)
}

func startPostgresAs(ctx context.Context, who identity, config PostgresConfig) (_ *Postgres, err error) {
	dir, err := filepath.Abs(config.Dir)
	if err != nil {
		return nil, err
	}
	config.Dir = dir
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the server's folder: %w", err)
	}

	server := &Postgres{config: config, who: who}
	if server.lock, err = Lock(filepath.Join(dir, "lock")); err != nil {
		return nil, fmt.Errorf("start postgres: %w", err)
	}
	defer func() {
		if err != nil {
			_ = server.lock.Unlock()
		}
	}()

	if server.password, err = server.loadPassword(); err != nil {
		return nil, err
	}
	if err := server.makeCluster(ctx); err != nil {
		return nil, err
	}
	// In the data folder, which only the server's identity may enter.
	if err := os.WriteFile(server.settingsFile(), deploy.PostgresSettings, 0o600); err != nil {
		return nil, fmt.Errorf("write the server's settings: %w", err)
	}
	if err := server.who.own(server.dataDir()); err != nil {
		return nil, err
	}
	if err := server.startAnyPort(ctx); err != nil {
		return nil, err
	}
	return server, nil
}

// URL is for pgx and libpq: the database, logged in as user.
func (p *Postgres) URL(database, user, password string) string {
	return (&url.URL{
		Scheme:   "postgres",
		User:     url.UserPassword(user, password),
		Host:     net.JoinHostPort("127.0.0.1", strconv.Itoa(p.port)),
		Path:     "/" + database,
		RawQuery: "sslmode=disable",
	}).String()
}

// AdminURL is the database, logged in as superuser.
func (p *Postgres) AdminURL(database string) string {
	return p.URL(database, superuser, p.password)
}

// Port is where the server listens, at 127.0.0.1.
func (p *Postgres) Port() int { return p.port }

// LogFile is where the server writes what it has to say.
func (p *Postgres) LogFile() string { return filepath.Join(p.config.Dir, "postgres.log") }

// Done is closed when the server process has ended, wanted or not. Restart
// makes another one.
func (p *Postgres) Done() <-chan struct{} { return p.process.Done() }

// Stop ends the server: sessions are broken off, everything committed is kept.
// The folder is free afterwards.
func (p *Postgres) Stop(ctx context.Context) error {
	defer p.lock.Unlock()
	return p.stopProcess(ctx)
}

// Kill ends the server as a crash would. The folder stays locked, for Restart
// or Stop.
func (p *Postgres) Kill() { p.process.Kill() }

// StopImmediately ends the server without a checkpoint (an immediate shutdown):
// sessions break, and the next start recovers. The folder stays locked, for
// Restart or Stop.
func (p *Postgres) StopImmediately(ctx context.Context) error {
	if err := p.process.Stop(ctx, syscall.SIGQUIT); err != nil {
		return fmt.Errorf("stop postgres immediately: %w", err)
	}
	return nil
}

// Restart starts the server again on the same port, stopping it first if it
// runs, so that URLs stay good.
func (p *Postgres) Restart(ctx context.Context) error {
	if err := p.stopProcess(ctx); err != nil {
		return err
	}
	return p.startProcess(ctx)
}

func (p *Postgres) stopProcess(ctx context.Context) error {
	select {
	case <-p.process.Done():
		return nil
	default:
	}
	if err := p.process.Stop(ctx, syscall.SIGINT); err != nil { // SIGINT is Postgres' fast stop
		return fmt.Errorf("stop postgres: %w", err)
	}
	return nil
}

func (p *Postgres) dataDir() string      { return filepath.Join(p.config.Dir, "data") }
func (p *Postgres) portFile() string     { return filepath.Join(p.config.Dir, "port") }
func (p *Postgres) settingsFile() string { return filepath.Join(p.dataDir(), "onceledger.conf") }
func (p *Postgres) passwordFile() string { return filepath.Join(p.config.Dir, "password") }

// loadPassword reads the superuser's password, making one for a new folder.
func (p *Postgres) loadPassword() (string, error) {
	text, err := os.ReadFile(p.passwordFile())
	if err == nil && len(bytes.TrimSpace(text)) > 0 {
		return string(bytes.TrimSpace(text)), nil
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("read the superuser's password: %w", err)
	}
	if _, err := os.Stat(p.dataDir()); err == nil {
		return "", fmt.Errorf("%s is missing, without it nobody can log in to %s: put it back, or remove the folder to start anew",
			p.passwordFile(), p.dataDir())
	}
	password := rand.Text()
	if err := os.WriteFile(p.passwordFile(), []byte(password+"\n"), 0o600); err != nil {
		return "", fmt.Errorf("keep the superuser's password: %w", err)
	}
	return password, nil
}

// makeCluster makes the data folder if there is none. It works aside and
// renames, so that a folder named data is always a whole one.
func (p *Postgres) makeCluster(ctx context.Context) error {
	major, version, err := serverVersion(ctx, p.config.BinDir)
	if err != nil {
		return err
	}
	made, err := os.ReadFile(filepath.Join(p.dataDir(), "PG_VERSION"))
	if err == nil {
		if got := strings.TrimSpace(string(made)); got != strconv.Itoa(major) {
			return fmt.Errorf("%s was made by Postgres %s, and %s is Postgres %s: use the old programs (ONCELEDGER_POSTGRES_BIN) or another folder (ONCELEDGER_HOME)",
				p.dataDir(), got, p.config.BinDir, version)
		}
		return nil
	}
	if !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("read the data folder's version: %w", err)
	}
	if _, err := os.Stat(p.dataDir()); err == nil {
		return fmt.Errorf("%s is no database cluster: it has no PG_VERSION", p.dataDir())
	}

	p.config.Logf.printf("making a Postgres %s database cluster in %s", version, p.dataDir())
	fresh := filepath.Join(p.config.Dir, "data.new")
	if err := os.RemoveAll(fresh); err != nil {
		return fmt.Errorf("remove a half-made data folder: %w", err)
	}
	if err := os.Mkdir(fresh, 0o700); err != nil {
		return err
	}
	if err := p.who.own(fresh); err != nil {
		return err
	}
	cmd := p.who.command(ctx, filepath.Join(p.config.BinDir, "initdb"),
		"--pgdata="+fresh, "--username="+superuser, "--pwfile="+p.passwordFile(),
		"--auth=scram-sha-256", "--data-checksums", "--encoding=UTF8",
		"--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("initdb: %w: %s", err, strings.TrimSpace(string(out)))
	}
	return os.Rename(fresh, p.dataDir())
}

// errPortTaken is why startProcess failed when another port would help.
var errPortTaken = errors.New("the port is taken")

// startAnyPort starts the server on the configured port, or on the remembered
// one, or on a free one.
func (p *Postgres) startAnyPort(ctx context.Context) error {
	p.port = p.config.Port
	if p.port != 0 {
		return p.startProcess(ctx)
	}
	p.port = rememberedPort(p.portFile())
	for attempt := 0; ; attempt++ {
		if p.port == 0 {
			port, err := FreePort(ctx)
			if err != nil {
				return err
			}
			p.port = port
		}
		err := p.startProcess(ctx)
		if err == nil {
			return rememberPort(p.portFile(), p.port)
		}
		if !errors.Is(err, errPortTaken) || attempt == 10 {
			return err
		}
		p.config.Logf.printf("port %d is taken, choosing another for Postgres", p.port)
		p.port = 0
	}
}

// startProcess starts the server on p.port and waits until it answers.
func (p *Postgres) startProcess(ctx context.Context) error {
	for attempt := 0; ; attempt++ {
		if err := p.clearPidFile(ctx); err != nil {
			return err
		}
		said, err := p.startOnce(ctx)
		switch {
		case err == nil:
			return nil
		case strings.Contains(said, "Address already in use"):
			return fmt.Errorf("start postgres: %w: %d", errPortTaken, p.port)
		case strings.Contains(said, "pre-existing shared memory block") && attempt < 100:
			// A killed server's sessions notice within moments that it is gone.
			if err := pause(ctx, 50*time.Millisecond); err != nil {
				return err
			}
		default:
			return fmt.Errorf("start postgres: %w; it said (%s):\n%s", err, p.LogFile(), said)
		}
	}
}

// startOnce runs the server; when that fails it returns what the server said.
func (p *Postgres) startOnce(ctx context.Context) (said string, err error) {
	log, err := os.OpenFile(p.LogFile(), os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return "", err
	}
	defer log.Close()
	logStart, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return "", err
	}

	// The process outlives ctx, which only bounds the start.
	cmd := p.who.command(context.WithoutCancel(ctx), filepath.Join(p.config.BinDir, "postgres"), p.arguments()...)
	cmd.Stdout = log
	cmd.Stderr = log
	process, err := StartProcess(cmd, syscall.SIGINT)
	if err != nil {
		return "", err
	}
	p.process = process
	if err := p.waitReady(ctx); err != nil {
		p.process.Kill()
		tail, _ := io.ReadAll(io.NewSectionReader(log, logStart, 1<<16))
		return strings.TrimSpace(string(tail)), err
	}
	return "", nil
}

func (p *Postgres) arguments() []string {
	settings := map[string]string{
		"config_file":             p.settingsFile(),
		"port":                    strconv.Itoa(p.port),
		"listen_addresses":        "127.0.0.1",
		"unix_socket_directories": "", // nothing to leave behind in /tmp after a kill
		"log_line_prefix":         "%m [%p] %q%u@%d ",
	}
	if p.config.ReplicationSlots > 0 {
		slots := strconv.Itoa(p.config.ReplicationSlots)
		settings["max_wal_senders"], settings["max_replication_slots"] = slots, slots
	}
	maps.Copy(settings, p.config.Settings)

	args := []string{"-D", p.dataDir()}
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		args = append(args, "-c", name+"="+settings[name])
	}
	return args
}

// waitReady asks until the server answers, has ended, or ctx is done.
func (p *Postgres) waitReady(ctx context.Context) error {
	config, err := pgx.ParseConfig(p.AdminURL("postgres"))
	if err != nil {
		return err
	}
	config.ConnectTimeout = 2 * time.Second
	for {
		conn, err := pgx.ConnectConfig(ctx, config)
		if err == nil {
			return conn.Close(ctx)
		}
		select {
		case <-p.process.Done():
			return fmt.Errorf("the server ended: %w", p.process.Err())
		case <-ctx.Done():
			return fmt.Errorf("the server does not answer: %w (last: %w)", ctx.Err(), err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// clearPidFile removes what a crash left in the way of the next start. A
// server that lost its supervisor is stopped: its settings may be old ones,
// and nobody would be told if it died.
func (p *Postgres) clearPidFile(ctx context.Context) error {
	path := filepath.Join(p.dataDir(), "postmaster.pid")
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}

	first, _, _ := strings.Cut(string(text), "\n")
	pid, err := strconv.Atoi(strings.TrimSpace(first))
	if err == nil && p.isServer(pid) {
		p.config.Logf.printf("a Postgres of this folder still runs without a supervisor (pid %d); stopping it", pid)
		return p.stopOrphan(ctx, pid)
	}

	// Postgres itself would wait for any process of that pid to end.
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove a stale pid file: %w", err)
	}
	return nil
}

func (p *Postgres) stopOrphan(ctx context.Context, pid int) error {
	if err := syscall.Kill(pid, syscall.SIGINT); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("stop the other postgres (pid %d): %w", pid, err)
	}
	for p.isServer(pid) {
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return fmt.Errorf("wait for the other postgres (pid %d) to stop: %w", pid, err)
		}
	}
	return nil
}

// isServer tells whether pid is a server of our data folder, rather than a
// process that got a dead server's pid.
func (p *Postgres) isServer(pid int) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return false
	}
	args := strings.Split(string(text), "\x00")
	at := slices.Index(args, "-D")
	return filepath.Base(args[0]) == "postgres" && at > 0 && at+1 < len(args) && args[at+1] == p.dataDir()
}

package sandbox

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceledger/onceledger/internal/devstack"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/migrate"
	"github.com/onceledger/onceledger/internal/tenants"
)

// The brokers that can be started.
const (
	KafkaEmbedded = "embedded"
	KafkaApache   = "apache"
)

// Config says what a sandbox is made of.
type Config struct {
	// Dir is its folder. Absent, it is made.
	Dir string
	// Programs is the folder with api and worker.
	Programs string

	// Kafka is KafkaEmbedded, which "" means too, or KafkaApache; Brokers is 1,
	// which 0 means too, or 3 of Apache Kafka.
	Kafka   string
	Brokers int
	// BrokerCommand runs the embedded broker. Its arguments are followed by --dir;
	// it says "ready host:port" on standard output.
	BrokerCommand []string
	// Partitions is how many each topic gets when it is made. 0 means 6.
	Partitions int
	// KafkaSettings are settings of Apache Kafka's brokers.
	KafkaSettings map[string]string

	// PostgresBin and JavaHome are as for `onceledger up`.
	PostgresBin, JavaHome string
	// PostgresDir is where the server's folder is; "" means in Dir.
	PostgresDir string
	// PostgresSettings are over those that the sandbox has by itself.
	PostgresSettings map[string]string

	// DatabaseURL and KafkaBrokers are services that are there already, to use
	// instead of starting some. The login must be the database's owner, and one
	// that may act as each of the service's roles; no password is changed.
	DatabaseURL, KafkaBrokers string

	// Environ is what the environment of api and worker begins with.
	Environ []string
	Logf    devstack.Logf
}

// Sandbox is services that run, and what is needed to start programs on them.
type Sandbox struct {
	Config

	// Postgres is the server; nil where DatabaseURL is used.
	Postgres *devstack.Postgres
	// Kafka is the cluster of Apache Kafka; nil with another broker.
	Kafka *devstack.Kafka
	// Owner is the database, logged in as its owner.
	Owner *pgxpool.Pool

	ctx       context.Context // the processes'
	lock      *devstack.FileLock
	broker    *devstack.Process // the embedded one
	brokers   string
	password  string // of the service's roles
	processes []*Process
	stopped   bool
}

// database is the service's database on a server of the sandbox's own.
const database = "onceledger"

// settings keep a proof's Postgres small; what was committed stays committed.
var settings = map[string]string{
	"shared_buffers":          "64MB",
	"autovacuum_naptime":      "30s",
	"max_connections":         "60",
	"log_min_error_statement": "panic", // statements of the clients fill it otherwise
}

// Start starts the services in config.Dir and returns when they answer: the
// database is migrated, the topics are there. Programs are not started. What an
// earlier sandbox stored in the folder is there.
//
// Everything ends with Stop, with this process, and the programs also with ctx.
func Start(ctx context.Context, config Config) (_ *Sandbox, err error) {
	if config.Partitions == 0 {
		config.Partitions = 6
	}
	if err := config.check(); err != nil {
		return nil, err
	}
	if config.Dir, err = filepath.Abs(config.Dir); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Join(config.Dir, "logs"), 0o700); err != nil {
		return nil, fmt.Errorf("make the folder: %w", err)
	}
	s := &Sandbox{Config: config, ctx: ctx}
	if s.lock, err = devstack.Lock(filepath.Join(config.Dir, "lock")); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Stop(ctx))
		}
	}()
	if err := s.startDatabase(ctx); err != nil {
		return nil, err
	}
	if err := s.startKafka(ctx); err != nil {
		return nil, err
	}
	topicsCtx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := kafka.EnsureTopics(topicsCtx, s.brokers, kafka.ServiceTopics(config.Partitions, config.replication())); err != nil {
		return nil, err
	}
	return s, nil
}

// check looks at what was asked for, before anything is started.
func (c Config) check() error {
	var faults []error
	for _, name := range []string{"api", "worker"} {
		path := filepath.Join(c.Programs, name)
		if info, err := os.Stat(path); err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
			faults = append(faults, fmt.Errorf("there is no program %s: 'make build' puts api, worker and onceledger into bin/ together", path))
		}
	}
	switch c.Kafka {
	case "", KafkaEmbedded:
		if c.Brokers > 1 {
			faults = append(faults, fmt.Errorf("%d brokers need Apache Kafka: the embedded broker is one", c.Brokers))
		}
	case KafkaApache:
		if c.Brokers != 0 && c.Brokers != 1 && c.Brokers != 3 {
			faults = append(faults, fmt.Errorf("%d brokers are asked for: want 1 or 3", c.Brokers))
		}
	default:
		faults = append(faults, fmt.Errorf("Kafka is %q: want %s or %s", c.Kafka, KafkaEmbedded, KafkaApache))
	}
	return errors.Join(faults...)
}

func (c Config) replication() int {
	if c.KafkaBrokers != "" {
		return 0 // the brokers' default
	}
	return max(1, c.Brokers)
}

func (s *Sandbox) startDatabase(ctx context.Context) error {
	admin := s.DatabaseURL
	if admin == "" {
		binaries, err := devstack.FindPostgres(ctx, devstack.BinariesConfig{BinDir: s.PostgresBin, FallbackDir: s.Dir, Logf: s.Logf})
		if err != nil {
			return err
		}
		with := make(map[string]string)
		for _, of := range []map[string]string{settings, s.PostgresSettings} {
			for name, value := range of {
				with[name] = value
			}
		}
		dir := s.PostgresDir
		if dir == "" {
			dir = filepath.Join(s.Dir, "postgres")
		}
		if s.Postgres, err = devstack.StartPostgres(ctx, devstack.PostgresConfig{Dir: dir, BinDir: binaries, Settings: with, Logf: s.Logf}); err != nil {
			return err
		}
		if err := createDatabase(ctx, s.Postgres.AdminURL("postgres")); err != nil {
			return fmt.Errorf("create the database: %w", err)
		}
		admin = s.Postgres.AdminURL(database)
	}
	if err := migrate.Up(ctx, admin); err != nil {
		return err
	}
	config, err := pgxpool.ParseConfig(admin)
	if err != nil {
		return errors.New("the database's address must be a URL, like postgres://user:password@host:5432/name")
	}
	config.MaxConns = 6
	config.ConnConfig.RuntimeParams["application_name"] = "onceledger-prove"
	if s.Owner, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return err
	}
	if s.Postgres == nil {
		return nil
	}
	return s.setPasswords(ctx)
}

func createDatabase(ctx context.Context, url string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	var exists bool
	err = conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", database).Scan(&exists)
	if err == nil && !exists {
		_, err = conn.Exec(ctx, "CREATE DATABASE "+database)
	}
	return err
}

var roles = []string{"api", "relay", "worker", "janitor", "verify"}

// setPasswords gives the service's roles a password, a new one at each start.
func (s *Sandbox) setPasswords(ctx context.Context) error {
	s.password = rand.Text()
	for _, role := range roles {
		// No parameters in ALTER ROLE; the password is letters and digits.
		if _, err := s.Owner.Exec(ctx, "ALTER ROLE onceledger_"+role+" PASSWORD '"+s.password+"'"); err != nil {
			return fmt.Errorf("set the password of onceledger_%s: %w", role, err)
		}
	}
	return nil
}

// URL is the database with a login that may do what one role does ("api",
// "relay", "worker", "janitor", "verify"), or as the owner (""). With via, a
// host:port, it leads there instead of to the server: to a proxy.
func (s *Sandbox) URL(role string, via ...string) string {
	var address *url.URL
	if s.Postgres != nil {
		text := s.Postgres.AdminURL(database)
		if role != "" {
			text = s.Postgres.URL(database, "onceledger_"+role, s.password)
		}
		address, _ = url.Parse(text) // made by devstack
	} else {
		address, _ = url.Parse(s.DatabaseURL) // was parsed at the start
		if role != "" && role != "relay" {
			// The owner acts as the role: whose server it is, keeps its passwords.
			query := address.Query()
			query.Set("role", "onceledger_"+role)
			address.RawQuery = query.Encode()
		}
	}
	if len(via) > 0 {
		address.Host = via[0]
	}
	return address.String()
}

// PostgresAddr is where the server listens, as host:port.
func (s *Sandbox) PostgresAddr() string {
	if s.Postgres != nil {
		return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.Postgres.Port()))
	}
	address, _ := url.Parse(s.DatabaseURL) // was parsed at the start
	if address.Port() == "" {
		return net.JoinHostPort(address.Hostname(), "5432")
	}
	return address.Host
}

// KafkaAddr is what clients of the brokers connect to, as host:port, separated by
// commas.
func (s *Sandbox) KafkaAddr() string { return s.brokers }

func (s *Sandbox) startKafka(ctx context.Context) (err error) {
	switch {
	case s.KafkaBrokers != "":
		s.brokers = s.KafkaBrokers
		return kafka.Reachable(ctx, s.brokers)
	case s.Config.Kafka == KafkaApache:
		s.Kafka, err = devstack.StartKafka(ctx, devstack.KafkaConfig{
			Dir: filepath.Join(s.Dir, "kafka"), Brokers: s.Brokers, Settings: s.KafkaSettings,
			JavaHome: s.JavaHome, FallbackDir: s.Dir, Logf: s.Logf,
		})
		if err == nil {
			s.brokers = s.Kafka.Bootstrap()
		}
		return err
	default:
		return s.startEmbedded(ctx)
	}
}

func (s *Sandbox) startEmbedded(ctx context.Context) error {
	log, err := os.OpenFile(filepath.Join(s.Dir, "logs", "broker.log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	args := slices.Concat(s.BrokerCommand[1:], []string{"--dir", filepath.Join(s.Dir, "broker")})
	cmd := exec.Command(s.BrokerCommand[0], args...) //nolint:noctx // it outlives ctx until Stop
	cmd.Stderr = log
	cmd.Env = s.Environ
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	// Left alone, it saves its state and ends by itself.
	if s.broker, err = devstack.StartProcess(cmd, syscall.SIGTERM); err != nil {
		return err
	}
	ready := make(chan string, 1)
	go func() {
		line, _ := bufio.NewReader(stdout).ReadString('\n')
		ready <- strings.TrimSpace(line)
		_, _ = io.Copy(io.Discard, stdout)
	}()
	select {
	case line := <-ready:
		addr, ok := strings.CutPrefix(line, "ready ")
		if !ok {
			return fmt.Errorf("the broker did not start: see %s", log.Name())
		}
		s.brokers = addr
		return nil
	case <-time.After(Patience):
		return fmt.Errorf("the broker does not say that it is ready: see %s", log.Name())
	case <-ctx.Done():
		return ctx.Err()
	}
}

// CreateKey makes an API key for the tenant of a name, which it makes too if it
// is not there.
func (s *Sandbox) CreateKey(ctx context.Context, tenant string) (string, error) {
	return tenants.CreateKey(ctx, s.Owner, tenant, "prove")
}

// API makes an API, which is not started yet. More variables may follow.
func (s *Sandbox) API(name string, env ...string) *Process {
	return s.program(name, "api", slices.Concat([]string{"DATABASE_URL=" + s.URL("api"), "ONCELEDGER_ADDR=127.0.0.1:0"}, env))
}

// Worker makes a worker with some roles, such as "relay,billing", known to its
// consumer group as name, which is not started yet. More variables may follow.
func (s *Sandbox) Worker(name, withRoles string, env ...string) *Process {
	needs := map[string][]string{
		"billing":  {"DATABASE_URL=" + s.URL("worker")},
		"relay":    {"RELAY_DATABASE_URL=" + s.URL("relay")},
		"balances": {},
		"janitor":  {"JANITOR_DATABASE_URL=" + s.URL("janitor")},
	}
	with := []string{"WORKER_ROLES=" + withRoles, "WORKER_ID=" + name, "WORKER_ADDR=127.0.0.1:0", "KAFKA_BROKERS=" + s.KafkaAddr()}
	for role := range strings.SplitSeq(withRoles, ",") {
		with = append(with, needs[role]...)
	}
	return s.program(name, "worker", append(with, env...))
}

func (s *Sandbox) program(name, program string, env []string) *Process {
	p := NewProcess(s.ctx, name, filepath.Join(s.Programs, program), filepath.Join(s.Dir, "logs", name+".log"), slices.Concat(s.Environ, env)...)
	s.processes = append(s.processes, p)
	return p
}

// Stop ends everything that runs: the programs first, then the broker, then the
// database. The folder stays, and is free. It is no error to stop twice.
func (s *Sandbox) Stop(ctx context.Context) error {
	if s.stopped {
		return nil
	}
	s.stopped = true
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	var faults []error
	for _, process := range s.processes {
		_ = process.Signal(syscall.SIGCONT)
		faults = append(faults, process.Kill())
		process.log.close()
	}
	if s.broker != nil {
		faults = append(faults, s.broker.Stop(ctx, syscall.SIGTERM))
	}
	if s.Kafka != nil {
		faults = append(faults, s.Kafka.Stop(ctx))
	}
	if s.Owner != nil {
		s.Owner.Close()
	}
	if s.Postgres != nil {
		faults = append(faults, s.Postgres.Stop(ctx))
	}
	faults = append(faults, s.lock.Unlock())
	return errors.Join(faults...)
}

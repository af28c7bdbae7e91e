package supervisor

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/devstack"
	"github.com/onceledger/onceledger/internal/migrate"
	"github.com/onceledger/onceledger/internal/tenants"
)

// databaseName is the service's database on a Postgres of our own.
const databaseName = "onceledger"

// Connections says how to reach the parts of a running service.
type Connections struct {
	Databases    Databases `json:"databases"`
	KafkaBrokers string    `json:"kafka_brokers"`
	Connect      string    `json:"connect,omitempty"` // Kafka Connect's REST interface, if it runs
	API          string    `json:"api"`               // as http://host:port
	Worker       string    `json:"worker"`            // its own interface, and the operators', as http://host:port
}

// Databases are URLs of the same database, each with a login that may do what
// one part of the service does. Admin is the owner; "" when the database is one
// that DATABASE_URL gave.
type Databases struct {
	Admin   string `json:"admin"`
	API     string `json:"api"`
	Relay   string `json:"relay"`
	Worker  string `json:"worker"`
	Janitor string `json:"janitor"`
	Verify  string `json:"verify"`
}

// ReadConnections reads what the supervisor that runs on a home folder, or ran
// there last, connected to: for operators' commands that are given no address.
func ReadConnections(home string) (Connections, error) {
	var connections Connections
	text, err := os.ReadFile(connectionsFile(home))
	if err == nil {
		err = json.Unmarshal(text, &connections)
	}
	if err != nil {
		return Connections{}, fmt.Errorf("read %s (onceledger up writes it anew): %w", connectionsFile(home), err)
	}
	return connections, nil
}

func (s *supervisor) saveConnections(connections Connections) error {
	if s.config.DatabaseURL != "" {
		connections.Databases.Admin = "" // it was lent to us, and is not ours to keep
	}
	text, err := json.MarshalIndent(connections, "", "  ")
	if err == nil {
		err = writePrivate(connectionsFile(s.config.Home), text)
	}
	if err != nil {
		return fmt.Errorf("save connections: %w", err)
	}
	return nil
}

func connectionsFile(home string) string { return filepath.Join(home, "connections.json") }

// startDatabase returns a migrated database with a login for each part.
func (s *supervisor) startDatabase(ctx context.Context) (Databases, error) {
	admin := s.config.DatabaseURL
	if admin != "" {
		if err := checkDatabase(ctx, admin); err != nil {
			return Databases{}, fmt.Errorf("DATABASE_URL: %w", err)
		}
		s.say("using the Postgres of DATABASE_URL; its roles onceledger_* get new passwords")
	} else {
		server, err := s.startPostgres(ctx)
		if err != nil {
			return Databases{}, err
		}
		if err := createDatabase(ctx, server.AdminURL("postgres")); err != nil {
			return Databases{}, fmt.Errorf("create the database: %w", err)
		}
		admin = server.AdminURL(databaseName)
	}

	s.say("migrating")
	if err := migrate.Up(ctx, admin); err != nil {
		return Databases{}, err
	}
	return s.setPasswords(ctx, admin)
}

// startPostgres starts a server of our own and keeps it running.
func (s *supervisor) startPostgres(ctx context.Context) (*devstack.Postgres, error) {
	binDir, err := devstack.FindPostgres(ctx, devstack.BinariesConfig{
		BinDir:      s.config.PostgresBin,
		FallbackDir: s.config.Home,
		Logf:        s.say,
	})
	if err != nil {
		return nil, err
	}
	s.say("starting Postgres (%s)", binDir)
	server, err := devstack.StartPostgres(ctx, devstack.PostgresConfig{
		Dir:    filepath.Join(s.config.Home, "postgres"),
		BinDir: binDir,
		Logf:   s.say,
	})
	if err != nil {
		return nil, err
	}
	first := true
	s.keep(ctx, &keeper{
		name:        "postgres",
		stopTimeout: postgresStopTimeout,
		start: func(ctx context.Context) (<-chan struct{}, func() string, error) {
			if !first {
				if err := server.Restart(ctx); err != nil {
					return nil, nil, err
				}
			}
			first = false
			return server.Done(), func() string { return "its log is " + server.LogFile() }, nil
		},
		stop: server.Stop,
	})
	return server, nil
}

func createDatabase(ctx context.Context, url string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	var exists bool
	err = conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", databaseName).Scan(&exists)
	if err != nil || exists {
		return err
	}
	_, err = conn.Exec(ctx, "CREATE DATABASE "+databaseName)
	return err
}

// checkDatabase says what a server that is not ours lacks, before a migration
// fails half-way for it.
func checkDatabase(ctx context.Context, address string) error {
	if parsed, err := url.Parse(address); err != nil || !strings.HasPrefix(parsed.Scheme, "postgres") {
		return errors.New("it must be a URL, like postgres://user:password@host:5432/name")
	}
	conn, err := pgx.Connect(ctx, address)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))

	var version int
	var walLevel string
	var mayCreateRoles bool
	err = conn.QueryRow(ctx, `
		SELECT current_setting('server_version_num')::int, current_setting('wal_level'),
		       rolsuper OR (rolcreaterole AND rolreplication)
		FROM pg_roles WHERE rolname = current_user`).Scan(&version, &walLevel, &mayCreateRoles)
	if err != nil {
		return err
	}
	var faults []error
	if version < 180000 {
		faults = append(faults, fmt.Errorf("the server is Postgres %d, needed is 18 or later", version/10000))
	}
	if walLevel != "logical" {
		faults = append(faults, fmt.Errorf("the server has wal_level=%s, the relay needs wal_level=logical", walLevel))
	}
	if !mayCreateRoles {
		faults = append(faults, errors.New("the user must be able to create the service's roles, one of them with REPLICATION: a superuser, or CREATEROLE and REPLICATION"))
	}
	return errors.Join(faults...)
}

// setPasswords gives each role the password that is kept in the home folder,
// making it the first time.
func (s *supervisor) setPasswords(ctx context.Context, admin string) (Databases, error) {
	databases := Databases{Admin: admin}
	urls := map[string]*string{
		"api": &databases.API, "relay": &databases.Relay, "worker": &databases.Worker,
		"janitor": &databases.Janitor, "verify": &databases.Verify,
	}
	file := filepath.Join(s.config.Home, "passwords.json")
	passwords, err := loadPasswords(file, urls)
	if err != nil {
		return Databases{}, fmt.Errorf("read the roles' passwords from %s (without it new ones are made): %w", file, err)
	}
	address, err := url.Parse(admin)
	if err != nil {
		return Databases{}, fmt.Errorf("set the roles' passwords: %w", err)
	}
	conn, err := pgx.Connect(ctx, admin)
	if err != nil {
		return Databases{}, fmt.Errorf("set the roles' passwords: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))

	for role, roleURL := range urls {
		name := "onceledger_" + role
		// No parameters in ALTER ROLE; the password is letters and digits.
		if _, err := conn.Exec(ctx, "ALTER ROLE "+name+" PASSWORD '"+passwords[role]+"'"); err != nil {
			return Databases{}, fmt.Errorf("set the password of %s: %w", name, err)
		}
		address.User = url.UserPassword(name, passwords[role])
		*roleURL = address.String()
	}
	return databases, nil
}

func loadPasswords(path string, roles map[string]*string) (map[string]string, error) {
	passwords := make(map[string]string)
	text, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(text, &passwords)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	for role := range roles {
		if passwords[role] == "" {
			passwords[role] = rand.Text()
		}
	}
	if text, err = json.Marshal(passwords); err != nil {
		return nil, err
	}
	return passwords, writePrivate(path, text)
}

// ensureAPIKey makes a tenant with a key, unless the key made earlier is still
// good. It returns the key's file.
func (s *supervisor) ensureAPIKey(ctx context.Context, admin string) (string, error) {
	path := filepath.Join(s.config.Home, "api-key")
	conn, err := pgx.Connect(ctx, admin)
	if err != nil {
		return "", fmt.Errorf("make an API key: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))

	text, err := os.ReadFile(path)
	if err == nil {
		_, err := tenants.Authenticate(ctx, conn, "Bearer "+strings.TrimSpace(string(text)))
		if err == nil {
			return path, nil
		}
		if !errors.Is(err, tenants.ErrUnauthorized) {
			return "", fmt.Errorf("check the API key: %w", err)
		}
		s.say("the key in %s is not valid here (revoked, or of another database); making another", path)
	} else if !errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("check the API key: %w", err)
	}

	key, err := tenants.CreateKey(ctx, conn, "default", "onceledger up")
	if err != nil {
		return "", fmt.Errorf("make an API key: %w", err)
	}
	if err := writePrivate(path, []byte(key+"\n")); err != nil {
		return "", fmt.Errorf("keep the API key: %w", err)
	}
	return path, nil
}

// writePrivate writes a file only we can read: all of it, or nothing.
func writePrivate(path string, content []byte) error {
	fresh := path + ".new"
	if err := os.WriteFile(fresh, content, 0o600); err != nil {
		return err
	}
	return os.Rename(fresh, path)
}

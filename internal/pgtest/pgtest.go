// Package pgtest gives tests real databases on a real Postgres 18, migrated
// and empty, in some tens of milliseconds each.
//
// The first use in a test program starts a server that is private to the
// program and ends with it. Tests may run in parallel: New gives each a
// database of its own, Tx a transaction that is rolled back. What is shared by
// the whole server, such as roles and replication slots, is shared by the tests
// of a program; Server gives one test a server of its own, to be killed and
// restarted at will. Durability is off (fsync): it survives the death of the
// server, not of the machine.
//
// A server that cannot be started fails the test. It is never skipped.
package pgtest

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// rolePassword is the password of every service role on a test server.
const rolePassword = "onceledger-test"

// dropTimeout bounds what a test's clean-up does on the server.
const dropTimeout = 30 * time.Second

// shared is the server of this test program. Nothing stops it: it ends with
// the program.
var shared = sync.OnceValues(startShared)

// Database is one test's own database, cloned from the migrated template.
type Database struct {
	Name string

	instance *Instance
}

// New makes a database, and drops it when the test ends, with whatever
// replication slots it then has.
func New(t testing.TB) *Database {
	t.Helper()
	instance, err := shared()
	require.NoError(t, err, "start the Postgres of this test program")
	return instance.New(t)
}

// URL logs in to the database as a service role: "api", "relay", "worker",
// "janitor" or "verify". "" is the owner, a superuser.
func (d *Database) URL(role string) string {
	if role == "" {
		return d.instance.AdminURL(d.Name)
	}
	return d.instance.URL(d.Name, "onceledger_"+role, rolePassword)
}

// Pool connects as a role (see URL). It has up to 8 connections; a configure
// function may say otherwise. It is closed when the test ends.
func (d *Database) Pool(t testing.TB, role string, configure ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(d.URL(role))
	require.NoError(t, err)
	config.MaxConns = 8 // the server has 300 for all parallel tests together
	for _, change := range configure {
		change(config)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// Tx begins a transaction as owner, in a database shared with other tests that
// use Tx, and rolls it back when the test ends. It cannot show what others see
// after a commit: use New for that.
func Tx(t testing.TB) pgx.Tx {
	t.Helper()
	pool, err := sharedTxPool()
	require.NoError(t, err, "start the Postgres of this test program")
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := cleanupContext(t)
		defer cancel()
		require.NoError(t, tx.Rollback(ctx))
	})
	return tx
}

// sharedTxPool outlives each single test, so it belongs to none.
var sharedTxPool = sync.OnceValues(func() (*pgxpool.Pool, error) {
	instance, err := shared()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	const name = "shared_by_tx"
	if err := instance.clone(ctx, name); err != nil {
		return nil, err
	}
	config, err := pgxpool.ParseConfig(instance.AdminURL(name))
	if err != nil {
		return nil, err
	}
	config.MaxConns = 32
	return pgxpool.NewWithConfig(context.Background(), config)
})

// New makes a database on this server; see the function New.
func (i *Instance) New(t testing.TB) *Database {
	t.Helper()
	name := databaseName(t.Name())
	require.NoError(t, i.clone(t.Context(), name))
	t.Cleanup(func() {
		if i.private {
			return // the whole server goes, and may be dead already
		}
		ctx, cancel := cleanupContext(t)
		defer cancel()
		require.NoError(t, i.drop(ctx, name))
	})
	return &Database{Name: name, instance: i}
}

func (i *Instance) clone(ctx context.Context, name string) error {
	return i.admin(ctx, func(conn *pgx.Conn) error {
		// file_copy writes no WAL: quicker for a database this small.
		_, err := conn.Exec(ctx, "CREATE DATABASE "+pgx.Identifier{name}.Sanitize()+
			" TEMPLATE "+templateDatabase+" STRATEGY file_copy")
		if err != nil {
			return err
		}
		// The migrations' rights on the database itself are not copied.
		_, err = conn.Exec(ctx, "REVOKE TEMPORARY ON DATABASE "+pgx.Identifier{name}.Sanitize()+" FROM PUBLIC")
		return err
	})
}

func (i *Instance) drop(ctx context.Context, name string) error {
	return i.admin(ctx, func(conn *pgx.Conn) error {
		// An active slot refuses the drop even WITH (FORCE); an idle one goes
		// with its database.
		_, err := conn.Exec(ctx, `
			SELECT pg_terminate_backend(active_pid, 10000)
			FROM pg_replication_slots
			WHERE database = $1 AND active`, name)
		if err != nil {
			return fmt.Errorf("end the users of replication slots: %w", err)
		}
		_, err = conn.Exec(ctx, "DROP DATABASE "+pgx.Identifier{name}.Sanitize()+" WITH (FORCE)")
		return err
	})
}

// admin runs fn on a superuser's connection to no database in particular.
func (i *Instance) admin(ctx context.Context, fn func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, i.AdminURL("postgres"))
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	return fn(conn)
}

// cleanupContext is for clean-ups: t.Context has ended by then.
func cleanupContext(t testing.TB) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(t.Context()), dropTimeout)
}

var (
	databaseCount   atomic.Int64
	notInIdentifier = regexp.MustCompile(`[^a-z0-9]+`)
)

// databaseName is unique in this program and shows the test in server logs.
func databaseName(test string) string {
	name := notInIdentifier.ReplaceAllString(strings.ToLower(test), "_")
	name = strings.TrimPrefix(name, "test")
	return fmt.Sprintf("t%d_%.40s", databaseCount.Add(1), name)
}

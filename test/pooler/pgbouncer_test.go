//go:build pgbouncer

// Package pooler_test runs the API and the worker behind PgBouncer, in the mode
// that gives each transaction another connection. It needs the program pgbouncer,
// and is run by make test-pooler.
package pooler_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/httpapi"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/inbox/inboxtest"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
	"github.com/onceledger/onceledger/internal/relay"
	"github.com/onceledger/onceledger/internal/telemetry"
	"github.com/onceledger/onceledger/internal/tenants"
)

const patience = time.Minute

// bouncer is a PgBouncer before a test's database, which can be killed and started
// again at the same address.
type bouncer struct {
	t    *testing.T
	file string
	addr string
	cmd  *exec.Cmd
}

// startBouncer puts a PgBouncer with two server connections before the database.
func startBouncer(t *testing.T, database *pgtest.Database, ignored string) *bouncer {
	t.Helper()
	address, err := url.Parse(database.URL("api"))
	require.NoError(t, err)
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	b := &bouncer{t: t, addr: listener.Addr().String()}
	require.NoError(t, listener.Close())
	_, port, err := net.SplitHostPort(b.addr)
	require.NoError(t, err)

	dir := t.TempDir()
	for _, folder := range []string{dir, filepath.Dir(dir)} { // it may run as another user
		require.NoError(t, os.Chmod(folder, 0o755))
	}
	b.file = filepath.Join(dir, "pgbouncer.ini")
	var users string
	for _, role := range []string{"api", "worker", "relay", "janitor"} {
		login, err := url.Parse(database.URL(role))
		require.NoError(t, err)
		password, _ := login.User.Password()
		users += fmt.Sprintf("%q %q\n", login.User.Username(), password)
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "users"), []byte(users), 0o644))
	require.NoError(t, os.WriteFile(b.file, fmt.Appendf(nil, `[databases]
* = host=%s port=%s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %s
unix_socket_dir =
auth_type = plain
auth_file = %s
pool_mode = transaction
default_pool_size = 2
max_client_conn = 200
ignore_startup_parameters = %s
`, address.Hostname(), address.Port(), port, filepath.Join(dir, "users"), ignored), 0o644))
	b.start()
	t.Cleanup(b.kill)
	return b
}

func (b *bouncer) start() {
	b.t.Helper()
	program, err := exec.LookPath("pgbouncer")
	if err != nil {
		program = "/usr/sbin/pgbouncer" // where Debian has it, which is not on everybody's PATH
	}
	b.cmd = exec.Command(program, b.file)
	b.cmd.Stdout, b.cmd.Stderr = b.t.Output(), b.t.Output()
	b.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if os.Getuid() == 0 {
		b.cmd.SysProcAttr.Credential = &syscall.Credential{Uid: 65534, Gid: 65534} // it refuses to be root
	}
	require.NoError(b.t, b.cmd.Start(), "pgbouncer is missing: install it (Debian: apt-get install pgbouncer)")
	require.Eventually(b.t, func() bool {
		conn, err := new(net.Dialer).DialContext(b.t.Context(), "tcp", b.addr)
		return err == nil && conn.Close() == nil
	}, patience, 10*time.Millisecond)
}

func (b *bouncer) kill() {
	_ = b.cmd.Process.Kill()
	_ = b.cmd.Wait()
}

// url is the database through the pooler.
func (b *bouncer) url(database *pgtest.Database, role string) string {
	b.t.Helper()
	address, err := url.Parse(database.URL(role))
	require.NoError(b.t, err)
	address.Host = b.addr
	return address.String()
}

const ignoreLimits = "idle_in_transaction_session_timeout,transaction_timeout,lock_timeout"

// withLimits gives the logins of a server what the pooler does not pass on.
func withLimits(t *testing.T, owner *pgxpool.Pool, roles ...string) {
	t.Helper()
	for _, role := range roles {
		for _, setting := range strings.Split(ignoreLimits, ",") {
			_, err := owner.Exec(t.Context(), fmt.Sprintf("ALTER ROLE onceledger_%s SET %s = '5s'", role, setting))
			require.NoError(t, err)
		}
	}
}

func open(t *testing.T, address string, conns int32) *pgxpool.Pool {
	t.Helper()
	pool, err := postgres.Open(t.Context(), address, postgres.Options{
		ApplicationName: "behind-a-pooler", MaxConns: conns, TransactionTimeout: 5 * time.Second, LockTimeout: 5 * time.Second,
	})
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// Field report R34: behind a pooler that gives each transaction another
// connection, prepared statements clash or are missing, and what is set or locked
// in a session is somebody else's. Roles belong to the server, so each test has one
// of its own.
func TestBehindAPooler(t *testing.T) {
	t.Parallel()

	t.Run("FiftyClientsAndARestartCostNothing", func(t *testing.T) {
		t.Parallel()
		database := pgtest.Server(t).New(t)
		owner := database.Pool(t, "")
		withLimits(t, owner, "api", "worker")
		b := startBouncer(t, database, ignoreLimits)
		key, err := tenants.CreateKey(t.Context(), owner, "tenant", "test")
		require.NoError(t, err)
		pool := open(t, b.url(database, "api"), 50)
		registry := prometheus.NewRegistry()
		handler := httpapi.New(httpapi.Config{
			Shed: func() bool { return false }, Pool: pool, Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Now: time.Now,
			Metrics: registry, Operations: telemetry.Handler(registry, nil),
		})
		const clients, each = 50, 6
		var answered, unknown atomic.Int64
		// post sends until it is known what became of it.
		post := func(key, path, idempotencyKey, body string) {
			for began := time.Now(); time.Since(began) < patience; {
				request := httptest.NewRequestWithContext(t.Context(), http.MethodPost, path, strings.NewReader(body))
				request.Header.Set("Authorization", "Bearer "+key)
				request.Header.Set("Content-Type", "application/json")
				request.Header.Set("Idempotency-Key", idempotencyKey)
				response := httptest.NewRecorder()
				handler.ServeHTTP(response, request)
				switch {
				case response.Code < 300:
					answered.Add(1)
					return
				case response.Code == http.StatusServiceUnavailable && response.Header().Get("Retry-After") != "",
					response.Code == http.StatusConflict && strings.Contains(response.Body.String(), "request-in-progress"):
					unknown.Add(1)
				default:
					t.Errorf("%s: %d: %s", idempotencyKey, response.Code, response.Body)
					return
				}
			}
			t.Errorf("%s is never answered", idempotencyKey)
		}
		var group sync.WaitGroup
		for client := range clients {
			group.Go(func() {
				for i := range each {
					post(key, "/v1/orders", fmt.Sprintf("order-%d-%d", client, i),
						`{"customer_id":"c","customer_email":"a@example.com","currency":"EUR","lines":[{"sku":"book","description":"A book","quantity":1,"unit_amount":1000,"tax_rate":"0.19"}],"metadata":{}}`)
				}
			})
		}
		require.Eventually(t, func() bool { return answered.Load() > clients }, patience, time.Millisecond)
		b.kill()
		b.start()
		group.Wait()
		require.EqualValues(t, clients*each, answered.Load())
		require.Positive(t, unknown.Load(), "the restart was not noticed: it showed nothing")
		require.Equal(t, []int{clients * each}, pgtest.Column[int](t, owner, "SELECT count(*)::int FROM orders"))
		require.Equal(t, []int{clients * each}, pgtest.Column[int](t, owner, "SELECT count(*)::int FROM outbox_events"))

		// And the worker, on what the API has written.
		rows, err := owner.Query(t.Context(), `SELECT id, tenant_id, aggregate_type, aggregate_id, aggregate_version, event_type,
			schema_version, occurred_at, coalesce(traceparent, ''), payload FROM outbox_events`)
		require.NoError(t, err)
		events, err := pgx.CollectRows(rows, pgx.RowToStructByPos[event.Event])
		require.NoError(t, err)
		workerPool := open(t, b.url(database, "worker"), 4)
		w := inboxtest.On(t, database, billing.Handler{Now: time.Now}, func(c *inbox.Config) { c.Pool, c.Writers = workerPool, 2 })
		order := &factory.Order{TenantID: events[0].TenantID}
		events = append(events, order.Created(), order.Paid(), order.Refunded(100))
		records := w.Partition.Append(events...)
		for i, batch := 0, 30; i < len(records); i += batch {
			if i == 5*batch {
				b.kill()
				require.Error(t, w.Process(t.Context(), records[i:i+batch]), "an outage, to be tried again")
				b.start()
			}
			require.Eventually(t, func() bool {
				return w.Process(t.Context(), records[i:min(i+batch, len(records))]) == nil
			}, patience, 10*time.Millisecond)
		}
		require.Empty(t, w.DeadLetters(t))
		require.Len(t, w.Applied(t), len(events))
		require.Equal(t, []uuid.UUID{events[len(events)-2].ID}, pgtest.Column[uuid.UUID](t, owner, "SELECT id FROM invoices"))
		require.Zero(t, pgtest.Column[int](t, owner, "SELECT count(*)::int FROM pg_locks WHERE locktype = 'advisory'")[0], "no lock outlives its transaction")
	})

	t.Run("WhatNothingWouldBoundIsRefused", func(t *testing.T) {
		t.Parallel()
		database := pgtest.Server(t).New(t)
		b := startBouncer(t, database, ignoreLimits)
		_, err := postgres.Open(t.Context(), b.url(database, "api"), postgres.Options{TransactionTimeout: time.Second, LockTimeout: time.Second})
		require.ErrorIs(t, err, postgres.ErrPooled)
		require.ErrorContains(t, err, "keeps idle_in_transaction_session_timeout, transaction_timeout, lock_timeout from being set: give them to the login")

		strict := startBouncer(t, database, "")
		_, err = postgres.Open(t.Context(), strict.url(database, "api"), postgres.Options{TransactionTimeout: time.Second})
		require.ErrorContains(t, err, "ignore_startup_parameters = "+ignoreLimits)
	})

	t.Run("WhoLocksForASessionIsRefused", func(t *testing.T) {
		t.Parallel()
		database := pgtest.Server(t).New(t)
		owner := database.Pool(t, "")
		withLimits(t, owner, "relay", "janitor")
		b := startBouncer(t, database, ignoreLimits+",idle_session_timeout")
		_, err := postgres.Open(t.Context(), b.url(database, "janitor"), postgres.Options{Direct: true})
		require.ErrorIs(t, err, postgres.ErrPooled)

		_, err = owner.Exec(t.Context(), "INSERT INTO relay_assignment (slot_name, relay, target) VALUES ('pooled', 'poll', 'poll')")
		require.NoError(t, err)
		r, err := relay.NewRelay(relay.Config{
			URL: b.url(database, "relay"), Slot: "pooled", Log: slog.New(slog.DiscardHandler),
			NewPublisher: func(relay.Reports) (relay.Publisher, error) { panic("it is not its turn") },
		})
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		require.ErrorContains(t, r.Run(ctx), "a pooler stands between the relay and Postgres")
		require.Zero(t, pgtest.Column[int](t, owner, "SELECT count(*)::int FROM pg_locks WHERE locktype = 'advisory'")[0])
	})
}

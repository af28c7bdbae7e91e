package faults_test

import (
	"context"
	"net"
	"net/url"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/faults"
	"github.com/onceledger/onceledger/internal/pgtest"
)

func hostOf(t *testing.T, address string) string {
	t.Helper()
	parsed, err := url.Parse(address)
	require.NoError(t, err)
	return parsed.Host
}

// TestPgProxyCutsAtCommit cuts off commits of each form, before they arrive and
// after they are done, and looks at what became of each.
func TestPgProxyCutsAtCommit(t *testing.T) {
	t.Parallel()

	database := pgtest.New(t)
	owner := database.Pool(t, "")
	_, err := owner.Exec(t.Context(), "CREATE TABLE written (name text)")
	require.NoError(t, err)
	commits := map[string]func(context.Context, *pgconn.PgConn) error{
		"SimpleQuery": func(ctx context.Context, conn *pgconn.PgConn) error {
			return conn.Exec(ctx, "commit").Close()
		},
		"SimpleQueryInOtherLetters": func(ctx context.Context, conn *pgconn.PgConn) error {
			return conn.Exec(ctx, " COMMIT ;").Close()
		},
		"ExtendedQuery": func(ctx context.Context, conn *pgconn.PgConn) error {
			_, err := conn.ExecParams(ctx, "commit", nil, nil, nil, nil).Close()
			return err
		},
		"PreparedStatement": func(ctx context.Context, conn *pgconn.PgConn) error {
			if _, err := conn.Prepare(ctx, "end_of_it", "END", nil); err != nil {
				return err
			}
			_, err := conn.ExecPrepared(ctx, "end_of_it", nil, nil, nil).Close()
			return err
		},
		"Pipeline": func(ctx context.Context, conn *pgconn.PgConn) error {
			pipeline := conn.StartPipeline(ctx)
			pipeline.SendQueryParams("SELECT 'commit'", nil, nil, nil, nil)
			pipeline.SendQueryParams("COMMIT", nil, nil, nil, nil)
			if err := pipeline.Sync(); err != nil {
				return err
			}
			for range 3 { // two answers and the end
				result, err := pipeline.GetResults()
				if reader, ok := result.(*pgconn.ResultReader); ok && err == nil {
					_, err = reader.Close()
				}
				if err != nil {
					return err
				}
			}
			return pipeline.Close()
		},
	}
	for form, commit := range commits {
		for _, after := range []bool{false, true} {
			name := form + map[bool]string{false: "Before", true: "After"}[after]
			t.Run(name, func(t *testing.T) {
				t.Parallel()

				proxy, err := faults.StartPgProxy(t.Context(), hostOf(t, database.URL("")))
				require.NoError(t, err)
				t.Cleanup(proxy.Close)
				through, err := proxy.Through(database.URL(""))
				require.NoError(t, err)
				conn, err := pgconn.Connect(t.Context(), through)
				require.NoError(t, err)
				defer conn.Close(context.WithoutCancel(t.Context())) //nolint:errcheck // it is broken by then

				if after {
					proxy.CutAfterCommit(1)
				} else {
					proxy.CutBeforeCommit(1)
				}
				exec := func(sql string) { require.NoError(t, conn.Exec(t.Context(), sql).Close()) }
				exec("begin transaction read only") // whose commit is none to strike at
				exec("commit")
				exec("begin; set local lock_timeout = 1000")
				exec("INSERT INTO written VALUES ('" + name + "')")
				exec("SELECT 'commit'") // is none
				err = commit(t.Context(), conn)
				require.Error(t, err)
				require.True(t, conn.IsClosed())

				before, cutAfter := proxy.Cut()
				require.Equal(t, map[bool]int{false: 1, true: 0}[after], before)
				require.Equal(t, map[bool]int{false: 0, true: 1}[after], cutAfter)
				require.Equal(t, 1, proxy.Broken())
				var written bool
				require.NoError(t, owner.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM written WHERE name = $1)", name).Scan(&written))
				require.Equal(t, after, written)

				again, err := pgx.Connect(t.Context(), through)
				require.NoError(t, err)
				defer again.Close(context.WithoutCancel(t.Context())) //nolint:errcheck // nothing hangs on it
				require.NoError(t, pgx.BeginFunc(t.Context(), again, func(tx pgx.Tx) error {
					_, err := tx.Exec(t.Context(), "SELECT 1")
					return err
				}), "it strikes once")
			})
		}
	}
}

// TestPgProxyLeavesAloneWhatRollsBack: a COMMIT that the server answers with
// ROLLBACK committed nothing, so there is nothing to be in doubt about.
func TestPgProxyLeavesAloneWhatRollsBack(t *testing.T) {
	t.Parallel()

	database := pgtest.New(t)
	proxy, err := faults.StartPgProxy(t.Context(), hostOf(t, database.URL("")))
	require.NoError(t, err)
	t.Cleanup(proxy.Close)
	through, err := proxy.Through(database.URL(""))
	require.NoError(t, err)
	conn, err := pgconn.Connect(t.Context(), through+"&sslmode=prefer")
	require.NoError(t, err, "it declines encryption")
	defer conn.Close(context.WithoutCancel(t.Context())) //nolint:errcheck // nothing hangs on it

	proxy.CutAfterCommit(1)
	require.NoError(t, conn.Exec(t.Context(), "begin").Close())
	require.Error(t, conn.Exec(t.Context(), "SELECT 1/0").Close())
	require.NoError(t, conn.Exec(t.Context(), "commit").Close())
	_, after := proxy.Cut()
	require.Zero(t, after)
	results, err := conn.Exec(t.Context(), "SELECT repeat('x', 1000000)").ReadAll()
	require.NoError(t, err)
	require.Len(t, results[0].Rows[0][0], 1000000)
	require.NoError(t, conn.Exec(t.Context(), "begin").Close())
	require.Error(t, conn.Exec(t.Context(), "commit").Close(), "and it is still armed")
}

// TestGate has a gate shut, fall silent, slow down and break, with Postgres
// behind it.
func TestGate(t *testing.T) {
	t.Parallel()

	database := pgtest.New(t)
	gate, err := faults.OpenGate(t.Context(), hostOf(t, database.URL("")))
	require.NoError(t, err)
	t.Cleanup(gate.Close)
	through, err := gate.Through(database.URL(""))
	require.NoError(t, err)
	connect := func() (*pgconn.PgConn, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		return pgconn.Connect(ctx, through)
	}
	ask := func(conn *pgconn.PgConn, patience time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		return conn.Exec(ctx, "SELECT 1").Close()
	}
	const long = 30 * time.Second

	conn, err := connect()
	require.NoError(t, err)
	gate.Slow(50 * time.Millisecond)
	began := time.Now()
	require.NoError(t, ask(conn, long))
	require.GreaterOrEqual(t, time.Since(began), 50*time.Millisecond)
	gate.Open()

	gate.Silence()
	require.Error(t, ask(conn, 200*time.Millisecond))
	gate.Open()

	conn, err = connect()
	require.NoError(t, err)
	gate.Shut()
	require.Error(t, ask(conn, long))
	_, err = connect()
	require.Error(t, err)
	gate.Open()

	conn, err = connect()
	require.NoError(t, err)
	broken := gate.Broken()
	require.Positive(t, gate.Break())
	require.Greater(t, gate.Broken(), broken)
	require.Error(t, ask(conn, long))

	_, port, err := net.SplitHostPort(gate.Addr())
	require.NoError(t, err)
	number, err := strconv.Atoi(port)
	require.NoError(t, err)
	require.Positive(t, number)
}

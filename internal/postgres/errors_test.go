package postgres_test

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
)

// kind is all that a caller can ask about an error.
type kind struct {
	Code             string
	LostToAnother    bool
	LockTimedOut     bool
	MissingPartition bool
	DataFault        bool
	Unavailable      bool
}

func kindOf(err error) kind {
	return kind{
		Code:             postgres.Code(err),
		LostToAnother:    postgres.LostToAnother(err),
		LockTimedOut:     postgres.LockTimedOut(err),
		MissingPartition: postgres.MissingPartition(err),
		DataFault:        postgres.DataFault(err),
		Unavailable:      postgres.Unavailable(err),
	}
}

// TestErrors makes a real Postgres refuse things and asks what kind of error
// that is: the data's fault, the moment's, or neither.
func TestErrors(t *testing.T) {
	t.Parallel()
	database := pgtest.New(t)
	owner := database.Pool(t, "")
	_, err := owner.Exec(t.Context(), "CREATE TABLE texts (text text CONSTRAINT texts_key UNIQUE CONSTRAINT texts_filled CHECK (text <> ''))")
	require.NoError(t, err)
	_, err = owner.Exec(t.Context(), "CREATE ROLE "+database.Name+"_limited LOGIN PASSWORD 'limited' CONNECTION LIMIT 0")
	require.NoError(t, err)

	incompressible := make([]byte, 2400)
	_, _ = rand.Read(incompressible)
	exec := func(sql string, args ...any) func(*testing.T) error {
		return func(t *testing.T) error {
			_, err := owner.Exec(t.Context(), sql, args...)
			return err
		}
	}
	connect := func(change func(*url.URL)) func(*testing.T) error {
		return func(t *testing.T) error {
			address, err := url.Parse(database.URL("api"))
			require.NoError(t, err)
			change(address)
			_, err = pgx.Connect(t.Context(), address.String())
			return err
		}
	}

	for _, test := range []struct {
		name string
		make func(t *testing.T) error
		want kind
	}{
		{"AZeroCharacterInJSON", exec(`SELECT '{"a":"\u0000"}'::jsonb`), kind{Code: "22P05", DataFault: true}},
		{"AZeroByteInAText", exec(`SELECT $1::text`, "a\x00b"), kind{Code: "22021", DataFault: true}},
		{"ANumberOutOfRange", exec(`SELECT 9223372036854775807 + 1`), kind{Code: "22003", DataFault: true}},
		{"AUniqueViolation", exec(`INSERT INTO texts VALUES ('a'), ('a')`), kind{Code: "23505", DataFault: true}},
		{"ACheckViolation", exec(`INSERT INTO texts VALUES ('')`), kind{Code: "23514", DataFault: true}},
		{"AForeignKeyViolation", exec(`
			INSERT INTO api_keys (id, tenant_id, name, key_hash) VALUES (uuidv7(), uuidv7(), 'k', sha256('k'))`),
			kind{Code: "23503", DataFault: true}},
		{"ATooLargeIndexRow", exec(`INSERT INTO texts VALUES ($1)`, hex.EncodeToString(incompressible)), kind{Code: "54000", DataFault: true}},
		{"TwoRowsOfOneKeyInAnUpsert", exec(`
			INSERT INTO texts VALUES ('b'), ('b') ON CONFLICT (text) DO UPDATE SET text = excluded.text`),
			kind{Code: "21000", DataFault: true}},
		{"AMissingPartition", exec(`
			INSERT INTO processed_events (consumer, event_id, tenant_id, fingerprint, topic, partition, "offset")
			VALUES ('c', 'ffffffff-ffff-7000-8000-000000000000', uuidv7(), sha256('x'), 't', 0, 0)`),
			kind{Code: "23514", MissingPartition: true, Unavailable: true}},

		{"AStatementTimeout", func(t *testing.T) error {
			return inTx(t, database, "SET LOCAL statement_timeout = 20", "SELECT pg_sleep(60)")
		}, kind{Code: "57014", Unavailable: true}},
		{"ATransactionTimeout", func(t *testing.T) error {
			return inTx(t, database, "SET LOCAL transaction_timeout = 20", "SELECT pg_sleep(60)")
		}, kind{Code: "25P04", Unavailable: true}},
		{"ALockTimeout", func(t *testing.T) error {
			holder, err := owner.Begin(t.Context())
			require.NoError(t, err)
			defer holder.Rollback(t.Context()) //nolint:errcheck // the lock goes with the connection too
			_, err = holder.Exec(t.Context(), "LOCK TABLE tenants")
			require.NoError(t, err)
			return inTx(t, database, "SET LOCAL lock_timeout = 20", "LOCK TABLE tenants")
		}, kind{Code: "55P03", LockTimedOut: true, Unavailable: true}},
		{"AnEndedBackend", func(t *testing.T) error {
			return inTx(t, database, "SELECT pg_terminate_backend(pg_backend_pid())")
		}, kind{Code: "57P01", Unavailable: true}},
		{"AReadOnlyTransaction", func(t *testing.T) error {
			return inTx(t, database, "SET TRANSACTION READ ONLY", "INSERT INTO texts VALUES ('c')")
		}, kind{Code: "25006", Unavailable: true}},
		{"TooManyConnections", connect(func(u *url.URL) {
			u.User = url.UserPassword(database.Name+"_limited", "limited")
		}), kind{Code: "53300", Unavailable: true}},
		{"AWrongPassword", connect(func(u *url.URL) {
			u.User = url.UserPassword("onceledger_api", "wrong")
		}), kind{Code: "28P01", Unavailable: true}},
		{"ADatabaseThatIsNotThere", connect(func(u *url.URL) { u.Path = "/nowhere" }), kind{Code: "3D000", Unavailable: true}},
		{"ARefusedConnection", connect(func(u *url.URL) { u.Host = closedPort(t) }), kind{Unavailable: true}},
		{"AHostThatIsNone", connect(func(u *url.URL) { u.Host = "host.invalid:5432" }), kind{Unavailable: true}},
		{"ADeadline", func(t *testing.T) error {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
			defer cancel()
			_, err := owner.Exec(ctx, "SELECT pg_sleep(60)")
			return err
		}, kind{Unavailable: true}},
		{"AnEndOfTheStream", func(*testing.T) error { return io.ErrUnexpectedEOF }, kind{Unavailable: true}},

		{"AMissingPrivilege", func(t *testing.T) error {
			_, err := database.Pool(t, "api").Exec(t.Context(), "DELETE FROM orders")
			return err
		}, kind{Code: "42501"}},
		{"ATableThatIsNotThere", exec(`SELECT FROM nowhere`), kind{Code: "42P01"}},
		{"AStatementInAFailedTransaction", func(t *testing.T) error {
			tx, err := owner.Begin(t.Context())
			require.NoError(t, err)
			defer tx.Rollback(t.Context()) //nolint:errcheck // nothing was written
			_, err = tx.Exec(t.Context(), "SELECT 1/0")
			require.Error(t, err)
			_, err = tx.Exec(t.Context(), "SELECT 1")
			return err
		}, kind{Code: "25P02"}},
		{"NoRow", func(*testing.T) error { return pgx.ErrNoRows }, kind{}},
		{"AnErrorOfAnotherKind", func(*testing.T) error { return errors.New("55P03") }, kind{}},
		{"NoError", func(*testing.T) error { return nil }, kind{}},
	} {
		t.Run("Knows"+test.name, func(t *testing.T) {
			t.Parallel()

			err := test.make(t)
			require.Equal(t, test.want, kindOf(err), "%v", err)
			if err != nil {
				err = fmt.Errorf("insert order: %w", errors.Join(errors.New("another"), err))
				require.Equal(t, test.want, kindOf(err), "wrapped")
			}
		})
	}
}

// inTx runs statements in a transaction and returns the first error.
func inTx(t *testing.T, database *pgtest.Database, statements ...string) error {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), database.URL(""))
	require.NoError(t, err)
	defer conn.Close(t.Context()) //nolint:errcheck // it may be broken by now
	return pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
		for _, statement := range statements {
			if _, err := tx.Exec(t.Context(), statement); err != nil {
				return err
			}
		}
		return nil
	})
}

// closedPort is an address at which nobody listens.
func closedPort(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, listener.Close())
	return listener.Addr().String()
}

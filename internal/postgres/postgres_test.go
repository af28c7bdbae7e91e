package postgres_test

import (
	"context"
	"errors"
	"net/url"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
)

func one(config *pgxpool.Config) { config.MaxConns = 1 }

func TestInTx(t *testing.T) {
	t.Parallel()

	type testBundle struct {
		database *pgtest.Database
		pool     *pgxpool.Pool // of one connection
	}
	setup := func(t *testing.T) *testBundle {
		t.Helper()
		database := pgtest.New(t)
		_, err := database.Pool(t, "").Exec(t.Context(), `
			CREATE TABLE counters (id integer PRIMARY KEY, n integer NOT NULL);
			INSERT INTO counters VALUES (1, 0), (2, 0)`)
		require.NoError(t, err)
		return &testBundle{database, database.Pool(t, "", one)}
	}
	add := func(ctx context.Context, conn interface {
		QueryRow(context.Context, string, ...any) pgx.Row
	}, id int) error {
		return conn.QueryRow(ctx, "UPDATE counters SET n = n + 1 WHERE id = $1 RETURNING n", id).Scan(new(int))
	}
	count := func(t *testing.T, bundle *testBundle, id int) (n int) {
		t.Helper()
		require.NoError(t, bundle.pool.QueryRow(t.Context(), "SELECT n FROM counters WHERE id = $1", id).Scan(&n))
		return n
	}
	backend := func(t *testing.T, bundle *testBundle) (pid int) {
		t.Helper()
		require.NoError(t, bundle.pool.QueryRow(t.Context(), "SELECT pg_backend_pid()").Scan(&pid))
		return pid
	}
	serializable := pgx.TxOptions{IsoLevel: pgx.RepeatableRead}

	t.Run("CommitsWhatSucceeds", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		require.NoError(t, postgres.InTx(t.Context(), bundle.pool, func(tx pgx.Tx) error { return add(t.Context(), tx, 1) }))
		require.Equal(t, 1, count(t, bundle, 1))
	})

	t.Run("RollsBackWhatFailsAndGivesItsError", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		refusal := errors.New("no")
		calls := 0
		err := postgres.InTx(t.Context(), bundle.pool, func(tx pgx.Tx) error {
			calls++
			return errors.Join(add(t.Context(), tx, 1), refusal)
		})
		require.ErrorIs(t, err, refusal)
		require.Equal(t, 1, calls)
		require.Zero(t, count(t, bundle, 1))
	})

	t.Run("RollsBackOnAPanicAndKeepsTheConnection", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		before := backend(t, bundle)
		require.PanicsWithValue(t, "bang", func() {
			_ = postgres.InTx(t.Context(), bundle.pool, func(tx pgx.Tx) error {
				require.NoError(t, add(t.Context(), tx, 1))
				panic("bang")
			})
		})
		require.Zero(t, count(t, bundle, 1))
		require.Equal(t, before, backend(t, bundle))
	})

	t.Run("RollsBackWhenTheCallerGivesUpAndKeepsTheConnection", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		before := backend(t, bundle)
		ctx, cancel := context.WithCancel(t.Context())
		err := postgres.InTx(ctx, bundle.pool, func(tx pgx.Tx) error {
			require.NoError(t, add(ctx, tx, 1))
			cancel()
			return ctx.Err()
		})
		require.ErrorIs(t, err, context.Canceled)
		require.Zero(t, count(t, bundle, 1))
		require.Equal(t, before, backend(t, bundle))
	})

	t.Run("DoesNotCommitForACallerThatGaveUp", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		ctx, cancel := context.WithCancel(t.Context())
		err := postgres.InTx(ctx, bundle.pool, func(tx pgx.Tx) error {
			require.NoError(t, add(ctx, tx, 1))
			cancel()
			return nil
		})
		require.ErrorIs(t, err, context.Canceled)
		require.Zero(t, count(t, bundle, 1))
	})

	t.Run("DoesNothingForACallerThatIsGone", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		err := postgres.InTx(ctx, bundle.pool, func(pgx.Tx) error {
			require.Fail(t, "called")
			return nil
		})
		require.ErrorIs(t, err, context.Canceled)
	})

	t.Run("RunsAgainAfterASerializationFailure", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)
		other := bundle.database.Pool(t, "", one)

		var seen []int
		err := postgres.InTxOptions(t.Context(), bundle.pool, serializable, func(tx pgx.Tx) error {
			var n int
			if err := tx.QueryRow(t.Context(), "SELECT n FROM counters WHERE id = 1").Scan(&n); err != nil {
				return err
			}
			seen = append(seen, n)
			if len(seen) == 1 { // another one is quicker, once
				require.NoError(t, add(t.Context(), other, 1))
			}
			return add(t.Context(), tx, 1)
		})
		require.NoError(t, err)
		require.Equal(t, []int{0, 1}, seen, "the second attempt sees what the first one lost to")
		require.Equal(t, 2, count(t, bundle, 1))
	})

	t.Run("RunsAgainAfterASerializationFailureAtTheCommit", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		// A sequence does not go back: the first commit fails, the second not.
		_, err := bundle.pool.Exec(t.Context(), `
			CREATE SEQUENCE commits;
			CREATE FUNCTION lose_once() RETURNS trigger LANGUAGE plpgsql AS $$
			BEGIN
				IF nextval('commits') = 1 THEN
					RAISE EXCEPTION 'lost' USING ERRCODE = 'serialization_failure';
				END IF;
				RETURN NULL;
			END $$;
			CREATE CONSTRAINT TRIGGER lose_once AFTER UPDATE ON counters
				DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION lose_once()`)
		require.NoError(t, err)
		calls := 0
		require.NoError(t, postgres.InTx(t.Context(), bundle.pool, func(tx pgx.Tx) error {
			calls++
			return add(t.Context(), tx, 1)
		}))
		require.Equal(t, 2, calls)
		require.Equal(t, 1, count(t, bundle, 1))
	})

	t.Run("RunsAgainAfterADeadlock", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)
		pool := bundle.database.Pool(t, "")

		// Each holds one row before it asks for the other's.
		holding := make(chan struct{}, 2)
		both := make(chan struct{})
		go func() {
			<-holding
			<-holding
			close(both)
		}()
		calls := make([]int, 2)
		done := make(chan error, 2)
		for i := range 2 {
			go func() {
				done <- postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error {
					calls[i]++
					if _, err := tx.Exec(t.Context(), "SET LOCAL deadlock_timeout = '20ms'"); err != nil {
						return err
					}
					if err := add(t.Context(), tx, 1+i); err != nil {
						return err
					}
					if calls[i] == 1 {
						holding <- struct{}{}
						<-both
					}
					return add(t.Context(), tx, 2-i)
				})
			}()
		}
		require.NoError(t, <-done)
		require.NoError(t, <-done)
		require.GreaterOrEqual(t, calls[0]+calls[1], 3, "one of them was run again")
		require.Equal(t, 2, count(t, bundle, 1))
		require.Equal(t, 2, count(t, bundle, 2))
	})

	t.Run("LosesNothingOfManyWritersOfOneRow", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)
		pool := bundle.database.Pool(t, "")

		const writers = 50
		gate, done := make(chan struct{}), make(chan error, writers)
		for range writers {
			go func() {
				<-gate
				done <- postgres.InTxOptions(t.Context(), pool, serializable, func(tx pgx.Tx) error {
					var n int
					if err := tx.QueryRow(t.Context(), "SELECT n FROM counters WHERE id = 1").Scan(&n); err != nil {
						return err
					}
					_, err := tx.Exec(t.Context(), "UPDATE counters SET n = $1 WHERE id = 1", n+1)
					return err
				})
			}()
		}
		close(gate)
		for range writers {
			require.NoError(t, <-done)
		}
		require.Equal(t, writers, count(t, bundle, 1))
	})

	t.Run("GivesUpAfterABoundedNumberOfAttempts", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		calls := 0
		err := postgres.InTx(t.Context(), bundle.pool, func(tx pgx.Tx) error {
			calls++
			_, err := tx.Exec(t.Context(), "DO $$ BEGIN RAISE EXCEPTION 'lost' USING ERRCODE = '40001'; END $$")
			return err
		})
		require.True(t, postgres.LostToAnother(err), err)
		require.Equal(t, 12, calls)
	})

	t.Run("StopsTryingWhenTheCallerGivesUp", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		ctx, cancel := context.WithCancel(t.Context())
		calls := 0
		err := postgres.InTx(ctx, bundle.pool, func(tx pgx.Tx) error {
			calls++
			_, err := tx.Exec(ctx, "DO $$ BEGIN RAISE EXCEPTION 'lost' USING ERRCODE = '40001'; END $$")
			cancel()
			return err
		})
		require.ErrorIs(t, err, context.Canceled)
		require.LessOrEqual(t, calls, 2)
	})

	for name, statement := range map[string]string{
		"AUniqueViolation": "INSERT INTO counters VALUES (1, 0)",
		"ALockTimeout":     "DO $$ BEGIN RAISE EXCEPTION 'late' USING ERRCODE = '55P03'; END $$",
		"ACheckViolation":  "DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '23514'; END $$",
		"AnEndedBackend":   "SELECT pg_terminate_backend(pg_backend_pid())",
	} {
		t.Run("DoesNotRunAgainAfter"+name, func(t *testing.T) {
			t.Parallel()
			bundle := setup(t)

			calls := 0
			err := postgres.InTx(t.Context(), bundle.pool, func(tx pgx.Tx) error {
				calls++
				_, err := tx.Exec(t.Context(), statement)
				return err
			})
			require.Error(t, err)
			require.Equal(t, 1, calls)
			require.NoError(t, postgres.InTx(t.Context(), bundle.pool, func(tx pgx.Tx) error { return add(t.Context(), tx, 1) }),
				"the pool works on")
		})
	}

	t.Run("TurnsACaughtErrorIntoOneAtTheCommit", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		err := postgres.InTx(t.Context(), bundle.pool, func(tx pgx.Tx) error {
			require.NoError(t, add(t.Context(), tx, 1))
			_, _ = tx.Exec(t.Context(), "INSERT INTO counters VALUES (1, 0)") // 23505, and the transaction is dead
			return nil
		})
		require.ErrorIs(t, err, pgx.ErrTxCommitRollback)
		require.Zero(t, count(t, bundle, 1))
	})
}

func TestOpen(t *testing.T) {
	t.Parallel()

	t.Run("BoundsEverythingThatCouldHang", func(t *testing.T) {
		t.Parallel()

		pool, err := postgres.Open(t.Context(), pgtest.New(t).URL("api"), postgres.Options{
			ApplicationName: "onceledger-test", MaxConns: 3, TransactionTimeout: 5 * time.Second, LockTimeout: 250 * time.Millisecond,
		})
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		require.EqualValues(t, 3, pool.Config().MaxConns)
		for setting, want := range map[string]string{
			"application_name": "onceledger-test", "TimeZone": "UTC", "lock_timeout": "250ms",
			"transaction_timeout": "5s", "idle_in_transaction_session_timeout": "10s",
		} {
			var got string
			require.NoError(t, pool.QueryRow(t.Context(), "SELECT current_setting($1)", setting).Scan(&got))
			require.Equal(t, want, got, setting)
		}
	})

	const secret = "s3cr:et@with/all?of#it%"
	for name, address := range map[string]func(database *pgtest.Database) string{
		"AWrongPassword": func(database *pgtest.Database) string {
			address, _ := url.Parse(database.URL("api"))
			address.User = url.UserPassword("onceledger_api", secret)
			return address.String()
		},
		"AnAddressThatIsNone":     func(*pgtest.Database) string { return "postgres://api:" + secret + "@127.0.0.1:1/x" },
		"AnAddressWithABadOption": func(*pgtest.Database) string { return "host=127.0.0.1 port=none password=" + secret },
		"ANumberOfConnectionsThatIsNone": func(*pgtest.Database) string {
			return "postgres://api:s3cr%3Aet@127.0.0.1:1/x?pool_max_conns=many"
		},
	} {
		t.Run("FailsAndKeepsTheSecretOf"+name, func(t *testing.T) {
			t.Parallel()

			_, err := postgres.Open(t.Context(), address(pgtest.New(t)), postgres.Options{})
			require.Error(t, err)
			for _, part := range []string{secret, "s3cr", "with/all", "of#it"} {
				require.NotContains(t, err.Error(), part)
			}
		})
	}

	t.Run("FailsAtOnceWhereNobodyListens", func(t *testing.T) {
		t.Parallel()

		_, err := postgres.Open(t.Context(), "postgres://api:secret@"+closedPort(t)+"/x", postgres.Options{})
		require.ErrorContains(t, err, "reach database")
		require.True(t, postgres.Unavailable(err))
		require.NotContains(t, err.Error(), "secret")
	})
}

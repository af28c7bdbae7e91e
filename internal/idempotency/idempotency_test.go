package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/failure"
	"github.com/onceledger/onceledger/internal/idempotency"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
	"github.com/onceledger/onceledger/internal/tenants"
)

func TestParseKey(t *testing.T) {
	t.Parallel()

	for name, key := range map[string]string{
		"OneCharacter": "k", "AUUID": uuid.NewString(), "255Bytes": strings.Repeat("k", 255), "Quotes": `"k"`, "TheFirstVisible": "!", "TheLastVisible": "~",
	} {
		t.Run("Takes"+name, func(t *testing.T) {
			t.Parallel()

			got, err := idempotency.ParseKey([]string{key})
			require.NoError(t, err)
			require.Equal(t, key, got)
		})
	}

	for name, values := range map[string][]string{
		"Empty": {""}, "Blank": {" "}, "256Bytes": {strings.Repeat("k", 256)}, "128Emoji": {strings.Repeat("🔑", 128)}, "Umlaut": {"ä"},
		"ABlankInside": {"a b"}, "ATab": {"a\tb"}, "ANewline": {"a\nb"}, "AZeroByte": {"a\x00b"}, "ADelete": {"a\x7f"}, "NoUTF8": {"a\xff"},
		"Two": {"a", "b"}, "TwoAlike": {"a", "a"}, "OneAndAnEmpty": {"a", ""},
	} {
		t.Run("Refuses"+name, func(t *testing.T) {
			t.Parallel()

			_, err := idempotency.ParseKey(values)
			require.ErrorIs(t, err, idempotency.ErrKeyInvalid)
			var refusal *failure.Error
			require.ErrorAs(t, err, &refusal)
			require.NotEmpty(t, refusal.Detail)
		})
	}

	t.Run("RefusesNone", func(t *testing.T) {
		t.Parallel()

		_, err := idempotency.ParseKey(nil)
		require.ErrorIs(t, err, idempotency.ErrKeyMissing)
	})
}

func TestOnceTx(t *testing.T) {
	t.Parallel()

	type testBundle struct {
		owner, api       *pgxpool.Pool
		impatient        *pgxpool.Pool // waits 50 ms for a lock
		tenant, stranger uuid.UUID
	}
	setup := func(t *testing.T) *testBundle {
		t.Helper()
		database := pgtest.New(t)
		bundle := &testBundle{
			owner: database.Pool(t, ""), api: database.Pool(t, "api"),
			tenant: uuid.Must(uuid.NewV7()), stranger: uuid.Must(uuid.NewV7()),
		}
		_, err := bundle.owner.Exec(t.Context(), "INSERT INTO tenants (id, name) VALUES ($1, 'a'), ($2, 'b')", bundle.tenant, bundle.stranger)
		require.NoError(t, err)
		bundle.impatient, err = postgres.Open(t.Context(), database.URL("api"), postgres.Options{LockTimeout: 50 * time.Millisecond})
		require.NoError(t, err)
		t.Cleanup(bundle.impatient.Close)
		return bundle
	}
	request := idempotency.Request{Key: "k", Method: "POST", Path: "/v1/orders", Body: []byte(`{"a":1}`)}
	want := idempotency.Answer{Status: 201, ContentType: "application/json", Location: "/v1/orders/1", Body: []byte("{\"a\":1}\n\x00\xff")}

	once := func(t *testing.T, pool *pgxpool.Pool, tenant uuid.UUID, request idempotency.Request, do func() (idempotency.Answer, error)) (answer idempotency.Answer, replayed bool, err error) {
		t.Helper()
		err = tenants.InTx(t.Context(), pool, tenant, func(tx pgx.Tx) error {
			answer, replayed, err = idempotency.OnceTx(t.Context(), tx, tenant, request, do)
			return err
		})
		return answer, replayed, err
	}
	gives := func(answer idempotency.Answer) func() (idempotency.Answer, error) {
		return func() (idempotency.Answer, error) { return answer, nil }
	}
	mustNotRun := func(t *testing.T) func() (idempotency.Answer, error) {
		t.Helper()
		return func() (idempotency.Answer, error) {
			require.Fail(t, "done a second time")
			return idempotency.Answer{}, nil
		}
	}
	// begin begins a transaction that ends with the test at the latest.
	begin := func(t *testing.T, bundle *testBundle) pgx.Tx {
		t.Helper()
		tx, err := bundle.owner.Begin(t.Context())
		require.NoError(t, err)
		t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
		return tx
	}
	stored := func(t *testing.T, bundle *testBundle) int {
		t.Helper()
		return pgtest.Column[int](t, bundle.owner, "SELECT count(*) FROM idempotency_keys")[0]
	}

	t.Run("DoesItOnceAndThenGivesTheSameBytes", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		answer, replayed, err := once(t, bundle.api, bundle.tenant, request, gives(want))
		require.NoError(t, err)
		require.False(t, replayed)
		require.Equal(t, want, answer)
		for range 3 {
			answer, replayed, err = once(t, bundle.api, bundle.tenant, request, mustNotRun(t))
			require.NoError(t, err)
			require.True(t, replayed)
			require.Equal(t, want, answer)
		}
		require.Equal(t, 1, stored(t, bundle))
	})

	t.Run("RefusesAnyOtherRequest", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		_, _, err := once(t, bundle.api, bundle.tenant, request, gives(want))
		require.NoError(t, err)
		for name, change := range map[string]func(*idempotency.Request){
			"Method": func(r *idempotency.Request) { r.Method = "PUT" },
			"Path":   func(r *idempotency.Request) { r.Path = "/v1/orders/" },
			"Body":   func(r *idempotency.Request) { r.Body = []byte(`{"a":1} `) },
			"NoBody": func(r *idempotency.Request) { r.Body = nil },
		} {
			other := request
			change(&other)
			_, _, err := once(t, bundle.api, bundle.tenant, other, mustNotRun(t))
			require.ErrorIs(t, err, idempotency.ErrKeyReused, name)
		}
	})

	t.Run("TellsKeysApartThatBeginAlike", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		for i := range 3 {
			other := request
			other.Key = strings.Repeat("k", 254) + fmt.Sprint(i)
			_, replayed, err := once(t, bundle.api, bundle.tenant, other, gives(want))
			require.NoError(t, err)
			require.False(t, replayed)
		}
		require.Equal(t, 3, stored(t, bundle))
	})

	t.Run("KeepsTenantsApart", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		_, _, err := once(t, bundle.api, bundle.tenant, request, gives(want))
		require.NoError(t, err)
		other := want
		other.Location = "/v1/orders/2"
		answer, replayed, err := once(t, bundle.api, bundle.stranger, request, gives(other))
		require.NoError(t, err)
		require.False(t, replayed)
		require.Equal(t, other, answer)
	})

	t.Run("KeepsNothingOfWhatFailed", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		outage := errors.New("outage")
		_, _, err := once(t, bundle.api, bundle.tenant, request, func() (idempotency.Answer, error) { return want, outage })
		require.ErrorIs(t, err, outage)
		require.Zero(t, stored(t, bundle))
		_, replayed, err := once(t, bundle.api, bundle.tenant, request, gives(want))
		require.NoError(t, err)
		require.False(t, replayed)
	})

	t.Run("KeepsNothingOfWhatWasRolledBack", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		err := tenants.InTx(t.Context(), bundle.api, bundle.tenant, func(tx pgx.Tx) error {
			_, _, err := idempotency.OnceTx(t.Context(), tx, bundle.tenant, request, gives(want))
			return errors.Join(err, errors.New("later"))
		})
		require.EqualError(t, err, "later")
		require.Zero(t, stored(t, bundle))
	})

	t.Run("WaitsForTheFirstAndGivesItsAnswer", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		const callers = 8
		started, goOn := make(chan struct{}, callers), make(chan struct{})
		done := make(chan bool, callers)
		for range callers {
			go func() {
				_, replayed, err := once(t, bundle.api, bundle.tenant, request, func() (idempotency.Answer, error) {
					started <- struct{}{}
					select {
					case <-goOn:
						return want, nil
					case <-t.Context().Done(): // the test has failed
						return want, t.Context().Err()
					}
				})
				done <- replayed && err == nil
			}()
		}
		<-started
		require.Eventually(t, func() bool {
			return pgtest.Column[int](t, bundle.owner, `
				SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`)[0] > 0
		}, 10*time.Second, 10*time.Millisecond)
		close(goOn)
		replayed := 0
		for range callers {
			if <-done {
				replayed++
			}
		}
		require.Equal(t, callers-1, replayed)
		require.Empty(t, started, "it ran once")
	})

	t.Run("IsTheFirstWhereTheOneBeforeWasRolledBack", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		holder := begin(t, bundle)
		_, _, err := idempotency.OnceTx(t.Context(), holder, bundle.tenant, request, gives(idempotency.Answer{Status: 500}))
		require.NoError(t, err)
		second := make(chan error, 1)
		go func() {
			answer, replayed, err := once(t, bundle.api, bundle.tenant, request, gives(want))
			if replayed || answer.Status != want.Status {
				err = errors.Join(err, fmt.Errorf("replayed %t, status %d", replayed, answer.Status))
			}
			second <- err
		}()
		require.Eventually(t, func() bool {
			return pgtest.Column[int](t, bundle.owner, `
				SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`)[0] > 0
		}, 10*time.Second, 10*time.Millisecond)
		require.NoError(t, holder.Rollback(t.Context()))
		require.NoError(t, <-second)
	})

	t.Run("WaitsNoLongerThanTheLockTimeout", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		holder := begin(t, bundle)
		_, _, err := idempotency.OnceTx(t.Context(), holder, bundle.tenant, request, gives(want))
		require.NoError(t, err)
		_, _, err = once(t, bundle.impatient, bundle.tenant, request, mustNotRun(t))
		require.ErrorIs(t, err, idempotency.ErrInProgress)

		other := request
		other.Key = "another"
		_, _, err = once(t, bundle.impatient, bundle.tenant, other, gives(want))
		require.NoError(t, err, "other keys do not wait")

		require.NoError(t, holder.Commit(t.Context()))
		answer, replayed, err := once(t, bundle.impatient, bundle.tenant, request, mustNotRun(t))
		require.NoError(t, err)
		require.True(t, replayed)
		require.Equal(t, want, answer)
	})

	t.Run("LeavesALockTimeoutOfTheWorkToTheCaller", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		holder := begin(t, bundle)
		_, err := holder.Exec(t.Context(), "LOCK TABLE orders")
		require.NoError(t, err)
		err = tenants.InTx(t.Context(), bundle.impatient, bundle.tenant, func(tx pgx.Tx) error {
			_, _, err := idempotency.OnceTx(t.Context(), tx, bundle.tenant, request, func() (idempotency.Answer, error) {
				_, err := tx.Exec(t.Context(), "SELECT FROM orders")
				return want, err
			})
			return err
		})
		require.True(t, postgres.LockTimedOut(err), err)
		require.NotErrorIs(t, err, idempotency.ErrInProgress)
		require.Zero(t, stored(t, bundle))
	})
}

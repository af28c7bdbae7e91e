package claims_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
)

// Goal: a call to the outside inside a transaction keeps everybody from the rows that the transaction has touched, for
// as long as the other side likes; the same call outside keeps nobody.
// Method: a receiver that answers when it is told to. Meanwhile somebody else updates the same account.
func TestCallInsideATransactionHoldsItsLocks(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name  string
		work  func(ctx context.Context, pool *pgxpool.Pool, call func() error) error
		waits bool
	}{
		{"Inside", func(ctx context.Context, pool *pgxpool.Pool, call func() error) error {
			return postgres.InTx(ctx, pool, func(tx pgx.Tx) error {
				if err := credit(ctx, tx); err != nil {
					return err
				}
				return call()
			})
		}, true},
		{"Outside", func(ctx context.Context, pool *pgxpool.Pool, call func() error) error {
			if err := postgres.InTx(ctx, pool, func(tx pgx.Tx) error { return credit(ctx, tx) }); err != nil {
				return err
			}
			return call()
		}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			called, answer := make(chan struct{}), make(chan struct{})
			receiver := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
				close(called)
				<-answer
			}))
			t.Cleanup(receiver.Close)
			pool := pgtest.New(t).Pool(t, "")
			_, err := pool.Exec(t.Context(), "CREATE TABLE claims_account (id int PRIMARY KEY, balance bigint); INSERT INTO claims_account VALUES (1, 0)")
			require.NoError(t, err)

			first := make(chan error, 1)
			go func() {
				first <- test.work(t.Context(), pool, func() error {
					response, err := http.Get(receiver.URL)
					if err != nil {
						return err
					}
					return response.Body.Close()
				})
			}()
			<-called

			began := time.Now()
			second := make(chan error, 1)
			go func() {
				second <- postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error { return credit(t.Context(), tx) })
			}()
			if test.waits {
				require.Eventually(t, func() bool {
					return pgtest.Column[bool](t, pool, `
						SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database()
						  AND wait_event_type = 'Lock' AND query LIKE 'UPDATE claims_account%')`)[0]
				}, patience, 10*time.Millisecond, "the second does not wait")
				select {
				case err := <-second:
					require.FailNow(t, "the second came through", err)
				case <-time.After(300 * time.Millisecond): // however long: nothing but the answer ends it
				}
				close(answer)
				require.NoError(t, <-first)
				require.NoError(t, <-second)
			} else {
				require.NoError(t, <-second)
				t.Logf("the call has no answer yet")
				close(answer)
				require.NoError(t, <-first)
			}
			t.Logf("the second waited for %s", time.Since(began).Round(time.Millisecond))
			require.Equal(t, []int64{2}, pgtest.Column[int64](t, pool, "SELECT balance FROM claims_account"))
		})
	}
}

func credit(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, "UPDATE claims_account SET balance = balance + 1 WHERE id = 1")
	return err
}

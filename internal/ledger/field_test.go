package ledger_test

import (
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/ledger"
)

// Field report R33: five hundred postings to one revenue account at once, on ten
// connections. None waits for another's balance, for there is no row of it; all
// finish, and who only asks is answered meanwhile.
func TestManyPostingsToOneAccount(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.worker = w.db.Pool(t, "worker", func(config *pgxpool.Config) { config.MaxConns = 10 })
	reader := w.db.Pool(t, "verify", func(config *pgxpool.Config) { config.MaxConns = 1 })

	const postings = 500
	var group sync.WaitGroup
	gate := make(chan struct{})
	errs := make([]error, postings)
	for i := range postings {
		group.Go(func() {
			<-gate
			errs[i] = w.post(t.Context(), w.payment())
		})
	}
	done := make(chan struct{})
	close(gate)
	go func() {
		group.Wait()
		close(done)
	}()
	asked := 0
	for answered := true; answered; {
		var entries int
		require.NoError(t, reader.QueryRow(t.Context(), "SELECT count(*) FROM ledger_entries").Scan(&entries))
		asked++
		select {
		case <-done:
			answered = false
		case <-time.After(time.Millisecond):
		}
	}
	require.Positive(t, asked)
	for _, err := range errs {
		require.NoError(t, err)
	}
	entries, lines, _ := w.written(t)
	require.Equal(t, []int{postings, 2 * postings}, []int{entries, lines})
	w.read(t, func(tx pgx.Tx) {
		trial, err := ledger.TrialBalanceTx(t.Context(), tx, w.tenant)
		require.NoError(t, err)
		var sum int64
		for _, balance := range trial {
			sum += balance.Debit.Int64() - balance.Credit.Int64()
		}
		require.Zero(t, sum)
		require.EqualValues(t, postings*2975, trial[0].Minor.Int64())
	})
}

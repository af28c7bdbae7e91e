package relay_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/onceledger/onceledger/internal/relay"
)

// Field report R28: a topic that the relay may not write to. Nothing counts as
// sent, the relay says why it is stuck, and goes on once it may.
func TestRelayIsDeniedTheTopic(t *testing.T) {
	t.Parallel()

	bench := setup(t)
	denied := bench.broker.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Produce}, Err: kerr.TopicAuthorizationFailed, Count: -1})
	r := bench.start(t)
	ids := bench.commit(t, newOrders(t, 3).events(t, 10)...)
	const says = "the broker refuses a record for topic order.events: Broker: Topic authorization failed"
	require.Contains(t, bench.waitFor(t, relay.StateStuck), says)
	ready, why := r.Ready()
	require.False(t, ready)
	require.Contains(t, why, says)
	require.EqualValues(t, 10, bench.unconfirmed(t), "what was not acknowledged counts as sent")
	require.NoError(t, r.stop())
	require.EqualValues(t, 10, bench.unconfirmed(t), "the end of the relay confirms nothing")

	denied.Remove()
	bench.start(t)
	require.ElementsMatch(t, ids, bench.receive(t, 10))
	require.Eventually(t, func() bool { return bench.unconfirmed(t) == 0 }, 20*time.Second, 10*time.Millisecond)
}

// unconfirmed counts the events that the relay has not on record as delivered.
func (b *bench) unconfirmed(t *testing.T) (n int64) {
	t.Helper()
	require.NoError(t, b.pool.QueryRow(t.Context(),
		"SELECT count(*) FROM outbox_events WHERE tx_id >= coalesce(outbox_confirmed_xmin($1), '0')", b.slot).Scan(&n))
	return n
}

// Field report R30: nothing comes to the outbox while another table writes. The
// slot must let the log go all the same, or it fills the disk.
func TestIdleOutboxLetsTheLogGo(t *testing.T) {
	t.Parallel()

	bench := setup(t)
	bench.start(t, func(config *relay.Config) { config.KeptEvery = 200 * time.Millisecond })
	ids := bench.commit(t, newOrders(t, 1).events(t, 1)...)
	require.Equal(t, ids, bench.receive(t, 1))
	var began string
	require.NoError(t, bench.pool.QueryRow(t.Context(), "SELECT pg_current_wal_insert_lsn()").Scan(&began))
	_, err := bench.pool.Exec(t.Context(), "CREATE TABLE busy (filling text); ALTER TABLE busy ALTER COLUMN filling SET STORAGE EXTERNAL")
	require.NoError(t, err)
	const rounds = 8 // of 16 MB, a segment of the log each
	for range rounds {
		_, err := bench.pool.Exec(t.Context(), "INSERT INTO busy SELECT repeat('x', 1 << 20) FROM generate_series(1, 16)")
		require.NoError(t, err)
	}
	_, err = bench.pool.Exec(t.Context(), "CHECKPOINT") // with which Postgres notes the open transactions, as it does now and then
	require.NoError(t, err)
	// Nobody writes any more. What the slot still keeps is a fraction of what was written since.
	require.Eventually(t, func() bool {
		var written, kept int64
		err := bench.pool.QueryRow(t.Context(), `
			SELECT (pg_current_wal_insert_lsn() - $2::pg_lsn)::bigint, (pg_current_wal_insert_lsn() - restart_lsn)::bigint
			FROM pg_replication_slots WHERE slot_name = $1`, bench.slot, began).Scan(&written, &kept)
		return err == nil && written > rounds<<24 && kept < written/4
	}, time.Minute, 50*time.Millisecond, "the slot keeps the log that others write")
	require.Len(t, bench.records, 1)
}

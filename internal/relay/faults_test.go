package relay_test

import (
	"bufio"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/crash"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/relay"
)

// TestRelayIsKilled kills a relay process with -9 between any two steps, at an
// early and at a late event, and lets another one finish. Nothing may be left
// out, and no order of an aggregate turned round.
func TestRelayIsKilled(t *testing.T) {
	t.Parallel()

	if os.Getenv("RELAY_TEST_URL") != "" {
		relayProcess(t)
		return
	}
	for _, point := range []string{
		crash.RelayDecodedNotProduced + ":1", crash.RelayDecodedNotProduced + ":157",
		crash.RelayProducedNotAcked + ":1", crash.RelayProducedNotAcked + ":157",
		crash.RelayAckedNotConfirmed + ":1", crash.RelayAckedNotConfirmed + ":2",
	} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()

			bench := setup(t)
			orders := newOrders(t, 5)
			ids := bench.commit(t, orders.events(t, 50)...) // are sent from the table

			cmd := exec.Command(os.Args[0], "-test.run=^TestRelayIsKilled$")
			cmd.Env = append(os.Environ(), "RELAY_TEST_URL="+bench.database.URL("relay"),
				"RELAY_TEST_BROKERS="+bench.broker.Brokers(), "RELAY_TEST_SLOT="+bench.slot, "RELAY_TEST_CRASH="+point)
			cmd.Stderr = t.Output()
			stdout, err := cmd.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())
			died := make(chan struct{})
			go func() {
				for lines := bufio.NewScanner(stdout); lines.Scan(); {
					fmt.Fprintln(t.Output(), lines.Text())
				}
				_ = cmd.Wait() // how it ended is looked at below
				close(died)
			}()
			// Write until it dies.
			for dead := false; !dead; {
				select {
				case <-died:
					dead = true
				case <-time.After(2 * time.Millisecond):
					ids = append(ids, bench.commit(t, orders.events(t, 7)...)...)
				}
			}
			status := cmd.ProcessState.Sys().(syscall.WaitStatus)
			require.Equal(t, syscall.SIGKILL, status.Signal(), "it was to die at the crash point")

			ids = append(ids, bench.commit(t, orders.events(t, 7)...)...)
			bench.start(t)
			require.ElementsMatch(t, ids, bench.receive(t, len(ids)))
			t.Logf("%d events, %d records", len(ids), len(bench.records))
		})
	}
}

func relayProcess(t *testing.T) {
	require.NoError(t, crash.Arm(os.Getenv("RELAY_TEST_CRASH")))
	r, err := relay.NewRelay(relay.Config{
		URL:          os.Getenv("RELAY_TEST_URL"),
		Slot:         os.Getenv("RELAY_TEST_SLOT"),
		NewPublisher: newPublisher(os.Getenv("RELAY_TEST_BROKERS")),
		Log:          slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	require.NoError(t, err)
	require.NoError(t, r.Run(t.Context()))
}

// TestRelayLosesItsSlot takes away what the relay goes on from, while events
// are written. It must notice, and send what the new slot will not bring.
func TestRelayLosesItsSlot(t *testing.T) {
	t.Parallel()

	drop := func(b *bench) string { return "SELECT pg_drop_replication_slot('" + b.slot + "')" }
	make := func(b *bench) string {
		return "SELECT pg_create_logical_replication_slot('" + b.slot + "', 'pgoutput')"
	}
	const dropPublication = "DROP PUBLICATION onceledger_outbox"
	const makePublication = "CREATE PUBLICATION onceledger_outbox FOR TABLE outbox_events " +
		"WITH (publish = 'insert', publish_via_partition_root = true)"
	forge := func(set string) func(b *bench) string {
		return func(b *bench) string {
			return "UPDATE relay_position SET " + set + " WHERE slot_name = '" + b.slot + "'"
		}
	}
	plain := func(text string) func(*bench) string { return func(*bench) string { return text } }

	for name, tt := range map[string]struct {
		before, after []func(*bench) string // the events that only the table has
		resendsAll    bool
	}{
		"Dropped":        {before: []func(*bench) string{drop}},
		"MadeAnewBefore": {before: []func(*bench) string{drop, make}},
		"MadeAnewAfter":  {before: []func(*bench) string{drop}, after: []func(*bench) string{make}},
		"Moved": {after: []func(*bench) string{func(b *bench) string {
			return "SELECT pg_replication_slot_advance('" + b.slot + "', pg_current_wal_lsn())"
		}}},
		"PublicationMadeAnewBetween": {before: []func(*bench) string{plain(dropPublication)}, after: []func(*bench) string{plain(makePublication)}},
		"OtherServer":                {after: []func(*bench) string{forge("system_id = '1'")}, resendsAll: true},
		"OtherTimeline":              {after: []func(*bench) string{forge("timeline = 77")}, resendsAll: true},
		"LogGoneBack":                {after: []func(*bench) string{forge("lsn = 'FFFFFFFF/0'")}, resendsAll: true},
		"RecordGone":                 {after: []func(*bench) string{func(b *bench) string { return "DELETE FROM relay_position" }}, resendsAll: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			bench := setup(t)
			orders := newOrders(t, 3)
			r := bench.start(t)
			bench.waitFor(t, relay.StateStreaming)
			old := bench.commit(t, orders.events(t, 20)...)
			bench.receive(t, 20)
			bench.waitForRecord(t)
			require.NoError(t, r.stop())

			for _, statement := range tt.before {
				_, err := bench.pool.Exec(t.Context(), statement(bench))
				require.NoError(t, err)
			}
			hole := bench.commit(t, orders.events(t, 20)...)
			for _, statement := range tt.after {
				_, err := bench.pool.Exec(t.Context(), statement(bench))
				require.NoError(t, err)
			}
			bench.start(t)
			bench.receive(t, 40)
			later := bench.commit(t, orders.events(t, 20)...)
			require.ElementsMatch(t, concat(old, hole, later), bench.receive(t, 60))

			counts := bench.counts(t)
			for _, id := range concat(hole, later) {
				require.Equal(t, 1, counts[id])
			}
			for _, id := range old {
				require.Equal(t, tt.resendsAll, counts[id] == 2, "only what may be missing is sent again")
			}
		})
	}

	t.Run("InvalidatedForItsSize", func(t *testing.T) {
		t.Parallel()

		server := pgtest.Server(t)
		bench := setupOn(t, server.New(t))
		orders := newOrders(t, 3)
		r := bench.start(t)
		bench.waitFor(t, relay.StateStreaming)
		ids := bench.commit(t, orders.events(t, 20)...)
		bench.receive(t, 20)
		require.NoError(t, r.stop())

		ids = append(ids, bench.commit(t, orders.events(t, 20)...)...)
		for _, statement := range []string{
			"ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'",
			"SELECT pg_reload_conf()",
			"SELECT pg_switch_wal() FROM (SELECT pg_logical_emit_message(false, 'fill', repeat('x', 1000000))) AS fill",
			"SELECT pg_switch_wal() FROM (SELECT pg_logical_emit_message(false, 'fill', repeat('x', 1000000))) AS fill",
			"CHECKPOINT",
		} {
			_, err := bench.pool.Exec(t.Context(), statement)
			require.NoError(t, err)
		}
		require.Eventually(t, func() bool {
			var status string
			err := bench.pool.QueryRow(t.Context(), "SELECT wal_status FROM pg_replication_slots WHERE slot_name = $1", bench.slot).Scan(&status)
			return err == nil && status == "lost"
		}, 20*time.Second, 10*time.Millisecond)
		bench.start(t)
		require.ElementsMatch(t, ids, bench.receive(t, 40))
	})
}

// TestRelayLosesThePublication drops it under a relay at work. Postgres leaves
// rows out with a warning; the relay must take it for what it is.
func TestRelayLosesThePublication(t *testing.T) {
	t.Parallel()

	bench := setup(t)
	orders := newOrders(t, 3)
	r, err := relay.NewRelay(bench.config(t))
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() { done <- r.Run(t.Context()) }()
	bench.waitFor(t, relay.StateStreaming)
	ids := bench.commit(t, orders.events(t, 10)...)
	bench.receive(t, 10)

	_, err = bench.pool.Exec(t.Context(), "DROP PUBLICATION onceledger_outbox")
	require.NoError(t, err)
	ids = append(ids, bench.commit(t, orders.events(t, 10)...)...)
	select {
	case err := <-done:
		require.ErrorContains(t, err, "leaves out rows")
	case <-time.After(20 * time.Second):
		require.Fail(t, "the relay goes on")
	}
	require.Contains(t, bench.waitFor(t, relay.StateStuck), "leaves out rows")
	ready, why := r.Ready()
	require.False(t, ready)
	require.Contains(t, why, "leaves out rows")

	_, err = bench.pool.Exec(t.Context(), "CREATE PUBLICATION onceledger_outbox FOR TABLE outbox_events "+
		"WITH (publish = 'insert', publish_via_partition_root = true)")
	require.NoError(t, err)
	bench.start(t)
	require.ElementsMatch(t, ids, bench.receive(t, 20))
}

// R28 of the field reports: rows count as sent when the broker says so, and not
// before.
func TestRelayAndTheBroker(t *testing.T) {
	t.Parallel()

	t.Run("WaitsForOneThatIsAway", func(t *testing.T) {
		t.Parallel()

		bench := setup(t)
		orders := newOrders(t, 3)
		bench.broker.Pause()
		r := bench.start(t, func(c *relay.Config) { c.WindowEvents = 5 })
		require.Contains(t, bench.waitFor(t, relay.StateBrokerAway), "no broker of")
		ready, why := r.Ready()
		require.False(t, ready)
		require.Contains(t, why, "no broker of")

		ids := bench.commit(t, orders.events(t, 40)...)
		bench.broker.Resume()
		bench.waitFor(t, relay.StateStreaming)
		require.ElementsMatch(t, ids, bench.receive(t, 40))

		// And in the middle of work, with more than the window holds.
		bench.broker.Pause()
		ids = append(ids, bench.commit(t, orders.events(t, 40)...)...)
		bench.waitFor(t, relay.StateBrokerAway)
		ids = append(ids, bench.commit(t, orders.events(t, 40)...)...)
		bench.broker.Resume()
		require.ElementsMatch(t, ids, bench.receive(t, 120))
		bench.waitFor(t, relay.StateStreaming)
	})

	t.Run("WaitsForOneThatIsSilent", func(t *testing.T) {
		t.Parallel()

		bench := setup(t)
		orders := newOrders(t, 3)
		bench.start(t)
		bench.waitFor(t, relay.StateStreaming)
		ids := bench.commit(t, orders.events(t, 10)...)
		bench.receive(t, 10)
		bench.broker.Stall()
		ids = append(ids, bench.commit(t, orders.events(t, 10)...)...)
		// Longer than wal_sender_timeout: Postgres hears of the relay all the same.
		var since time.Time
		require.NoError(t, bench.pool.QueryRow(t.Context(), "SELECT backend_start FROM pg_stat_replication WHERE application_name = 'onceledger-relay' AND pid = (SELECT active_pid FROM pg_replication_slots WHERE slot_name = $1)", bench.slot).Scan(&since))
		require.Eventually(t, func() bool {
			var replied time.Time
			err := bench.pool.QueryRow(t.Context(), "SELECT reply_time FROM pg_stat_replication WHERE backend_start = $1", since).Scan(&replied)
			return err == nil && replied.Sub(since) > 7*time.Second
		}, 20*time.Second, 50*time.Millisecond)
		bench.broker.Resume()
		require.ElementsMatch(t, ids, bench.receive(t, 20))
	})

	for name, tt := range map[string]struct {
		spoil, repair func(t *testing.T, b *bench)
		says          string
	}{
		"ThatFindsAMessageTooLarge": {
			spoil:  func(t *testing.T, b *bench) { b.setMaxMessageBytes(t, 2000) },
			repair: func(t *testing.T, b *bench) { b.setMaxMessageBytes(t, 1_000_000) },
			says:   "the broker refuses a record for topic order.events: Broker: Message size too large",
		},
		"ThatHasNoSuchTopic": {
			spoil:  func(t *testing.T, b *bench) { require.NoError(t, b.broker.DeleteTopic(event.OrderEvents)) },
			repair: func(t *testing.T, b *bench) { require.NoError(t, b.broker.CreateTopic(event.OrderEvents, 3, nil)) },
			says:   "the broker refuses a record for topic order.events",
		},
	} {
		t.Run("IsStuckBehindOne"+name, func(t *testing.T) {
			t.Parallel()

			bench := setup(t)
			orders := newOrders(t, 1)
			tt.spoil(t, bench)
			r := bench.start(t)
			bench.waitFor(t, relay.StateStreaming)
			large := orders.event(t)
			large.Payload = incompressible(3000)
			ids := bench.commit(t, large)
			ids = append(ids, bench.commit(t, orders.events(t, 10)...)...)

			require.Contains(t, bench.waitFor(t, relay.StateStuck), tt.says)
			ready, why := r.Ready()
			require.False(t, ready)
			require.Contains(t, why, tt.says)

			tt.repair(t, bench)
			require.Equal(t, ids, bench.receive(t, 11), "nothing may pass the one that is refused")
			bench.waitFor(t, relay.StateStreaming)
		})
	}
}

// TestRelayAndPostgres restarts the server under a relay at work.
func TestRelayAndPostgres(t *testing.T) {
	t.Parallel()

	server := pgtest.Server(t)
	bench := setupOn(t, server.New(t))
	orders := newOrders(t, 3)
	bench.start(t)
	bench.waitFor(t, relay.StateStreaming)
	ids := bench.commit(t, orders.events(t, 20)...)
	bench.receive(t, 20)

	server.Kill()
	require.NoError(t, server.Restart(t.Context()))
	bench.pool.Reset()
	ids = append(ids, bench.commit(t, orders.events(t, 20)...)...)
	require.ElementsMatch(t, ids, bench.receive(t, 40))

	// An orderly stop waits until the relay has confirmed everything, or is gone.
	require.NoError(t, server.Stop(t.Context()))
	require.NoError(t, server.Restart(t.Context()))
	bench.pool.Reset()
	ids = append(ids, bench.commit(t, orders.events(t, 20)...)...)
	require.ElementsMatch(t, ids, bench.receive(t, 60))
}

func incompressible(size int) json.RawMessage {
	random := make([]byte, size/2)
	_, _ = rand.Read(random)
	return json.RawMessage(`{"fill":"` + hex.EncodeToString(random) + `"}`)
}

func concat(lists ...[]uuid.UUID) (all []uuid.UUID) {
	for _, list := range lists {
		all = append(all, list...)
	}
	return all
}

// waitForRecord waits until the relay's record covers every row.
func (b *bench) waitForRecord(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		var covered bool
		err := b.pool.QueryRow(t.Context(), `
			SELECT snapshot_xmin > (SELECT max(tx_id) FROM outbox_events)
			FROM relay_position WHERE slot_name = $1`, b.slot).Scan(&covered)
		return err == nil && covered
	}, 20*time.Second, 10*time.Millisecond)
}

func (b *bench) setMaxMessageBytes(t *testing.T, bytes int) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(b.broker.Brokers()))
	require.NoError(t, err)
	defer client.Close()
	value := fmt.Sprint(bytes)
	responses, err := kadm.NewClient(client).AlterTopicConfigs(t.Context(),
		[]kadm.AlterConfig{{Op: kadm.SetConfig, Name: "max.message.bytes", Value: &value}}, event.OrderEvents)
	require.NoError(t, err)
	for _, response := range responses {
		require.NoError(t, response.Err)
	}
}

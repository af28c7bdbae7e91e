package relay_test

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/outbox"
	"github.com/onceledger/onceledger/internal/postgres"
	"github.com/onceledger/onceledger/internal/relay"
)

var update = flag.Bool("update", false, "write the golden files anew")

func TestRelayPublishes(t *testing.T) {
	t.Parallel()

	t.Run("TheRecordOfTheContract", func(t *testing.T) {
		t.Parallel()

		bench := setup(t)
		_, err := bench.pool.Exec(t.Context(), "SELECT make_day_partition('outbox_events', '2026-01-02')")
		require.NoError(t, err)
		created := event.Event{
			ID:               uuid.MustParse("019b7c9a-6c00-7abc-8def-0123456789ab"),
			TenantID:         uuid.MustParse("019b0000-0000-7000-8000-00000000000a"),
			AggregateType:    event.AggregateOrder,
			AggregateID:      uuid.MustParse("019b0000-0000-7000-8000-00000000000b"),
			AggregateVersion: 1,
			Type:             event.OrderCreated,
			SchemaVersion:    event.SchemaVersion,
			OccurredAt:       time.Date(2026, 1, 2, 3, 4, 5, 600_000_000, time.FixedZone("", 3600)),
			Traceparent:      "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
			Payload:          json.RawMessage(`{"total_amount":1e3, "b":1,"a":1.00,"text":"\u00e9 \"é\" \\ \/ 1\t2"}`),
		}
		paid := created
		paid.ID[15]++
		paid.AggregateVersion++
		paid.Type = event.OrderPaid
		paid.Traceparent = ""
		require.NoError(t, postgres.InTx(t.Context(), bench.pool, func(tx pgx.Tx) error {
			if err := outbox.Append(t.Context(), tx, created); err != nil {
				return err
			}
			return outbox.AppendMany(t.Context(), tx, []event.Event{paid})
		}))

		// Once from the table, once from the log.
		r := bench.start(t)
		bench.receive(t, 2)
		fromTable := printRecords(bench)
		require.NoError(t, r.stop())

		log := setup(t)
		_, err = log.pool.Exec(t.Context(), "SELECT make_day_partition('outbox_events', '2026-01-02')")
		require.NoError(t, err)
		log.start(t)
		log.waitFor(t, relay.StateStreaming)
		log.commit(t, created, paid)
		log.receive(t, 2)
		require.Equal(t, fromTable, printRecords(log))

		golden := filepath.Join("testdata", "records.golden")
		if *update {
			require.NoError(t, os.WriteFile(golden, fromTable, 0o644))
		}
		want, err := os.ReadFile(golden)
		require.NoError(t, err)
		require.Equal(t, string(want), string(fromTable))
	})

	t.Run("TheBytesOfThePayload", func(t *testing.T) {
		t.Parallel()

		bench := setup(t)
		orders := newOrders(t, 1)
		bench.start(t)
		bench.waitFor(t, relay.StateStreaming)
		payloads := []string{
			`{"a":1e3,"a":1.0,"B":-0,"b":12345678901234567890.12345678901234567890}`,
			"{ \"spaces\" :\t[ ] ,\r\n \"z\":1,\"a\":2 }",
			`{"escapes":"\u0041\u00e9\ud83d\ude00\/\\\"\b\f\n\r\t","raw":"é😀"}`,
			`{"zero":"\u0000"}`,
			string(largePayload(event.MaxPayload)),
		}
		for _, payload := range payloads {
			e := orders.event(t)
			e.Payload = json.RawMessage(payload)
			bench.commit(t, e)
		}
		for len(bench.records) < len(payloads) {
			bench.poll(t)
		}
		for i, payload := range payloads {
			require.Equal(t, payload, string(bench.records[i].Value), "payload %d", i)
		}
	})

	t.Run("EachAggregateInOrder", func(t *testing.T) {
		t.Parallel()

		bench := setup(t)
		orders := newOrders(t, 7)
		bench.start(t, func(c *relay.Config) { c.WindowEvents = 10 })
		bench.waitFor(t, relay.StateStreaming)
		for range 20 {
			bench.commit(t, orders.events(t, 50)...)
		}
		require.Len(t, bench.receive(t, 1000), 1000) // looks at the order
	})

	t.Run("NothingThatIsRolledBack", func(t *testing.T) {
		t.Parallel()

		bench := setup(t)
		orders := newOrders(t, 1)
		bench.start(t)
		bench.waitFor(t, relay.StateStreaming)
		tx, err := bench.pool.Begin(t.Context())
		require.NoError(t, err)
		require.NoError(t, outbox.Append(t.Context(), tx, newOrders(t, 1).event(t)))
		require.NoError(t, tx.Rollback(t.Context()))
		ids := bench.commit(t, orders.event(t))
		require.Equal(t, ids, bench.receive(t, 1))
	})

	// A reader that goes by id or time would skip the one that is committed last.
	t.Run("TheEarlierIdThatIsCommittedLast", func(t *testing.T) {
		t.Parallel()

		bench := setup(t)
		slow, quick := newOrders(t, 1).event(t), newOrders(t, 1).event(t)
		bench.start(t)
		bench.waitFor(t, relay.StateStreaming)
		tx, err := bench.pool.Begin(t.Context())
		require.NoError(t, err)
		require.NoError(t, outbox.Append(t.Context(), tx, slow))
		bench.commit(t, quick)
		require.Equal(t, []uuid.UUID{quick.ID}, bench.receive(t, 1))
		require.NoError(t, tx.Commit(t.Context()))
		require.Equal(t, []uuid.UUID{quick.ID, slow.ID}, bench.receive(t, 2))
	})
}

func TestRelayStarts(t *testing.T) {
	t.Parallel()

	t.Run("WithWhatTheTableHolds", func(t *testing.T) {
		t.Parallel()

		bench := setup(t)
		orders := newOrders(t, 5)
		var ids []uuid.UUID
		for range 30 {
			ids = append(ids, bench.commit(t, orders.events(t, 50)...)...)
		}
		bench.start(t, func(c *relay.Config) { c.WindowEvents = 50 })
		bench.receive(t, 1500)
		ids = append(ids, bench.commit(t, orders.event(t))...)
		require.ElementsMatch(t, ids, bench.receive(t, 1501))
		require.Len(t, bench.records, 1501)
	})

	t.Run("WithAFewLargeRows", func(t *testing.T) {
		t.Parallel()

		bench := setup(t)
		orders := newOrders(t, 2)
		var ids []uuid.UUID
		for range 6 {
			e := orders.event(t)
			e.Payload = largePayload(event.MaxPayload)
			ids = append(ids, bench.commit(t, e, orders.event(t))...)
		}
		bench.start(t)
		require.ElementsMatch(t, ids, bench.receive(t, 12))
		require.Len(t, bench.records, 12)
	})

	t.Run("WhereItLeftOff", func(t *testing.T) {
		t.Parallel()

		bench := setup(t)
		orders := newOrders(t, 2)
		r := bench.start(t)
		bench.waitFor(t, relay.StateStreaming)
		bench.commit(t, orders.events(t, 10)...)
		bench.receive(t, 10)
		require.NoError(t, r.stop())
		require.Equal(t, "stopped", bench.status(t))

		bench.commit(t, orders.events(t, 10)...)
		bench.start(t)
		bench.receive(t, 20)
		require.Len(t, bench.records, 20, "after an orderly stop nothing comes twice")
	})

	// What was wrong may have been put right while no relay was there.
	t.Run("StuckOnlyUntilNothingIsLeftToSend", func(t *testing.T) {
		t.Parallel()

		bench := setup(t)
		r := bench.start(t)
		bench.waitFor(t, relay.StateStreaming)
		require.NoError(t, r.stop())
		_, err := bench.pool.Exec(t.Context(), "UPDATE relay_status SET state = 'stuck', detail = 'a reason' WHERE slot_name = $1", bench.slot)
		require.NoError(t, err)
		bench.start(t)
		bench.waitFor(t, relay.StateStreaming)
	})

	setupFaults := map[string]struct{ spoil, says string }{
		"WithoutPublication": {
			"DROP PUBLICATION onceledger_outbox", "no publication onceledger_outbox: run the migrations"},
		"WithAPublicationOfUpdates": {
			"ALTER PUBLICATION onceledger_outbox SET (publish = 'update')", "publication onceledger_outbox is not what the relay needs"},
		"WithAPublicationOfPartitions": {
			"ALTER PUBLICATION onceledger_outbox SET (publish_via_partition_root = false)", "publication onceledger_outbox is not what the relay needs"},
		"WithAPublicationOfSomeRows": {
			"ALTER PUBLICATION onceledger_outbox SET TABLE outbox_events WHERE (id IS NOT NULL)", "publication onceledger_outbox is not what the relay needs"},
		"WithAPublicationOfAnotherTable": {
			"ALTER PUBLICATION onceledger_outbox SET TABLE orders", "publication onceledger_outbox is not what the relay needs"},
		"WithASlotOfAnotherKind": {
			"SELECT pg_create_logical_replication_slot('%s', 'test_decoding')", "is not a pgoutput slot of this database"},
		"WithoutItsTable": {
			"DROP TABLE outbox_events", `relation "outbox_events" does not exist`},
		"AsARoleWithoutReplication": {
			`CREATE ROLE "plain_%s" LOGIN PASSWORD 'plain' IN ROLE onceledger_relay`, "may not read the log: give it REPLICATION (ALTER ROLE), or have the table polled"},
	}
	for name, fault := range setupFaults {
		t.Run("Not"+name, func(t *testing.T) {
			t.Parallel()

			bench := setup(t)
			if fault.spoil != "" {
				_, err := bench.pool.Exec(t.Context(), strings.ReplaceAll(fault.spoil, "%s", bench.slot))
				require.NoError(t, err)
			}
			config := bench.config(t)
			if name == "AsARoleWithoutReplication" {
				role := "plain_" + bench.slot
				t.Cleanup(func() {
					_, err := bench.pool.Exec(context.WithoutCancel(t.Context()), fmt.Sprintf("DROP ROLE %q", role))
					require.NoError(t, err)
				})
				address, err := url.Parse(config.URL)
				require.NoError(t, err)
				address.User = url.UserPassword(role, "plain")
				config.URL = address.String()
			}
			r, err := relay.NewRelay(config)
			require.NoError(t, err)
			require.ErrorContains(t, r.Run(t.Context()), fault.says)
			ready, why := r.Ready()
			require.False(t, ready)
			require.Contains(t, why, fault.says)
		})
	}

	t.Run("NotWithANameThatIsNone", func(t *testing.T) {
		t.Parallel()

		_, err := relay.NewRelay(relay.Config{Slot: "a'b"})
		require.Error(t, err)
	})
}

func TestRelayTakesTurns(t *testing.T) {
	t.Parallel()

	bench := setup(t)
	orders := newOrders(t, 3)
	first := bench.start(t)
	bench.waitFor(t, relay.StateStreaming)
	second := bench.start(t)
	require.Eventually(t, func() bool {
		ready, why := second.Ready()
		return ready && why == "another relay is active"
	}, 10*time.Second, time.Millisecond)

	bench.commit(t, orders.events(t, 10)...)
	bench.receive(t, 10)
	require.NoError(t, first.stop())
	bench.commit(t, orders.events(t, 10)...)
	bench.receive(t, 20)
	require.Len(t, bench.records, 20)
	require.Equal(t, "streaming", bench.status(t))
}

// The relay's own writing moves the log: it must not take that for news.
func TestRelayComesToRest(t *testing.T) {
	t.Parallel()

	bench := setup(t)
	bench.start(t)
	bench.waitFor(t, relay.StateStreaming)
	bench.commit(t, newOrders(t, 1).event(t))
	bench.receive(t, 1)
	bench.waitForRecord(t)
	stored := func() (lsn int64) {
		require.NoError(t, bench.pool.QueryRow(t.Context(), "SELECT lsn - '0/0' FROM relay_position WHERE slot_name = $1", bench.slot).Scan(&lsn))
		return lsn
	}
	// Other tests write to the same log, so that a record may be due meanwhile.
	var last int64
	ticks := func(n int, between func(recorded int64)) {
		var reply, previous time.Time
		for n > 0 {
			require.NoError(t, bench.pool.QueryRow(t.Context(), `
				SELECT reply_time FROM pg_stat_replication
				WHERE pid = (SELECT active_pid FROM pg_replication_slots WHERE slot_name = $1)`, bench.slot).Scan(&reply))
			if !reply.Equal(previous) {
				n--
				previous = reply
				// Others write a little at each tick.
				_, err := bench.pool.Exec(t.Context(), "SELECT pg_logical_emit_message(true, 'x', 'x')")
				require.NoError(t, err)
			}
			between(stored())
		}
	}
	ticks(10, func(recorded int64) { last = recorded })
	ticks(40, func(recorded int64) {
		if recorded != last {
			require.Greater(t, recorded-last, int64(1<<20), "a record that no megabyte of log was the reason for")
			last = recorded
		}
	})

	// A megabyte is worth a record, or the log would be kept for ever.
	_, err := bench.pool.Exec(t.Context(), "SELECT pg_logical_emit_message(true, 'x', repeat('x', 2000000))")
	require.NoError(t, err)
	require.Eventually(t, func() bool { return stored()-last > 1<<20 }, 20*time.Second, 10*time.Millisecond)
}

func TestRelayStopsAtOnce(t *testing.T) {
	t.Parallel()

	for name, during := range map[string]func(t *testing.T, bench *bench){
		"WhenIdle": func(*testing.T, *bench) {},
		"WithABrokerAway": func(t *testing.T, bench *bench) {
			bench.broker.Pause()
			bench.commit(t, newOrders(t, 1).event(t))
			bench.waitFor(t, relay.StateBrokerAway)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			bench := setup(t)
			r := bench.start(t)
			bench.waitFor(t, relay.StateStreaming)
			during(t, bench)
			start := time.Now()
			require.NoError(t, r.stop())
			require.Less(t, time.Since(start), 2*time.Second)
			require.Equal(t, "stopped", bench.status(t))
		})
	}
}

// printRecords shows records byte for byte, sorted by nothing: they are of one
// aggregate.
func printRecords(b *bench) []byte {
	var out bytes.Buffer
	for _, record := range b.records {
		fmt.Fprintf(&out, "topic %s\nkey   %q\n", record.Topic, record.Key)
		for _, header := range record.Headers {
			fmt.Fprintf(&out, "      %s: %q\n", header.Key, header.Value)
		}
		fmt.Fprintf(&out, "value %s\n\n", record.Value)
	}
	return out.Bytes()
}

func largePayload(size int) json.RawMessage {
	const frame = `{"fill":""}`
	return json.RawMessage(`{"fill":"` + strings.Repeat("x", size-len(frame)) + `"}`)
}

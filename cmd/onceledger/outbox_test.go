package main

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/kafkatest"
	"github.com/onceledger/onceledger/internal/outbox"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
)

// write has the events in the outbox, from where no relay takes them.
func (w *replayWorld) write(t *testing.T, events ...event.Event) {
	t.Helper()
	require.NoError(t, postgres.InTx(t.Context(), w.Owner, func(tx pgx.Tx) error {
		return outbox.AppendMany(t.Context(), tx, events)
	}))
}

func (w *replayWorld) missing(t *testing.T) int {
	t.Helper()
	return pgtest.Column[int](t, w.Owner, "SELECT count(*)::int FROM missing_versions")[0]
}

// headers are those of a record, as a map.
func headers(record kafkatest.Record) map[string]string {
	found := make(map[string]string)
	for _, header := range record.Headers {
		found[header.Key] = string(header.Value)
	}
	return found
}

// An event that the relay left out is noticed, sent again from the outbox under
// its id, and applied once. The environment is the process's, so these do not run
// in parallel.
func TestOutboxResend(t *testing.T) {
	t.Run("ClosesTheGapsThatBillingHasNoticed", func(t *testing.T) {
		w := newReplayWorld(t)
		t.Setenv("DATABASE_URL", w.DB.URL("verify"))
		whole, holed, cancelled := &factory.Order{TenantID: w.tenant}, &factory.Order{TenantID: w.tenant}, &factory.Order{TenantID: w.tenant}
		wholes := []event.Event{whole.Created(), whole.Paid()}
		holes := []event.Event{holed.Created(), holed.Paid(), holed.Refunded(100), holed.Refunded(100)}
		cancels := []event.Event{cancelled.Created(), cancelled.Cancelled()}
		w.write(t, append(append(wholes, holes...), cancels...)...)
		w.publish(t, append(wholes, holes[0], holes[1], holes[3], cancels[1])...)
		w.bill(t)
		require.Equal(t, 2, w.missing(t))

		stdout, stderr, err := call(t, "outbox", "resend", "--gaps", "--dry-run")
		require.NoError(t, err, stderr)
		require.Contains(t, stdout, "would send "+holes[2].ID.String()+": OrderRefunded version 3 of order "+holed.State.OrderID.String())
		require.Contains(t, stdout, "2 events would be sent")
		require.Len(t, w.broker.Records(t, event.OrderEvents), 6)

		stdout, stderr, err = call(t, "outbox", "resend", "--gaps")
		require.NoError(t, err, stderr)
		require.Contains(t, stdout, "2 of 2 events sent")
		require.Len(t, w.broker.Records(t, event.OrderEvents), 8)
		w.bill(t)
		require.Zero(t, w.missing(t))
		require.Len(t, w.Applied(t), 8)
		require.Empty(t, w.DeadLetters(t))
		require.Equal(t, 2, pgtest.Column[int](t, w.Owner, "SELECT count(*)::int FROM credit_notes")[0])

		stdout, _, err = call(t, "outbox", "resend", "--gaps")
		require.NoError(t, err)
		require.Contains(t, stdout, "0 of 0 events sent")
		require.Len(t, w.broker.Records(t, event.OrderEvents), 8)
	})

	t.Run("SendsTheRecordThatTheRelaySends", func(t *testing.T) {
		w := newReplayWorld(t)
		order := &factory.Order{TenantID: w.tenant}
		created := order.Created()
		created.Traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
		w.write(t, created)
		w.publish(t, created)
		w.bill(t)
		before := w.Contents(t)
		_, stderr, err := call(t, "outbox", "resend", "--event", created.ID.String())
		require.NoError(t, err, stderr)
		records := w.broker.Records(t, event.OrderEvents)
		require.Len(t, records, 2)
		require.Equal(t, records[0].Partition, records[1].Partition)
		require.Equal(t, string(records[0].Key), string(records[1].Key))
		require.Equal(t, string(records[0].Value), string(records[1].Value))
		require.Equal(t, headers(records[0]), headers(records[1]))
		w.bill(t)
		require.Equal(t, before, w.Contents(t), "who has it drops it")
	})

	t.Run("NamesWhatTheOutboxHoldsNoMore", func(t *testing.T) {
		w := newReplayWorld(t)
		t.Setenv("DATABASE_URL", w.DB.URL("verify"))
		order := &factory.Order{TenantID: w.tenant}
		events := []event.Event{order.Created(), order.Paid(), order.Refunded(1), order.Refunded(1)}
		w.write(t, events[1], events[3])
		stdout, stderr, err := call(t, "outbox", "resend", "--order", order.State.OrderID.String())
		require.ErrorIs(t, err, exit(1))
		require.Contains(t, stdout, "2 of 2 events sent")
		for _, version := range []string{"1", "3"} {
			require.Contains(t, stderr, "version "+version+" of order "+order.State.OrderID.String()+" is no longer in the outbox")
		}
		w.bill(t)
		require.Equal(t, 2, w.missing(t))
		stdout, stderr, err = call(t, "outbox", "resend", "--gaps")
		require.ErrorIs(t, err, exit(1))
		require.Contains(t, stdout, "0 of 0 events sent")
		require.Contains(t, stderr, "version 3 of order "+order.State.OrderID.String()+" is no longer in the outbox")

		stdout, stderr, err = call(t, "outbox", "list", "--order", order.State.OrderID.String())
		require.NoError(t, err)
		require.Contains(t, stdout, events[1].ID.String()+"  order.events   version 2    OrderPaid")
		require.Contains(t, stderr, "version 3")
	})

	t.Run("FindsWhatLeftNoTrace", func(t *testing.T) {
		w := newReplayWorld(t)
		t.Setenv("DATABASE_URL", w.DB.URL("verify"))
		past := time.Now().Add(-5 * time.Minute)
		order := &factory.Order{TenantID: w.tenant, Now: func() time.Time { return past }}
		created, paid := order.Created(), order.Paid() // the last version: no later one shows that it is missing
		w.write(t, created, paid)
		w.publish(t, created)
		stdout, stderr, err := call(t, "outbox", "resend", "--unapplied")
		require.ErrorContains(t, err, "billing is 1 records behind", stderr)
		require.Empty(t, stdout)
		w.bill(t)
		require.Zero(t, w.missing(t))
		stdout, _, err = call(t, "outbox", "resend", "--unapplied")
		require.NoError(t, err)
		require.Contains(t, stdout, "0 of 0 events sent", "the relay is not known to have delivered it")

		w.Exec(t, `INSERT INTO relay_position (slot_name, system_id, timeline, publication_oid, lsn, snapshot_xmin)
			VALUES ('onceledger_outbox', '', 1, 0, '0/0', pg_snapshot_xmax(pg_current_snapshot()))`)
		stdout, stderr, err = call(t, "outbox", "resend", "--unapplied")
		require.NoError(t, err, stderr)
		require.Contains(t, stdout, "sent "+paid.ID.String())
		require.Contains(t, stdout, "1 of 1 events sent")
		w.bill(t)
		require.Equal(t, []uuid.UUID{paid.ID}, pgtest.Column[uuid.UUID](t, w.Owner, "SELECT id FROM invoices"))
	})

	t.Run("FindsWhatAResolvedLetterSaysWasApplied", func(t *testing.T) {
		w := newReplayWorld(t)
		past := time.Now().Add(-5 * time.Minute)
		order := &factory.Order{TenantID: w.tenant, Now: func() time.Time { return past }}
		created, paid, refunded := order.Created(), order.Paid(), order.Refunded(1)
		w.write(t, created, paid, refunded)
		w.Exec(t, `INSERT INTO relay_position (slot_name, system_id, timeline, publication_oid, lsn, snapshot_xmin)
			VALUES ('onceledger_outbox', '', 1, 0, '0/0', pg_snapshot_xmax(pg_current_snapshot()))`)
		w.publish(t, created, refunded, paid)
		w.bill(t)
		_, stderr, err := call(t, "dlq", "retry", "--order", order.State.OrderID.String(), "--yes")
		require.NoError(t, err, stderr)
		t.Setenv("DATABASE_URL", w.DB.URL("verify"))
		stdout, stderr, err := call(t, "outbox", "resend", "--unapplied")
		require.NoError(t, err, stderr)
		require.Contains(t, stdout, "0 of 0 events sent")
		w.losePayment(t, order)
		stdout, stderr, err = call(t, "outbox", "resend", "--unapplied")
		require.NoError(t, err, stderr)
		require.Contains(t, stdout, "sent "+paid.ID.String())
		require.Contains(t, stdout, "1 of 1 events sent")
	})

	t.Run("NamesWhatWasNeverWritten", func(t *testing.T) {
		w := newReplayWorld(t)
		t.Setenv("DATABASE_URL", w.DB.URL("verify"))
		order := &factory.Order{TenantID: w.tenant}
		events := []event.Event{order.Created(), order.Paid()}
		w.write(t, events...)
		order.State.Version = 4
		w.publish(t, append(events, order.Refunded(1))...) // forged
		w.bill(t)
		require.Equal(t, 2, w.missing(t))
		stdout, stderr, err := call(t, "outbox", "resend", "--gaps")
		require.ErrorIs(t, err, exit(1))
		require.Contains(t, stdout, "0 of 0 events sent")
		require.Contains(t, stderr, "version 4 of order "+order.State.OrderID.String()+" was never written")
		require.NotContains(t, stderr, "OUTBOX_RETENTION")
	})

	t.Run("SaysWhatWaitsForIt", func(t *testing.T) {
		w := newReplayWorld(t)
		t.Setenv("DATABASE_URL", w.DB.URL("verify"))
		order := &factory.Order{TenantID: w.tenant}
		created, paid, refunded := order.Created(), order.Paid(), order.Refunded(1)
		w.write(t, created, paid, refunded)
		w.publish(t, created, refunded)
		w.bill(t)
		require.Len(t, w.DeadLetters(t), 1, "a refund cannot do without its payment")
		stdout, stderr, err := call(t, "outbox", "resend", "--gaps")
		require.NoError(t, err, stderr)
		require.Contains(t, stdout, "sent "+paid.ID.String())
		require.Contains(t, stdout, "onceledger dlq retry --order "+order.State.OrderID.String())
	})

	t.Run("NamesWhatIsWrongWithItsInput", func(t *testing.T) {
		w := newReplayWorld(t)
		order := &factory.Order{TenantID: w.tenant}
		w.write(t, order.Created())
		id := uuid.New().String()
		for want, args := range map[string][]string{
			"at least one of the flags":               {},
			"if any flags in the group":               {"--gaps", "--order", id},
			"--order is \"order-1\"":                  {"--order", "order-1"},
			"holds no event of order " + id:           {"--order", id},
			"event " + id + " is not in the outbox":   {"--event", id},
			"no broker of 127.0.0.1:1 answers":        {"--order", order.State.OrderID.String()},
			"unknown flag":                            {"--gap"},
			"--event is \"" + id[:35] + "\": want an": {"--event", id[:35]},
		} {
			t.Setenv("KAFKA_BROKERS", "127.0.0.1:1")
			_, _, err := call(t, append([]string{"outbox", "resend"}, args...)...)
			require.ErrorContains(t, err, want)
			require.Equal(t, 1, exitCode(err))
		}
		t.Setenv("KAFKA_BROKERS", "")
		_, _, err := call(t, "outbox", "resend", "--order", order.State.OrderID.String())
		require.ErrorContains(t, err, "KAFKA_BROKERS is not set")
	})
}

package main

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/inbox/inboxtest"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/kafkatest"
	"github.com/onceledger/onceledger/internal/pgtest"
)

// replayWorld is a database, brokers with order.events, and billing between them,
// as the commands find them by the environment.
type replayWorld struct {
	*inboxtest.Consumer
	broker *kafkatest.Broker
	tenant uuid.UUID
}

func newReplayWorld(t *testing.T) *replayWorld {
	t.Helper()
	database := pgtest.New(t)
	broker := kafkatest.New(t)
	for _, topic := range []string{event.OrderEvents, event.BillingEvents} {
		require.NoError(t, broker.CreateTopic(topic, 3, nil))
	}
	w := &replayWorld{Consumer: inboxtest.On(t, database, billing.Handler{Now: time.Now}), broker: broker}
	w.tenant = w.Tenant(t)
	for name, value := range map[string]string{
		"DATABASE_URL": database.URL("worker"), "RELAY_DATABASE_URL": database.URL("relay"), "KAFKA_BROKERS": broker.Brokers(),
		"ONCELEDGER_HOME": t.TempDir(), "RELAY_SLOT": "", "OUTBOX_RETENTION": "", "DEDUPE_WINDOW": "", "REPLAY_WINDOW": "",
	} {
		t.Setenv(name, value)
	}
	return w
}

// publish puts the events on the topic, as a relay does.
func (w *replayWorld) publish(t *testing.T, events ...event.Event) {
	t.Helper()
	delivered := make(chan error, len(events))
	producer, err := kafka.NewProducer(kafka.ProducerConfig{
		Brokers: w.broker.Brokers(), Log: slog.New(slog.DiscardHandler),
		Delivered: func(_ uint64, err error) { delivered <- err }, Reachable: func(error) {},
	})
	require.NoError(t, err)
	defer producer.Close()
	for i, e := range events {
		require.NoError(t, producer.Publish(e.Record(), uint64(i)))
		require.NoError(t, <-delivered)
	}
}

// startBilling runs a worker's billing until stop.
func (w *replayWorld) startBilling(t *testing.T, instance string) (stop func()) {
	t.Helper()
	consumer, err := kafka.NewConsumer(kafka.ConsumerConfig{
		Brokers: w.broker.Brokers(), Group: billing.Consumer, InstanceID: instance, ClientID: "onceledger-billing",
		Topics: []string{event.OrderEvents}, SessionTimeout: time.Second, Log: slog.New(slog.DiscardHandler),
	})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- consumer.Run(ctx, w.Process) }()
	stopped := false
	stop = func() {
		if !stopped {
			stopped = true
			cancel()
			require.NoError(t, <-ended)
		}
	}
	t.Cleanup(stop)
	return stop
}

// bill has billing read all there is.
func (w *replayWorld) bill(t *testing.T) {
	t.Helper()
	stop := w.startBilling(t, "")
	w.waitRead(t)
	stop()
}

func (w *replayWorld) waitRead(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		behind, err := kafka.Behind(t.Context(), w.broker.Brokers(), billing.Consumer, event.OrderEvents)
		return err == nil && behind == 0
	}, 30*time.Second, 20*time.Millisecond, "billing does not come to the end")
}

func (w *replayWorld) committed(t *testing.T) map[int32]int64 {
	t.Helper()
	committed, _, err := kafka.GroupLag(t.Context(), w.broker.Brokers(), billing.Consumer, event.OrderEvents)
	require.NoError(t, err)
	return committed
}

func (w *replayWorld) orders(t *testing.T, n int) (orders []*factory.Order) {
	t.Helper()
	for range n {
		order := &factory.Order{TenantID: w.tenant}
		w.publish(t, order.Created(), order.Paid(), order.Refunded(100))
		orders = append(orders, order)
	}
	return orders
}

// callUntil is call, ended as by Ctrl-C once it has said something.
func callUntil(t *testing.T, said string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out, errOut syncBuffer
	cmd := newRootCommand()
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	cmd.SetErr(&errOut)
	ended := make(chan error, 1)
	go func() { ended <- cmd.ExecuteContext(ctx) }()
	require.Eventually(t, func() bool { return strings.Contains(errOut.String(), said) }, 30*time.Second, time.Millisecond)
	cancel()
	err = <-ended
	return out.String(), errOut.String(), err
}

// losePayment takes away all that a paid order's event has caused, and the mark of
// it, as no login of the service could.
func (w *replayWorld) losePayment(t *testing.T, order *factory.Order) (eventID uuid.UUID) {
	t.Helper()
	tx, err := w.Owner.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, tx.QueryRow(t.Context(), "SELECT id FROM invoices WHERE order_id = $1", order.State.OrderID).Scan(&eventID))
	for _, statement := range []string{
		"SET LOCAL session_replication_role = replica", // no trigger, no foreign key
		fmt.Sprintf("DELETE FROM invoice_lines WHERE invoice_id = '%s'", eventID),
		fmt.Sprintf("DELETE FROM invoices WHERE id = '%s'", eventID),
		fmt.Sprintf("DELETE FROM ledger_lines WHERE event_id = '%s'", eventID),
		fmt.Sprintf("DELETE FROM ledger_entries WHERE event_id = '%s'", eventID),
		fmt.Sprintf("DELETE FROM outbox_events WHERE id::text IN (SELECT id::text FROM outbox_events WHERE aggregate_type = 'billing' AND event_type = 'InvoiceIssued' AND aggregate_id = '%s')", order.State.OrderID),
		fmt.Sprintf("DELETE FROM processed_events WHERE event_id = '%s'", eventID),
	} {
		_, err := tx.Exec(t.Context(), statement)
		require.NoError(t, err, statement)
	}
	require.NoError(t, tx.Commit(t.Context()))
	return eventID
}

// A replay of what was applied changes nothing, and one of what was not finds it.
// The environment is the process's, so these do not run in parallel.
func TestReplay(t *testing.T) {
	t.Run("OfTheWholeTopicChangesNothing", func(t *testing.T) {
		w := newReplayWorld(t)
		w.orders(t, 15)
		w.bill(t)
		poison := kafkatest.Record{Key: []byte("no id"), Value: []byte("this-is-not-json {{{")}
		w.broker.Produce(t, event.OrderEvents, poison, kafkatest.Record{Key: []byte("gone"), Value: nil})
		w.bill(t)
		before, committed := w.Contents(t), w.committed(t)

		stdout, stderr, err := call(t, "replay", "--from", "earliest", "--group", "billing", "--yes", "--rate", "0")
		require.NoError(t, err, stderr)
		require.Contains(t, stdout, "Unchanged: everything had been applied, once.")
		require.Regexp(t, `duplicate +45\n`, stdout)
		require.Regexp(t, `undecodable +1\n`, stdout)
		require.Regexp(t, `no event +1\n`, stdout)
		require.Regexp(t, `invoices +15 +15\n`, stdout)
		require.Equal(t, before, w.Contents(t))
		require.Equal(t, committed, w.committed(t))

		// Once more, of some of it, at a rate.
		stdout, stderr, err = call(t, "replay", "--from", "1h", "--to", "5", "--group", "billing", "--yes", "--rate", "1000")
		require.NoError(t, err, stderr)
		require.Contains(t, stdout, "15 records replayed")
		require.Equal(t, before, w.Contents(t))
	})

	t.Run("FindsWhatWasLost", func(t *testing.T) {
		w := newReplayWorld(t)
		orders := w.orders(t, 5)
		w.bill(t)
		lost := w.losePayment(t, orders[3])
		before := w.Contents(t)

		stdout, _, err := call(t, "replay", "--from", "earliest", "--group", "billing", "--dry-run", "--rate", "0")
		require.ErrorIs(t, err, exitReplayFound)
		require.Contains(t, stdout, "1 EVENTS ARE MISSING")
		require.Contains(t, stdout, "missing: event "+lost.String())
		require.Equal(t, before, w.Contents(t))

		stdout, stderr, err := call(t, "replay", "--from", "earliest", "--group", "billing", "--yes", "--rate", "0")
		require.ErrorIs(t, err, exitReplayFound)
		require.Contains(t, stderr, "MISSING: event "+lost.String())
		require.Contains(t, stdout, "1 EVENTS WERE MISSING: 1 are applied now, 0 became dead letters")
		require.Regexp(t, `invoices +4 +5  \*\n`, stdout)
		require.Regexp(t, `credit notes +5 +5\n`, stdout)
		require.Equal(t, []uuid.UUID{lost}, pgtest.Column[uuid.UUID](t, w.Owner, "SELECT id FROM invoices WHERE order_id = $1", orders[3].State.OrderID))

		stdout, _, err = call(t, "replay", "--from", "earliest", "--group", "billing", "--yes", "--rate", "0")
		require.NoError(t, err)
		require.Contains(t, stdout, "Unchanged")
	})

	t.Run("IsRefusedWhileTheGroupRuns", func(t *testing.T) {
		w := newReplayWorld(t)
		w.orders(t, 2)
		stop := w.startBilling(t, "worker-7")
		w.waitRead(t)
		before := w.Contents(t)
		stdout, stderr, err := call(t, "replay", "--from", "earliest", "--group", "billing", "--yes", "--wait", "0")
		require.ErrorIs(t, err, exitReplayNotRun)
		require.Empty(t, stdout)
		require.Contains(t, stderr, "worker-7 of onceledger-billing")
		require.Contains(t, stderr, "order.events[0 1 2]")
		require.Contains(t, stderr, "WORKER_ROLES")
		require.Equal(t, before, w.Contents(t))

		_, _, err = call(t, "replay", "--from", "earliest", "--group", "billing", "--dry-run")
		require.NoError(t, err, "to look is harmless")

		// A static member stays for its session timeout after it has ended.
		stop()
		stdout, stderr, err = call(t, "replay", "--from", "earliest", "--group", "billing", "--yes", "--wait", "20s")
		require.NoError(t, err, stderr)
		require.Contains(t, stdout, "Unchanged")
	})

	t.Run("EndedInTheMiddleSaysSoAndIsRunAgain", func(t *testing.T) {
		w := newReplayWorld(t)
		w.orders(t, 10)
		w.bill(t)
		before := w.Contents(t)
		stdout, stderr, err := callUntil(t, " of 30 records (", "replay", "--from", "earliest", "--group", "billing", "--yes", "--rate", "5")
		require.ErrorIs(t, err, exitReplayNotRun)
		require.Contains(t, stderr, "Stopped in the middle")
		require.Regexp(t, `(?m)^[0-9]+ records replayed$`, stdout)
		require.NotContains(t, stdout, "30 records replayed")
		require.Equal(t, before, w.Contents(t))
		stdout, _, err = call(t, "replay", "--from", "earliest", "--group", "billing", "--yes", "--rate", "0")
		require.NoError(t, err)
		require.Contains(t, stdout, "30 records replayed")
	})

	t.Run("RefusesWhatIsTooOld", func(t *testing.T) {
		w := newReplayWorld(t)
		w.orders(t, 1)
		w.bill(t)
		// The marks of today's events are gone, as after too short a DEDUPE_WINDOW.
		w.Exec(t, "SELECT make_day_partition('processed_events', (now() AT TIME ZONE 'UTC')::date + 1)")
		for _, day := range pgtest.Column[time.Time](t, w.Owner, "SELECT d FROM partition_days('processed_events') AS d WHERE d <= (now() AT TIME ZONE 'UTC')::date") {
			w.Exec(t, "DROP TABLE processed_events_"+day.Format("20060102"))
		}
		before := w.Contents(t)
		stdout, stderr, err := call(t, "replay", "--from", "earliest", "--group", "billing", "--yes")
		require.ErrorIs(t, err, exitReplayNotRun)
		require.Empty(t, stdout)
		require.Contains(t, stderr, "too old to be told from a repeat")
		require.Contains(t, stderr, "DEDUPE_WINDOW 720h")
		require.Contains(t, stderr, "the earliest is --from ")
		require.Equal(t, before, w.Contents(t))
	})

	t.Run("ChecksTheRetentionContract", func(t *testing.T) {
		w := newReplayWorld(t)
		w.orders(t, 1)
		w.bill(t)
		t.Setenv("DEDUPE_WINDOW", "72h")
		_, stderr, err := call(t, "replay", "--from", "earliest", "--group", "billing", "--yes")
		require.ErrorIs(t, err, exitReplayNotRun)
		require.Contains(t, stderr, "DEDUPE_WINDOW 72h must be longer than OUTBOX_RETENTION 72h")
		t.Setenv("DEDUPE_WINDOW", "")
		t.Setenv("REPLAY_WINDOW", "0")
		_, stderr, err = call(t, "replay", "--from", "earliest", "--group", "billing", "--yes")
		require.ErrorIs(t, err, exitReplayNotRun)
		require.Contains(t, stderr, "REPLAY_WINDOW is 0s")
	})

	t.Run("NamesWhatIsWrongWithItsInput", func(t *testing.T) {
		w := newReplayWorld(t)
		args := []string{"replay", "--group", "billing", "--yes", "--from"}
		_, stderr, err := call(t, append(args, "earliest")...)
		require.ErrorIs(t, err, exitReplayNotRun)
		require.Contains(t, stderr, "has committed nothing")
		w.orders(t, 2)
		w.bill(t)
		for from, want := range map[string]string{
			"yesterday":            "is no place in a topic",
			"-5":                   "is no place in a topic",
			"100":                  "offset 100 is out of range: partition 0",
			"0:99999":              "offset 99999 is out of range",
			"9:0":                  "there is no partition 9: the topic has 3",
			"2099-01-01T00:00:00Z": "there is nothing to replay",
			"0:0,0:1":              "names partition 0 twice",
		} {
			_, stderr, err := call(t, append(args, from)...)
			require.ErrorIs(t, err, exitReplayNotRun, from)
			require.Contains(t, stderr, want, from)
		}
		for want, args := range map[string][]string{
			"--group is not set":             {"--from", "earliest"},
			"no marks of single events":      {"--from", "earliest", "--group", "balances"},
			"there is no such consumer here": {"--from", "earliest", "--group", "biling"},
			"--from is not set":              {"--group", "billing"},
			"--rate is -1":                   {"--from", "earliest", "--group", "billing", "--rate", "-1"},
			"nobody is there to be asked":    {"--from", "earliest", "--group", "billing"},
			"--stop: no 'onceledger up'":     {"--from", "earliest", "--group", "billing", "--yes", "--stop"},
			"unknown flag":                   {"--form", "earliest"},
		} {
			_, stderr, err := call(t, append([]string{"replay"}, args...)...)
			require.ErrorIs(t, err, exitReplayNotRun, want)
			require.Contains(t, stderr, want)
		}
		t.Setenv("KAFKA_BROKERS", "127.0.0.1:1")
		_, stderr, err = call(t, append(args, "earliest")...)
		require.ErrorIs(t, err, exitReplayNotRun)
		require.Contains(t, stderr, "127.0.0.1:1")
	})
}

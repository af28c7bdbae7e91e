package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/inbox/inboxtest"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/kafkatest"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
	"github.com/onceledger/onceledger/internal/supervisor"
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
	require.NoError(t, w.Owner.QueryRow(t.Context(), "SELECT id FROM invoices WHERE order_id = $1", order.State.OrderID).Scan(&eventID))
	w.spoil(t,
		fmt.Sprintf("DELETE FROM invoice_lines WHERE invoice_id = '%s'", eventID),
		fmt.Sprintf("DELETE FROM invoices WHERE id = '%s'", eventID),
		fmt.Sprintf("DELETE FROM ledger_lines WHERE event_id = '%s'", eventID),
		fmt.Sprintf("DELETE FROM ledger_entries WHERE event_id = '%s'", eventID),
		fmt.Sprintf("DELETE FROM outbox_events WHERE id::text IN (SELECT id::text FROM outbox_events WHERE aggregate_type = 'billing' AND event_type = 'InvoiceIssued' AND aggregate_id = '%s')", order.State.OrderID),
		fmt.Sprintf("DELETE FROM processed_events WHERE event_id = '%s'", eventID),
	)
	return eventID
}

// spoil runs statements in one transaction that no trigger and no foreign key
// refuses.
func (w *replayWorld) spoil(t *testing.T, statements ...string) {
	t.Helper()
	require.NoError(t, postgres.InTx(t.Context(), w.Owner, func(tx pgx.Tx) error {
		for _, statement := range append([]string{"SET LOCAL session_replication_role = replica"}, statements...) {
			if _, err := tx.Exec(t.Context(), statement); err != nil {
				return fmt.Errorf("%s: %w", statement, err)
			}
		}
		return nil
	}))
}

// account is what billing has made of the events.
func (w *replayWorld) account(t *testing.T) []string {
	t.Helper()
	return pgtest.Column[string](t, w.Owner, `
		SELECT concat_ws(' ', 'invoice', id, order_id, total_minor) FROM invoices
		UNION ALL SELECT concat_ws(' ', 'credit note', id, order_id) FROM credit_notes
		UNION ALL SELECT concat_ws(' ', 'entry', event_id, order_id) FROM ledger_entries
		UNION ALL SELECT concat_ws(' ', 'mark', event_id) FROM processed_events
		ORDER BY 1`)
}

// resolvedOrder is an order whose payment was a dead letter, and was then applied.
func (w *replayWorld) resolvedOrder(t *testing.T) *factory.Order {
	t.Helper()
	order := &factory.Order{TenantID: w.tenant}
	created, paid, refunded := order.Created(), order.Paid(), order.Refunded(1)
	w.write(t, created, paid, refunded)
	w.publish(t, created, refunded, paid)
	w.bill(t)
	require.Len(t, w.DeadLetters(t), 2)
	_, stderr, err := call(t, "dlq", "retry", "--order", order.State.OrderID.String(), "--yes")
	require.NoError(t, err, stderr)
	require.Equal(t, []string{"resolved", "resolved"}, pgtest.Column[string](t, w.Owner, "SELECT state FROM dead_letters"))
	return order
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

	t.Run("FindsWhatWasAppliedFromADeadLetterAndLost", func(t *testing.T) {
		w := newReplayWorld(t)
		order := w.resolvedOrder(t)
		lost := w.losePayment(t, order)

		stdout, _, err := call(t, "replay", "--from", "earliest", "--group", "billing", "--dry-run", "--rate", "0")
		require.ErrorIs(t, err, exitReplayFound)
		require.Contains(t, stdout, "1 EVENTS ARE MISSING")
		require.Contains(t, stdout, "missing: event "+lost.String())

		stdout, _, err = call(t, "replay", "--from", "earliest", "--group", "billing", "--yes", "--rate", "0")
		require.ErrorIs(t, err, exitReplayFound)
		require.Contains(t, stdout, "1 EVENTS WERE MISSING: 1 are applied now, 0 became dead letters")
		require.Contains(t, stdout, "applied: event "+lost.String())
		require.Equal(t, []uuid.UUID{lost}, pgtest.Column[uuid.UUID](t, w.Owner, "SELECT id FROM invoices"))

		stdout, _, err = call(t, "replay", "--from", "earliest", "--group", "billing", "--yes", "--rate", "0")
		require.NoError(t, err)
		require.Contains(t, stdout, "Unchanged")
	})

	t.Run("NamesWhatAClosedLetterKeepsMissing", func(t *testing.T) {
		w := newReplayWorld(t)
		order := w.resolvedOrder(t)
		unknown := order.Refunded(1)
		unknown.SchemaVersion = 99
		w.publish(t, unknown)
		w.bill(t)
		lost := w.losePayment(t, order)
		before := w.Contents(t)

		stdout, _, err := call(t, "replay", "--from", "earliest", "--group", "billing", "--dry-run", "--rate", "0")
		require.ErrorIs(t, err, exitReplayFound)
		require.Contains(t, stdout, "missing, and held: event "+lost.String())
		require.Regexp(t, `dead letter before +1\n`, stdout)
		stdout, _, err = call(t, "replay", "--from", "earliest", "--group", "billing", "--yes", "--rate", "0")
		require.ErrorIs(t, err, exitReplayFound)
		require.Contains(t, stdout, "still missing: event "+lost.String())
		require.Contains(t, stdout, "1 cannot be applied")
		require.Equal(t, before, w.Contents(t))
	})

	t.Run("FindsLostDeadLetters", func(t *testing.T) {
		w := newReplayWorld(t)
		orders := w.orders(t, 2)
		reused, early := orders[0].Refunded(1), orders[1].Refunded(1)
		w.bill(t)
		reused.ID = w.Applied(t)[0]
		early.SchemaVersion = 99
		poison := kafkatest.Record{Key: []byte("no id"), Value: []byte("this-is-not-json {{{")}
		w.publish(t, reused, early)
		w.broker.Produce(t, event.OrderEvents, poison)
		w.publish(t, orders[1].Refunded(1)) // waits behind the one before it
		w.bill(t)
		require.Len(t, w.DeadLetters(t), 4)
		stdout, _, err := call(t, "replay", "--from", "earliest", "--group", "billing", "--dry-run", "--rate", "0")
		require.NoError(t, err, stdout)
		require.Contains(t, stdout, "Nothing is missing")
		w.spoil(t, "DELETE FROM dead_letters")

		stdout, _, err = call(t, "replay", "--from", "earliest", "--group", "billing", "--dry-run", "--rate", "0")
		require.ErrorIs(t, err, exitReplayFound)
		require.Contains(t, stdout, "4 EVENTS ARE MISSING")
		require.Contains(t, stdout, "and store 4 anew as dead letters")
		require.Contains(t, stdout, "missing dead letter: a record that cannot be read, at partition")
		require.Contains(t, stdout, "missing dead letter: event "+reused.ID.String())
		require.Empty(t, w.DeadLetters(t))

		stdout, stderr, err := call(t, "replay", "--from", "earliest", "--group", "billing", "--yes", "--rate", "0")
		require.ErrorIs(t, err, exitReplayFound)
		require.Contains(t, stderr, "MISSING: the record at partition")
		require.Contains(t, stdout, "4 EVENTS WERE MISSING: 0 are applied now, 4 became dead letters")
		require.Len(t, w.DeadLetters(t), 4)

		letter := pgtest.Column[uuid.UUID](t, w.Owner, "SELECT id FROM dead_letters WHERE class = 'undecodable'")[0]
		_, stderr, err = call(t, "dlq", "discard", letter.String(), "--reason", "no event", "--yes")
		require.NoError(t, err, stderr)
		stdout, _, err = call(t, "replay", "--from", "earliest", "--group", "billing", "--yes", "--rate", "0")
		require.NoError(t, err, stdout)
		require.Contains(t, stdout, "Unchanged")
		require.Regexp(t, `discarded +1\n`, stdout)
		require.Regexp(t, `id reused +1\n`, stdout)
		require.Regexp(t, `dead letter before +2\n`, stdout)
	})

	t.Run("SaysThatNothingRunsInTheHomeFolder", func(t *testing.T) {
		database := "postgres://nobody@127.0.0.1:1/onceledger"
		home := t.TempDir()
		text, err := json.Marshal(supervisor.Connections{
			Databases: supervisor.Databases{Relay: database, Worker: database, Verify: database}, KafkaBrokers: "127.0.0.1:1",
		})
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(home, "connections.json"), text, 0o600))
		for _, name := range []string{"DATABASE_URL", "RELAY_DATABASE_URL", "KAFKA_BROKERS", "RELAY_SLOT", "OUTBOX_RETENTION", "DEDUPE_WINDOW", "REPLAY_WINDOW"} {
			t.Setenv(name, "")
		}
		t.Setenv("ONCELEDGER_HOME", home)
		for _, args := range [][]string{
			{"replay", "--from", "earliest", "--group", "billing", "--yes"},
			{"outbox", "resend", "--gaps"},
			{"outbox", "list", "--order", uuid.NewString()},
			{"verify"},
		} {
			_, stderr, err := call(t, args...)
			require.Error(t, err)
			require.Contains(t, stderr+err.Error(), `is not set, and no "onceledger up" runs on `+home, args)
		}
	})

	t.Run("InterruptedWhileItWaits", func(t *testing.T) {
		w := newReplayWorld(t)
		w.orders(t, 1)
		w.startBilling(t, "")
		w.waitRead(t)
		stdout, stderr, err := callUntil(t, "for them to leave", "replay", "--from", "earliest", "--group", "billing", "--yes")
		require.ErrorIs(t, err, exitReplayNotRun)
		require.Empty(t, stdout)
		require.Contains(t, stderr, "Nothing was replayed: interrupted")
	})

	t.Run("KilledInTheMiddleIsRunAgain", func(t *testing.T) {
		w := newReplayWorld(t)
		orders := w.orders(t, 5)
		w.bill(t)
		before := w.account(t)
		for _, order := range orders {
			w.losePayment(t, order)
		}
		committed := w.committed(t)
		program, err := os.Executable()
		require.NoError(t, err)
		var stderr syncBuffer
		killed := &exec.Cmd{
			Path: program, Args: []string{"onceledger", "replay", "--from", "earliest", "--group", "billing", "--yes", "--rate", "10"},
			Env: os.Environ(), Stderr: &stderr,
		}
		require.NoError(t, killed.Start())
		t.Cleanup(func() { _ = killed.Process.Kill() })
		require.Eventually(t, func() bool { return strings.Contains(stderr.String(), "MISSING: event ") }, 30*time.Second, time.Millisecond, "it applies nothing")
		require.NoError(t, killed.Process.Kill())
		require.Error(t, killed.Wait())
		require.Equal(t, -1, killed.ProcessState.ExitCode(), "it was not killed, but ended: %s", &stderr)
		require.Less(t, len(pgtest.Column[uuid.UUID](t, w.Owner, "SELECT id FROM invoices")), len(orders), "it was killed after its end")

		stdout, _, err := call(t, "replay", "--from", "earliest", "--group", "billing", "--yes", "--rate", "0")
		require.ErrorIs(t, err, exitReplayFound)
		require.Contains(t, stdout, "15 records replayed")
		require.Equal(t, before, w.account(t))
		require.Equal(t, committed, w.committed(t))
		contents := w.Contents(t)
		stdout, _, err = call(t, "replay", "--from", "earliest", "--group", "billing", "--yes", "--rate", "0")
		require.NoError(t, err)
		require.Contains(t, stdout, "Unchanged")
		require.Equal(t, contents, w.Contents(t))
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

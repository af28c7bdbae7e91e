package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/faults"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/inbox/inboxtest"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
)

// These tests are about what is no event's fault. A batch is then an error that
// leaves no trace, or is tried again here, as a whole; never a dead letter.

// requireNoTrace checks that nothing was applied and nothing was given up.
func (w *world) requireNoTrace(t *testing.T) {
	t.Helper()
	require.Empty(t, w.effects(t))
	require.Empty(t, w.Applied(t))
	require.Empty(t, w.DeadLetters(t))
}

// requireOnce checks that each event was applied, once and in order.
func (w *world) requireOnce(t *testing.T, events ...event.Event) {
	t.Helper()
	require.Equal(t, ids(events...), w.effects(t))
	require.ElementsMatch(t, ids(events...), w.Applied(t))
	require.Empty(t, w.DeadLetters(t))
}

// withSetting makes the worker's connections have a setting.
func withSetting(name, value string) func(*pgxpool.Config) {
	return func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams[name] = value }
}

func TestTimeouts(t *testing.T) {
	t.Parallel()

	sleep := func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "SELECT pg_sleep(30)")
		return err
	}
	for name, test := range map[string]struct {
		setting string
		code    string
		block   func(t *testing.T, w *world, e event.Event) (release func())
	}{
		"OfALock": {"lock_timeout", "55P03", func(t *testing.T, w *world, e event.Event) func() {
			t.Helper()
			// Another worker that is at the same event, and does not come to an end.
			other, err := w.Owner.Begin(t.Context())
			require.NoError(t, err)
			_, err = other.Exec(t.Context(), `
				INSERT INTO processed_events (consumer, event_id, tenant_id, fingerprint, topic, partition, "offset")
				VALUES ('billing', $1, $1, sha256('x'), 'order.events', 0, 0)`, e.ID)
			require.NoError(t, err)
			return func() { require.NoError(t, other.Rollback(t.Context())) }
		}},
		"OfAStatement": {"statement_timeout", "57014", func(_ *testing.T, w *world, _ event.Event) func() {
			w.handler.after = sleep
			return func() { w.handler.after = nil }
		}},
		"OfTheTransaction": {"transaction_timeout", "25P04", func(_ *testing.T, w *world, _ event.Event) func() {
			w.handler.after = sleep
			return func() { w.handler.after = nil }
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			patient := w.Inbox
			w.Inbox = inboxtest.On(t, w.DB, w.handler, func(config *inbox.Config) {
				config.Pool = w.DB.Pool(t, "worker", withSetting(test.setting, "200ms"))
			}).Inbox

			events := w.created(3)
			release := test.block(t, w, events[1])
			records := w.Partition.Append(events...)
			err := w.Process(t.Context(), records)
			require.Equal(t, test.code, postgres.Code(err), "%v", err)
			require.True(t, postgres.Unavailable(err), "the consumer is to pause and try again")
			release()
			w.requireNoTrace(t)

			w.Inbox = patient
			w.DeliverRecords(t, records...)
			w.requireOnce(t, events...)
		})
	}
}

func TestHandlerErrors(t *testing.T) {
	t.Parallel()

	t.Run("ThatAreNoFaultOfTheEventsAreErrors", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		events := w.created(4)
		records := w.Partition.Append(events...)
		failed := errors.New("something is broken")
		w.handler.after = func(context.Context, pgx.Tx) error { return fmt.Errorf("apply: %w", failed) }
		require.ErrorIs(t, w.Process(t.Context(), records), failed)
		require.Equal(t, 1, w.calls(), "not split, not tried again")
		w.requireNoTrace(t)

		w.handler.after = nil
		w.DeliverRecords(t, records...)
		w.requireOnce(t, events...)
	})

	t.Run("OfAMissingPrivilegeAreErrors", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		records := w.Partition.Append(w.created(2)...)
		w.handler.after = func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "DELETE FROM ledger_entries")
			return err
		}
		require.Equal(t, "42501", postgres.Code(w.Process(t.Context(), records)))
		w.requireNoTrace(t)
	})

	t.Run("LeaveNoDeadLetterOfTheBatchBehind", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		// One that would be a dead letter, in a batch that fails as a whole.
		records := w.Partition.Append(w.created(3)...)
		records[1].Value = []byte("not JSON")
		w.handler.after = func(context.Context, pgx.Tx) error { return errors.New("later in the same transaction") }
		require.Error(t, w.Process(t.Context(), records))
		w.requireNoTrace(t)
	})

	t.Run("AfterACancelledContextLeaveNoTrace", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		events := w.created(3)
		records := w.Partition.Append(events...)
		ctx, cancel := context.WithCancel(t.Context())
		w.handler.after = func(context.Context, pgx.Tx) error { cancel(); return nil }
		require.ErrorIs(t, w.Process(ctx, records), context.Canceled)
		w.requireNoTrace(t)

		w.handler.after = nil
		w.DeliverRecords(t, records...)
		w.requireOnce(t, events...)
	})
}

// TestLostToAnother is field report R33: a transaction that Postgres gives up in
// favour of another is run again from its beginning.
func TestLostToAnother(t *testing.T) {
	t.Parallel()

	// failing makes the first n transactions that have an effect fail with a
	// SQLSTATE, at a statement or at the commit.
	failing := func(t *testing.T, w *world, n int, code, trigger string) {
		w.Exec(t, "CREATE SEQUENCE tries; GRANT USAGE ON tries TO onceledger_worker")
		w.Exec(t, fmt.Sprintf(`
			CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$
			BEGIN
				IF nextval('tries') <= %d THEN RAISE EXCEPTION 'lost to another' USING ERRCODE = '%s'; END IF;
				RETURN NULL;
			END $$`, n, code))
		w.Exec(t, trigger)
	}
	const (
		atStatement = "CREATE TRIGGER fail AFTER INSERT ON effects FOR EACH STATEMENT EXECUTE FUNCTION fail()"
		atCommit    = "CREATE CONSTRAINT TRIGGER fail AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fail()"
	)

	for name, test := range map[string]struct{ code, trigger string }{
		"SerializationFailureAtAStatement": {"40001", atStatement},
		"SerializationFailureAtTheCommit":  {"40001", atCommit},
		"DeadlockAtAStatement":             {"40P01", atStatement},
		"DeadlockAtTheCommit":              {"40P01", atCommit},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			failing(t, w, 3, test.code, test.trigger)

			events := w.created(5)
			w.Deliver(t, events...)
			w.requireOnce(t, events...)
			require.Equal(t, 4, w.calls(), "the whole batch each time")
			require.Equal(t, 5, w.Counted(t, "applied"), "counted once")
		})
	}

	t.Run("ForEverIsAnErrorInTheEnd", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		failing(t, w, 1_000_000, "40001", atCommit)

		records := w.Partition.Append(w.created(2)...)
		err := w.Process(t.Context(), records)
		require.True(t, postgres.LostToAnother(err), "%v", err)
		w.requireNoTrace(t)
	})

	t.Run("TwoBatchesThatLockEachOtherBothComeThrough", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.Exec(t, "CREATE TABLE locks AS SELECT 1 AS n UNION SELECT 2; GRANT SELECT, UPDATE ON locks TO onceledger_worker")
		w.Exec(t, fmt.Sprintf("ALTER DATABASE %s SET deadlock_timeout = '50ms'", w.DB.Name))
		other := w.another(t)

		var bothHaveOne sync.WaitGroup
		bothHaveOne.Add(2)
		lock := func(first, second int) func(context.Context, pgx.Tx) error {
			met := false
			return func(ctx context.Context, tx pgx.Tx) error {
				if _, err := tx.Exec(ctx, "SELECT FROM locks WHERE n = $1 FOR UPDATE", first); err != nil {
					return err
				}
				if !met {
					met = true
					bothHaveOne.Done()
					bothHaveOne.Wait()
				}
				_, err := tx.Exec(ctx, "SELECT FROM locks WHERE n = $1 FOR UPDATE", second)
				return err
			}
		}
		w.handler.before, other.handler.before = lock(1, 2), lock(2, 1)

		mine, theirs := w.created(3), w.created(3)
		other.Partition.Number = 1
		var finished sync.WaitGroup
		errs := make([]error, 2)
		finished.Go(func() { errs[0] = w.Process(t.Context(), w.Partition.Append(mine...)) })
		finished.Go(func() { errs[1] = other.Process(t.Context(), other.Partition.Append(theirs...)) })
		finished.Wait()
		require.NoError(t, errors.Join(errs...))
		require.ElementsMatch(t, append(ids(mine...), ids(theirs...)...), w.effects(t))
		require.GreaterOrEqual(t, w.calls()+other.calls(), 3, "one of them was run again")
		require.Empty(t, w.DeadLetters(t))
	})
}

// TestMissingPartition is field report R32: an event that finds no partition
// waits for it.
func TestMissingPartition(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	at := time.Now().Add(23 * time.Hour) // tomorrow, nearly always: a day with no other event
	partition := "processed_events_" + at.UTC().Format("20060102")
	w.Exec(t, "DROP TABLE "+partition)

	order := &factory.Order{TenantID: w.tenant, Now: func() time.Time { return at }}
	events := []event.Event{order.Created(), order.Paid()}
	if now := time.Now(); now.Day() != at.UTC().Day() {
		events = append([]event.Event{w.order().Created()}, events...)
	}
	records := w.Partition.Append(events...)
	for range 2 {
		err := w.Process(t.Context(), records)
		require.True(t, postgres.MissingPartition(err), "%v", err)
		require.True(t, postgres.Unavailable(err), "the consumer is to pause and try again")
		w.requireNoTrace(t)
	}

	w.Exec(t, "SELECT make_day_partition('processed_events', $1::date)", at.UTC().Format(time.DateOnly))
	w.DeliverRecords(t, records...)
	w.requireOnce(t, events...)
}

// TestNoPartitionAtAll is a database whose janitor never ran.
func TestNoPartitionAtAll(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	for _, leaf := range pgtest.Column[string](t, w.Owner, "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'processed_events'::regclass") {
		w.Exec(t, "DROP TABLE "+leaf)
	}
	require.ErrorContains(t, w.Process(t.Context(), w.Partition.Append(w.created(1)...)), "janitor")
	w.requireNoTrace(t)
}

// TestPostgresDies kills the server while a batch is in the middle of its
// transaction. It is rolled back, and the same batch is applied once when the
// server is there again.
func TestPostgresDies(t *testing.T) {
	t.Parallel()

	server := pgtest.Server(t)
	handler := &recorder{}
	w := &world{Consumer: inboxtest.On(t, server.New(t), handler), handler: handler}
	w.tenant = w.Tenant(t)
	w.makeEffects(t)

	events := w.created(10)
	records := w.Partition.Append(events...)
	kill := func(ctx context.Context, tx pgx.Tx) error {
		server.Kill()
		for err := error(nil); err == nil; { // until this connection's own process has gone too
			_, err = tx.Exec(ctx, "SELECT 1")
		}
		return nil // so that it is the commit that fails
	}

	handler.before = kill
	err := w.Process(t.Context(), records)
	require.Error(t, err)
	require.True(t, postgres.Unavailable(err), "%v", err)
	require.Error(t, w.Process(t.Context(), records), "while it is away")
	require.NoError(t, server.Restart(t.Context()))
	w.settle(t)
	w.requireNoTrace(t)

	handler.before, handler.after = nil, kill // with everything written, before the commit
	require.Error(t, w.Process(t.Context(), records))
	require.NoError(t, server.Restart(t.Context()))
	w.settle(t)
	w.requireNoTrace(t)

	handler.after = nil
	require.Eventually(t, func() bool { return w.Process(t.Context(), records) == nil }, 20*time.Second, 20*time.Millisecond)
	w.requireOnce(t, events...)
}

// settle waits until the owner's connections work again.
func (w *world) settle(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool { return w.Owner.Ping(t.Context()) == nil }, 20*time.Second, 20*time.Millisecond)
}

// TestCommitOfUnknownOutcome breaks the connection after the server has
// committed and before the worker is told. The batch is an error, and applied:
// delivered again, all of it is recognised.
func TestCommitOfUnknownOutcome(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.handler.refuse = refuseMarked
	address, err := url.Parse(w.DB.URL("worker"))
	require.NoError(t, err)
	proxy, err := faults.StartPgProxy(t.Context(), address.Host)
	require.NoError(t, err)
	t.Cleanup(proxy.Close)
	through := func(config *pgxpool.Config) {
		config.ConnConfig.Port = uint16(netip.MustParseAddrPort(proxy.Addr()).Port())
	}
	broken := inboxtest.On(t, w.DB, w.handler, func(config *inbox.Config) { config.Pool = w.DB.Pool(t, "worker", through) })

	order := w.order()
	bad, events := marked(order.Created(), inbox.ClassRule), w.created(3)
	records := w.Partition.Append(events[0], events[1], bad, events[2], order.Paid())
	proxy.CutAfterCommit(1)
	err = broken.Process(t.Context(), records)
	require.ErrorContains(t, err, "commit")
	require.True(t, postgres.Unavailable(err), "%v", err)
	require.Equal(t, ids(events...), w.effects(t), "it is committed, though nobody was told")

	before := w.Contents(t)
	require.NoError(t, broken.Process(t.Context(), records))
	require.Equal(t, before, w.Contents(t))
	require.Equal(t, 3, broken.Counted(t, "duplicate"))
	require.Equal(t, map[string]int{"rule": 1, "parked": 1}, countClasses(w.DeadLetters(t)))
}

func countClasses(letters []inboxtest.DeadLetter) map[string]int {
	classes := make(map[string]int)
	for _, letter := range letters {
		classes[string(letter.Class)]++
	}
	return classes
}

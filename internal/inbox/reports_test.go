package inbox_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/inbox/inboxtest"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
)

// billedConsumer is a consumer with billing's own effects, and its log.
func billedConsumer(t *testing.T) (c *inboxtest.Consumer, tenant uuid.UUID, log *bytes.Buffer) {
	t.Helper()
	log = new(bytes.Buffer)
	c = inboxtest.New(t, billing.Handler{Now: time.Now}, func(config *inbox.Config) { config.Log = slog.New(slog.NewTextHandler(log, nil)) })
	return c, c.Tenant(t), log
}

// TestPaymentsWithOneID is field report R18: a payment, the same id with another
// amount, and the same id for another order. The first is applied, once; the others
// change nothing, are dead letters that say why, and have a count of their own. A
// true repeat is silent.
func TestPaymentsWithOneID(t *testing.T) {
	t.Parallel()
	c, tenant, log := billedConsumer(t)

	order := &factory.Order{TenantID: tenant}
	created, paid := order.Created(), order.Paid()
	c.Deliver(t, created, paid)
	books := c.Contents(t)
	delete(books, "dead_letters")

	dearer := factory.Altered(paid, func(state *event.Order) {
		state.NetAmount, state.TotalAmount = state.NetAmount+7024, 9999
		state.Payment.Amount = 9999
	})
	others := (&factory.Order{TenantID: tenant}).Paid()
	others.ID = paid.ID
	c.Deliver(t, dearer)
	c.Deliver(t, others)
	for _, letter := range c.DeadLetters(t) {
		require.Equal(t, inbox.ClassIDReused, letter.Class)
		require.Equal(t, paid.ID, letter.EventID)
		require.Contains(t, letter.Detail, "the id was used before for an event with another type or content")
	}
	require.Len(t, c.DeadLetters(t), 2)
	require.Equal(t, 2, c.Counted(t, "id-reused"))
	require.Zero(t, c.Counted(t, "duplicate"))

	log.Reset()
	c.Deliver(t, paid, created)
	require.Equal(t, 2, c.Counted(t, "duplicate"))
	require.Equal(t, 2, c.Counted(t, "id-reused"))
	require.Empty(t, log.String())
	after := c.Contents(t)
	delete(after, "dead_letters")
	require.Equal(t, books, after)
}

// TestPoison is field report R26: three records that nobody can read among a
// hundred. Each is a dead letter after one try, and the others are applied.
func TestPoison(t *testing.T) {
	t.Parallel()

	poison := map[string]func(event.Record) event.Record{
		"RandomBytes": func(r event.Record) event.Record { r.Value = []byte{0x8f, 0xff, 0, 0xc3}; return r },
		"NoJSON":      func(r event.Record) event.Record { r.Value = []byte("this-is-not-json {{{"); return r },
		"AList":       func(r event.Record) event.Record { r.Value = []byte(`[{"order_id":1}]`); return r },
		"AnotherType": func(r event.Record) event.Record { return header(r, event.HeaderType, []byte("CustomerRenamed")) },
		"AnotherTopicsEvent": func(r event.Record) event.Record {
			return header(r, event.HeaderType, []byte(event.InvoiceIssued))
		},
	}
	for name, spoil := range poison {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, tenant, _ := billedConsumer(t)

			events := make([]event.Event, 100)
			for i := range events {
				events[i] = (&factory.Order{TenantID: tenant}).Created()
			}
			records := c.Partition.Append(events...)
			for at := 10; at <= 12; at++ {
				records[at] = spoil(records[at])
			}
			c.DeliverRecords(t, records...) // no error: the offsets move
			require.Len(t, c.Applied(t), 97)
			var at []int64
			for _, letter := range c.DeadLetters(t) {
				require.NotEmpty(t, letter.Detail)
				at = append(at, letter.Offset)
			}
			require.Equal(t, []int64{10, 11, 12}, at)
			require.Equal(t, []int{1}, pgtest.Column[int](t, c.Owner, "SELECT DISTINCT attempts FROM dead_letters"))
		})
	}
}

// TestDeadLettersCannotBeStored is the end of field report R26: where a dead letter
// cannot be kept, its record is not passed over. The batch is an error, for the
// consumer to stop at and to tell, and leaves no trace; once it can be kept it is,
// and all goes on.
func TestDeadLettersCannotBeStored(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct{ down, up string }{
		"NoRight":    {"REVOKE INSERT ON dead_letters FROM onceledger_worker", "GRANT INSERT ON dead_letters TO onceledger_worker"},
		"NoTable":    {"ALTER TABLE dead_letters RENAME TO elsewhere", "ALTER TABLE elsewhere RENAME TO dead_letters"},
		"ReadOnly":   {"ALTER DATABASE %s SET default_transaction_read_only = on", "ALTER DATABASE %s SET default_transaction_read_only = off"},
		"NotItsSize": {"ALTER TABLE dead_letters ADD CONSTRAINT dead_letters_none CHECK (false) NOT VALID", "ALTER TABLE dead_letters DROP CONSTRAINT dead_letters_none"},
		"NoSpace": {`CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $f$
			BEGIN RAISE EXCEPTION 'no space left on device' USING ERRCODE = 'disk_full'; END $f$;
			CREATE TRIGGER full_disk BEFORE INSERT ON dead_letters FOR EACH STATEMENT EXECUTE FUNCTION full_disk()`,
			"DROP TRIGGER full_disk ON dead_letters"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			in := func(sql string) string {
				if bytes.Contains([]byte(sql), []byte("%s")) {
					return fmt.Sprintf(sql, w.DB.Name)
				}
				return sql
			}

			events := w.created(3)
			records := w.Partition.Append(events...)
			records[1].Value = []byte("{{{")
			w.Exec(t, in(test.down))
			for range 3 {
				worker := w.another(t) // a worker that was started again finds the same
				require.Error(t, worker.Process(t.Context(), records))
				require.Zero(t, worker.Counted(t, "undecodable"), "it is not said to be kept")
				require.NotContains(t, w.effects(t), events[2].ID, "nobody goes on behind it")
			}
			w.Exec(t, "SET default_transaction_read_only = off; "+in(test.up))
			w = &world{Consumer: inboxtest.On(t, w.DB, w.handler), handler: w.handler, tenant: w.tenant}
			w.DeliverRecords(t, records...)
			require.Equal(t, ids(events[0], events[2]), w.effects(t))
			require.Len(t, w.DeadLetters(t), 1)
		})
	}
	t.Run("AndThatIsNoDeadLetterItself", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.Exec(t, "REVOKE INSERT ON dead_letters FROM onceledger_worker")
		records := w.Partition.Append(w.created(1)...)
		records[0].Value = []byte("x")
		require.Equal(t, "42501", postgres.Code(w.Process(t.Context(), records)))
		w.Exec(t, "GRANT INSERT ON dead_letters TO onceledger_worker")
		w.requireNoTrace(t)
	})
}

// TestWhatIsNoEvent is field report R15, in one batch: what a change capture sends
// beside events is passed over and counted, what should be an event and is none is
// a dead letter with a reason, and the books have neither.
func TestWhatIsNoEvent(t *testing.T) {
	t.Parallel()
	c, tenant, _ := billedConsumer(t)

	paid := (&factory.Order{TenantID: tenant}).Paid()
	key := []byte(paid.AggregateID.String())
	ofEvent := func(value []byte) event.Record {
		r := paid.Record()
		r.Value = value
		return r
	}
	noKey := ofEvent(paid.Payload)
	noKey.Key = nil
	records := c.Partition.AppendRecords(
		ofEvent(nil),
		event.Record{Topic: event.OrderEvents, Key: key},
		ofEvent([]byte("")), ofEvent([]byte("null")), ofEvent([]byte("{}")), ofEvent([]byte("[]")), noKey,
		event.Record{Topic: event.OrderEvents, Key: key, Value: []byte(`{"op":"d","before":{"id":1},"after":null}`)},
		event.Record{Topic: event.OrderEvents, Value: []byte(`{"ts_ms":1755933141855}`)},
	)
	records = append(records, c.Partition.Append(paid)...)
	c.DeliverRecords(t, records...)
	require.Equal(t, 4, c.Counted(t, "skipped"))
	letters := c.DeadLetters(t)
	require.Len(t, letters, 5)
	for _, letter := range letters {
		require.NotEmpty(t, letter.Detail)
	}
	require.Equal(t, []uuid.UUID{paid.ID}, c.Applied(t))
	require.Equal(t, []int{1, 1}, pgtest.Column[int](t, c.Owner, "SELECT count(*) FROM invoices UNION ALL SELECT count(*) FROM ledger_entries"))
}

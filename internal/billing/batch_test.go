package billing_test

import (
	"errors"
	"fmt"
	"slices"
	"sync"
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

// payments is n events, each the payment of an order of its own.
func (w *world) payments(n int) []event.Event {
	events := make([]event.Event, n)
	for i := range events {
		events[i] = w.order().Paid()
	}
	return events
}

// numbers are the numbers of a tenant's invoices, ascending.
func (w *world) numbers(t *testing.T, tenant uuid.UUID) []int64 {
	t.Helper()
	return pgtest.Column[int64](t, w.Owner, "SELECT number FROM invoices WHERE tenant_id = $1 ORDER BY 1", tenant)
}

func upTo(n int) []int64 {
	numbers := make([]int64, n)
	for i := range numbers {
		numbers[i] = int64(i + 1)
	}
	return numbers
}

// TestUnknownTenant is what only the database knows to be wrong, without saying
// whose fault it is: the batch is halved until each culprit stands alone.
func TestUnknownTenant(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	culprits := []int{13, 14, 77}
	events := w.payments(100)
	for _, i := range culprits {
		events[i] = (&factory.Order{TenantID: uuid.New()}).Paid()
	}
	records := w.Deliver(t, events...)

	var dead []int
	for _, letter := range w.DeadLetters(t) {
		require.Equal(t, inbox.ClassData, letter.Class)
		require.Contains(t, letter.Detail, "order_billing_tenant_id_fkey")
		dead = append(dead, int(letter.Offset))
	}
	require.Equal(t, culprits, dead)

	var good []uuid.UUID
	for i, e := range events {
		if !slices.Contains(culprits, i) {
			good = append(good, e.ID)
		}
	}
	require.Equal(t, good, pgtest.Column[uuid.UUID](t, w.Owner, "SELECT id FROM invoices ORDER BY number"), "the others, in their order")
	require.Equal(t, upTo(97), w.numbers(t, w.tenant), "no number is lost with a batch that was rolled back")
	require.Equal(t, written{Invoices: 97, InvoiceLines: 97, Entries: 97, LedgerLines: 2 * 97, Facts: 97}, w.written(t))
	require.ElementsMatch(t, good, w.Applied(t))

	before := w.Contents(t)
	w.DeliverRecords(t, records...)
	require.Equal(t, before, w.Contents(t))

	// With the tenant there and nothing open, its later events are applied.
	w.Exec(t, "INSERT INTO tenants (id, name) VALUES ($1, 'late')", events[13].TenantID)
	w.Exec(t, pgtest.CloseLetters("discarded", "true"))
	w.Deliver(t, (&factory.Order{TenantID: events[13].TenantID}).Paid())
	require.Equal(t, upTo(1), w.numbers(t, events[13].TenantID))
}

// TestTenants has a batch mix the events of several tenants, as a partition does.
func TestTenants(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	tenants := []uuid.UUID{w.tenant, w.Tenant(t), w.Tenant(t)}
	var events []event.Event
	for i := range 30 {
		order := &factory.Order{TenantID: tenants[i%3]}
		events = append(events, order.Paid(), order.Refunded(1))
	}
	w.Deliver(t, events...)
	require.Empty(t, w.DeadLetters(t))
	for _, tenant := range tenants {
		require.Equal(t, upTo(10), w.numbers(t, tenant))
		require.Equal(t, []int64{10 * 2974, 10 * 2499, 10 * 475}, w.balances(t, tenant, "EUR"))
	}

	t.Run("CannotTouchEachOthersOrders", func(t *testing.T) {
		order := &factory.Order{TenantID: tenants[0]}
		w.Deliver(t, order.Paid())
		stolen := order.Refunded(1)
		stolen.TenantID = tenants[1]
		w.Deliver(t, stolen)
		require.Equal(t, inbox.ClassGap, w.Classes(t)[stolen.ID], "for the other tenant there is no such invoice")
		require.Empty(t, w.documents(t, order).creditNotes)
	})
}

// TestALedgerConflictIsNoDuplicate has an entry that is there although its event
// was never marked as applied: a fault to be looked at, not passed over.
func TestALedgerConflictIsNoDuplicate(t *testing.T) {
	t.Parallel()

	// forge writes an entry for an event behind billing's back.
	forge := func(t *testing.T, w *world, e event.Event) {
		w.Exec(t, fmt.Sprintf(`
			INSERT INTO ledger_accounts (tenant_id, code, currency, kind) VALUES ('%[1]s', 'cash', 'EUR', 'asset'), ('%[1]s', 'revenue', 'EUR', 'income');
			INSERT INTO ledger_entries (tenant_id, event_id, kind, order_id, currency, effective_at)
				VALUES ('%[1]s', '%[2]s', 'payment', gen_random_uuid(), 'EUR', now());
			INSERT INTO ledger_lines (tenant_id, event_id, line_no, debit_account, credit_account, currency, amount_minor)
				VALUES ('%[1]s', '%[2]s', 1, 'cash', 'revenue', 'EUR', 1)`, w.tenant, e.ID))
	}

	t.Run("ButADeadLetter", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		order, other := w.order(), w.order()
		paid := order.Paid()
		forge(t, w, paid)
		w.Deliver(t, paid, other.Paid())
		letters := w.DeadLetters(t)
		require.Len(t, letters, 1)
		require.Equal(t, paid.ID, letters[0].EventID)
		require.Equal(t, inbox.ClassData, letters[0].Class)
		require.Contains(t, letters[0].Detail, "ledger_entries_pkey")
		require.Equal(t, 1, w.written(t).Invoices)
		require.NotNil(t, w.view(t, other))
	})

	t.Run("AndDoesNotBlameTheEventsAfterIt", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		// A second payment is refused because of the first. When that then turns
		// out to be the culprit, it is not the second's fault that it waits.
		order := w.order()
		paid := order.Paid()
		again := paid
		again.ID = factory.ID(time.Now())
		forge(t, w, paid)
		w.Deliver(t, paid, again)
		require.Equal(t, map[uuid.UUID]inbox.Class{paid.ID: inbox.ClassData, again.ID: inbox.ClassParked}, w.Classes(t))
	})
}

// TestYearOfRecording is about 31 December: a document gets a number of the
// year (UTC) in which it is recorded, whenever and wherever it was paid.
func TestYearOfRecording(t *testing.T) {
	t.Parallel()

	tokyo := time.FixedZone("UTC+9", 9*3600)
	for name, test := range map[string]struct {
		paid, recorded time.Time
		number         string
	}{
		"PaidAndRecordedOnTheEveInTokyo": {
			time.Date(2026, 12, 31, 23, 30, 0, 0, tokyo), time.Date(2026, 12, 31, 23, 30, 1, 0, tokyo), "INV-2026-000001",
		},
		"PaidOnNewYearInTokyoWhichIsTheEveHere": {
			time.Date(2027, 1, 1, 8, 59, 0, 0, tokyo), time.Date(2027, 1, 1, 8, 59, 59, 0, tokyo), "INV-2026-000001",
		},
		"PaidOnTheEveAndRecordedInTheNewYear": {
			time.Date(2026, 12, 31, 23, 59, 59, 0, time.UTC), time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC), "INV-2027-000001",
		},
		"PaidInMayAndRecordedAfterALongOutage": {
			time.Date(2026, 5, 1, 0, 0, 0, 0, time.UTC), time.Date(2027, 1, 2, 0, 0, 0, 0, time.UTC), "INV-2027-000001",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)

			order := &factory.Order{TenantID: w.tenant, Now: func() time.Time { return test.paid }}
			paid := order.Paid()
			paid.ID = factory.ID(time.Now()) // partitions are made for today
			w.clock.set(test.recorded)
			w.Deliver(t, paid)
			invoice := w.documents(t, order).invoice
			require.Equal(t, test.number, invoice.FullNumber())
			require.True(t, test.paid.Equal(invoice.PaidAt))
			require.True(t, test.recorded.Equal(invoice.IssuedAt))
		})
	}
}

// TestNumbersOfManyWorkers has four workers bill two tenants at once, in batches
// that fail now and then after they took their numbers.
func TestNumbersOfManyWorkers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	other := w.Tenant(t)
	w.Exec(t, `
		CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			IF random() < 0.2 THEN RAISE EXCEPTION 'out of memory' USING ERRCODE = '53200'; END IF;
			RETURN NULL;
		END $$;
		CREATE TRIGGER fail AFTER INSERT ON outbox_events FOR EACH STATEMENT EXECUTE FUNCTION fail()`)

	const workers, batches, each = 4, 6, 5
	var finished sync.WaitGroup
	gate := make(chan struct{})
	errs := make([]error, workers)
	for i := range workers {
		worker := inboxtest.On(t, w.DB, billing.Handler{Now: time.Now})
		worker.Partition.Number = int32(i)
		finished.Go(func() {
			<-gate
			for range batches {
				var events []event.Event
				for range each {
					events = append(events, w.order().Paid(), (&factory.Order{TenantID: other}).Paid())
				}
				records := worker.Partition.Append(events...)
				err := worker.Process(t.Context(), records)
				for attempts := 0; postgres.Unavailable(err) && attempts < 100; attempts++ {
					err = worker.Process(t.Context(), records)
				}
				errs[i] = errors.Join(errs[i], err)
			}
		})
	}
	close(gate)
	finished.Wait()
	require.NoError(t, errors.Join(errs...))
	require.Empty(t, w.DeadLetters(t))
	for _, tenant := range []uuid.UUID{w.tenant, other} {
		require.Equal(t, upTo(workers*batches*each), w.numbers(t, tenant))
	}
}

// TestMissingOutboxPartition is R32 for what billing itself says: its facts wait
// for their partition, and its documents with them.
func TestMissingOutboxPartition(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	for _, leaf := range pgtest.Column[string](t, w.Owner, "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'outbox_events'::regclass") {
		w.Exec(t, "DROP TABLE "+leaf)
	}
	records := w.Partition.Append(w.payments(3)...)
	err := w.Process(t.Context(), records)
	require.True(t, postgres.MissingPartition(err), "%v", err)
	require.Equal(t, written{}, w.written(t))
	require.Empty(t, w.DeadLetters(t))
	require.Empty(t, w.Applied(t))

	today := time.Now().UTC()
	for _, day := range []time.Time{today, today.AddDate(0, 0, 1)} {
		w.Exec(t, "SELECT make_day_partition('outbox_events', $1::date)", day.Format(time.DateOnly))
	}
	w.DeliverRecords(t, records...)
	require.Equal(t, upTo(3), w.numbers(t, w.tenant))
}

package inbox_test

import (
	"encoding/json"
	"flag"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/inbox/inboxtest"
	"github.com/onceledger/onceledger/internal/money"
	"github.com/onceledger/onceledger/internal/orders"
	"github.com/onceledger/onceledger/internal/pgtest"
)

var (
	seedFlag   = flag.Uint64("seed", 0, "of the random streams; 0 is a new one each time")
	streamFlag = flag.Int("stream", 600, "records of a random stream")
)

// TestRandomStreams feeds billing streams of good and bad events of several
// tenants, out of order and with repetitions, in random batches, from two
// workers in turn that now and then go back to an earlier offset, on a database
// that now and then gives a transaction up. Whatever the batches were, each
// record must end as a model says that takes them one by one, and the books must
// equal the model's.
func TestRandomStreams(t *testing.T) {
	t.Parallel()

	for _, name := range []string{"First", "Second", "Third"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			seed := *seedFlag
			if seed == 0 {
				seed = rand.Uint64()
			}
			t.Logf("go test ./internal/inbox -run TestRandomStreams/First -seed %d -stream %d", seed, *streamFlag)
			rng := rand.New(rand.NewPCG(seed, 0))

			handler := billing.Handler{Now: time.Now}
			workers := []*inboxtest.Consumer{inboxtest.New(t, handler)}
			workers = append(workers, inboxtest.On(t, workers[0].DB, handler))
			c := workers[0]
			tenants := []uuid.UUID{c.Tenant(t), c.Tenant(t), c.Tenant(t)}
			loseNowAndThen(t, c)

			today := time.Now().UTC().Truncate(24 * time.Hour)
			stream := generate(rng, tenants, *streamFlag)
			m := newModel(tenants, today.AddDate(0, 0, -1), time.Now().Add(24*time.Hour))
			var records []event.Record
			for _, s := range stream {
				records = append(records, record(&c.Partition, s))
				var state event.Order
				_ = json.Unmarshal(s.event.Payload, &state)
				m.take(s, state)
			}

			for done, at := 0, 0; done < len(records); {
				end := min(at+1+rng.IntN(40), len(records))
				require.NoError(t, workers[rng.IntN(2)].Process(t.Context(), records[at:end]))
				done, at = max(done, end), end
				if rng.IntN(4) == 0 {
					at -= rng.IntN(min(at, 60) + 1)
				}
			}
			requireBooks(t, c, m, stream)

			before := c.Contents(t)
			for at := 0; at < len(records); at += 100 {
				require.NoError(t, workers[1].Process(t.Context(), records[at:min(at+100, len(records))]))
			}
			require.Equal(t, before, c.Contents(t), "all of it again, from offset 0")
		})
	}
}

// loseNowAndThen has the database give up one transaction in ten.
func loseNowAndThen(t *testing.T, c *inboxtest.Consumer) {
	t.Helper()
	c.Exec(t, `
		CREATE FUNCTION lose() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			IF random() < 0.1 THEN RAISE EXCEPTION 'lost to another' USING ERRCODE = 'serialization_failure'; END IF;
			RETURN NULL;
		END $$;
		CREATE TRIGGER lose AFTER INSERT ON order_billing FOR EACH STATEMENT EXECUTE FUNCTION lose()`)
}

// generate is a stream of about so many records.
func generate(rng *rand.Rand, tenants []uuid.UUID, length int) []said {
	var stream, delayed []said
	var alive []*factory.Order
	unknown := uuid.New()
	reused := make(map[uuid.UUID]bool)
	for len(stream) < length {
		// Something happens to some order.
		if len(alive) == 0 || rng.IntN(4) == 0 {
			tenant := tenants[rng.IntN(len(tenants))]
			if rng.IntN(25) == 0 {
				tenant = unknown
			}
			alive = append(alive, factory.Random(rng, tenant))
		}
		at := rng.IntN(len(alive))
		e, more := next(rng, alive[at])
		if !more {
			alive = slices.Delete(alive, at, at+1)
		}
		s := said{event: e}
		if rng.IntN(12) == 0 {
			s = spoil(rng, s)
		}

		// It may be said twice, and it may be said late, so that events of one
		// order change places.
		if rng.IntN(40) == 0 {
			again := s
			again.event.ID = factory.ID(time.Now())
			delayed = append(delayed, again)
		}
		if rng.IntN(12) == 0 {
			delayed = append(delayed, s)
		} else {
			stream = append(stream, s)
		}
		if len(delayed) > 0 && rng.IntN(4) == 0 {
			stream = append(stream, delayed[0])
			delayed = delayed[1:]
		}
		if len(stream) == 0 {
			continue
		}

		// The relay sends an event again; a producer uses an id again.
		if rng.IntN(10) == 0 {
			stream = append(stream, stream[rng.IntN(len(stream))])
		}
		if victim := stream[rng.IntN(len(stream))]; rng.IntN(20) == 0 && victim.fault == none && !reused[victim.event.ID] {
			reused[victim.event.ID] = true
			other := (&factory.Order{TenantID: tenants[0]}).Created()
			if rng.IntN(2) == 0 {
				other = factory.Altered(victim.event, func(state *event.Order) { state.CustomerID = "another" })
			}
			other.ID = victim.event.ID
			stream = append(stream, said{event: other})
		}
	}
	return stream
}

// spoil is the same with something wrong with it.
func spoil(rng *rand.Rand, s said) said {
	switch rng.IntN(5) {
	case 0:
		s.fault = notJSON
	case 1:
		s.fault = newerSchema
		s.event.SchemaVersion = 2
	case 2:
		s.fault = wrongSums
		s.event = factory.Altered(s.event, func(state *event.Order) { state.NetAmount++ })
	case 3:
		s.fault = tombstone
	case 4:
		s.fault = wrongID
		ids := []uuid.UUID{uuid.New(), factory.ID(time.Now().AddDate(0, 0, -9)), factory.ID(time.Now().AddDate(0, 0, 9))}
		s.event.ID = ids[rng.IntN(len(ids))]
	}
	return s
}

// next is the next thing that happens to an order, and whether more can follow.
func next(rng *rand.Rand, order *factory.Order) (e event.Event, more bool) {
	switch order.State.Status {
	case "":
		return order.Created(), true
	case string(orders.StatusCreated):
		if rng.IntN(8) == 0 {
			return order.Cancelled(), false
		}
		return order.Paid(), true
	}
	return order.Refunded(1 + rng.Int64N(order.Left())), order.Left() > 0
}

func record(partition *factory.Partition, s said) event.Record {
	r := partition.Append(s.event)[0]
	switch s.fault {
	case tombstone:
		r.Value = nil
	case notJSON:
		r.Value = []byte("{{{")
	default: // the event's own
	}
	return r
}

// requireBooks compares everything that billing wrote with the model.
func requireBooks(t *testing.T, c *inboxtest.Consumer, m *model, stream []said) {
	t.Helper()
	require.Empty(t, pgtest.Column[uuid.UUID](t, c.Owner, `
		SELECT event_id FROM processed_events JOIN dead_letters USING (consumer, event_id)
		WHERE fingerprint = sha256(convert_to(event_type, 'UTF8') || '\x00' || record_value)`),
		"applied and a dead letter")

	got := make([]inbox.Class, len(stream))
	for _, letter := range c.DeadLetters(t) {
		got[letter.Offset] = letter.Class
	}
	for i, class := range m.classes {
		// Where an id is used again by an event that is applied in the same
		// batch, one that is parked may also say so.
		if class == inbox.ClassParked && got[i] == inbox.ClassIDReused && m.applied[stream[i].event.ID] != "" {
			continue
		}
		require.Equal(t, class, got[i], "offset %d: %s %s %q", i, stream[i].event.Type, stream[i].event.AggregateID, stream[i].fault)
	}

	require.ElementsMatch(t, m.appliedIDs(), c.Applied(t))
	require.Equal(t, m.billed(), pgtest.Rows[billed](t, c.Owner, `
		SELECT order_id, version, coalesce(invoices.id, '00000000-0000-0000-0000-000000000000'),
			(SELECT count(*) FROM credit_notes WHERE credit_notes.order_id = order_billing.order_id)
		FROM order_billing LEFT JOIN invoices USING (tenant_id, order_id) ORDER BY order_id`))
	require.ElementsMatch(t, m.moved(), pgtest.Rows[moved](t, c.Owner, `
		SELECT tenant_id, debit_account, credit_account, currency, sum(amount_minor)::bigint
		FROM ledger_lines GROUP BY 1, 2, 3, 4`))
	require.Equal(t, []int{m.entries, m.entries, m.entries}, pgtest.Column[int](t, c.Owner, `
		SELECT count(*) FROM ledger_entries
		UNION ALL SELECT (SELECT count(*) FROM invoices) + (SELECT count(*) FROM credit_notes)
		UNION ALL SELECT count(*) FROM outbox_events`), "entries, documents, and events that say so")
	require.Empty(t, pgtest.Column[string](t, c.Owner, `
		SELECT tenant_id::text FROM (
			SELECT tenant_id, number, row_number() OVER (PARTITION BY 'invoice', tenant_id, year ORDER BY number) AS place FROM invoices
			UNION ALL
			SELECT tenant_id, number, row_number() OVER (PARTITION BY 'note', tenant_id, year ORDER BY number) FROM credit_notes
		) AS numbered WHERE number <> place`), "numbers have gaps")
}

// TestReplay takes a topic from its beginning to its end and then once more from
// offset 0: every table is as it was, to the row.
func TestReplay(t *testing.T) {
	t.Parallel()

	c := inboxtest.New(t, billing.Handler{Now: time.Now})
	tenant := c.Tenant(t)
	var events []event.Event
	for _, currency := range []string{"EUR", "JPY", "KWD", "CLF"} {
		for i := range 25 {
			order := &factory.Order{TenantID: tenant, Currency: currency, Lines: []orders.LineParams{
				{SKU: "a", Description: "A", Quantity: 3, UnitAmount: 333, TaxRate: money.Rate(72_500)},
				{SKU: "b", Description: "B", Quantity: 1, UnitAmount: int64(i), TaxRate: 190_000},
			}}
			events = append(events, order.Created(), order.Paid(), order.Refunded(1), order.Refunded(order.Left()))
		}
	}
	records := c.Partition.Append(events...)
	records[37].Value = []byte("not JSON")
	for batch := range slices.Chunk(records, 33) {
		c.DeliverRecords(t, batch...)
	}
	require.Len(t, c.DeadLetters(t), 1+2, "the undecodable payment, and two refunds without it")
	before := c.Contents(t)
	require.Len(t, before, 28, "every table")

	for _, size := range []int{1000, 7} {
		for batch := range slices.Chunk(records, size) {
			c.DeliverRecords(t, batch...)
		}
		require.Equal(t, before, c.Contents(t))
	}
	require.Equal(t, 397, c.Counted(t, "applied"))
}

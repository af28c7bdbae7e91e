package stack

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/kafkatest"
	"github.com/onceledger/onceledger/internal/verify"
)

// Counts says how hard it was: what the faults of a test did to the requests
// and events, in spite of which the books are right.
type Counts struct {
	Orders   int
	Requests int
	Unknown  int // requests that were sent, and sent again since the outcome was not known
	Replayed int // of these, those that had been done the first time
	Resent   int // records on the topics beyond the first of each event
}

func (c Counts) String() string {
	return fmt.Sprintf("%d orders, %d requests, %d with an unknown outcome at first, of which %d had been done; %d events sent again",
		c.Orders, c.Requests, c.Unknown, c.Replayed, c.Resent)
}

// RequireBooks waits until the pipeline is quiet and requires that nothing was
// lost, done twice, or made up:
//
//   - verify, which recomputes the books from the orders, finds them right;
//   - plain counts and sums, which owe nothing to verify, agree;
//   - the orders are exactly those that the clients know, as they know them;
//   - the topics hold every event of the outbox and no other, each order's in
//     order, and what was sent twice was the same twice;
//   - each request, sent once more, is answered as it was the first time, and
//     nothing changes.
func (s *Stack) RequireBooks(t testing.TB, api *Process) Counts {
	t.Helper()
	s.requireVerified(t)
	s.requireSums(t)
	s.requireOrders(t)
	resent := s.requireTopic(t, event.AggregateOrder) + s.requireTopic(t, event.AggregateBilling)

	before := s.Checksums(t)
	s.requireSameAnswers(t, api)
	require.Equal(t, before, s.Checksums(t), "answering again changed something")

	counts := Counts{Resent: resent}
	for _, load := range s.loads {
		counts.Orders += len(load.orders)
		for _, exchange := range load.exchanges {
			counts.Requests++
			if exchange.Unknown > 0 {
				counts.Unknown++
				if exchange.Replayed {
					counts.Replayed++
				}
			}
		}
	}
	t.Log(counts)
	return counts
}

// Verify runs the product's own check, giving what is in flight time to arrive.
func (s *Stack) Verify(t testing.TB) *verify.Report {
	t.Helper()
	report, err := verify.Run(t.Context(), verify.Config{
		DB:   s.Owner,
		Wait: Patience,
		Lag: func(ctx context.Context) (committed, end map[int32]int64, err error) {
			return kafka.GroupLag(ctx, s.Broker.Brokers(), billing.Consumer, event.OrderEvents)
		},
	})
	require.NoError(t, err)
	return report
}

func (s *Stack) requireVerified(t testing.TB) {
	t.Helper()
	report := s.Verify(t)
	require.True(t, report.OK, "%+v", report.Findings)
	require.Zero(t, report.InFlight, "%v", report.Notes)
	require.Zero(t, report.DeadLetters.Open+report.DeadLetters.Parked)
}

// requireSums compares what must be equal, in SQL that a reader can check.
func (s *Stack) requireSums(t testing.TB) {
	t.Helper()
	rows, err := s.Owner.Query(t.Context(), `
		SELECT what, got, want FROM (VALUES
		  ('invoices, for paid orders',
		    (SELECT count(*) FROM invoices),
		    (SELECT count(*) FROM orders WHERE status = 'paid')),
		  ('orders with an invoice, for invoices',
		    (SELECT count(DISTINCT order_id) FROM invoices),
		    (SELECT count(*) FROM invoices)),
		  ('credit notes, for refunds',
		    (SELECT count(DISTINCT refund_id) FROM credit_notes),
		    (SELECT count(*) FROM refunds)),
		  ('payments in the ledger',
		    (SELECT count(DISTINCT order_id) FROM ledger_entries WHERE kind = 'payment'),
		    (SELECT count(*) FROM payments)),
		  ('ledger entries, for payments and refunds',
		    (SELECT count(*) FROM ledger_entries),
		    (SELECT count(*) FROM payments) + (SELECT count(*) FROM refunds)),
		  ('cash in the ledger, for what was paid and not given back',
		    (SELECT coalesce(sum(CASE WHEN debit_account = 'cash' THEN amount_minor ELSE -amount_minor END), 0)
		       FROM ledger_lines WHERE 'cash' IN (debit_account, credit_account)),
		    (SELECT coalesce(sum(total_minor - refunded_minor), 0) FROM orders WHERE status = 'paid')),
		  ('events applied, for events of orders',
		    (SELECT count(*) FROM processed_events JOIN outbox_events ON id = event_id AND aggregate_type = 'order'),
		    (SELECT count(*) FROM outbox_events WHERE aggregate_type = 'order')),
		  ('events applied at all',
		    (SELECT count(*) FROM processed_events),
		    (SELECT count(*) FROM outbox_events WHERE aggregate_type = 'order')),
		  ('events of orders, for their versions',
		    (SELECT count(*) FROM outbox_events WHERE aggregate_type = 'order'),
		    (SELECT coalesce(sum(version), 0) FROM orders)),
		  ('events of billing, for its documents',
		    (SELECT count(*) FROM outbox_events WHERE aggregate_type = 'billing'),
		    (SELECT count(*) FROM invoices) + (SELECT count(*) FROM credit_notes)),
		  ('the last invoice number, for invoices',
		    (SELECT coalesce(max(number), 0) FROM invoices),
		    (SELECT count(*) FROM invoices))
		) AS compared (what, got, want) WHERE got <> want`)
	require.NoError(t, err)
	differences, err := pgx.CollectRows(rows, pgx.RowToMap)
	require.NoError(t, err)
	require.Empty(t, differences)
}

// requireOrders compares the orders with what the clients were answered.
func (s *Stack) requireOrders(t testing.TB) {
	t.Helper()
	known := make(map[string]Order)
	for _, load := range s.loads {
		for _, order := range load.orders {
			known[order.ID] = order
		}
	}
	rows, err := s.Owner.Query(t.Context(), `
		SELECT id::text AS "ID", status, currency, total_minor AS total, refunded_minor AS refunded, version,
		       (SELECT count(*) FROM refunds WHERE refunds.order_id = orders.id) AS refunds
		FROM orders`)
	require.NoError(t, err)
	stored, err := pgx.CollectRows(rows, pgx.RowToStructByName[Order])
	require.NoError(t, err)
	require.Len(t, stored, len(known), "an order is missing, or there is one that nobody made")
	for _, order := range stored {
		require.Equal(t, known[order.ID], order)
	}
}

// requireTopic waits until a topic has every event of the outbox, and returns
// how many records it has beyond the first of each.
func (s *Stack) requireTopic(t testing.TB, aggregateType string) (resent int) {
	t.Helper()
	rows, err := s.Owner.Query(t.Context(), "SELECT id FROM outbox_events WHERE aggregate_type = $1", aggregateType)
	require.NoError(t, err)
	written, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	require.NoError(t, err)

	var first map[uuid.UUID]kafkatest.Record
	require.NoError(t, Wait(t.Context(), func() (bool, error) {
		records := s.Broker.Records(t, event.Topic(aggregateType))
		first = make(map[uuid.UUID]kafkatest.Record, len(records))
		versions := make(map[uuid.UUID]int64)
		for _, record := range records {
			e, err := decode(record)
			require.NoError(t, err)
			if earlier, again := first[e.ID]; again {
				require.Equal(t, earlier.Headers, record.Headers)
				require.Equal(t, string(earlier.Value), string(record.Value))
				require.Equal(t, earlier.Partition, record.Partition)
				continue
			}
			first[e.ID] = record
			versions[e.AggregateID]++
			require.Equal(t, versions[e.AggregateID], e.AggregateVersion, "%s of %s %s is out of order", e.Type, aggregateType, e.AggregateID)
		}
		resent = len(records) - len(first)
		return len(first) >= len(written), fmt.Errorf("topic has %d events of %d", len(first), len(written))
	}))
	require.ElementsMatch(t, written, slices.Collect(maps.Keys(first)), "events on the topic and in the outbox")
	return resent
}

func decode(record kafkatest.Record) (event.Event, error) {
	headers := make([]event.Header, len(record.Headers))
	for i, header := range record.Headers {
		headers[i] = event.Header{Key: header.Key, Value: header.Value}
	}
	return event.Decode(event.Record{
		Topic: record.Topic, Partition: record.Partition, Offset: record.Offset, Time: record.Timestamp,
		Key: record.Key, Value: record.Value, Headers: headers,
	})
}

// requireSameAnswers sends every request of the clients once more.
func (s *Stack) requireSameAnswers(t testing.TB, api *Process) {
	t.Helper()
	client := s.NewClient(api)
	group, ctx := errgroup.WithContext(t.Context())
	group.SetLimit(8)
	for _, load := range s.loads {
		for _, exchange := range load.exchanges {
			group.Go(func() error {
				again, want := exchange, exchange.Answer
				want.Replayed = true
				if err := client.Exchange(ctx, &again); err != nil {
					return err
				}
				if again.Answer != want {
					return fmt.Errorf("POST %s was answered %+v, and is now %+v", exchange.Path, want, again.Answer)
				}
				return nil
			})
		}
	}
	require.NoError(t, group.Wait())
}

// Checksums is one for each table, over all its rows. The relay's notes on how
// far it is are left out: they go on by themselves.
func (s *Stack) Checksums(t testing.TB) map[string]string {
	t.Helper()
	rows, err := s.Owner.Query(t.Context(), `
		SELECT relname FROM pg_class
		WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition
		  AND relname NOT IN ('relay_position', 'relay_status', 'schema_migrations')`)
	require.NoError(t, err)
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	sums := make(map[string]string, len(tables))
	for _, table := range tables {
		var sum string
		err := s.Owner.QueryRow(t.Context(), "SELECT count(*) || ' rows, ' || md5(coalesce(string_agg(md5(x::text), '' ORDER BY x::text), '')) FROM "+
			pgx.Identifier{table}.Sanitize()+" AS x").Scan(&sum)
		require.NoError(t, err)
		sums[table] = sum
	}
	return sums
}

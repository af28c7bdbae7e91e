// Package inboxtest feeds events to a consumer on a test's own database, without
// a broker, and reads back what became of them.
package inboxtest

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/pgtest"
)

// Name is the consumer's, unless a Config says otherwise.
const Name = "billing"

// Consumer is an inbox with its database and one partition to read from.
type Consumer struct {
	*inbox.Inbox
	DB        *pgtest.Database
	Owner     *pgxpool.Pool // may look at and spoil everything
	Partition factory.Partition

	metrics *prometheus.Registry
}

// New makes a consumer with a database of its own. A configure function may
// change whatever it is made of.
func New(t testing.TB, handler inbox.Handler, configure ...func(*inbox.Config)) *Consumer {
	t.Helper()
	return On(t, pgtest.New(t), handler, configure...)
}

// On makes a consumer on a database that is there. Several on one database are
// as many worker processes.
func On(t testing.TB, database *pgtest.Database, handler inbox.Handler, configure ...func(*inbox.Config)) *Consumer {
	t.Helper()
	c := &Consumer{DB: database, Owner: database.Pool(t, ""), metrics: prometheus.NewRegistry()}
	config := inbox.Config{
		Consumer: Name,
		Handler:  handler,
		Log:      slog.New(slog.DiscardHandler),
		Metrics:  c.metrics,
		Now:      time.Now,
	}
	for _, change := range configure {
		change(&config)
	}
	if config.Pool == nil {
		config.Pool = database.Pool(t, "worker")
	}
	c.Inbox = inbox.New(config)
	return c
}

// Tenant makes a tenant.
func (c *Consumer) Tenant(t testing.TB) uuid.UUID {
	t.Helper()
	id := uuid.Must(uuid.NewV7())
	c.Exec(t, "INSERT INTO tenants (id, name) VALUES ($1, $2)", id, id.String())
	return id
}

// Exec runs a statement as the database's owner.
func (c *Consumer) Exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	_, err := c.Owner.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// Deliver appends events to the partition and processes them as one batch. It
// returns their records, to be delivered again.
func (c *Consumer) Deliver(t testing.TB, events ...event.Event) []event.Record {
	t.Helper()
	return c.DeliverRecords(t, c.Partition.Append(events...)...)
}

// DeliverRecords processes records as one batch, as they are.
func (c *Consumer) DeliverRecords(t testing.TB, records ...event.Record) []event.Record {
	t.Helper()
	require.NoError(t, c.Process(t.Context(), records))
	return records
}

// DeadLetter is what a test looks at of a dead letter.
type DeadLetter struct {
	Offset  int64
	Class   inbox.Class
	EventID uuid.UUID // uuid.Nil if it has none that can be read
	Detail  string
}

// DeadLetters lists the dead letters by offset.
func (c *Consumer) DeadLetters(t testing.TB) []DeadLetter {
	t.Helper()
	return pgtest.Rows[DeadLetter](t, c.Owner, `
		SELECT "offset", class, coalesce(event_id, '00000000-0000-0000-0000-000000000000') AS event_id, detail
		FROM dead_letters ORDER BY topic, partition, "offset"`)
}

// Classes is each dead letter's class by its event.
func (c *Consumer) Classes(t testing.TB) map[uuid.UUID]inbox.Class {
	t.Helper()
	classes := make(map[uuid.UUID]inbox.Class)
	for _, letter := range c.DeadLetters(t) {
		classes[letter.EventID] = letter.Class
	}
	return classes
}

// Applied lists the ids of the events that are marked as applied, ascending.
func (c *Consumer) Applied(t testing.TB) []uuid.UUID {
	t.Helper()
	return pgtest.Column[uuid.UUID](t, c.Owner, "SELECT event_id FROM processed_events ORDER BY 1")
}

// Counted is how many records had an outcome, by this consumer's own metric.
func (c *Consumer) Counted(t testing.TB, outcome string) int {
	t.Helper()
	families, err := c.metrics.Gather()
	require.NoError(t, err)
	for _, family := range families {
		if family.GetName() != "onceledger_inbox_records_total" {
			continue
		}
		for _, metric := range family.GetMetric() {
			for _, label := range metric.GetLabel() {
				if label.GetName() == "outcome" && label.GetValue() == outcome {
					return int(metric.GetCounter().GetValue())
				}
			}
		}
	}
	return 0
}

// Contents is a digest of every table, by its name: of each row the values and
// the transaction that wrote it, so that a row written anew with the same values
// shows too.
func (c *Consumer) Contents(t testing.TB) map[string]string {
	t.Helper()
	tables := pgtest.Column[string](t, c.Owner, `
		SELECT relname FROM pg_class
		WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition`)
	require.NotEmpty(t, tables)
	contents := make(map[string]string, len(tables))
	for _, table := range tables {
		var rows int
		var digest string
		require.NoError(t, c.Owner.QueryRow(t.Context(), fmt.Sprintf(`
			SELECT count(*), md5(coalesce(string_agg(xmin::text || content::text, E'\n' ORDER BY content::text), ''))
			FROM %s AS content`, pgx.Identifier{table}.Sanitize())).Scan(&rows, &digest))
		contents[table] = fmt.Sprintf("%d rows, %s", rows, digest)
	}
	return contents
}

// Waiting waits until a transaction of the worker waits for another's lock.
func (c *Consumer) Waiting(t testing.TB) {
	t.Helper()
	require.Eventually(t, func() bool {
		waiting := pgtest.Column[bool](t, c.Owner, `
			SELECT EXISTS (SELECT FROM pg_stat_activity
			WHERE datname = current_database() AND usename = 'onceledger_worker' AND wait_event_type = 'Lock')`)
		return waiting[0]
	}, 20*time.Second, 5*time.Millisecond)
}

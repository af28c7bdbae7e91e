package drain

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/postgres"
	"github.com/onceledger/onceledger/internal/relay"
)

// Fill writes a backlog of events, in transactions of so many rows: payloads of
// some 390 bytes, ten headers, versions in turn for a thousand orders. It leaves
// the connection without synchronous commits.
func Fill(ctx context.Context, conn *pgx.Conn, events, rows int) error {
	if _, err := conn.Exec(ctx, "SET synchronous_commit = off"); err != nil {
		return err
	}
	_, err := conn.Exec(ctx, fmt.Sprintf(`
		DO $$
		DECLARE
		  tenant uuid := uuidv7();
		BEGIN
		  FOR i IN 0 .. %d / %d - 1 LOOP
		    INSERT INTO outbox_events (id, tenant_id, aggregate_type, aggregate_id, aggregate_version,
		      event_type, payload, traceparent, occurred_at)
		    SELECT uuidv7(), tenant, 'order', ('019b0000-0000-7000-8000-' || lpad((n %% 1000)::text, 12, '0'))::uuid, n / 1000 + 1,
		      'OrderPaid',
		      json_build_object('order_id', uuidv7(), 'version', n / 1000 + 1, 'status', 'paid', 'customer_id', 'c-' || n,
		        'customer_email', 'customer-' || n || '@example.com', 'currency', 'EUR', 'total_amount', n,
		        'lines', json_build_array(json_build_object('sku', 'book-' || n %% 97, 'description', md5(n::text),
		          'quantity', 2, 'unit_amount', 1250, 'tax_rate', '0.19')), 'reference', md5((n * 7)::text)),
		      '00-' || md5(n::text) || '-00f067aa0ba902b7-01', now()
		    FROM generate_series(i * %d, i * %d + %d - 1) AS n;
		    COMMIT;
		  END LOOP;
		END $$`, events, rows, rows, rows, rows))
	return err
}

// Empty takes everything out of the outbox, and what relays remember of it.
func Empty(ctx context.Context, conn *pgx.Conn) error {
	_, err := conn.Exec(ctx, "TRUNCATE outbox_events; DELETE FROM relay_position; CHECKPOINT")
	return err
}

// CopySlot makes a slot that is where another one is.
func CopySlot(ctx context.Context, conn *pgx.Conn, from, to string) error {
	_, err := conn.Exec(ctx, "SELECT pg_copy_logical_replication_slot($1, $2)", from, to)
	return err
}

// Own lets a slot pass for one that the relay has made: otherwise it makes a new
// one and sends what the table holds.
func Own(ctx context.Context, conn *pgx.Conn, slot string) error {
	_, err := conn.Exec(ctx, `
		INSERT INTO relay_position (slot_name, system_id, timeline, publication_oid, lsn, snapshot_xmin)
		SELECT slot_name, (SELECT system_identifier FROM pg_control_system())::text, (SELECT timeline_id FROM pg_control_checkpoint()),
		  (SELECT oid::bigint FROM pg_publication WHERE pubname = $2), confirmed_flush_lsn, '3'
		FROM pg_replication_slots WHERE slot_name = $1
		ON CONFLICT (slot_name) DO UPDATE SET
		  publication_oid = excluded.publication_oid, lsn = excluded.lsn, snapshot_xmin = excluded.snapshot_xmin, snapshot = NULL`,
		slot, relay.DefaultPublication)
	return err
}

// DropSlot waits for the walsender to be gone: it may outlive its client a
// little.
func DropSlot(ctx context.Context, conn *pgx.Conn, slot string) error {
	for {
		_, err := conn.Exec(ctx, "SELECT pg_drop_replication_slot($1)", slot)
		if postgres.Code(err) != "55006" {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

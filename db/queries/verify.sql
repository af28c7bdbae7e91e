-- VerifySeesAll tells whether this login reads the rows of every tenant. Row
-- security would hide them in silence, and empty books are always right.
-- name: VerifySeesAll :one
SELECT (NOT row_security_active('orders') OR pg_has_role('onceledger_verify', 'USAGE'))::boolean AS sees_all;

-- VerifyKeyList is the next page of order ids, ascending, of the orders and of
-- all that billing has: an order that only the ledger knows is to be found. An
-- event without an order comes up once it is applied.
-- name: VerifyKeyList :many
SELECT keys.tenant_id, keys.order_id FROM (
  (SELECT tenant_id, id AS order_id FROM orders
   WHERE (tenant_id, id) > (@after_tenant::uuid, @after_order::uuid)
   ORDER BY tenant_id, id LIMIT @page_size)
  UNION
  (SELECT tenant_id, order_id FROM order_billing
   WHERE (tenant_id, order_id) > (@after_tenant::uuid, @after_order::uuid)
   ORDER BY tenant_id, order_id LIMIT @page_size)
  UNION
  (SELECT tenant_id, order_id FROM invoices
   WHERE (tenant_id, order_id) > (@after_tenant::uuid, @after_order::uuid)
   ORDER BY tenant_id, order_id LIMIT @page_size)
  UNION
  (SELECT DISTINCT tenant_id, order_id FROM credit_notes
   WHERE (tenant_id, order_id) > (@after_tenant::uuid, @after_order::uuid)
   ORDER BY tenant_id, order_id LIMIT @page_size)
  UNION
  (SELECT DISTINCT tenant_id, order_id FROM ledger_entries
   WHERE (tenant_id, order_id) > (@after_tenant::uuid, @after_order::uuid)
   ORDER BY tenant_id, order_id LIMIT @page_size)
) AS keys
ORDER BY keys.tenant_id, keys.order_id
LIMIT @page_size;

-- VerifyBooks is everything that is written about each of the orders, on either
-- side of the pipeline, as one JSON document for each; lines and taxes look as
-- they do in events. It is one statement, so all of it is of one moment.
-- name: VerifyBooks :many
SELECT
  key.tenant_id::uuid AS tenant_id,
  key.order_id::uuid AS order_id,
  json_build_object(
    'order', (
      SELECT json_build_object(
        'version', version, 'status', status, 'currency', currency, 'net', net_minor, 'tax', tax_minor,
        'total', total_minor, 'refunded', refunded_minor, 'created', created_at, 'updated', updated_at)
      FROM orders WHERE tenant_id = key.tenant_id AND id = key.order_id),
    'lines', (
      SELECT json_agg(json_build_object(
        'quantity', quantity, 'unit_amount', unit_minor, 'tax_rate', trim_scale(tax_rate_ppm / 1000000.0)::text))
      FROM order_lines WHERE tenant_id = key.tenant_id AND order_id = key.order_id),
    'taxes', (
      SELECT json_agg(json_build_object(
        'rate', trim_scale(tax_rate_ppm / 1000000.0)::text, 'net_amount', net_minor, 'tax_amount', tax_minor))
      FROM order_taxes WHERE tenant_id = key.tenant_id AND order_id = key.order_id),
    'payment', (
      SELECT json_build_object('amount', amount_minor, 'currency', currency, 'at', paid_at)
      FROM payments WHERE tenant_id = key.tenant_id AND order_id = key.order_id),
    'refunds', (
      SELECT json_agg(json_build_object(
        'id', id, 'total', amount_minor, 'net', net_minor, 'tax', tax_minor, 'at', refunded_at, 'taxes', (
          SELECT json_agg(json_build_object(
            'rate', trim_scale(tax_rate_ppm / 1000000.0)::text, 'net_amount', net_minor, 'tax_amount', tax_minor))
          FROM refund_taxes WHERE tenant_id = refunds.tenant_id AND refund_id = refunds.id))
        ORDER BY refunded_at, id)
      FROM refunds WHERE tenant_id = key.tenant_id AND order_id = key.order_id),
    'known', (
      SELECT json_build_object(
        'version', version, 'status', status, 'currency', currency, 'total', total_minor, 'refunded', refunded_minor)
      FROM order_billing WHERE tenant_id = key.tenant_id AND order_id = key.order_id),
    'invoices', (
      SELECT json_agg(json_build_object(
        'id', id, 'currency', currency, 'net', net_minor, 'tax', tax_minor, 'total', total_minor,
        'taxes', taxes, 'issued', issued_at, 'lines', (
          SELECT json_agg(json_build_object(
            'quantity', quantity, 'unit_amount', unit_minor, 'tax_rate', trim_scale(tax_rate_ppm / 1000000.0)::text))
          FROM invoice_lines WHERE tenant_id = invoices.tenant_id AND invoice_id = invoices.id))
        ORDER BY id)
      FROM invoices WHERE tenant_id = key.tenant_id AND order_id = key.order_id),
    'credit_notes', (
      SELECT json_agg(json_build_object(
        'id', id, 'invoice', invoice_id, 'refund', refund_id, 'ordinal', ordinal, 'currency', currency,
        'net', net_minor, 'tax', tax_minor, 'total', total_minor, 'taxes', taxes, 'issued', issued_at)
        ORDER BY ordinal, id)
      FROM credit_notes WHERE tenant_id = key.tenant_id AND order_id = key.order_id),
    'entries', (
      SELECT json_agg(json_build_object(
        'event', event_id, 'kind', kind, 'currency', currency, 'reverses', reverses, 'lines', (
          SELECT json_agg(json_build_object(
            'debit', debit_account, 'credit', credit_account, 'currency', currency, 'amount', amount_minor))
          FROM ledger_lines WHERE tenant_id = ledger_entries.tenant_id AND event_id = ledger_entries.event_id))
        ORDER BY event_id)
      FROM ledger_entries WHERE tenant_id = key.tenant_id AND order_id = key.order_id),
    'events', (
      SELECT json_agg(json_build_object(
        'id', id, 'version', aggregate_version, 'type', event_type,
        'refund', CASE WHEN event_type = 'OrderRefunded' THEN payload -> 'refund' -> 'refund_id' END,
        'applied', (
          SELECT count(*) FROM processed_events AS mark
          WHERE mark.event_id = outbox_events.id AND mark.consumer = @consumer))
        ORDER BY aggregate_version, id)
      FROM outbox_events
      WHERE tenant_id = key.tenant_id AND aggregate_id = key.order_id AND aggregate_type IN ('order', 'billing')),
    'dead_letters', (
      SELECT json_agg(json_build_object('event', event_id, 'type', event_type))
      FROM dead_letters
      WHERE tenant_id = key.tenant_id AND aggregate_id = key.order_id
        AND consumer = @consumer AND state = 'open')
  ) AS books
FROM (SELECT unnest(@tenant_ids::uuid[]) AS tenant_id, unnest(@order_ids::uuid[]) AS order_id) AS key
ORDER BY key.tenant_id, key.order_id;

-- VerifyOutboxHorizon is the start of the oldest day that the outbox holds.
-- name: VerifyOutboxHorizon :one
SELECT (coalesce(min(partition_days), current_date + 1)::timestamp AT TIME ZONE 'UTC')::timestamptz AS horizon
FROM partition_days('outbox_events');

-- VerifyMark is a point that the pipeline passes: a place in the log behind
-- everything that can be seen now, since a commit is flushed before it is
-- visible, and the last transaction that wrote an event.
-- name: VerifyMark :one
SELECT
  pg_current_wal_flush_lsn()::pg_lsn                          AS lsn,
  (SELECT coalesce(max(tx_id), '0') FROM outbox_events)::xid8 AS last_tx_id;

-- VerifyRelayPassed tells whether the relay has delivered everything before a
-- mark. With no more events to come wal's slot stays behind what the relay has
-- written itself; its record then says below which transaction everything is
-- delivered. poll has no slot: what its last snapshot saw is delivered. No row: the
-- slot that there should be is not there.
-- name: VerifyRelayPassed :one
SELECT CASE WHEN assigned.relay = 'poll' AND record.snapshot IS NOT NULL
  THEN NOT EXISTS (
    SELECT FROM outbox_events
    WHERE tx_id <= @last_tx_id::xid8
      AND (tx_id >= pg_snapshot_xmax(record.snapshot)
           OR tx_id = ANY (ARRAY(SELECT pg_snapshot_xip(record.snapshot)))))
  ELSE coalesce(slot.confirmed_flush_lsn >= @lsn::pg_lsn, false)
    OR coalesce(CASE assigned.relay WHEN 'debezium' THEN slot_oldest_xid(slot.slot_name::text)
                                    ELSE record.snapshot_xmin END > @last_tx_id::xid8, false)
  END::boolean AS passed
FROM (
  SELECT coalesce((SELECT relay FROM relay_assignment AS a WHERE a.slot_name = @slot_name::text), 'wal') AS relay
) AS assigned
LEFT JOIN relay_position AS record ON record.slot_name = @slot_name::text
LEFT JOIN pg_catalog.pg_replication_slots AS slot
  ON slot.slot_name = CASE assigned.relay WHEN 'debezium' THEN relay_debezium_slot(@slot_name::text) ELSE @slot_name::text END
  AND slot.database = current_database()
WHERE assigned.relay = 'poll' OR slot.slot_name IS NOT NULL;

-- VerifyDeadLetters counts the consumer's dead letters that wait for somebody.
-- name: VerifyDeadLetters :one
SELECT
  count(*) FILTER (WHERE class <> 'parked') AS open,
  count(*) FILTER (WHERE class = 'parked') AS parked
FROM dead_letters WHERE consumer = @consumer AND state = 'open';

-- VerifyNumberSeriesList lists the series of document numbers that are not
-- 1, 2, 3 … up to the last number given out. broken_at is the first number that
-- does not follow on the one before it.
-- name: VerifyNumberSeriesList :many
WITH steps AS (
  SELECT tenant_id, 'invoice' AS kind, year, number,
    number - lag(number, 1, 0::bigint) OVER (PARTITION BY tenant_id, year ORDER BY number) AS step
  FROM invoices
  UNION ALL
  SELECT tenant_id, 'credit-note' AS kind, year, number,
    number - lag(number, 1, 0::bigint) OVER (PARTITION BY tenant_id, year ORDER BY number) AS step
  FROM credit_notes
), series AS (
  SELECT tenant_id, kind, year, count(*) AS documents, max(number) AS highest,
    min(number) FILTER (WHERE step <> 1) AS broken_at
  FROM steps
  GROUP BY tenant_id, kind, year
)
SELECT
  coalesce(series.tenant_id, given.tenant_id)::uuid AS tenant_id,
  coalesce(series.kind, given.kind)::text AS kind,
  coalesce(series.year, given.year)::integer AS year,
  coalesce(series.documents, 0)::bigint AS documents,
  coalesce(series.highest, 0)::bigint AS highest,
  coalesce(series.broken_at, 0)::bigint AS broken_at,
  coalesce(given.last_number, 0)::bigint AS last_number
FROM series
FULL JOIN document_numbers AS given
  ON given.tenant_id = series.tenant_id AND given.kind = series.kind AND given.year = series.year
WHERE series.broken_at IS NOT NULL OR coalesce(series.highest, 0) <> coalesce(given.last_number, 0)
ORDER BY 1, 2, 3;

-- VerifyStrayLineList finds ledger lines that belong to no entry, a few of them.
-- name: VerifyStrayLineList :many
SELECT tenant_id, event_id FROM ledger_lines
WHERE NOT EXISTS (
  SELECT FROM ledger_entries
  WHERE ledger_entries.tenant_id = ledger_lines.tenant_id AND ledger_entries.event_id = ledger_lines.event_id)
LIMIT @at_most;

-- VerifyLedgerBalances sums all lines of each account: debits less credits. It is
-- one statement, so all sums are of one moment; it reads the whole ledger.
-- name: VerifyLedgerBalances :many
SELECT moved.tenant_id::uuid AS tenant_id, moved.account::text AS account, moved.currency::text AS currency,
       sum(moved.amount)::text AS balance_minor
FROM (
  SELECT tenant_id, debit_account AS account, currency, amount_minor AS amount FROM ledger_lines
  UNION ALL
  SELECT tenant_id, credit_account AS account, currency, -amount_minor AS amount FROM ledger_lines
) AS moved
GROUP BY moved.tenant_id, moved.account, moved.currency;

-- ReplayCounts is what a replay must leave as it is, of one moment. The checksum
-- of the view changes with any of its rows, and with no other order of them.
-- name: ReplayCounts :one
SELECT
  (SELECT count(*) FROM invoices)                                     AS invoices,
  (SELECT count(*) FROM invoice_lines)                                AS invoice_lines,
  (SELECT count(*) FROM credit_notes)                                 AS credit_notes,
  (SELECT count(*) FROM ledger_entries)                               AS ledger_entries,
  (SELECT count(*) FROM ledger_lines)                                 AS ledger_lines,
  (SELECT count(*) FROM processed_events AS p WHERE p.consumer = @consumer) AS processed_events,
  (SELECT count(*) FROM dead_letters AS d WHERE d.consumer = @consumer)     AS dead_letters,
  (SELECT count(*) FROM order_billing)                                AS orders,
  (SELECT coalesce(sum(hashtextextended(concat_ws('|',
     tenant_id, order_id, version, status, currency, total_minor, refunded_minor, updated_at), 0)), 0)::text
   FROM order_billing)::text                                          AS orders_checksum;

-- DeadLetterListByEvents is what of some events a consumer could not apply.
-- name: DeadLetterListByEvents :many
SELECT event_id::uuid AS event_id, state
FROM dead_letters
WHERE consumer = @consumer AND event_id = ANY(@event_ids::uuid[]);

-- OutboxFindByAggregate is what the outbox holds of an aggregate id, whoever's it
-- is, in order; an order's own events first.
-- name: OutboxFindByAggregate :many
SELECT id, tenant_id, aggregate_type, aggregate_id, aggregate_version, event_type, occurred_at
FROM outbox_events
WHERE aggregate_id = @aggregate_id
ORDER BY tenant_id, aggregate_type DESC, aggregate_version;

-- OutboxFindByIDs is what the outbox holds of some events.
-- name: OutboxFindByIDs :many
SELECT id, tenant_id, aggregate_type, aggregate_id, aggregate_version, event_type, occurred_at
FROM outbox_events
WHERE id = ANY(@ids::uuid[])
ORDER BY tenant_id, aggregate_id, aggregate_type DESC, aggregate_version;

-- OutboxFindByVersions is what the outbox holds of some versions of orders.
-- name: OutboxFindByVersions :many
SELECT id, outbox_events.tenant_id, aggregate_type, aggregate_id, aggregate_version, event_type, occurred_at
FROM (SELECT unnest(@tenant_ids::uuid[]) AS tenant_id, unnest(@order_ids::uuid[]) AS order_id, unnest(@versions::bigint[]) AS version) AS wanted
JOIN outbox_events ON outbox_events.tenant_id = wanted.tenant_id AND aggregate_id = order_id
  AND aggregate_type = 'order' AND aggregate_version = version
ORDER BY outbox_events.tenant_id, aggregate_id, aggregate_version;

-- OutboxFindUnapplied is what the relay has delivered some time ago and a consumer
-- of order.events has neither applied nor kept as a dead letter.
-- name: OutboxFindUnapplied :many
SELECT id, tenant_id, aggregate_type, aggregate_id, aggregate_version, event_type, occurred_at
FROM outbox_events
WHERE aggregate_type = 'order'
  AND tx_id < outbox_confirmed_xmin(@relay_slot)
  AND occurred_at < @before
  AND NOT EXISTS (SELECT FROM processed_events AS p WHERE p.event_id = outbox_events.id AND p.consumer = @consumer)
  AND NOT EXISTS (SELECT FROM dead_letters AS d WHERE d.event_id = outbox_events.id AND d.consumer = @consumer)
ORDER BY tenant_id, aggregate_id, aggregate_version;

-- MissingVersionListAll is what billing has noticed to be missing, however short a
-- while ago, and whether a dead letter waits for it.
-- name: MissingVersionListAll :many
SELECT
  missing.tenant_id::uuid AS tenant_id, missing.order_id::uuid AS order_id, missing.version::bigint AS version,
  EXISTS (
    SELECT FROM dead_letters AS letter
    WHERE letter.tenant_id = missing.tenant_id AND letter.aggregate_id = missing.order_id
      AND letter.consumer = 'billing' AND letter.state = 'open') AS awaited
FROM missing_versions AS missing
ORDER BY missing.tenant_id, missing.order_id, missing.version;

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

-- DeadLetterListOfRecords is the letters of records, by their places on the topic,
-- and what was discarded of their events, wherever it lay.
-- name: DeadLetterListOfRecords :many
SELECT * FROM dead_letters AS letter
WHERE letter.consumer = @consumer AND letter.id IN (
  SELECT placed.id FROM dead_letters AS placed
  JOIN (SELECT unnest(@topics::text[]) AS topic, unnest(@partitions::integer[]) AS partition, unnest(@offsets::bigint[]) AS record_offset) AS record
    ON placed.topic = record.topic AND placed.partition = record.partition AND placed."offset" = record.record_offset
  WHERE placed.consumer = @consumer
  UNION
  SELECT gone.id FROM dead_letters AS gone WHERE gone.state = 'discarded' AND gone.event_id = ANY(@event_ids::uuid[]));

-- DeadLetterListHeld is which of some aggregates have a letter that later events
-- of theirs wait behind.
-- name: DeadLetterListHeld :many
SELECT DISTINCT letter.tenant_id::uuid AS tenant_id, letter.aggregate_id::uuid AS aggregate_id
FROM dead_letters AS letter
WHERE letter.consumer = @consumer AND letter.state = 'open' AND letter.aggregate_id = ANY(@aggregate_ids::uuid[])
  AND letter.class NOT IN ('undecodable', 'bad-id', 'too-old', 'future-id', 'id-reused');

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

-- OutboxLastVersions is the last version of each of some orders that the outbox holds.
-- name: OutboxLastVersions :many
SELECT outbox_events.tenant_id, aggregate_id, max(aggregate_version)::bigint AS version
FROM (SELECT DISTINCT unnest(@tenant_ids::uuid[]) AS tenant_id, unnest(@order_ids::uuid[]) AS order_id) AS wanted
JOIN outbox_events ON outbox_events.tenant_id = wanted.tenant_id AND aggregate_id = order_id AND aggregate_type = 'order'
GROUP BY outbox_events.tenant_id, aggregate_id;

-- OutboxFindUnapplied is what the relay has delivered some time ago and a consumer
-- of order.events has neither applied nor kept as a dead letter. A letter that was
-- resolved says that the event was applied, and then there is a mark; one for a
-- reused id is another event's.
-- name: OutboxFindUnapplied :many
SELECT id, tenant_id, aggregate_type, aggregate_id, aggregate_version, event_type, occurred_at
FROM outbox_events
WHERE aggregate_type = 'order'
  AND tx_id < outbox_confirmed_xmin(@relay_slot)
  AND occurred_at < @before
  AND NOT EXISTS (SELECT FROM processed_events AS p WHERE p.event_id = outbox_events.id AND p.consumer = @consumer)
  AND NOT EXISTS (SELECT FROM dead_letters AS d WHERE d.event_id = outbox_events.id AND d.consumer = @consumer
    AND d.state <> 'resolved' AND d.class <> 'id-reused')
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

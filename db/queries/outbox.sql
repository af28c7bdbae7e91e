-- OutboxInsertMany writes events of one aggregate type in the caller's
-- transaction; the arrays are of one length.
-- name: OutboxInsertMany :exec
INSERT INTO outbox_events (
  id, tenant_id, aggregate_type, aggregate_id, aggregate_version,
  event_type, schema_version, payload, traceparent, occurred_at)
SELECT
  unnest(@ids::uuid[]),
  unnest(@tenant_ids::uuid[]),
  @aggregate_type,
  unnest(@aggregate_ids::uuid[]),
  unnest(@aggregate_versions::bigint[]),
  unnest(@event_types::text[]),
  @schema_version,
  unnest(@payloads::text[])::json,
  nullif(unnest(@traceparents::text[]), ''),
  @occurred_at;

-- OutboxListByAggregate is what happened to one aggregate, in order, as far as
-- the outbox still holds it.
-- name: OutboxListByAggregate :many
SELECT id, aggregate_type, aggregate_version, event_type, occurred_at
FROM outbox_events
WHERE tenant_id = @tenant_id AND aggregate_id = @aggregate_id
ORDER BY aggregate_type DESC, aggregate_version;

-- PartitionMake makes the partition of one day (UTC) of a table; false when it
-- was there.
-- name: PartitionMake :one
SELECT make_day_partition(@parent, @day::date) AS made;

-- PartitionDays lists the days that a table has a partition for, oldest first.
-- name: PartitionDays :many
SELECT partition_days::date AS day FROM partition_days(@parent);

-- ProcessedEventInsertMany marks events as applied by a consumer, before they
-- are applied and in the same transaction. It returns those that were not marked
-- before; whatever it leaves out is a duplicate. It waits for another
-- transaction that is marking the same event.
-- name: ProcessedEventInsertMany :many
INSERT INTO processed_events (consumer, event_id, tenant_id, fingerprint, topic, partition, "offset")
SELECT
  @consumer,
  unnest(@event_ids::uuid[]) AS event_id,
  unnest(@tenant_ids::uuid[]),
  unnest(@fingerprints::bytea[]),
  unnest(@topics::text[]),
  unnest(@partitions::integer[]),
  unnest(@offsets::bigint[])
ORDER BY event_id
ON CONFLICT DO NOTHING
RETURNING event_id;

-- ProcessedEventFingerprints reads what the given events looked like when the
-- consumer applied them.
-- name: ProcessedEventFingerprints :many
SELECT event_id, fingerprint FROM processed_events
WHERE consumer = @consumer AND event_id = ANY(@event_ids::uuid[]);

-- ProcessedEventListByIDs is where the tenant's events were applied from.
-- name: ProcessedEventListByIDs :many
SELECT consumer, event_id, topic, partition, "offset", processed_at
FROM processed_events
WHERE tenant_id = @tenant_id AND event_id = ANY(@event_ids::uuid[]);

-- DeadLetterParkedAggregates tells which of the tenants' aggregates have an open
-- dead letter that later events have to wait behind.
-- name: DeadLetterParkedAggregates :many
SELECT DISTINCT letter.tenant_id::uuid AS tenant_id, letter.aggregate_id::uuid AS aggregate_id
FROM dead_letters AS letter
JOIN (SELECT unnest(@tenant_ids::uuid[]) AS tenant_id, unnest(@aggregate_ids::uuid[]) AS aggregate_id) AS wanted
  ON wanted.tenant_id = letter.tenant_id AND wanted.aggregate_id = letter.aggregate_id
WHERE letter.consumer = @consumer AND letter.state = 'open' AND letter.aggregate_id IS NOT NULL
  AND letter.class NOT IN ('undecodable', 'bad-id', 'too-old', 'future-id', 'id-reused');

-- DeadLetterInsert stores a record that could not be applied, in the transaction
-- that would have applied it. The same record again changes nothing.
-- name: DeadLetterInsert :execrows
INSERT INTO dead_letters (
  id, consumer, topic, partition, "offset", class, detail,
  event_id, event_type, tenant_id, aggregate_id, aggregate_version,
  record_hash, record_key, record_value, record_headers, record_time)
VALUES (
  @id, @consumer, @topic, @partition, @record_offset, @class, @detail,
  @event_id, @event_type, @tenant_id, @aggregate_id, @aggregate_version,
  @record_hash, @record_key, @record_value, @record_headers, @record_time)
ON CONFLICT ON CONSTRAINT dead_letters_record_key DO NOTHING;

-- DeadLetterListByAggregate is what of an aggregate could not be applied.
-- name: DeadLetterListByAggregate :many
SELECT id, consumer, event_id, event_type, aggregate_version, class, detail, state,
  topic, partition, "offset", first_failed_at
FROM dead_letters
WHERE tenant_id = @tenant_id AND aggregate_id = @aggregate_id
ORDER BY topic, partition, "offset";

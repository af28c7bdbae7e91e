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

-- DeadLetterLockForBatch is the open dead letters that a batch has to do with:
-- those that hold one of its aggregates, so that later events have to wait, and
-- those of its own events. Letters that are being tried again hold nothing.
--
-- It keeps them as they are until the transaction ends, locking them in the order
-- of their ids. So whoever closes them, and applies what waits behind them, comes
-- before this batch or after it, and what is stored behind them is never left
-- behind nothing. What was closed while this waited is seen by the next statement
-- only: DeadLetterListDiscarded is to come after it.
--
-- Each aggregate and each event is looked up by itself, whatever the planner
-- believes of the table: the partial indexes are nearly always empty.
-- name: DeadLetterLockForBatch :many
WITH found AS MATERIALIZED (
  SELECT letter.id
  FROM (SELECT DISTINCT unnest(@tenant_ids::uuid[]) AS tenant_id, unnest(@aggregate_ids::uuid[]) AS aggregate_id) AS wanted
  CROSS JOIN LATERAL (
    SELECT held.id FROM dead_letters AS held
    WHERE held.consumer = @consumer AND held.tenant_id = wanted.tenant_id AND held.aggregate_id = wanted.aggregate_id
      AND held.state = 'open' AND held.class NOT IN ('undecodable', 'bad-id', 'too-old', 'future-id', 'id-reused')
    OFFSET 0
  ) AS letter
  UNION ALL
  SELECT letter.id
  FROM unnest(@event_ids::uuid[]) AS wanted (event_id)
  CROSS JOIN LATERAL (
    SELECT own.id FROM dead_letters AS own
    WHERE own.event_id = wanted.event_id AND own.state = 'open' AND own.consumer = @consumer
    OFFSET 0
  ) AS letter
)
SELECT
  coalesce(letter.tenant_id, '00000000-0000-0000-0000-000000000000')::uuid AS tenant_id,
  coalesce(letter.aggregate_id, '00000000-0000-0000-0000-000000000000')::uuid AS aggregate_id,
  letter.class
FROM dead_letters AS letter
WHERE letter.id = ANY(ARRAY(SELECT found.id FROM found)) AND letter.id <> ALL(@trying::uuid[]) AND letter.state = 'open'
ORDER BY letter.id
FOR SHARE OF letter;

-- DeadLetterListDiscarded is what of a batch was discarded, by its event or by its
-- place on the topic.
-- name: DeadLetterListDiscarded :many
SELECT
  coalesce(letter.tenant_id, '00000000-0000-0000-0000-000000000000')::uuid AS tenant_id,
  coalesce(letter.aggregate_id, '00000000-0000-0000-0000-000000000000')::uuid AS aggregate_id,
  coalesce(letter.aggregate_version, 0)::bigint AS aggregate_version,
  coalesce(letter.event_id, '00000000-0000-0000-0000-000000000000')::uuid AS event_id,
  coalesce(letter.event_type, '')::text AS event_type,
  letter.topic, letter.partition, letter."offset", letter.record_hash, letter.record_headers
FROM (
  SELECT by_event.*
  FROM (SELECT DISTINCT unnest(@event_ids::uuid[]) AS event_id) AS wanted
  CROSS JOIN LATERAL (
    SELECT gone.* FROM dead_letters AS gone
    WHERE gone.event_id = wanted.event_id AND gone.state = 'discarded' AND gone.consumer = @consumer
    OFFSET 0
  ) AS by_event
  UNION ALL
  SELECT by_place.*
  FROM (
    SELECT unnest(@topics::text[]) AS topic, unnest(@partitions::integer[]) AS partition,
      unnest(@first_offsets::bigint[]) AS first_offset, unnest(@last_offsets::bigint[]) AS last_offset
  ) AS span
  CROSS JOIN LATERAL (
    SELECT gone.* FROM dead_letters AS gone
    WHERE gone.topic = span.topic AND gone.partition = span.partition AND gone."offset" BETWEEN span.first_offset AND span.last_offset
      AND gone.state = 'discarded' AND gone.consumer = @consumer
    OFFSET 0
  ) AS by_place
) AS letter;

-- DeadLetterInsert stores a record that could not be applied, in the transaction
-- that would have applied it. The same record again changes nothing: 0.
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

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

-- DeadLetterListForBatch is what dead letters have to say of a batch: the
-- aggregates that later events have to wait in (what is held), and what was
-- discarded, by its event or by its place on the topic. Letters that are being
-- tried again hold nothing.
--
-- It keeps the letters that hold something as they are until the transaction ends,
-- locking them in the order of their ids. So whoever closes them, and applies what
-- waits behind them, comes before this batch or after it, and what is stored
-- behind them is never left behind nothing.
-- name: DeadLetterListForBatch :many
WITH held AS MATERIALIZED (
  SELECT letter.tenant_id, letter.aggregate_id
  FROM dead_letters AS letter
  JOIN (SELECT DISTINCT unnest(@tenant_ids::uuid[]) AS tenant_id, unnest(@aggregate_ids::uuid[]) AS aggregate_id) AS wanted
    ON wanted.tenant_id = letter.tenant_id AND wanted.aggregate_id = letter.aggregate_id
  WHERE letter.consumer = @consumer AND letter.state = 'open' AND letter.aggregate_id IS NOT NULL
    AND letter.class NOT IN ('undecodable', 'bad-id', 'too-old', 'future-id', 'id-reused')
    AND letter.id <> ALL(@trying::uuid[])
  ORDER BY letter.id
  FOR SHARE OF letter
), discarded AS (
  SELECT letter.* FROM dead_letters AS letter
  WHERE letter.state = 'discarded' AND letter.consumer = @consumer AND letter.event_id = ANY(@event_ids::uuid[])
  UNION
  SELECT letter.* FROM dead_letters AS letter
  JOIN (
    SELECT unnest(@topics::text[]) AS topic, unnest(@partitions::integer[]) AS partition,
      unnest(@first_offsets::bigint[]) AS first_offset, unnest(@last_offsets::bigint[]) AS last_offset
  ) AS span ON span.topic = letter.topic AND span.partition = letter.partition
    AND letter."offset" BETWEEN span.first_offset AND span.last_offset
  WHERE letter.state = 'discarded' AND letter.consumer = @consumer
)
SELECT DISTINCT
  'held'::text AS what, held.tenant_id::uuid AS tenant_id, held.aggregate_id::uuid AS aggregate_id,
  0::bigint AS aggregate_version, '00000000-0000-0000-0000-000000000000'::uuid AS event_id, ''::text AS event_type,
  ''::text AS topic, 0::integer AS partition, 0::bigint AS record_offset, ''::bytea AS record_hash
FROM held
UNION ALL
SELECT
  'discarded', coalesce(tenant_id, '00000000-0000-0000-0000-000000000000'), coalesce(aggregate_id, '00000000-0000-0000-0000-000000000000'),
  coalesce(aggregate_version, 0), coalesce(event_id, '00000000-0000-0000-0000-000000000000'), coalesce(event_type, ''),
  topic, partition, "offset", record_hash
FROM discarded;

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

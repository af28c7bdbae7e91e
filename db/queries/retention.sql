-- PartitionNeededBy tells what a day of a partitioned table is still needed by;
-- no row means that nothing needs it.
-- name: PartitionNeededBy :many
SELECT needed.reason::text AS reason, needed.detail::text AS detail
FROM partition_needed_by(@parent, @day::date, @relay_slot) AS needed;

-- PartitionListDetached lists the days of a table whose partition is on its way
-- out: pending if it is half detached, and else a table of its own by now.
-- name: PartitionListDetached :many
SELECT
  to_date(right(child.relname, 8), 'YYYYMMDD')::date AS day,
  (inheritance.inhrelid IS NOT NULL)::boolean        AS pending
FROM pg_catalog.pg_class AS child
LEFT JOIN pg_catalog.pg_inherits AS inheritance ON inheritance.inhrelid = child.oid
WHERE child.relnamespace = 'public'::regnamespace
  AND child.relkind = 'r'
  AND child.relowner = 'onceledger_janitor'::regrole
  AND child.relname ~ ('^' || @parent::text || '_[0-9]{8}$')
  AND coalesce(inheritance.inhdetachpending, true)
ORDER BY 1;

-- JanitorLock makes this connection the one whose janitor drops; false if
-- another is at it. It ends with the connection, or with JanitorUnlock.
-- name: JanitorLock :one
SELECT pg_try_advisory_lock(hashtextextended('onceledger.janitor', 0::bigint))::boolean AS locked;

-- JanitorUnlock lets another janitor drop.
-- name: JanitorUnlock :exec
SELECT pg_advisory_unlock(hashtextextended('onceledger.janitor', 0::bigint));

-- IdempotencyKeyDeleteExpired deletes at most so many keys that are older than
-- the age, and says how many.
-- name: IdempotencyKeyDeleteExpired :one
SELECT delete_idempotency_keys(make_interval(secs => @older_than_seconds::double precision), @at_most::integer)::bigint AS deleted;

-- PressureGet is how near the relay's slots are to the limit of the log that is
-- kept for them, and for how long the oldest event has waited. keep_bytes is below
-- zero where there is no limit; safe_bytes is of the slot that has least left, and
-- the largest number where no slot has a limit; oldest_seconds is 0 if none waits.
-- name: PressureGet :one
SELECT
  (SELECT setting::bigint * 1048576 FROM pg_catalog.pg_settings WHERE name = 'max_slot_wal_keep_size')::bigint AS keep_bytes,
  coalesce((SELECT min(safe_wal_size) FROM pg_catalog.pg_replication_slots
    WHERE slot_name IN (@slot::text, relay_debezium_slot(@slot::text))), 9223372036854775807)::bigint AS safe_bytes,
  coalesce(extract(epoch FROM clock_timestamp() - outbox_oldest_undelivered(@slot::text)), 0)::double precision AS oldest_seconds;

-- SlotList is what Postgres says of the relay's slots. safe_bytes is below zero
-- where there is no limit, and for a slot that is lost.
-- name: SlotList :many
SELECT
  slot_name::text                                                         AS slot_name,
  coalesce(active, false)::boolean                                        AS active,
  coalesce(wal_status, '')::text                                          AS wal_status,
  coalesce(invalidation_reason, '')::text                                 AS invalidation_reason,
  coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn), 0)::bigint AS retained_bytes,
  coalesce(CASE WHEN safe_wal_size < 0 THEN 0 ELSE safe_wal_size END, -1)::bigint AS safe_bytes
FROM pg_catalog.pg_replication_slots
WHERE slot_name IN (@slot::text, relay_debezium_slot(@slot::text))
ORDER BY 1;

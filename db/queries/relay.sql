-- RelaySetup is what the server says about the publication and the slot; an oid
-- of 0 is no publication.
-- name: RelaySetup :one
SELECT
  current_setting('wal_level')::text                AS wal_level,
  coalesce(publication.oid::bigint, 0)::bigint      AS publication_oid,
  coalesce(publication.pubinsert AND publication.pubviaroot AND EXISTS (
    SELECT FROM pg_catalog.pg_publication_rel AS published
    WHERE published.prpubid = publication.oid
      AND published.prrelid = 'outbox_events'::regclass
      AND published.prqual IS NULL
      AND published.prattrs IS NULL
  ), false)::boolean                                AS publication_fits,
  (slot.slot_name IS NOT NULL)::boolean             AS slot_exists,
  coalesce(slot.plugin = 'pgoutput' AND slot.database = current_database(), false)::boolean AS slot_fits,
  coalesce(slot.wal_status = 'lost' OR slot.invalidation_reason IS NOT NULL, false)::boolean AS slot_lost,
  coalesce(slot.confirmed_flush_lsn, '0/0')::pg_lsn AS slot_confirmed
FROM (SELECT @publication::name AS publication, @slot::name AS slot) AS wanted
LEFT JOIN pg_catalog.pg_publication AS publication ON publication.pubname = wanted.publication
LEFT JOIN pg_catalog.pg_replication_slots AS slot ON slot.slot_name = wanted.slot;

-- RelayPositionGet is how far the relay says it has got.
-- name: RelayPositionGet :one
SELECT * FROM relay_position WHERE slot_name = @slot_name;

-- RelayPositionStore moves the relay's position on, never back: no row means
-- that another relay has got further. It returns what may be stored once the log
-- up to lsn is delivered: the snapshot is taken first and the position of the
-- log read after it, so the transactions below xmin all end before lsn.
-- name: RelayPositionStore :one
INSERT INTO relay_position AS position (slot_name, system_id, timeline, publication_oid, lsn, snapshot_xmin)
VALUES (@slot_name, @system_id, @timeline, @publication_oid, @lsn, @snapshot_xmin)
ON CONFLICT (slot_name) DO UPDATE SET
  system_id       = excluded.system_id,
  timeline        = excluded.timeline,
  publication_oid = excluded.publication_oid,
  lsn             = excluded.lsn,
  snapshot_xmin   = excluded.snapshot_xmin,
  updated_at      = now()
WHERE position.lsn <= excluded.lsn
RETURNING
  pg_snapshot_xmin(pg_current_snapshot())::xid8 AS next_xmin,
  pg_current_wal_insert_lsn()::pg_lsn           AS next_lsn;

-- RelayPositionForget puts the position back to the beginning: whatever the
-- outbox holds is to be sent again.
-- name: RelayPositionForget :exec
UPDATE relay_position
SET lsn = '0/0', snapshot_xmin = '0', updated_at = now()
WHERE slot_name = @slot_name;

-- RelayStatusSet says what the relay is doing, unless it says so already.
-- name: RelayStatusSet :exec
INSERT INTO relay_status AS status (slot_name, state, detail)
VALUES (@slot_name, @state, @detail)
ON CONFLICT (slot_name) DO UPDATE SET
  state      = excluded.state,
  detail     = excluded.detail,
  changed_at = now()
WHERE (status.state, status.detail) <> (excluded.state, excluded.detail);

-- RelayStatusGet is what the relay of a slot last said it was doing.
-- name: RelayStatusGet :one
SELECT * FROM relay_status WHERE slot_name = @slot_name;

-- SnapshotXmin is the oldest transaction that the current snapshot does not see
-- as over.
-- name: SnapshotXmin :one
SELECT pg_snapshot_xmin(pg_current_snapshot())::xid8 AS xmin;

-- OutboxListSince names the events written by transactions from since_xmin on,
-- each aggregate's by version. Ids alone: a gap may be long.
-- name: OutboxListSince :many
SELECT id
FROM outbox_events
WHERE tx_id >= @since_xmin
ORDER BY tenant_id, aggregate_id, aggregate_type, aggregate_version, id;

-- OutboxGetMany reads events in the order of their ids in the list.
-- name: OutboxGetMany :many
SELECT
  id, tenant_id, aggregate_type, aggregate_id, aggregate_version,
  event_type, schema_version, payload, traceparent, occurred_at
FROM unnest(@ids::uuid[]) WITH ORDINALITY AS wanted (wanted_id, position)
JOIN outbox_events ON id = wanted_id
ORDER BY position;

-- RelaySetup is what the server says about the publication and the slot; an oid
-- of 0 is no publication.
-- name: RelaySetup :one
SELECT
  current_setting('wal_level')::text                AS wal_level,
  current_user::text                                AS login,
  (SELECT rolreplication OR rolsuper FROM pg_catalog.pg_roles WHERE rolname = current_user)::boolean AS may_replicate,
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

-- RelayPositionStore moves wal's position on, never back: no row means that
-- another relay has got further or taken over. It returns what may be stored once the log
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
  snapshot        = NULL,
  updated_at      = now()
WHERE position.lsn <= excluded.lsn
  AND NOT EXISTS (
    SELECT FROM relay_assignment AS other
    WHERE other.slot_name = excluded.slot_name AND other.relay NOT IN ('wal', 'none'))
RETURNING
  pg_snapshot_xmin(pg_current_snapshot())::xid8 AS next_xmin,
  pg_current_wal_insert_lsn()::pg_lsn           AS next_lsn;

-- RelayPositionForget puts the position back to the beginning: whatever the
-- outbox holds is to be sent again.
-- name: RelayPositionForget :exec
UPDATE relay_position
SET lsn = '0/0', snapshot_xmin = '0', updated_at = now()
WHERE slot_name = @slot_name;

-- RelaySnapshotStore records what poll has delivered. It runs on the connection
-- that holds the turn, so that a relay that has lost it records nothing.
-- name: RelaySnapshotStore :exec
INSERT INTO relay_position (slot_name, system_id, timeline, publication_oid, lsn, snapshot_xmin, snapshot)
VALUES (
  @slot_name, @system_id, @timeline, 0, '0/0',
  pg_snapshot_xmin(sqlc.arg(snapshot)::text::pg_snapshot), sqlc.arg(snapshot)::text::pg_snapshot)
ON CONFLICT (slot_name) DO UPDATE SET
  system_id       = excluded.system_id,
  timeline        = excluded.timeline,
  publication_oid = excluded.publication_oid,
  lsn             = excluded.lsn,
  snapshot_xmin   = excluded.snapshot_xmin,
  snapshot        = excluded.snapshot,
  updated_at      = now();

-- RelayPositionHandOver records what another relay is known to have delivered:
-- every row of a transaction below xmin.
-- name: RelayPositionHandOver :exec
INSERT INTO relay_position (slot_name, system_id, timeline, publication_oid, lsn, snapshot_xmin)
VALUES (@slot_name, @system_id, @timeline, 0, '0/0', @snapshot_xmin)
ON CONFLICT (slot_name) DO UPDATE SET
  system_id       = excluded.system_id,
  timeline        = excluded.timeline,
  publication_oid = excluded.publication_oid,
  lsn             = excluded.lsn,
  snapshot_xmin   = excluded.snapshot_xmin,
  snapshot        = NULL,
  updated_at      = now();

-- ServerIdentity tells one server, and one course of its history, from another.
-- name: ServerIdentity :one
SELECT
  system_identifier::text AS system_id,
  ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::integer AS timeline
FROM pg_control_system();

-- RelayAssignmentGet is which relay carries the outbox; no row is wal.
-- name: RelayAssignmentGet :one
SELECT relay, target, since, changed_at FROM relay_assignment WHERE slot_name = @slot_name;

-- RelayAssignmentBegin takes the job away from whoever has it, for a switch.
-- name: RelayAssignmentBegin :exec
INSERT INTO relay_assignment AS assignment (slot_name, relay, target)
VALUES (@slot_name, 'none', @target)
ON CONFLICT (slot_name) DO UPDATE SET relay = 'none', target = excluded.target, changed_at = now();

-- RelayAssignmentSettle gives the job to the switch's target; 0 rows if another
-- switch has begun. Rows of transactions below since were delivered before.
-- name: RelayAssignmentSettle :execrows
UPDATE relay_assignment
SET relay = target, since = @since, changed_at = now()
WHERE slot_name = @slot_name AND target = @target AND relay = 'none';

-- RelayFault is what keeps events from reaching Kafka, as far as the database
-- can tell; empty if nothing does.
-- name: RelayFault :one
SELECT relay_fault(@publication, @slot_name)::text AS fault;

-- SlotGet is what the server says about a slot. oldest_xid 0 is unknown.
-- name: SlotGet :one
SELECT
  coalesce(active, false)::boolean                                  AS active,
  coalesce(wal_status, '')::text                                    AS wal_status,
  coalesce(slot_oldest_xid(slot_name::text), '0')::xid8             AS oldest_xid,
  coalesce(confirmed_flush_lsn, '0/0')::pg_lsn                      AS confirmed
FROM pg_catalog.pg_replication_slots
WHERE slot_name = @slot_name::name;

-- SlotKeepsConfirmed is how many bytes of log a slot keeps that its reader has
-- confirmed.
-- name: SlotKeepsConfirmed :one
SELECT coalesce(confirmed_flush_lsn - restart_lsn, 0)::bigint AS bytes
FROM pg_catalog.pg_replication_slots
WHERE slot_name = @slot_name::name;

-- SlotMake makes a slot for pgoutput, and says where it begins. It waits for the
-- transactions that are open.
-- name: SlotMake :one
SELECT lsn::pg_lsn AS lsn FROM pg_create_logical_replication_slot(@slot_name::name, 'pgoutput');

-- TransactionID is that of a transaction of its own.
-- name: TransactionID :one
SELECT pg_current_xact_id()::xid8 AS id;

-- SlotDrop drops a slot, if it is there; one that is in use is an error.
-- name: SlotDrop :exec
SELECT pg_drop_replication_slot(slot_name) FROM pg_catalog.pg_replication_slots WHERE slot_name = @slot_name::name;

-- DebeziumSlot names the slot that Debezium reads for the relay of a slot.
-- name: DebeziumSlot :one
SELECT relay_debezium_slot(@slot_name)::text AS slot;

-- OutboxListUnseen names the events that are visible now and were not in a
-- snapshot, and what is visible now, as a snapshot: both of one moment. What
-- NOT pg_visible_in_snapshot() says is said in a form that an index answers: all
-- rows since the oldest open transaction would be looked at otherwise. A row with
-- a number that is yet to come was restored from another server's dump. It is
-- named with all others, by who has seen nothing yet, and not again each time.
-- name: OutboxListUnseen :one
SELECT
  pg_current_snapshot()::text AS snapshot,
  coalesce(array_agg(id ORDER BY aggregate_version, id), '{}')::uuid[] AS ids
FROM outbox_events
WHERE (tx_id >= pg_snapshot_xmax(sqlc.arg(seen)::text::pg_snapshot)
       OR tx_id = ANY (ARRAY(SELECT pg_snapshot_xip(sqlc.arg(seen)::text::pg_snapshot))))
  AND (tx_id < pg_snapshot_xmax(pg_current_snapshot())
       OR pg_snapshot_xmax(sqlc.arg(seen)::text::pg_snapshot) = '3');

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

-- RelayReport is what the database knows of the relay, for people.
-- name: RelayReport :one
SELECT
  coalesce(assignment.relay, 'wal')::text                    AS relay,
  coalesce(assignment.target, 'wal')::text                   AS target,
  coalesce(status.state, '')::text                           AS state,
  relay_fault(@publication, @relay_slot)::text               AS fault,
  coalesce(slot.slot_name::text, '')::text                   AS slot,
  coalesce(slot.wal_status, '')::text                        AS wal_status,
  coalesce(pg_current_wal_lsn() - slot.restart_lsn, 0)::bigint AS retained_bytes,
  (SELECT count(*) FROM outbox_events
    WHERE tx_id >= coalesce(outbox_confirmed_xmin(@relay_slot), '0')) AS unconfirmed_events
FROM (SELECT) AS one_row
LEFT JOIN relay_assignment AS assignment ON assignment.slot_name = @relay_slot
LEFT JOIN relay_status AS status ON status.slot_name = @relay_slot
LEFT JOIN pg_catalog.pg_replication_slots AS slot ON slot.slot_name =
  CASE assignment.relay WHEN 'debezium' THEN relay_debezium_slot(@relay_slot) ELSE @relay_slot END;

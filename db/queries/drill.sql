-- SlotUserEnd ends whoever uses a slot, and says how many that were.
-- name: SlotUserEnd :one
SELECT count(*)::bigint AS ended
FROM pg_catalog.pg_replication_slots AS slot
CROSS JOIN LATERAL pg_terminate_backend(slot.active_pid)
WHERE slot.slot_name = @slot_name::name AND slot.active_pid IS NOT NULL;

-- SnapshotNow is what is visible at this moment.
-- name: SnapshotNow :one
SELECT pg_current_snapshot()::text AS snapshot;

-- RelayCaughtUp tells whether every event that a snapshot saw is on record as
-- delivered by a relay that is at work.
-- name: RelayCaughtUp :one
SELECT (relay_fault(@publication, @slot_name) = '' AND NOT EXISTS (
  SELECT FROM outbox_events
  WHERE tx_id >= position.snapshot_xmin
    AND pg_visible_in_snapshot(tx_id, sqlc.arg(snapshot)::text::pg_snapshot)
))::boolean AS caught_up
FROM relay_position AS position
WHERE position.slot_name = @slot_name;

-- DrillEventList is every event that became visible between the first snapshot
-- and the last: whether that was between the two of the hole, and whether it is
-- applied.
-- name: DrillEventList :many
SELECT
  id, aggregate_type, aggregate_id,
  (NOT pg_visible_in_snapshot(tx_id, sqlc.arg(dropped)::text::pg_snapshot)
   AND pg_visible_in_snapshot(tx_id, sqlc.arg(allowed)::text::pg_snapshot))::boolean AS in_hole,
  EXISTS (SELECT FROM processed_events WHERE event_id = outbox_events.id AND consumer = @consumer) AS applied
FROM outbox_events
WHERE NOT pg_visible_in_snapshot(tx_id, sqlc.arg(began)::text::pg_snapshot)
  AND pg_visible_in_snapshot(tx_id, sqlc.arg(ended)::text::pg_snapshot)
  AND tx_id >= pg_snapshot_xmin(sqlc.arg(began)::text::pg_snapshot);

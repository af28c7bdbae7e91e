CREATE OR REPLACE FUNCTION relay_fault(publication text, relay_slot text) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, public, pg_temp AS $$
  SELECT CASE
    WHEN NOT EXISTS (SELECT FROM pg_publication WHERE pubname = publication)
      THEN format('publication %s does not exist: migrate the database', publication)
    WHEN slot.slot_name IS NULL
      THEN format('replication slot %s does not exist: no relay has started on it', relay_slot)
    WHEN slot.wal_status = 'lost'
      THEN format('replication slot %s is lost: the relay has to find what it missed', relay_slot)
    WHEN NOT slot.active
      THEN format('replication slot %s is not in use: no relay is running', relay_slot)
    WHEN status.state IS DISTINCT FROM 'streaming'
      THEN format('the relay is %s: %s', coalesce(status.state, 'silent'), coalesce(status.detail, ''))
    ELSE ''
  END
  FROM (SELECT) AS one_row
  LEFT JOIN pg_replication_slots AS slot ON slot.slot_name = relay_slot
  LEFT JOIN relay_status AS status ON status.slot_name = relay_slot
$$;
DROP FUNCTION outbox_confirmed_xmin(text);
DROP FUNCTION outbox_delivered_xmin(text);
DROP FUNCTION slot_oldest_xid(text);
DROP FUNCTION relay_debezium_slot(text);
DROP INDEX outbox_events_tx_id_idx;
ALTER TABLE relay_position DROP COLUMN snapshot;
DROP TABLE relay_assignment;

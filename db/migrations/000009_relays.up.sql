-- Three relays can carry the outbox to Kafka, one at a time: wal reads the
-- write-ahead log, poll the table, debezium is a connector of Kafka Connect's.
-- The workers do what stands here; no row is wal. While a switch is under way
-- relay is 'none', and target says where it leads.
CREATE TABLE relay_assignment (
  slot_name  text        NOT NULL,
  relay      text        NOT NULL,
  target     text        NOT NULL,
  since      xid8        NOT NULL DEFAULT '0',
  changed_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT relay_assignment_pkey PRIMARY KEY (slot_name),
  CONSTRAINT relay_assignment_relay_known CHECK (relay IN ('wal', 'poll', 'debezium', 'none')),
  CONSTRAINT relay_assignment_target_known CHECK (target IN ('wal', 'poll', 'debezium')),
  CONSTRAINT relay_assignment_settled CHECK (relay IN (target, 'none'))
);
COMMENT ON COLUMN relay_assignment.since IS 'Every row with a tx_id below it was delivered before the switch.';
GRANT SELECT, INSERT, UPDATE ON relay_assignment TO onceledger_relay;
GRANT SELECT ON relay_assignment TO onceledger_api, onceledger_verify;

-- What poll has delivered: every row that this snapshot sees. A snapshot, and
-- not a highest id: transactions end in another order than they begin.
ALTER TABLE relay_position ADD COLUMN snapshot pg_snapshot;

-- For poll, and for whoever looks for rows from a transaction on.
CREATE INDEX outbox_events_tx_id_idx ON outbox_events (tx_id);

-- The slot that Debezium reads for the relay of a slot.
CREATE FUNCTION relay_debezium_slot(relay_slot text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN left(relay_slot, 54) || '_debezium';

-- The oldest transaction that a logical slot may still have to bring: all older
-- ones had ended before its confirmed position. Postgres keeps 32 bits of it.
CREATE FUNCTION slot_oldest_xid(slot text) RETURNS xid8
LANGUAGE sql STABLE SET search_path = pg_catalog, public, pg_temp AS $$
  SELECT (CASE WHEN oldest <= (next & 4294967295) THEN (next >> 32 << 32) | oldest
               ELSE ((next >> 32) - 1 << 32) | oldest END)::text::xid8
  FROM pg_replication_slots AS s,
       LATERAL (SELECT s.catalog_xmin::text::bigint AS oldest,
                       pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS next) AS x
  WHERE s.slot_name = slot AND s.catalog_xmin IS NOT NULL
$$;

-- Every outbox row with a tx_id below it is delivered, whichever relay carries
-- them; NULL if nothing is known. A slot of Debezium's that is not read may be new,
-- made in place of one that was lost: then it says nothing of the rows before.
CREATE FUNCTION outbox_delivered_xmin(relay_slot text) RETURNS xid8
LANGUAGE sql STABLE SET search_path = pg_catalog, public, pg_temp AS $$
  SELECT CASE WHEN assignment.relay = 'debezium'
    THEN coalesce(
      (SELECT slot_oldest_xid(slot_name::text) FROM pg_replication_slots
        WHERE slot_name = relay_debezium_slot(relay_slot) AND active),
      assignment.since)
    ELSE position.snapshot_xmin
  END
  FROM (SELECT) AS one_row
  LEFT JOIN relay_assignment AS assignment ON assignment.slot_name = relay_slot
  LEFT JOIN relay_position AS position ON position.slot_name = relay_slot
$$;

-- The same as far as it can be told, for people and alarms: a slot of Debezium's
-- that is not read right now is taken for the one that was.
CREATE FUNCTION outbox_confirmed_xmin(relay_slot text) RETURNS xid8
LANGUAGE sql STABLE SET search_path = pg_catalog, public, pg_temp AS $$
  SELECT CASE WHEN assignment.relay = 'debezium'
    THEN coalesce(slot_oldest_xid(relay_debezium_slot(relay_slot)), assignment.since)
    ELSE position.snapshot_xmin
  END
  FROM (SELECT) AS one_row
  LEFT JOIN relay_assignment AS assignment ON assignment.slot_name = relay_slot
  LEFT JOIN relay_position AS position ON position.slot_name = relay_slot
$$;

-- As before, for whichever relay it is. A switch is given half a minute.
CREATE OR REPLACE FUNCTION relay_fault(publication text, relay_slot text) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, public, pg_temp AS $$
  SELECT CASE
    WHEN assignment.changed_at > now() - interval '30 seconds'
      THEN ''
    WHEN assignment.relay = 'none'
      THEN format('the switch to relay %s has not ended: run onceledger relay switch --to %1$s again', assignment.target)
    WHEN assignment.relay = 'poll' AND NOT EXISTS (
      SELECT FROM pg_locks
      WHERE locktype = 'advisory' AND objsubid = 1 AND granted
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND (classid::bigint << 32 | objid::bigint) = hashtextextended('onceledger.relay.' || relay_slot, 0))
      THEN 'no relay is running'
    WHEN assignment.relay <> 'poll' AND NOT EXISTS (SELECT FROM pg_publication WHERE pubname = publication)
      THEN format('publication %s does not exist: migrate the database', publication)
    WHEN assignment.relay <> 'poll' AND slot.slot_name IS NULL
      THEN format('replication slot %s does not exist: no relay has started on it', assignment.slot)
    WHEN assignment.relay <> 'poll' AND slot.wal_status = 'lost'
      THEN format('replication slot %s is lost: the relay has to find what it missed', assignment.slot)
    WHEN assignment.relay <> 'poll' AND NOT slot.active
      THEN format('replication slot %s is not in use: no relay is running', assignment.slot)
    WHEN assignment.relay <> 'debezium' AND status.state IS DISTINCT FROM 'streaming'
      THEN format('the relay is %s: %s', coalesce(status.state, 'silent'), coalesce(status.detail, ''))
    ELSE ''
  END
  FROM (
    SELECT coalesce(a.relay, 'wal') AS relay, a.target, a.changed_at,
           CASE WHEN a.relay = 'debezium' THEN relay_debezium_slot(relay_slot) ELSE relay_slot END AS slot
    FROM (SELECT) AS one_row
    LEFT JOIN relay_assignment AS a ON a.slot_name = relay_slot
  ) AS assignment
  LEFT JOIN pg_replication_slots AS slot ON slot.slot_name = assignment.slot
  LEFT JOIN relay_status AS status ON status.slot_name = relay_slot
$$;

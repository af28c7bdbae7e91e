-- The outbox: what happened, written in the transaction in which it happened,
-- never updated. The relay reads it from the write-ahead log.
--
-- Partitioned by the UUIDv7 id, a day each, so that old events can go with
-- their partition. There is no DEFAULT partition: a missing one must be seen.
-- tx_id is the only thing that maps a row to its place in the log: a search for
-- rows that a lost slot left out goes by it (ids and clocks run out of order).
-- payload is json and not jsonb, so that each relay publishes the same bytes.
CREATE TABLE outbox_events (
  id                uuid        NOT NULL,
  tenant_id         uuid        NOT NULL,
  aggregate_type    text        NOT NULL,
  aggregate_id      uuid        NOT NULL,
  aggregate_version bigint      NOT NULL,
  event_type        text        NOT NULL,
  schema_version    integer     NOT NULL DEFAULT 1,
  payload           json        NOT NULL,
  traceparent       text,
  occurred_at       timestamptz NOT NULL,
  tx_id             xid8        NOT NULL DEFAULT pg_current_xact_id(),
  CONSTRAINT outbox_events_pkey PRIMARY KEY (id),
  CONSTRAINT outbox_events_aggregate_type_known CHECK (aggregate_type IN ('order', 'billing')),
  CONSTRAINT outbox_events_aggregate_version_positive CHECK (aggregate_version >= 1),
  CONSTRAINT outbox_events_payload_size CHECK (octet_length(payload::text) <= 900000)
) PARTITION BY RANGE (id);
CREATE INDEX outbox_events_aggregate_idx ON outbox_events (tenant_id, aggregate_id, aggregate_type, aggregate_version);

-- Publication first, slot second, API last: Postgres skips a publication that
-- is not there with a mere warning, and the rows in between are lost.
CREATE PUBLICATION onceledger_outbox FOR TABLE outbox_events
  WITH (publish = 'insert', publish_via_partition_root = true);

-- How far the relay has got, in its own hand: a slot that vanished or moved is
-- noticed by it. Every row with a tx_id below snapshot_xmin was delivered.
CREATE TABLE relay_position (
  slot_name       text        NOT NULL,
  system_id       text        NOT NULL,
  timeline        integer     NOT NULL,
  publication_oid bigint      NOT NULL,
  lsn             pg_lsn      NOT NULL,
  snapshot_xmin   xid8        NOT NULL,
  updated_at      timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT relay_position_pkey PRIMARY KEY (slot_name)
);

-- What the relay says of itself, for readiness: written when it changes.
CREATE TABLE relay_status (
  slot_name  text        NOT NULL,
  state      text        NOT NULL,
  detail     text        NOT NULL DEFAULT '',
  changed_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT relay_status_pkey PRIMARY KEY (slot_name),
  CONSTRAINT relay_status_state_known CHECK (state IN ('starting', 'streaming', 'broker-away', 'stuck', 'stopped'))
);

-- What keeps events from reaching Kafka, as far as the database can tell; empty
-- if nothing does.
CREATE FUNCTION relay_fault(publication text, relay_slot text) RETURNS text
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

ALTER TABLE outbox_events ENABLE ROW LEVEL SECURITY;
CREATE POLICY outbox_events_api ON outbox_events TO onceledger_api USING (tenant_id = current_tenant_id());
CREATE POLICY outbox_events_services ON outbox_events
  TO onceledger_worker, onceledger_relay, onceledger_verify USING (true);

GRANT SELECT, INSERT ON outbox_events TO onceledger_api;
GRANT INSERT ON outbox_events TO onceledger_worker;
GRANT SELECT ON outbox_events TO onceledger_relay, onceledger_verify;
GRANT SELECT, INSERT, UPDATE ON relay_position, relay_status TO onceledger_relay;
GRANT SELECT ON relay_status TO onceledger_api;
GRANT SELECT ON relay_position TO onceledger_verify;

-- The janitor makes and drops partitions, which takes ownership.
GRANT CREATE ON SCHEMA public TO onceledger_janitor;
ALTER TABLE outbox_events OWNER TO onceledger_janitor;
REVOKE CREATE ON SCHEMA public FROM onceledger_janitor;

-- The first and the last UUIDv7 of a millisecond differ in the bits behind it;
-- this is the lowest one, so a range from one floor to the next holds them all.
CREATE FUNCTION uuidv7_floor(moment timestamptz) RETURNS uuid
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (lpad(to_hex((extract(epoch FROM moment) * 1000)::bigint), 12, '0') || '70000000000000000000')::uuid;

-- Makes the partition of one day (UTC) of a table that is partitioned by
-- UUIDv7, unless it is there: true when it made it. CREATE … (LIKE) and ATTACH
-- take no lock that an insert or a reader waits for; CREATE … PARTITION OF
-- would queue behind a reader of the parent and stall every insert behind it.
-- It runs as its owner, so that the janitor needs no CREATE anywhere.
CREATE FUNCTION make_day_partition(parent text, day date) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
  partition_name text := parent || '_' || to_char(day, 'YYYYMMDD');
BEGIN
  IF parent NOT IN ('outbox_events', 'processed_events') THEN
    RAISE EXCEPTION '% is not partitioned by day', parent;
  END IF;
  -- Two janitors at once: the second waits here and then finds it made.
  PERFORM pg_advisory_xact_lock(hashtextextended('onceledger.partition', 0::bigint));
  IF to_regclass(format('public.%I', partition_name)) IS NOT NULL THEN
    RETURN false;
  END IF;
  EXECUTE format('CREATE TABLE public.%I (LIKE public.%I INCLUDING ALL)', partition_name, parent);
  -- Only who may make a table in a schema can be given one in it. Nobody sees
  -- this grant: it is gone when the transaction commits.
  GRANT CREATE ON SCHEMA public TO onceledger_janitor;
  EXECUTE format('ALTER TABLE public.%I OWNER TO onceledger_janitor', partition_name);
  REVOKE CREATE ON SCHEMA public FROM onceledger_janitor;
  EXECUTE format('ALTER TABLE public.%I ATTACH PARTITION public.%I FOR VALUES FROM (%L) TO (%L)',
    parent, partition_name,
    uuidv7_floor(day::timestamp AT TIME ZONE 'UTC'),
    uuidv7_floor((day + 1)::timestamp AT TIME ZONE 'UTC'));
  RETURN true;
END
$$;
REVOKE EXECUTE ON FUNCTION make_day_partition(text, date) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION make_day_partition(text, date) TO onceledger_janitor;

-- The days that a table has an attached partition for, oldest first, read from
-- the partitions' names.
CREATE FUNCTION partition_days(parent text) RETURNS SETOF date
LANGUAGE sql STABLE SET search_path = pg_catalog, public, pg_temp AS $$
  SELECT to_date(right(child.relname, 8), 'YYYYMMDD')
  FROM pg_inherits
  JOIN pg_class AS child ON child.oid = pg_inherits.inhrelid
  WHERE pg_inherits.inhparent = to_regclass(format('public.%I', parent))
    AND NOT pg_inherits.inhdetachpending
  ORDER BY 1
$$;

-- What the janitor throws away, and what it must not. It owns the partitions and
-- drops them by itself; what it has to know of other tables it is told by the
-- functions here, and of rows in them it sees none.

-- Whether a day of a partitioned table is still needed, and by what; no row if it
-- is not. Time is not asked here. It looks at the table by name, so that the
-- answer is the same when the partition is detached already: nothing can be
-- added to it then, and the answer is final.
CREATE FUNCTION partition_needed_by(parent text, day date, relay_slot text)
RETURNS TABLE (reason text, detail text)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
DECLARE
  lowest  uuid := uuidv7_floor(day::timestamp AT TIME ZONE 'UTC');
  beyond  uuid := uuidv7_floor((day + 1)::timestamp AT TIME ZONE 'UTC');
  xmin    xid8;
  needing bigint;
BEGIN
  IF parent = 'outbox_events' THEN
    xmin := outbox_delivered_xmin(relay_slot);
    EXECUTE format('SELECT count(*) FROM (SELECT FROM public.%I WHERE tx_id >= $1 LIMIT 100000) AS undelivered',
      parent || '_' || to_char(day, 'YYYYMMDD')) INTO needing USING coalesce(xmin, '0');
    IF needing > 0 THEN
      RETURN QUERY SELECT 'undelivered', CASE
        WHEN xmin IS NULL THEN format('no relay of slot %s has recorded what it delivered', relay_slot)
        ELSE format('%s events with a tx_id from %s on are not known to be delivered', needing, xmin) END;
    END IF;
  ELSIF parent = 'processed_events' THEN
    -- An event that has waited for so long is still to come, and is to be applied
    -- then and not refused as too old.
    IF EXISTS (SELECT FROM partition_days('outbox_events') AS held WHERE held <= day) THEN
      RETURN QUERY SELECT 'undelivered', 'the outbox still holds that day or an older one';
      RETURN;
    END IF;
    SELECT count(*) INTO needing FROM dead_letters
    WHERE state = 'open' AND event_id >= lowest AND event_id < beyond;
    IF needing > 0 THEN
      RETURN QUERY SELECT 'open-dead-letter', format('%s dead letters of that day are open', needing);
    END IF;
  ELSE
    RAISE EXCEPTION '% is not partitioned by day', parent;
  END IF;
END
$$;
REVOKE EXECUTE ON FUNCTION partition_needed_by(text, date, text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION partition_needed_by(text, date, text) TO onceledger_janitor;

-- Few are open, and the janitor asks for them by the day of the event.
CREATE INDEX dead_letters_open_event_idx ON dead_letters (event_id) WHERE state = 'open';

-- Deletes some of the keys that are older than the given age, the oldest first,
-- and says how many. Those that a request holds at the moment are left for the
-- next time. However it is called, a key lives for a day.
CREATE INDEX idempotency_keys_created_at_idx ON idempotency_keys (created_at);
CREATE FUNCTION delete_idempotency_keys(older_than interval, at_most integer) RETURNS bigint
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
  WITH expired AS (
    SELECT tenant_id, key_hash
    FROM idempotency_keys
    WHERE created_at < now() - greatest(older_than, interval '1 day')
    ORDER BY created_at
    LIMIT at_most
    FOR UPDATE SKIP LOCKED
  ), deleted AS (
    DELETE FROM idempotency_keys AS used USING expired
    WHERE used.tenant_id = expired.tenant_id AND used.key_hash = expired.key_hash
    RETURNING 1
  )
  SELECT count(*) FROM deleted
$$;
REVOKE EXECUTE ON FUNCTION delete_idempotency_keys(interval, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION delete_idempotency_keys(interval, integer) TO onceledger_janitor;

-- When the oldest event happened that is not known to be delivered; NULL if all
-- are. It is of all tenants, and of no use to know which.
CREATE FUNCTION outbox_oldest_undelivered(relay_slot text) RETURNS timestamptz
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp AS $$
  SELECT occurred_at FROM outbox_events
  WHERE tx_id >= coalesce((SELECT outbox_confirmed_xmin(relay_slot)), '0')
  ORDER BY tx_id
  LIMIT 1
$$;
REVOKE EXECUTE ON FUNCTION outbox_oldest_undelivered(text) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION outbox_oldest_undelivered(text) TO onceledger_api, onceledger_janitor;

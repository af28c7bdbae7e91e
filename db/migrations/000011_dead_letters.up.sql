-- What a person does with dead letters, who may, and which versions of an order
-- have not come. Everything here is made in no time and waits for no reader:
-- new tables, and columns and indexes of tables that are small or get a constant.
--
-- A dead letter keeps the record as it came. What changes is what is known of it
-- (class, detail, attempts, last_failed_at) and, once, its state: from open to
-- resolved or discarded, and then nothing any more. Who decided so, when, why and
-- what came of it is in dead_letter_decisions, which is insert-only as the ledger
-- is.
CREATE FUNCTION dead_letters_refuse_change() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
  RAISE EXCEPTION 'dead letter % is %, and stays so', OLD.id, OLD.state
    USING ERRCODE = 'insufficient_privilege',
          HINT = 'What was decided of a dead letter is final.';
END
$$;
CREATE TRIGGER dead_letters_closed_stay_closed BEFORE UPDATE ON dead_letters
  FOR EACH ROW WHEN (OLD.state <> 'open') EXECUTE FUNCTION dead_letters_refuse_change();

CREATE FUNCTION dead_letters_refuse_removal() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
  RAISE EXCEPTION 'dead letters are kept: % refused', TG_OP
    USING ERRCODE = 'insufficient_privilege',
          HINT = 'A dead letter that is not to be applied is discarded.';
END
$$;
CREATE TRIGGER dead_letters_are_kept BEFORE DELETE OR TRUNCATE ON dead_letters
  FOR EACH STATEMENT EXECUTE FUNCTION dead_letters_refuse_removal();

-- A lock on a row takes the right to update it, too.
GRANT UPDATE (class, detail, state, attempts, last_failed_at) ON dead_letters TO onceledger_worker;

-- A discarded event that comes again is known by its id, and a discarded record
-- that could not be read by its place. Both are nearly always empty.
CREATE INDEX dead_letters_discarded_event_idx ON dead_letters (event_id) WHERE state = 'discarded' AND event_id IS NOT NULL;
CREATE INDEX dead_letters_discarded_place_idx ON dead_letters (topic, partition, "offset") WHERE state = 'discarded';
-- The letters that are open, for those who list and count them.
CREATE INDEX dead_letters_open_idx ON dead_letters (consumer, id) WHERE state = 'open';
-- For missing_versions: what waits for versions, and which versions have come.
CREATE INDEX dead_letters_open_gap_idx ON dead_letters (consumer, tenant_id, aggregate_id, aggregate_version) WHERE state = 'open' AND class = 'gap';
CREATE INDEX dead_letters_version_idx ON dead_letters (tenant_id, aggregate_id, aggregate_version)
  WHERE class NOT IN ('undecodable', 'bad-id', 'too-old', 'future-id', 'id-reused');

-- One decision for each letter that an act came to. outcome is what became of it:
-- applied, duplicate, skipped (it carries no event) and discarded close it;
-- failed and parked leave it open, with the class and the detail of this time.
CREATE TABLE dead_letter_decisions (
  id             uuid        NOT NULL,
  dead_letter_id uuid        NOT NULL,
  action         text        NOT NULL,
  outcome        text        NOT NULL,
  class          text,
  detail         text,
  reason         text,
  decided_by     text        NOT NULL,
  decided_at     timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT dead_letter_decisions_pkey PRIMARY KEY (id),
  CONSTRAINT dead_letter_decisions_letter_fkey FOREIGN KEY (dead_letter_id) REFERENCES dead_letters (id),
  CONSTRAINT dead_letter_decisions_action_known CHECK (action IN ('retried', 'discarded')),
  CONSTRAINT dead_letter_decisions_outcome_known CHECK (outcome IN (
    'applied', 'duplicate', 'skipped', 'discarded', 'failed', 'parked')),
  CONSTRAINT dead_letter_decisions_failure_named CHECK ((outcome IN ('failed', 'parked')) = (class IS NOT NULL)),
  CONSTRAINT dead_letter_decisions_discard_reasoned CHECK (action <> 'discarded' OR (outcome = 'discarded' AND reason ~ '[^[:space:]]')),
  CONSTRAINT dead_letter_decisions_decider_named CHECK (decided_by ~ '[^[:space:]]' AND char_length(decided_by) <= 200),
  CONSTRAINT dead_letter_decisions_reason_length CHECK (char_length(reason) <= 2000)
);
CREATE INDEX dead_letter_decisions_letter_idx ON dead_letter_decisions (dead_letter_id, id);
CREATE UNIQUE INDEX dead_letter_decisions_final_key ON dead_letter_decisions (dead_letter_id)
  WHERE outcome IN ('applied', 'duplicate', 'skipped', 'discarded');

CREATE FUNCTION dead_letter_decisions_refuse_change() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
  RAISE EXCEPTION '% is insert-only: % refused', TG_TABLE_NAME, TG_OP
    USING ERRCODE = 'insufficient_privilege';
END
$$;
CREATE TRIGGER dead_letter_decisions_insert_only BEFORE UPDATE OR DELETE OR TRUNCATE ON dead_letter_decisions
  FOR EACH STATEMENT EXECUTE FUNCTION dead_letter_decisions_refuse_change();

-- A letter is closed with the decision that closes it, in one transaction: neither
-- commits without the other.
CREATE FUNCTION dead_letters_check_decision() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
  IF NOT EXISTS (
    SELECT FROM dead_letter_decisions
    WHERE dead_letter_id = NEW.id
      AND outcome = ANY (CASE NEW.state WHEN 'discarded' THEN '{discarded}' ELSE '{applied,duplicate,skipped}' END::text[])
  ) THEN
    RAISE EXCEPTION 'dead letter % is %, and nobody has decided so', NEW.id, NEW.state
      USING ERRCODE = 'insufficient_privilege';
  END IF;
  RETURN NULL;
END
$$;
CREATE CONSTRAINT TRIGGER dead_letters_closed_by_decision AFTER INSERT OR UPDATE OF state ON dead_letters
  DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW WHEN (NEW.state <> 'open') EXECUTE FUNCTION dead_letters_check_decision();

CREATE FUNCTION dead_letter_decisions_check_letter() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
  IF EXISTS (SELECT FROM dead_letters WHERE id = NEW.dead_letter_id AND state = 'open') THEN
    RAISE EXCEPTION 'dead letter % is open, and was decided to be %', NEW.dead_letter_id, NEW.outcome
      USING ERRCODE = 'insufficient_privilege';
  END IF;
  RETURN NULL;
END
$$;
CREATE CONSTRAINT TRIGGER dead_letter_decisions_close AFTER INSERT ON dead_letter_decisions
  DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW WHEN (NEW.outcome IN ('applied', 'duplicate', 'skipped', 'discarded')) EXECUTE FUNCTION dead_letter_decisions_check_letter();
GRANT SELECT, INSERT ON dead_letter_decisions TO onceledger_worker;
GRANT SELECT ON dead_letter_decisions TO onceledger_verify;

-- The keys of those who may see to dead letters over HTTP. A key works for no
-- tenant. It is its row's id and 32 random bytes, of which a plain SHA-256 is all
-- that is stored.
CREATE TABLE operator_keys (
  id         uuid        NOT NULL,
  name       text        NOT NULL,
  key_hash   bytea       NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now(),
  revoked_at timestamptz,
  CONSTRAINT operator_keys_pkey PRIMARY KEY (id),
  CONSTRAINT operator_keys_key_hash_length CHECK (octet_length(key_hash) = 32),
  CONSTRAINT operator_keys_name_length CHECK (char_length(name) BETWEEN 1 AND 100)
);
GRANT SELECT ON operator_keys TO onceledger_worker;

-- The versions of an order that billing has not seen although it has seen a later
-- one. A row comes with the event that skips it and goes with the event that it
-- waits for.
CREATE TABLE version_gaps (
  tenant_id  uuid        NOT NULL,
  order_id   uuid        NOT NULL,
  version    bigint      NOT NULL,
  noticed_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT version_gaps_pkey PRIMARY KEY (tenant_id, order_id, version),
  CONSTRAINT version_gaps_order_fkey FOREIGN KEY (tenant_id, order_id) REFERENCES order_billing (tenant_id, order_id),
  CONSTRAINT version_gaps_version_positive CHECK (version >= 1)
);
ALTER TABLE version_gaps ENABLE ROW LEVEL SECURITY;
CREATE POLICY version_gaps_api ON version_gaps FOR SELECT TO onceledger_api USING (tenant_id = current_tenant_id());
CREATE POLICY version_gaps_services ON version_gaps TO onceledger_worker, onceledger_verify USING (true);
GRANT SELECT ON version_gaps TO onceledger_api, onceledger_verify;
GRANT SELECT, INSERT, DELETE ON version_gaps TO onceledger_worker;

-- The versions that a person has given up: they cannot come any more. It stays on
-- record, insert-only as the decisions on dead letters are, if one comes all the
-- same.
CREATE TABLE version_gap_decisions (
  tenant_id  uuid        NOT NULL,
  order_id   uuid        NOT NULL,
  version    bigint      NOT NULL,
  noticed_at timestamptz NOT NULL,
  reason     text        NOT NULL,
  decided_by text        NOT NULL,
  decided_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT version_gap_decisions_pkey PRIMARY KEY (tenant_id, order_id, version),
  CONSTRAINT version_gap_decisions_order_fkey FOREIGN KEY (tenant_id, order_id) REFERENCES order_billing (tenant_id, order_id),
  CONSTRAINT version_gap_decisions_reasoned CHECK (reason ~ '[^[:space:]]' AND char_length(reason) <= 2000),
  CONSTRAINT version_gap_decisions_decider_named CHECK (decided_by ~ '[^[:space:]]' AND char_length(decided_by) <= 200)
);
CREATE TRIGGER version_gap_decisions_insert_only BEFORE UPDATE OR DELETE OR TRUNCATE ON version_gap_decisions
  FOR EACH STATEMENT EXECUTE FUNCTION dead_letter_decisions_refuse_change();
ALTER TABLE version_gap_decisions ENABLE ROW LEVEL SECURITY;
CREATE POLICY version_gap_decisions_api ON version_gap_decisions FOR SELECT TO onceledger_api USING (tenant_id = current_tenant_id());
CREATE POLICY version_gap_decisions_services ON version_gap_decisions TO onceledger_worker, onceledger_verify USING (true);
GRANT SELECT (tenant_id, order_id, version) ON version_gap_decisions TO onceledger_api;
GRANT SELECT ON version_gap_decisions TO onceledger_verify;
GRANT SELECT, INSERT ON version_gap_decisions TO onceledger_worker;

-- The version that the present one took the place of; 0 if it was the first. What
-- lies between the two came with the same batch or is missing, and so a batch
-- learns from its own statement which versions it has skipped.
ALTER TABLE order_billing ADD COLUMN previous_version bigint NOT NULL DEFAULT 0;
GRANT UPDATE (previous_version) ON order_billing TO onceledger_worker;

-- The versions of orders that are missing by now: those that a later event has
-- skipped, and those that an event waits for that cannot be applied without them
-- (a dead letter "gap"). What came and is a dead letter itself is not missing,
-- whatever became of it: one that was discarded was given up. But letters that hold
-- back nothing, since their events may never have been the order's, fill nothing;
-- nor does one that says it is far ahead of everything.
CREATE VIEW missing_versions WITH (security_invoker = true) AS
SELECT found.tenant_id, found.order_id, found.version, min(found.noticed_at) AS noticed_at
FROM (
  SELECT gap.tenant_id, gap.order_id, gap.version, gap.noticed_at
  FROM version_gaps AS gap
  LEFT JOIN version_gap_decisions AS given_up
    ON given_up.tenant_id = gap.tenant_id AND given_up.order_id = gap.order_id AND given_up.version = gap.version
  WHERE given_up.version IS NULL
  UNION ALL
  SELECT letter.tenant_id, letter.aggregate_id, skipped.version, letter.first_failed_at
  FROM dead_letters AS letter
  LEFT JOIN order_billing AS known ON known.tenant_id = letter.tenant_id AND known.order_id = letter.aggregate_id
  CROSS JOIN LATERAL generate_series(
    coalesce(known.version, 0) + 1, least(letter.aggregate_version - 1, coalesce(known.version, 0) + 100)) AS skipped (version)
  WHERE letter.state = 'open' AND letter.class = 'gap' AND letter.consumer = 'billing'
    AND letter.aggregate_version - coalesce(known.version, 0) <= 100
) AS found
WHERE NOT EXISTS (
  SELECT FROM dead_letters AS letter
  WHERE letter.tenant_id = found.tenant_id AND letter.aggregate_id = found.order_id
    AND letter.aggregate_version = found.version AND letter.consumer = 'billing'
    AND letter.class NOT IN ('undecodable', 'bad-id', 'too-old', 'future-id', 'id-reused'))
GROUP BY found.tenant_id, found.order_id, found.version;
GRANT SELECT ON missing_versions TO onceledger_api, onceledger_worker, onceledger_verify;

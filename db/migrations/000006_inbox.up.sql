-- The consumer's side of exactly-once: which events were applied, and which
-- could not be.
--
-- An event is applied (a row in processed_events) or a dead letter, never both.
-- processed_events is partitioned by the event's own UUIDv7, not by the time it
-- came: uniqueness must not depend on when a redelivery arrives. The
-- fingerprint (SHA-256 of type and value) tells a duplicate from an id that was
-- used twice.
CREATE TABLE processed_events (
  consumer     text        NOT NULL,
  event_id     uuid        NOT NULL,
  tenant_id    uuid        NOT NULL,
  fingerprint  bytea       NOT NULL,
  topic        text        NOT NULL,
  partition    integer     NOT NULL,
  "offset"     bigint      NOT NULL,
  processed_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT processed_events_pkey PRIMARY KEY (event_id, consumer),
  CONSTRAINT processed_events_fingerprint_length CHECK (octet_length(fingerprint) = 32)
) PARTITION BY RANGE (event_id);

-- Everything that is known of a record that could not be applied, with its
-- bytes as they came. An open one parks later events of its aggregate behind it
-- (parked_behind), so that they keep their order.
-- record_hash (SHA-256 of key and value) is in the key because offsets begin anew
-- with a topic that is made anew: an offset alone would take a new record for the
-- old one and lose it.
CREATE TABLE dead_letters (
  id                uuid        NOT NULL,
  consumer          text        NOT NULL,
  topic             text        NOT NULL,
  partition         integer     NOT NULL,
  "offset"          bigint      NOT NULL,
  class             text        NOT NULL,
  detail            text        NOT NULL,
  state             text        NOT NULL DEFAULT 'open',
  event_id          uuid,
  event_type        text,
  tenant_id         uuid,
  aggregate_id      uuid,
  aggregate_version bigint,
  record_hash       bytea       NOT NULL,
  record_key        bytea,
  record_value      bytea,
  record_headers    jsonb       NOT NULL,
  record_time       timestamptz NOT NULL,
  attempts          integer     NOT NULL DEFAULT 1,
  first_failed_at   timestamptz NOT NULL DEFAULT now(),
  last_failed_at    timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT dead_letters_pkey PRIMARY KEY (id),
  CONSTRAINT dead_letters_record_key UNIQUE (consumer, topic, partition, "offset", record_hash),
  CONSTRAINT dead_letters_class_known CHECK (class IN (
    'undecodable', 'unknown-schema', 'bad-id', 'too-old', 'future-id', 'id-reused', 'gap', 'rule', 'data', 'parked')),
  CONSTRAINT dead_letters_state_known CHECK (state IN ('open', 'resolved', 'discarded')),
  CONSTRAINT dead_letters_attempts_positive CHECK (attempts >= 1)
);

-- Which aggregates are held: consulted for each batch, nearly always empty.
CREATE INDEX dead_letters_parking_idx ON dead_letters (consumer, tenant_id, aggregate_id)
  WHERE state = 'open' AND aggregate_id IS NOT NULL
    AND class NOT IN ('undecodable', 'bad-id', 'too-old', 'future-id', 'id-reused');
CREATE INDEX dead_letters_tenant_idx ON dead_letters (tenant_id, aggregate_id);

ALTER TABLE processed_events ENABLE ROW LEVEL SECURITY;
ALTER TABLE dead_letters ENABLE ROW LEVEL SECURITY;
CREATE POLICY processed_events_api ON processed_events FOR SELECT TO onceledger_api USING (tenant_id = current_tenant_id());
CREATE POLICY dead_letters_api ON dead_letters FOR SELECT TO onceledger_api USING (tenant_id = current_tenant_id());
CREATE POLICY processed_events_services ON processed_events TO onceledger_worker, onceledger_verify USING (true);
CREATE POLICY dead_letters_services ON dead_letters TO onceledger_worker, onceledger_verify USING (true);

GRANT SELECT ON processed_events, dead_letters TO onceledger_api, onceledger_verify;
GRANT SELECT, INSERT ON processed_events, dead_letters TO onceledger_worker;

GRANT CREATE ON SCHEMA public TO onceledger_janitor;
ALTER TABLE processed_events OWNER TO onceledger_janitor;
REVOKE CREATE ON SCHEMA public FROM onceledger_janitor;

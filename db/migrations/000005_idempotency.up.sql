-- The answer to a request, stored in the request's own transaction, so that
-- the same key gives the same answer even if the first one never arrived.
--
-- One table, not partitioned by time: with the time in its key, one key on both
-- sides of midnight would be two orders. Only a hash of the key is kept: keys
-- are of any length, and an index row is not.
CREATE TABLE idempotency_keys (
  tenant_id    uuid        NOT NULL,
  key_hash     bytea       NOT NULL,
  fingerprint  bytea       NOT NULL,
  status       integer,
  content_type text        NOT NULL DEFAULT '',
  location     text        NOT NULL DEFAULT '',
  body         bytea,
  created_at   timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT idempotency_keys_pkey PRIMARY KEY (tenant_id, key_hash),
  CONSTRAINT idempotency_keys_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES tenants (id),
  CONSTRAINT idempotency_keys_key_hash_length CHECK (octet_length(key_hash) = 16),
  CONSTRAINT idempotency_keys_fingerprint_length CHECK (octet_length(fingerprint) = 32)
);

ALTER TABLE idempotency_keys ENABLE ROW LEVEL SECURITY;
CREATE POLICY idempotency_keys_api ON idempotency_keys TO onceledger_api USING (tenant_id = current_tenant_id());

GRANT SELECT, INSERT ON idempotency_keys TO onceledger_api;
GRANT UPDATE (status, content_type, location, body) ON idempotency_keys TO onceledger_api;

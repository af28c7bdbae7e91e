-- Who uses the service, and with which keys. A key is 32 random bytes, so a
-- plain SHA-256 of it cannot be searched for and is all that is stored.
CREATE TABLE tenants (
  id         uuid        NOT NULL,
  name       text        NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT tenants_pkey PRIMARY KEY (id),
  CONSTRAINT tenants_name_key UNIQUE (name),
  CONSTRAINT tenants_name_length CHECK (char_length(name) BETWEEN 1 AND 100)
);

CREATE TABLE api_keys (
  id         uuid        NOT NULL,
  tenant_id  uuid        NOT NULL,
  name       text        NOT NULL,
  key_hash   bytea       NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now(),
  revoked_at timestamptz,
  CONSTRAINT api_keys_pkey PRIMARY KEY (id),
  CONSTRAINT api_keys_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES tenants (id),
  CONSTRAINT api_keys_key_hash_key UNIQUE (key_hash),
  CONSTRAINT api_keys_key_hash_length CHECK (octet_length(key_hash) = 32),
  CONSTRAINT api_keys_name_length CHECK (char_length(name) BETWEEN 1 AND 100)
);
CREATE INDEX api_keys_tenant_id_idx ON api_keys (tenant_id, created_at);

-- The API has no rights on either table: by a key's hash, and by nothing else, it
-- is told whose the key is.
CREATE FUNCTION api_key_tenant(hash bytea) RETURNS uuid
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
  SELECT tenant_id FROM public.api_keys WHERE key_hash = hash AND revoked_at IS NULL
$$;
REVOKE EXECUTE ON FUNCTION api_key_tenant(bytea) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION api_key_tenant(bytea) TO onceledger_api;

ALTER TABLE api_keys ENABLE ROW LEVEL SECURITY;
GRANT SELECT ON tenants TO onceledger_verify;

-- The roles stay: they belong to the server, and other databases may use them.
DROP FUNCTION current_tenant_id();
REVOKE ALL ON SCHEMA public FROM
  onceledger_api, onceledger_relay, onceledger_worker, onceledger_janitor, onceledger_verify;
DO $$
BEGIN
  EXECUTE format('GRANT TEMPORARY ON DATABASE %I TO PUBLIC', current_database());
END
$$;

-- One database role for each thing the service does, each with the least it
-- needs, so that the database and not the code says who may do what.
--
-- They log in by themselves and get their passwords outside the migrations
-- (`onceledger up` sets them; elsewhere ALTER ROLE … PASSWORD). Roles belong to
-- the server and not to one database, so they may be there already.
--
-- REPLICATION reads the whole server, base backups included: treat the relay's
-- password as a superuser's.
DO $$
DECLARE
  role_name text;
BEGIN
  FOREACH role_name IN ARRAY ARRAY[
    'onceledger_api', 'onceledger_relay', 'onceledger_worker',
    'onceledger_janitor', 'onceledger_verify'
  ] LOOP
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = role_name) THEN
      BEGIN
        EXECUTE format('CREATE ROLE %I LOGIN', role_name);
      EXCEPTION WHEN duplicate_object OR unique_violation THEN
        NULL; -- another database of this server was migrated at the same moment
      END;
    END IF;
  END LOOP;

  IF NOT (SELECT rolreplication FROM pg_roles WHERE rolname = 'onceledger_relay') THEN
    ALTER ROLE onceledger_relay REPLICATION;
  END IF;

  -- The owner of the schema hands two tables to the janitor and must still be
  -- able to migrate them.
  IF NOT pg_has_role(CURRENT_USER, 'onceledger_janitor', 'SET') THEN
    EXECUTE format('GRANT onceledger_janitor TO %I', CURRENT_USER);
  END IF;
END
$$;

REVOKE CREATE ON SCHEMA public FROM PUBLIC;
GRANT USAGE ON SCHEMA public TO
  onceledger_api, onceledger_relay, onceledger_worker, onceledger_janitor, onceledger_verify;

-- Whoever may make an object on the way that names are looked up can put it
-- before the one that a function means. So nobody but the owner may: no CREATE on
-- public, no temporary objects; and each function here says where it looks.
DO $$
BEGIN
  EXECUTE format('REVOKE TEMPORARY ON DATABASE %I FROM PUBLIC', current_database());
END
$$;

-- The tenant that the present transaction works for. Row security compares it;
-- unset means no tenant, and then no row matches.
CREATE FUNCTION current_tenant_id() RETURNS uuid
LANGUAGE sql STABLE PARALLEL SAFE
RETURN nullif(current_setting('onceledger.tenant_id', true), '')::uuid;

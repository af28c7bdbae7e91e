-- The ledger: insert-only double entry.
--
-- A line moves one positive amount from a credit account to a debit account of
-- the same currency, so an entry balances by construction and a mixed currency
-- is a foreign key violation. One event makes at most one entry (UNIQUE
-- event_id). What was written stays: no service role is granted UPDATE, DELETE
-- or TRUNCATE, and triggers refuse them to the owner too.
CREATE TABLE ledger_accounts (
  tenant_id  uuid        NOT NULL,
  code       text        NOT NULL,
  currency   text        NOT NULL,
  kind       text        NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT ledger_accounts_pkey PRIMARY KEY (tenant_id, code, currency),
  CONSTRAINT ledger_accounts_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES tenants (id),
  CONSTRAINT ledger_accounts_kind_known CHECK (kind IN ('asset', 'liability', 'income')),
  CONSTRAINT ledger_accounts_currency_form CHECK (currency ~ '^[A-Z]{3}$')
);

-- effective_at is when it happened, recorded_at when the ledger learned of it.
-- reverses names the entry that this one takes back in part or whole.
CREATE TABLE ledger_entries (
  tenant_id    uuid        NOT NULL,
  event_id     uuid        NOT NULL,
  kind         text        NOT NULL,
  order_id     uuid        NOT NULL,
  currency     text        NOT NULL,
  reverses     uuid,
  effective_at timestamptz NOT NULL,
  recorded_at  timestamptz NOT NULL DEFAULT now(),
  tx_id        xid8        NOT NULL DEFAULT pg_current_xact_id(),
  CONSTRAINT ledger_entries_pkey PRIMARY KEY (tenant_id, event_id),
  CONSTRAINT ledger_entries_event_id_key UNIQUE (event_id),
  CONSTRAINT ledger_entries_reverses_fkey FOREIGN KEY (tenant_id, reverses) REFERENCES ledger_entries (tenant_id, event_id),
  CONSTRAINT ledger_entries_kind_known CHECK (kind IN ('payment', 'refund'))
);
CREATE INDEX ledger_entries_order_idx ON ledger_entries (tenant_id, order_id);

CREATE TABLE ledger_lines (
  tenant_id      uuid    NOT NULL,
  event_id       uuid    NOT NULL,
  line_no        integer NOT NULL,
  debit_account  text    NOT NULL,
  credit_account text    NOT NULL,
  currency       text    NOT NULL,
  amount_minor   bigint  NOT NULL,
  CONSTRAINT ledger_lines_pkey PRIMARY KEY (tenant_id, event_id, line_no),
  CONSTRAINT ledger_lines_entry_fkey FOREIGN KEY (tenant_id, event_id) REFERENCES ledger_entries (tenant_id, event_id),
  CONSTRAINT ledger_lines_debit_account_fkey
    FOREIGN KEY (tenant_id, debit_account, currency) REFERENCES ledger_accounts (tenant_id, code, currency),
  CONSTRAINT ledger_lines_credit_account_fkey
    FOREIGN KEY (tenant_id, credit_account, currency) REFERENCES ledger_accounts (tenant_id, code, currency),
  CONSTRAINT ledger_lines_amount_positive CHECK (amount_minor > 0),
  CONSTRAINT ledger_lines_accounts_differ CHECK (debit_account <> credit_account)
);
CREATE INDEX ledger_lines_debit_idx ON ledger_lines (tenant_id, debit_account, currency, event_id) INCLUDE (amount_minor);
CREATE INDEX ledger_lines_credit_idx ON ledger_lines (tenant_id, credit_account, currency, event_id) INCLUDE (amount_minor);

CREATE FUNCTION ledger_refuse_change() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
  RAISE EXCEPTION '% is insert-only: % refused', TG_TABLE_NAME, TG_OP
    USING ERRCODE = 'insufficient_privilege',
          HINT = 'Correct a wrong entry with a new one that reverses it.';
END
$$;
CREATE TRIGGER ledger_accounts_insert_only BEFORE UPDATE OR DELETE OR TRUNCATE ON ledger_accounts
  FOR EACH STATEMENT EXECUTE FUNCTION ledger_refuse_change();
CREATE TRIGGER ledger_entries_insert_only BEFORE UPDATE OR DELETE OR TRUNCATE ON ledger_entries
  FOR EACH STATEMENT EXECUTE FUNCTION ledger_refuse_change();
CREATE TRIGGER ledger_lines_insert_only BEFORE UPDATE OR DELETE OR TRUNCATE ON ledger_lines
  FOR EACH STATEMENT EXECUTE FUNCTION ledger_refuse_change();

-- An entry is whole when its transaction commits: a line may be added in that
-- transaction only, in the entry's currency. Without this, an insert-only role
-- could still change an old entry by adding to it.
CREATE FUNCTION ledger_lines_check_entry() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
  IF EXISTS (
    SELECT FROM added
    JOIN ledger_entries AS entry USING (tenant_id, event_id)
    WHERE entry.tx_id <> pg_current_xact_id() OR entry.currency <> added.currency
  ) THEN
    RAISE EXCEPTION 'a ledger line must be written in the transaction and the currency of its entry'
      USING ERRCODE = 'integrity_constraint_violation';
  END IF;
  RETURN NULL;
END
$$;
CREATE TRIGGER ledger_lines_same_transaction AFTER INSERT ON ledger_lines
  REFERENCING NEW TABLE AS added
  FOR EACH STATEMENT EXECUTE FUNCTION ledger_lines_check_entry();

-- tx_id is what the check above trusts, so nobody may choose it.
CREATE FUNCTION ledger_entries_check_tx_id() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
  IF EXISTS (SELECT FROM added WHERE tx_id <> pg_current_xact_id()) THEN
    RAISE EXCEPTION 'a ledger entry carries the id of its own transaction'
      USING ERRCODE = 'integrity_constraint_violation';
  END IF;
  RETURN NULL;
END
$$;
CREATE TRIGGER ledger_entries_own_transaction AFTER INSERT ON ledger_entries
  REFERENCING NEW TABLE AS added
  FOR EACH STATEMENT EXECUTE FUNCTION ledger_entries_check_tx_id();

CREATE FUNCTION ledger_entries_check_lines() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp AS $$
BEGIN
  IF NOT EXISTS (SELECT FROM ledger_lines WHERE tenant_id = NEW.tenant_id AND event_id = NEW.event_id) THEN
    RAISE EXCEPTION 'ledger entry % has no lines', NEW.event_id
      USING ERRCODE = 'integrity_constraint_violation';
  END IF;
  RETURN NULL;
END
$$;
CREATE CONSTRAINT TRIGGER ledger_entries_have_lines AFTER INSERT ON ledger_entries
  DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW EXECUTE FUNCTION ledger_entries_check_lines();

ALTER TABLE ledger_accounts ENABLE ROW LEVEL SECURITY;
ALTER TABLE ledger_entries ENABLE ROW LEVEL SECURITY;
ALTER TABLE ledger_lines ENABLE ROW LEVEL SECURITY;
CREATE POLICY ledger_accounts_api ON ledger_accounts FOR SELECT TO onceledger_api USING (tenant_id = current_tenant_id());
CREATE POLICY ledger_entries_api ON ledger_entries FOR SELECT TO onceledger_api USING (tenant_id = current_tenant_id());
CREATE POLICY ledger_lines_api ON ledger_lines FOR SELECT TO onceledger_api USING (tenant_id = current_tenant_id());
CREATE POLICY ledger_accounts_services ON ledger_accounts TO onceledger_worker, onceledger_verify USING (true);
CREATE POLICY ledger_entries_services ON ledger_entries TO onceledger_worker, onceledger_verify USING (true);
CREATE POLICY ledger_lines_services ON ledger_lines TO onceledger_worker, onceledger_verify USING (true);

GRANT SELECT ON ledger_accounts, ledger_entries, ledger_lines TO onceledger_api, onceledger_verify;
GRANT SELECT, INSERT ON ledger_accounts, ledger_entries, ledger_lines TO onceledger_worker;

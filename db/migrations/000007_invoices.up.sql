-- The billing side: its own view of each order, and the documents it issues.
--
-- A document's id is the id of the event that caused it, so a document can be
-- made once per event and needs no look-up to be found again. Documents are
-- never changed: the worker may insert and read them, nothing else.
CREATE TABLE order_billing (
  tenant_id      uuid        NOT NULL,
  order_id       uuid        NOT NULL,
  version        bigint      NOT NULL,
  status         text        NOT NULL,
  currency       text        NOT NULL,
  total_minor    bigint      NOT NULL,
  refunded_minor bigint      NOT NULL,
  updated_at     timestamptz NOT NULL DEFAULT now(),
  CONSTRAINT order_billing_pkey PRIMARY KEY (tenant_id, order_id),
  CONSTRAINT order_billing_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES tenants (id),
  CONSTRAINT order_billing_version_positive CHECK (version >= 1)
);

-- The last number given out for a kind of document in a year (UTC). Taken last
-- in a transaction and held to its end, which makes numbers gap-free and the
-- billing of one tenant serial.
CREATE TABLE document_numbers (
  tenant_id   uuid    NOT NULL,
  kind        text    NOT NULL,
  year        integer NOT NULL,
  last_number bigint  NOT NULL,
  CONSTRAINT document_numbers_pkey PRIMARY KEY (tenant_id, kind, year),
  CONSTRAINT document_numbers_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES tenants (id),
  CONSTRAINT document_numbers_kind_known CHECK (kind IN ('invoice', 'credit-note'))
);

-- taxes: [{"rate","net_amount","tax_amount"}], minor units, one entry per rate.
CREATE TABLE invoices (
  tenant_id      uuid        NOT NULL,
  id             uuid        NOT NULL,
  order_id       uuid        NOT NULL,
  year           integer     NOT NULL,
  number         bigint      NOT NULL,
  customer_id    text        NOT NULL,
  customer_email text        NOT NULL,
  currency       text        NOT NULL,
  net_minor      bigint      NOT NULL,
  tax_minor      bigint      NOT NULL,
  total_minor    bigint      NOT NULL,
  taxes          json        NOT NULL,
  paid_at        timestamptz NOT NULL,
  issued_at      timestamptz NOT NULL,
  CONSTRAINT invoices_pkey PRIMARY KEY (tenant_id, id),
  CONSTRAINT invoices_order_key UNIQUE (tenant_id, order_id),
  CONSTRAINT invoices_number_key UNIQUE (tenant_id, year, number),
  CONSTRAINT invoices_number_positive CHECK (number >= 1),
  CONSTRAINT invoices_order_fkey FOREIGN KEY (tenant_id, order_id) REFERENCES order_billing (tenant_id, order_id),
  CONSTRAINT invoices_amounts_sum CHECK (
    net_minor >= 0 AND tax_minor >= 0 AND total_minor > 0 AND total_minor = net_minor + tax_minor)
);

CREATE TABLE invoice_lines (
  tenant_id    uuid    NOT NULL,
  invoice_id   uuid    NOT NULL,
  line_no      integer NOT NULL,
  sku          text    NOT NULL,
  description  text    NOT NULL,
  quantity     bigint  NOT NULL,
  unit_minor   bigint  NOT NULL,
  net_minor    bigint  NOT NULL,
  tax_rate_ppm integer NOT NULL,
  CONSTRAINT invoice_lines_pkey PRIMARY KEY (tenant_id, invoice_id, line_no),
  CONSTRAINT invoice_lines_invoice_fkey FOREIGN KEY (tenant_id, invoice_id) REFERENCES invoices (tenant_id, id),
  CONSTRAINT invoice_lines_net_product CHECK (quantity >= 1 AND unit_minor >= 0 AND net_minor = quantity * unit_minor)
);

-- ordinal counts the credit notes of one invoice from 1, without gaps.
CREATE TABLE credit_notes (
  tenant_id   uuid        NOT NULL,
  id          uuid        NOT NULL,
  invoice_id  uuid        NOT NULL,
  order_id    uuid        NOT NULL,
  refund_id   uuid        NOT NULL,
  ordinal     integer     NOT NULL,
  year        integer     NOT NULL,
  number      bigint      NOT NULL,
  currency    text        NOT NULL,
  net_minor   bigint      NOT NULL,
  tax_minor   bigint      NOT NULL,
  total_minor bigint      NOT NULL,
  taxes       json        NOT NULL,
  reason      text        NOT NULL,
  refunded_at timestamptz NOT NULL,
  issued_at   timestamptz NOT NULL,
  CONSTRAINT credit_notes_pkey PRIMARY KEY (tenant_id, id),
  CONSTRAINT credit_notes_refund_key UNIQUE (tenant_id, refund_id),
  CONSTRAINT credit_notes_ordinal_key UNIQUE (tenant_id, order_id, ordinal),
  CONSTRAINT credit_notes_number_key UNIQUE (tenant_id, year, number),
  CONSTRAINT credit_notes_number_positive CHECK (number >= 1 AND ordinal >= 1),
  CONSTRAINT credit_notes_invoice_fkey FOREIGN KEY (tenant_id, invoice_id) REFERENCES invoices (tenant_id, id),
  CONSTRAINT credit_notes_amounts_sum CHECK (
    net_minor >= 0 AND tax_minor >= 0 AND total_minor > 0 AND total_minor = net_minor + tax_minor)
);

ALTER TABLE order_billing ENABLE ROW LEVEL SECURITY;
ALTER TABLE document_numbers ENABLE ROW LEVEL SECURITY;
ALTER TABLE invoices ENABLE ROW LEVEL SECURITY;
ALTER TABLE invoice_lines ENABLE ROW LEVEL SECURITY;
ALTER TABLE credit_notes ENABLE ROW LEVEL SECURITY;

CREATE POLICY order_billing_api ON order_billing FOR SELECT TO onceledger_api USING (tenant_id = current_tenant_id());
CREATE POLICY invoices_api ON invoices FOR SELECT TO onceledger_api USING (tenant_id = current_tenant_id());
CREATE POLICY invoice_lines_api ON invoice_lines FOR SELECT TO onceledger_api USING (tenant_id = current_tenant_id());
CREATE POLICY credit_notes_api ON credit_notes FOR SELECT TO onceledger_api USING (tenant_id = current_tenant_id());

CREATE POLICY order_billing_services ON order_billing TO onceledger_worker, onceledger_verify USING (true);
CREATE POLICY document_numbers_services ON document_numbers TO onceledger_worker, onceledger_verify USING (true);
CREATE POLICY invoices_services ON invoices TO onceledger_worker, onceledger_verify USING (true);
CREATE POLICY invoice_lines_services ON invoice_lines TO onceledger_worker, onceledger_verify USING (true);
CREATE POLICY credit_notes_services ON credit_notes TO onceledger_worker, onceledger_verify USING (true);

GRANT SELECT ON order_billing, invoices, invoice_lines, credit_notes TO onceledger_api;
GRANT SELECT ON order_billing, document_numbers, invoices, invoice_lines, credit_notes TO onceledger_verify;
GRANT SELECT, INSERT ON order_billing, document_numbers, invoices, invoice_lines, credit_notes TO onceledger_worker;
GRANT UPDATE (version, status, currency, total_minor, refunded_minor, updated_at) ON order_billing TO onceledger_worker;
GRANT UPDATE (last_number) ON document_numbers TO onceledger_worker;

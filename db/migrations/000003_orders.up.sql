-- Orders and what was paid and given back. Amounts are minor units of the
-- order's currency (bigint), tax rates are millionths (190000 is 19 %).
CREATE TABLE orders (
  tenant_id      uuid        NOT NULL,
  id             uuid        NOT NULL,
  version        bigint      NOT NULL,
  status         text        NOT NULL,
  customer_id    text        NOT NULL,
  customer_email text        NOT NULL,
  currency       text        NOT NULL,
  net_minor      bigint      NOT NULL,
  tax_minor      bigint      NOT NULL,
  total_minor    bigint      NOT NULL,
  refunded_minor bigint      NOT NULL DEFAULT 0,
  metadata       json        NOT NULL DEFAULT '{}',
  created_at     timestamptz NOT NULL,
  updated_at     timestamptz NOT NULL,
  CONSTRAINT orders_pkey PRIMARY KEY (tenant_id, id),
  CONSTRAINT orders_tenant_id_fkey FOREIGN KEY (tenant_id) REFERENCES tenants (id),
  CONSTRAINT orders_version_positive CHECK (version >= 1),
  CONSTRAINT orders_status_known CHECK (status IN ('created', 'paid', 'cancelled')),
  CONSTRAINT orders_currency_form CHECK (currency ~ '^[A-Z]{3}$'),
  CONSTRAINT orders_amounts_sum CHECK (
    net_minor >= 0 AND tax_minor >= 0 AND total_minor > 0
    AND total_minor = net_minor + tax_minor AND total_minor <= 9007199254740991),
  CONSTRAINT orders_refunded_within_paid CHECK (
    refunded_minor = 0 OR (status = 'paid' AND refunded_minor BETWEEN 0 AND total_minor))
);

CREATE TABLE order_lines (
  tenant_id    uuid    NOT NULL,
  order_id     uuid    NOT NULL,
  line_no      integer NOT NULL,
  sku          text    NOT NULL,
  description  text    NOT NULL,
  quantity     bigint  NOT NULL,
  unit_minor   bigint  NOT NULL,
  net_minor    bigint  NOT NULL,
  tax_rate_ppm integer NOT NULL,
  CONSTRAINT order_lines_pkey PRIMARY KEY (tenant_id, order_id, line_no),
  CONSTRAINT order_lines_order_fkey FOREIGN KEY (tenant_id, order_id) REFERENCES orders (tenant_id, id),
  CONSTRAINT order_lines_quantity_positive CHECK (quantity >= 1),
  CONSTRAINT order_lines_net_product CHECK (unit_minor >= 0 AND net_minor = quantity * unit_minor),
  CONSTRAINT order_lines_tax_rate_range CHECK (tax_rate_ppm BETWEEN 0 AND 1000000)
);

-- Net and tax of an order by tax rate: tax is rounded once per order and rate.
CREATE TABLE order_taxes (
  tenant_id    uuid    NOT NULL,
  order_id     uuid    NOT NULL,
  tax_rate_ppm integer NOT NULL,
  net_minor    bigint  NOT NULL,
  tax_minor    bigint  NOT NULL,
  CONSTRAINT order_taxes_pkey PRIMARY KEY (tenant_id, order_id, tax_rate_ppm),
  CONSTRAINT order_taxes_order_fkey FOREIGN KEY (tenant_id, order_id) REFERENCES orders (tenant_id, id),
  CONSTRAINT order_taxes_amounts_range CHECK (net_minor >= 0 AND tax_minor >= 0)
);

CREATE TABLE payments (
  tenant_id    uuid        NOT NULL,
  order_id     uuid        NOT NULL,
  reference    text        NOT NULL,
  amount_minor bigint      NOT NULL,
  currency     text        NOT NULL,
  paid_at      timestamptz NOT NULL,
  CONSTRAINT payments_pkey PRIMARY KEY (tenant_id, order_id),
  CONSTRAINT payments_reference_key UNIQUE (tenant_id, reference),
  CONSTRAINT payments_order_fkey FOREIGN KEY (tenant_id, order_id) REFERENCES orders (tenant_id, id),
  CONSTRAINT payments_amount_positive CHECK (amount_minor > 0)
);

CREATE TABLE refunds (
  tenant_id    uuid        NOT NULL,
  id           uuid        NOT NULL,
  order_id     uuid        NOT NULL,
  amount_minor bigint      NOT NULL,
  net_minor    bigint      NOT NULL,
  tax_minor    bigint      NOT NULL,
  reason       text        NOT NULL,
  refunded_at  timestamptz NOT NULL,
  CONSTRAINT refunds_pkey PRIMARY KEY (tenant_id, id),
  CONSTRAINT refunds_order_fkey FOREIGN KEY (tenant_id, order_id) REFERENCES orders (tenant_id, id),
  CONSTRAINT refunds_amounts_sum CHECK (
    amount_minor > 0 AND net_minor >= 0 AND tax_minor >= 0 AND amount_minor = net_minor + tax_minor)
);
CREATE INDEX refunds_order_idx ON refunds (tenant_id, order_id);

CREATE TABLE refund_taxes (
  tenant_id    uuid    NOT NULL,
  refund_id    uuid    NOT NULL,
  tax_rate_ppm integer NOT NULL,
  net_minor    bigint  NOT NULL,
  tax_minor    bigint  NOT NULL,
  CONSTRAINT refund_taxes_pkey PRIMARY KEY (tenant_id, refund_id, tax_rate_ppm),
  CONSTRAINT refund_taxes_refund_fkey FOREIGN KEY (tenant_id, refund_id) REFERENCES refunds (tenant_id, id),
  CONSTRAINT refund_taxes_amounts_range CHECK (net_minor >= 0 AND tax_minor >= 0)
);

-- Only the API touches orders; the billing side knows them by their events.
ALTER TABLE orders ENABLE ROW LEVEL SECURITY;
ALTER TABLE order_lines ENABLE ROW LEVEL SECURITY;
ALTER TABLE order_taxes ENABLE ROW LEVEL SECURITY;
ALTER TABLE payments ENABLE ROW LEVEL SECURITY;
ALTER TABLE refunds ENABLE ROW LEVEL SECURITY;
ALTER TABLE refund_taxes ENABLE ROW LEVEL SECURITY;

CREATE POLICY orders_api ON orders TO onceledger_api USING (tenant_id = current_tenant_id());
CREATE POLICY order_lines_api ON order_lines TO onceledger_api USING (tenant_id = current_tenant_id());
CREATE POLICY order_taxes_api ON order_taxes TO onceledger_api USING (tenant_id = current_tenant_id());
CREATE POLICY payments_api ON payments TO onceledger_api USING (tenant_id = current_tenant_id());
CREATE POLICY refunds_api ON refunds TO onceledger_api USING (tenant_id = current_tenant_id());
CREATE POLICY refund_taxes_api ON refund_taxes TO onceledger_api USING (tenant_id = current_tenant_id());

CREATE POLICY orders_verify ON orders FOR SELECT TO onceledger_verify USING (true);
CREATE POLICY order_lines_verify ON order_lines FOR SELECT TO onceledger_verify USING (true);
CREATE POLICY order_taxes_verify ON order_taxes FOR SELECT TO onceledger_verify USING (true);
CREATE POLICY payments_verify ON payments FOR SELECT TO onceledger_verify USING (true);
CREATE POLICY refunds_verify ON refunds FOR SELECT TO onceledger_verify USING (true);
CREATE POLICY refund_taxes_verify ON refund_taxes FOR SELECT TO onceledger_verify USING (true);

GRANT SELECT, INSERT ON orders, order_lines, order_taxes, payments, refunds, refund_taxes TO onceledger_api;
GRANT UPDATE (version, status, refunded_minor, updated_at) ON orders TO onceledger_api;
GRANT SELECT ON orders, order_lines, order_taxes, payments, refunds, refund_taxes TO onceledger_verify;

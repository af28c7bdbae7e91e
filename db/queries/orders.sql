-- name: OrderInsert :exec
INSERT INTO orders (
  tenant_id, id, version, status, customer_id, customer_email, currency,
  net_minor, tax_minor, total_minor, metadata, created_at, updated_at)
VALUES (
  @tenant_id, @id, 1, 'created', @customer_id, @customer_email, @currency,
  @net_minor, @tax_minor, @total_minor, @metadata, @created_at, @created_at);

-- name: OrderLineInsertMany :exec
INSERT INTO order_lines (
  tenant_id, order_id, line_no, sku, description, quantity, unit_minor, net_minor, tax_rate_ppm)
SELECT
  @tenant_id, @order_id,
  unnest(@line_nos::integer[]),
  unnest(@skus::text[]),
  unnest(@descriptions::text[]),
  unnest(@quantities::bigint[]),
  unnest(@unit_minors::bigint[]),
  unnest(@net_minors::bigint[]),
  unnest(@tax_rates_ppm::integer[]);

-- name: OrderTaxInsertMany :exec
INSERT INTO order_taxes (tenant_id, order_id, tax_rate_ppm, net_minor, tax_minor)
SELECT
  @tenant_id, @order_id,
  unnest(@tax_rates_ppm::integer[]),
  unnest(@net_minors::bigint[]),
  unnest(@tax_minors::bigint[]);

-- name: OrderGet :one
SELECT * FROM orders WHERE tenant_id = @tenant_id AND id = @id;

-- OrderLock reads an order and holds its row to the end of the transaction.
-- Every change of an order starts here, so that its changes queue up one behind
-- the other and its versions have no gap. It reads no other table: after a wait
-- a joined row would still be the one from before the wait.
-- name: OrderLock :one
SELECT * FROM orders WHERE tenant_id = @tenant_id AND id = @id FOR UPDATE;

-- OrderList is one page, newest first: the orders whose id is below before.
-- name: OrderList :many
SELECT * FROM orders
WHERE tenant_id = @tenant_id AND id < @before
ORDER BY id DESC
LIMIT @page_size;

-- name: OrderLineList :many
SELECT * FROM order_lines
WHERE tenant_id = @tenant_id AND order_id = ANY(@order_ids::uuid[])
ORDER BY order_id, line_no;

-- OrderTaxList is what each tax rate of the orders came to, and how much of it
-- was given back so far.
-- name: OrderTaxList :many
SELECT
  order_taxes.order_id, order_taxes.tax_rate_ppm, order_taxes.net_minor, order_taxes.tax_minor,
  coalesce(sum(refund_taxes.net_minor), 0)::bigint AS refunded_net_minor,
  coalesce(sum(refund_taxes.tax_minor), 0)::bigint AS refunded_tax_minor
FROM order_taxes
LEFT JOIN refunds
  ON refunds.tenant_id = order_taxes.tenant_id AND refunds.order_id = order_taxes.order_id
LEFT JOIN refund_taxes
  ON refund_taxes.tenant_id = refunds.tenant_id AND refund_taxes.refund_id = refunds.id
  AND refund_taxes.tax_rate_ppm = order_taxes.tax_rate_ppm
WHERE order_taxes.tenant_id = @tenant_id AND order_taxes.order_id = ANY(@order_ids::uuid[])
GROUP BY order_taxes.order_id, order_taxes.tax_rate_ppm, order_taxes.net_minor, order_taxes.tax_minor
ORDER BY order_taxes.order_id, order_taxes.tax_rate_ppm;

-- name: PaymentList :many
SELECT * FROM payments WHERE tenant_id = @tenant_id AND order_id = ANY(@order_ids::uuid[]);

-- OrderAdvance moves an order on to its next version under the lock of
-- OrderLock. The version guard makes it 0 rows where somebody skipped the lock.
-- name: OrderAdvance :execrows
UPDATE orders
SET version = version + 1, status = @status, refunded_minor = @refunded_minor, updated_at = @updated_at
WHERE tenant_id = @tenant_id AND id = @id AND version = @version;

-- PaymentInsert takes the payment reference for one order: 0 when another order
-- of the tenant has it. It waits for an uncommitted one to be decided.
-- name: PaymentInsert :execrows
INSERT INTO payments (tenant_id, order_id, reference, amount_minor, currency, paid_at)
VALUES (@tenant_id, @order_id, @reference, @amount_minor, @currency, @paid_at)
ON CONFLICT DO NOTHING;

-- name: RefundInsert :exec
INSERT INTO refunds (tenant_id, id, order_id, amount_minor, net_minor, tax_minor, reason, refunded_at)
VALUES (@tenant_id, @id, @order_id, @amount_minor, @net_minor, @tax_minor, @reason, @refunded_at);

-- name: RefundTaxInsertMany :exec
INSERT INTO refund_taxes (tenant_id, refund_id, tax_rate_ppm, net_minor, tax_minor)
SELECT
  @tenant_id, @refund_id,
  unnest(@tax_rates_ppm::integer[]),
  unnest(@net_minors::bigint[]),
  unnest(@tax_minors::bigint[]);

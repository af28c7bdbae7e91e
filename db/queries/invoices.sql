-- OrderBillingUpsertMany brings the billing side's view of each order up to the
-- given version, and leaves it where it already knows that version or a later
-- one: duplicates and late events change nothing. One row per order at most.
--
-- It returns the orders whose versions do not simply follow on: some may be skipped,
-- or the batch has late ones too (lowest_versions is each order's lowest of the
-- batch). came_after is the version before the new one, or null where the view is
-- left as it is.
--
-- It locks every order it names, changed or not, in the order of their ids, and
-- so is the first thing a batch writes.
-- name: OrderBillingUpsertMany :many
WITH given AS (
  SELECT
    unnest(@tenant_ids::uuid[]) AS tenant_id,
    unnest(@order_ids::uuid[]) AS order_id,
    unnest(@versions::bigint[]) AS version,
    unnest(@lowest_versions::bigint[]) AS lowest_version,
    unnest(@statuses::text[]) AS status,
    unnest(@currencies::text[]) AS currency,
    unnest(@total_minors::bigint[]) AS total_minor,
    unnest(@refunded_minors::bigint[]) AS refunded_minor
), moved AS (
  INSERT INTO order_billing AS known (tenant_id, order_id, version, status, currency, total_minor, refunded_minor)
  SELECT tenant_id, order_id, version, status, currency, total_minor, refunded_minor FROM given
  ORDER BY tenant_id, order_id
  ON CONFLICT (tenant_id, order_id) DO UPDATE SET
    version = excluded.version,
    previous_version = known.version,
    status = excluded.status,
    currency = excluded.currency,
    total_minor = excluded.total_minor,
    refunded_minor = excluded.refunded_minor,
    updated_at = now()
  WHERE known.version < excluded.version
  RETURNING known.tenant_id, known.order_id, known.version, known.previous_version
)
SELECT given.tenant_id::uuid AS tenant_id, given.order_id::uuid AS order_id, moved.previous_version AS came_after
FROM given
LEFT JOIN moved ON moved.tenant_id = given.tenant_id AND moved.order_id = given.order_id
WHERE moved.version IS NULL OR moved.version > moved.previous_version + 1 OR given.lowest_version <= moved.previous_version;

-- VersionGapInsertMany notes versions that events have skipped. One that is a dead
-- letter of the consumer's is not missing, unless it is of a class whose events may
-- be anybody's (see missing_versions).
-- name: VersionGapInsertMany :exec
INSERT INTO version_gaps (tenant_id, order_id, version)
SELECT missing.tenant_id, missing.order_id, missing.version
FROM (
  SELECT unnest(@tenant_ids::uuid[]) AS tenant_id, unnest(@order_ids::uuid[]) AS order_id, unnest(@versions::bigint[]) AS version
) AS missing
WHERE NOT EXISTS (
  SELECT FROM dead_letters AS letter
  WHERE letter.tenant_id = missing.tenant_id AND letter.aggregate_id = missing.order_id
    AND letter.aggregate_version = missing.version AND letter.consumer = @consumer
    AND letter.class NOT IN ('undecodable', 'bad-id', 'too-old', 'future-id', 'id-reused'))
ORDER BY missing.tenant_id, missing.order_id, missing.version
ON CONFLICT DO NOTHING;

-- VersionGapDeleteMany takes away what has come.
-- name: VersionGapDeleteMany :exec
DELETE FROM version_gaps AS gap
USING (
  SELECT unnest(@tenant_ids::uuid[]) AS tenant_id, unnest(@order_ids::uuid[]) AS order_id, unnest(@versions::bigint[]) AS version
) AS came
WHERE gap.tenant_id = came.tenant_id AND gap.order_id = came.order_id AND gap.version = came.version;

-- VersionGapGiveUp decides that versions of an order will not come: one, or all that
-- are missing.
-- name: VersionGapGiveUp :many
INSERT INTO version_gap_decisions (tenant_id, order_id, version, noticed_at, reason, decided_by)
SELECT gap.tenant_id, gap.order_id, gap.version, gap.noticed_at, @reason, @decided_by
FROM version_gaps AS gap
WHERE gap.order_id = @order_id AND (sqlc.narg('version')::bigint IS NULL OR gap.version = sqlc.narg('version'))
ORDER BY gap.tenant_id, gap.version
ON CONFLICT DO NOTHING
RETURNING tenant_id, order_id, version, noticed_at;

-- MissingVersionListByOrder is which versions of an order billing lacks, and since when.
-- name: MissingVersionListByOrder :many
SELECT version::bigint AS version, noticed_at::timestamptz AS noticed_at FROM missing_versions
WHERE tenant_id = @tenant_id AND order_id = @order_id
ORDER BY missing_versions.version;

-- MissingVersionList is the next page of missing versions: those noticed before
-- the wait was over are left out.
-- name: MissingVersionList :many
SELECT tenant_id::uuid AS tenant_id, order_id::uuid AS order_id, version::bigint AS version, noticed_at::timestamptz AS noticed_at FROM missing_versions
WHERE (tenant_id, order_id, version) > (@after_tenant::uuid, @after_order::uuid, @after_version::bigint)
  AND noticed_at <= now() - make_interval(secs => @wait_seconds::double precision)
ORDER BY tenant_id, order_id, version
LIMIT @page_size;

-- InvoiceListByOrders finds the invoices of orders, with how many credit notes
-- each has and what they come to.
-- name: InvoiceListByOrders :many
SELECT
  invoices.tenant_id, invoices.order_id, invoices.id, invoices.customer_id, invoices.customer_email,
  invoices.currency, invoices.total_minor, credited.credit_notes, credited.credited_minor
FROM invoices
JOIN (SELECT unnest(@tenant_ids::uuid[]) AS tenant_id, unnest(@order_ids::uuid[]) AS order_id) AS wanted
  ON wanted.tenant_id = invoices.tenant_id AND wanted.order_id = invoices.order_id
CROSS JOIN LATERAL (
  SELECT count(*)::integer AS credit_notes, coalesce(sum(credit_notes.total_minor), 0)::bigint AS credited_minor
  FROM credit_notes
  WHERE credit_notes.tenant_id = invoices.tenant_id AND credit_notes.order_id = invoices.order_id
) AS credited;

-- DocumentNumbersTake gives out the next counts[i] numbers of each series and
-- returns the last one given. It locks the series to the end of the transaction,
-- sorted, and must be a batch's last lock: nothing may fail between a number and
-- its document.
-- name: DocumentNumbersTake :many
INSERT INTO document_numbers AS series (tenant_id, kind, year, last_number)
SELECT
  unnest(@tenant_ids::uuid[]) AS tenant_id,
  @kind::text AS kind,
  @year::integer AS year,
  unnest(@counts::bigint[])
ORDER BY tenant_id
ON CONFLICT (tenant_id, kind, year) DO UPDATE SET last_number = series.last_number + excluded.last_number
RETURNING tenant_id, last_number;

-- name: InvoiceInsertMany :exec
INSERT INTO invoices (
  tenant_id, id, order_id, year, number, customer_id, customer_email, currency,
  net_minor, tax_minor, total_minor, taxes, paid_at, issued_at)
SELECT
  unnest(@tenant_ids::uuid[]),
  unnest(@ids::uuid[]),
  unnest(@order_ids::uuid[]),
  @year,
  unnest(@numbers::bigint[]),
  unnest(@customer_ids::text[]),
  unnest(@customer_emails::text[]),
  unnest(@currencies::text[]),
  unnest(@net_minors::bigint[]),
  unnest(@tax_minors::bigint[]),
  unnest(@total_minors::bigint[]),
  unnest(@taxes::text[])::json,
  unnest(@paid_ats::timestamptz[]),
  @issued_at;

-- name: InvoiceLineInsertMany :exec
INSERT INTO invoice_lines (
  tenant_id, invoice_id, line_no, sku, description, quantity, unit_minor, net_minor, tax_rate_ppm)
SELECT
  unnest(@tenant_ids::uuid[]),
  unnest(@invoice_ids::uuid[]),
  unnest(@line_nos::integer[]),
  unnest(@skus::text[]),
  unnest(@descriptions::text[]),
  unnest(@quantities::bigint[]),
  unnest(@unit_minors::bigint[]),
  unnest(@net_minors::bigint[]),
  unnest(@tax_rates_ppm::integer[]);

-- name: CreditNoteInsertMany :exec
INSERT INTO credit_notes (
  tenant_id, id, invoice_id, order_id, refund_id, ordinal, year, number, currency,
  net_minor, tax_minor, total_minor, taxes, reason, refunded_at, issued_at)
SELECT
  unnest(@tenant_ids::uuid[]),
  unnest(@ids::uuid[]),
  unnest(@invoice_ids::uuid[]),
  unnest(@order_ids::uuid[]),
  unnest(@refund_ids::uuid[]),
  unnest(@ordinals::integer[]),
  @year,
  unnest(@numbers::bigint[]),
  unnest(@currencies::text[]),
  unnest(@net_minors::bigint[]),
  unnest(@tax_minors::bigint[]),
  unnest(@total_minors::bigint[]),
  unnest(@taxes::text[])::json,
  unnest(@reasons::text[]),
  unnest(@refunded_ats::timestamptz[]),
  @issued_at;

-- name: InvoiceGet :one
SELECT * FROM invoices WHERE tenant_id = @tenant_id AND id = @id;

-- name: InvoiceGetByOrder :one
SELECT * FROM invoices WHERE tenant_id = @tenant_id AND order_id = @order_id;

-- name: InvoiceLineList :many
SELECT * FROM invoice_lines WHERE tenant_id = @tenant_id AND invoice_id = @invoice_id ORDER BY line_no;

-- name: CreditNoteListByOrder :many
SELECT * FROM credit_notes WHERE tenant_id = @tenant_id AND order_id = @order_id ORDER BY ordinal;

-- name: OrderBillingGet :one
SELECT * FROM order_billing WHERE tenant_id = @tenant_id AND order_id = @order_id;

-- LedgerAccountInsertMany makes the accounts that are not there.
-- name: LedgerAccountInsertMany :exec
INSERT INTO ledger_accounts (tenant_id, code, currency, kind)
SELECT
  unnest(@tenant_ids::uuid[]) AS tenant_id,
  unnest(@codes::text[]) AS code,
  unnest(@currencies::text[]) AS currency,
  unnest(@kinds::text[])
ORDER BY tenant_id, code, currency
ON CONFLICT DO NOTHING;

-- LedgerEntryInsertMany has no ON CONFLICT on purpose: an entry that is there
-- already although its event was not marked as applied is a fault to be looked
-- at, not a duplicate to be passed over.
-- name: LedgerEntryInsertMany :exec
INSERT INTO ledger_entries (tenant_id, event_id, kind, order_id, currency, reverses, effective_at)
SELECT
  unnest(@tenant_ids::uuid[]),
  unnest(@event_ids::uuid[]),
  unnest(@kinds::text[]),
  unnest(@order_ids::uuid[]),
  unnest(@currencies::text[]),
  nullif(unnest(@reverses::uuid[]), '00000000-0000-0000-0000-000000000000'),
  unnest(@effective_ats::timestamptz[]);

-- name: LedgerLineInsertMany :exec
INSERT INTO ledger_lines (tenant_id, event_id, line_no, debit_account, credit_account, currency, amount_minor)
SELECT
  unnest(@tenant_ids::uuid[]),
  unnest(@event_ids::uuid[]),
  unnest(@line_nos::integer[]),
  unnest(@debit_accounts::text[]),
  unnest(@credit_accounts::text[]),
  unnest(@currencies::text[]),
  unnest(@amount_minors::bigint[]);

-- name: LedgerEntryListByOrder :many
SELECT * FROM ledger_entries WHERE tenant_id = @tenant_id AND order_id = @order_id ORDER BY event_id;

-- LedgerEntryListByAccount is one page, newest first, of the entries that touch
-- an account in any currency.
-- name: LedgerEntryListByAccount :many
SELECT * FROM ledger_entries
WHERE ledger_entries.tenant_id = @tenant_id AND ledger_entries.event_id < @before
  AND EXISTS (
    SELECT FROM ledger_lines
    WHERE ledger_lines.tenant_id = ledger_entries.tenant_id
      AND ledger_lines.event_id = ledger_entries.event_id
      AND (ledger_lines.debit_account = @account OR ledger_lines.credit_account = @account))
ORDER BY ledger_entries.event_id DESC
LIMIT @page_size;

-- name: LedgerLineList :many
SELECT * FROM ledger_lines
WHERE tenant_id = @tenant_id AND event_id = ANY(@event_ids::uuid[])
ORDER BY event_id, line_no;

-- LedgerAccountBalance sums the lines of one account. Sums of bigint are numeric:
-- they have no largest number, and come as text.
-- name: LedgerAccountBalance :one
SELECT
  ledger_accounts.code, ledger_accounts.currency, ledger_accounts.kind,
  (SELECT coalesce(sum(amount_minor), 0) FROM ledger_lines AS line
   WHERE line.tenant_id = ledger_accounts.tenant_id AND line.currency = ledger_accounts.currency
     AND line.debit_account = ledger_accounts.code)::text AS debit_minor,
  (SELECT coalesce(sum(amount_minor), 0) FROM ledger_lines AS line
   WHERE line.tenant_id = ledger_accounts.tenant_id AND line.currency = ledger_accounts.currency
     AND line.credit_account = ledger_accounts.code)::text AS credit_minor
FROM ledger_accounts
WHERE ledger_accounts.tenant_id = @tenant_id AND ledger_accounts.code = @code AND ledger_accounts.currency = @currency;

-- LedgerTrialBalance sums the lines of each of a tenant's accounts, as
-- LedgerAccountBalance does.
-- name: LedgerTrialBalance :many
SELECT
  ledger_accounts.code, ledger_accounts.currency, ledger_accounts.kind,
  (SELECT coalesce(sum(amount_minor), 0) FROM ledger_lines AS line
   WHERE line.tenant_id = ledger_accounts.tenant_id AND line.currency = ledger_accounts.currency
     AND line.debit_account = ledger_accounts.code)::text AS debit_minor,
  (SELECT coalesce(sum(amount_minor), 0) FROM ledger_lines AS line
   WHERE line.tenant_id = ledger_accounts.tenant_id AND line.currency = ledger_accounts.currency
     AND line.credit_account = ledger_accounts.code)::text AS credit_minor
FROM ledger_accounts
WHERE ledger_accounts.tenant_id = @tenant_id
ORDER BY ledger_accounts.currency, ledger_accounts.code;

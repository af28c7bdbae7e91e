-- DeadLetterList is the next page of letters, the oldest first. What is not asked
-- for is left empty: an empty list, or null.
-- name: DeadLetterList :many
SELECT
  id, consumer, topic, partition, "offset", class, detail, state, event_id, event_type, tenant_id, aggregate_id,
  aggregate_version, attempts, first_failed_at, last_failed_at
FROM dead_letters
WHERE id > @after
  AND (cardinality(@ids::uuid[]) = 0 OR id = ANY(@ids::uuid[]))
  AND (cardinality(@states::text[]) = 0 OR state = ANY(@states::text[]))
  AND (cardinality(@classes::text[]) = 0 OR class = ANY(@classes::text[]))
  AND (sqlc.narg('consumer')::text IS NULL OR consumer = sqlc.narg('consumer'))
  AND (sqlc.narg('tenant_id')::uuid IS NULL OR tenant_id = sqlc.narg('tenant_id'))
  AND (sqlc.narg('aggregate_id')::uuid IS NULL OR aggregate_id = sqlc.narg('aggregate_id'))
  AND (sqlc.narg('event_id')::uuid IS NULL OR event_id = sqlc.narg('event_id'))
  AND (sqlc.narg('since')::timestamptz IS NULL OR first_failed_at >= sqlc.narg('since'))
  AND (sqlc.narg('until')::timestamptz IS NULL OR first_failed_at < sqlc.narg('until'))
ORDER BY id
LIMIT @page_size;

-- DeadLetterGet is a letter with its record.
-- name: DeadLetterGet :one
SELECT * FROM dead_letters WHERE id = @id;

-- DeadLetterLockAggregate holds all open letters of an aggregate, in the order of
-- their ids: see DeadLetterListForBatch. What a batch stored behind them in the
-- meantime is seen by the next statement only.
-- name: DeadLetterLockAggregate :many
SELECT id FROM dead_letters
WHERE consumer = @consumer AND tenant_id = @tenant_id AND aggregate_id = @aggregate_id AND state = 'open'
ORDER BY id
FOR UPDATE;

-- DeadLetterListOpen is the open letters of an aggregate in the order in which
-- their events happened, as far as they say it.
-- name: DeadLetterListOpen :many
SELECT * FROM dead_letters
WHERE consumer = @consumer AND tenant_id = @tenant_id AND aggregate_id = @aggregate_id AND state = 'open'
ORDER BY aggregate_version, topic, partition, "offset", id;

-- DeadLetterLock holds letters whose aggregate is not known, and gives those that
-- are still open.
-- name: DeadLetterLock :many
SELECT * FROM dead_letters
WHERE id = ANY(@ids::uuid[]) AND state = 'open'
ORDER BY id
FOR UPDATE;

-- DeadLetterClose ends a letter; 0 if it was not open.
-- name: DeadLetterClose :execrows
UPDATE dead_letters SET state = @state WHERE id = @id AND state = 'open';

-- DeadLetterFail says what was wrong with a letter this time.
-- name: DeadLetterFail :execrows
UPDATE dead_letters
SET class = @class, detail = @detail, attempts = attempts + 1, last_failed_at = now()
WHERE id = @id AND state = 'open';

-- name: DeadLetterDecisionInsert :exec
INSERT INTO dead_letter_decisions (id, dead_letter_id, action, outcome, class, detail, reason, decided_by)
VALUES (@id, @dead_letter_id, @action, @outcome, @class, @detail, @reason, @decided_by);

-- name: DeadLetterDecisionList :many
SELECT * FROM dead_letter_decisions WHERE dead_letter_id = @dead_letter_id ORDER BY id;

-- DeadLetterBooks is what there is of an order on the billing side: to be held
-- against itself, before and after.
-- name: DeadLetterBooks :one
SELECT
  coalesce((SELECT version FROM order_billing AS known
    WHERE known.tenant_id = @tenant_id::uuid AND known.order_id = @order_id::uuid), 0)::bigint AS version,
  (SELECT count(*) FROM invoices WHERE invoices.tenant_id = @tenant_id::uuid AND invoices.order_id = @order_id::uuid)::bigint AS invoices,
  (SELECT count(*) FROM credit_notes WHERE credit_notes.tenant_id = @tenant_id::uuid AND credit_notes.order_id = @order_id::uuid)::bigint AS credit_notes,
  (SELECT count(*) FROM ledger_entries WHERE ledger_entries.tenant_id = @tenant_id::uuid AND ledger_entries.order_id = @order_id::uuid)::bigint AS ledger_entries,
  (SELECT count(*) FROM dead_letters AS letter WHERE letter.tenant_id = @tenant_id::uuid AND letter.aggregate_id = @order_id::uuid
    AND letter.state = 'open' AND letter.class <> 'parked')::bigint AS open,
  (SELECT count(*) FROM dead_letters AS letter WHERE letter.tenant_id = @tenant_id::uuid AND letter.aggregate_id = @order_id::uuid
    AND letter.state = 'open' AND letter.class = 'parked')::bigint AS parked;

-- DeadLetterCount counts the open letters, and tells how long the oldest waits.
-- name: DeadLetterCount :many
SELECT class, count(*) AS letters, extract(epoch FROM now() - min(first_failed_at))::double precision AS oldest_seconds
FROM dead_letters
WHERE consumer = @consumer AND state = 'open'
GROUP BY class
ORDER BY class;

-- MissingVersionCount counts the versions that are missing, and those of them that
-- have been for longer than the wait.
-- name: MissingVersionCount :one
SELECT
  count(*) AS missing,
  count(*) FILTER (WHERE noticed_at <= now() - make_interval(secs => @wait_seconds::double precision)) AS overdue,
  coalesce(extract(epoch FROM now() - min(noticed_at)), 0)::double precision AS oldest_seconds
FROM missing_versions;

-- DeadLettersBehindNothing counts letters that wait behind none that has failed.
-- There can be none: what ends a letter tries those behind it in the same
-- transaction.
-- name: DeadLettersBehindNothing :one
SELECT count(*) FROM dead_letters AS letter
WHERE letter.consumer = @consumer AND letter.state = 'open' AND letter.class = 'parked'
  AND NOT EXISTS (
    SELECT FROM dead_letters AS head
    WHERE head.consumer = letter.consumer AND head.tenant_id = letter.tenant_id AND head.aggregate_id = letter.aggregate_id
      AND head.state = 'open' AND head.class NOT IN ('parked', 'undecodable', 'bad-id', 'too-old', 'future-id', 'id-reused'));

-- name: OperatorKeyInsert :exec
INSERT INTO operator_keys (id, name, key_hash) VALUES (@id, @name, @key_hash);

-- OperatorKeyGet is a key that was not revoked, by its id.
-- name: OperatorKeyGet :one
SELECT name, key_hash FROM operator_keys WHERE id = @id AND revoked_at IS NULL;

-- name: OperatorKeyList :many
SELECT id, name, created_at, revoked_at FROM operator_keys ORDER BY created_at, id;

-- OperatorKeyRevoke ends a key; 0 when there is no such key or it ended before.
-- name: OperatorKeyRevoke :execrows
UPDATE operator_keys SET revoked_at = now() WHERE id = @id AND revoked_at IS NULL;

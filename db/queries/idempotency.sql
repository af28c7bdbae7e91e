-- IdempotencyKeyClaim is the first statement of a request's transaction: 1 means
-- that the request is ours to do, 0 that the key was used. It waits for another
-- transaction that holds the key, up to lock_timeout.
-- name: IdempotencyKeyClaim :execrows
INSERT INTO idempotency_keys (tenant_id, key_hash, fingerprint)
VALUES (@tenant_id, @key_hash, @fingerprint)
ON CONFLICT DO NOTHING;

-- IdempotencyKeyGet reads what a used key was answered. It has to be a statement
-- of its own: the one that met the conflict does not see the other's row.
-- name: IdempotencyKeyGet :one
SELECT fingerprint, status, content_type, location, body
FROM idempotency_keys
WHERE tenant_id = @tenant_id AND key_hash = @key_hash;

-- IdempotencyKeyAnswer stores the answer in the transaction that claimed the key.
-- name: IdempotencyKeyAnswer :exec
UPDATE idempotency_keys
SET status = @status::integer, content_type = @content_type, location = @location, body = @body
WHERE tenant_id = @tenant_id AND key_hash = @key_hash;

-- TenantInsert makes a tenant unless one of this name is there.
-- name: TenantInsert :exec
INSERT INTO tenants (id, name) VALUES (@id, @name)
ON CONFLICT (name) DO NOTHING;

-- name: TenantGetByName :one
SELECT id, name, created_at FROM tenants WHERE name = @name;

-- name: APIKeyInsert :exec
INSERT INTO api_keys (id, tenant_id, name, key_hash) VALUES (@id, @tenant_id, @name, @key_hash);

-- APIKeyTenant is the tenant that a key, known by its hash, works for: no row if
-- there is no such key.
-- name: APIKeyTenant :one
SELECT tenant_id::uuid AS tenant_id FROM api_key_tenant(@key_hash) AS tenant_id WHERE tenant_id IS NOT NULL;

-- name: APIKeyList :many
SELECT api_keys.id, tenants.name AS tenant, api_keys.name, api_keys.created_at, api_keys.revoked_at
FROM api_keys
JOIN tenants ON tenants.id = api_keys.tenant_id
ORDER BY tenants.name, api_keys.created_at;

-- APIKeyRevoke ends a key; 0 when there is no such key or it ended before.
-- name: APIKeyRevoke :execrows
UPDATE api_keys SET revoked_at = now() WHERE id = @id AND revoked_at IS NULL;

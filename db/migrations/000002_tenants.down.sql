DROP FUNCTION api_key_tenant(bytea);
DROP TABLE api_keys;
DROP TABLE tenants;

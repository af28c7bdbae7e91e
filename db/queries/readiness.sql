-- ReadinessGet is the database's own clock, and what keeps events from reaching
-- Kafka as far as the database can tell: empty if nothing does.
-- name: ReadinessGet :one
SELECT
  clock_timestamp()::timestamptz AS database_time,
  relay_fault(@publication, @slot_name)::text AS relay_fault;

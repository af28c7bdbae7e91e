DROP FUNCTION outbox_oldest_undelivered(text);
DROP FUNCTION delete_idempotency_keys(interval, integer);
DROP INDEX idempotency_keys_created_at_idx;
DROP INDEX dead_letters_open_event_idx;
DROP FUNCTION partition_needed_by(text, date, text);

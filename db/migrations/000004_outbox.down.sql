DROP FUNCTION partition_days(text);
DROP FUNCTION make_day_partition(text, date);
DROP FUNCTION uuidv7_floor(timestamptz);
DROP FUNCTION relay_fault(text, text);
DROP TABLE relay_status;
DROP TABLE relay_position;
DROP PUBLICATION onceledger_outbox;
DROP TABLE outbox_events;

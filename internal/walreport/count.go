package walreport

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
)

// countRecords counts the log between two places by what it was written for.
//
// Ours are the records that touch a block of our database, and all others of the
// same transactions, such as their commits. A record may touch blocks of several
// relations: each gets what the record holds for its block, and the first one the
// rest, so that every byte is counted once. The bytes are those of the record
// itself; that the log aligns records and heads its pages is in no table's account.
//
// It is written here and not in db/queries, since the functions belong to an
// extension that only the database of the measurement has.
const countRecords = `
WITH block AS MATERIALIZED (
  SELECT start_lsn, xid::text AS xid, block_id, reldatabase, relfilenode, record_length,
         block_data_length AS data, block_fpi_length AS image
  FROM pg_get_wal_block_info($1::text::pg_lsn, $2::text::pg_lsn, false)
), record AS MATERIALIZED (
  SELECT start_lsn, xid::text AS xid, record_length, resource_manager || ' ' || record_type AS kind
  FROM pg_get_wal_records_info($1::text::pg_lsn, $2::text::pg_lsn)
), in_database AS (
  SELECT * FROM block WHERE reldatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
), ours AS (
  SELECT record.* FROM record
  WHERE start_lsn IN (SELECT start_lsn FROM in_database)
     OR xid IN (SELECT xid FROM in_database WHERE xid <> '0')
), first_block AS (
  SELECT DISTINCT ON (start_lsn) start_lsn, relfilenode FROM in_database ORDER BY start_lsn, block_id
), part AS (
  SELECT relfilenode, NULL AS kind, sum(data) AS bytes, sum(image) AS images
  FROM in_database GROUP BY 1
  UNION ALL
  SELECT first_block.relfilenode, CASE WHEN first_block.relfilenode IS NULL THEN ours.kind END,
         sum(ours.record_length - coalesce(held.bytes, 0)), 0
  FROM ours
  LEFT JOIN first_block USING (start_lsn)
  LEFT JOIN (SELECT start_lsn, sum(data + image) AS bytes FROM in_database GROUP BY 1) AS held USING (start_lsn)
  GROUP BY 1, 2
), relation AS (
  SELECT pg_relation_filenode(c.oid) AS filenode,
         coalesce(pg_partition_root(t.oid), t.oid)::regclass::text AS name, t.relnamespace = 'pg_catalog'::regnamespace AS catalog
  FROM pg_class AS c
  LEFT JOIN pg_index AS i ON i.indexrelid = c.oid
  LEFT JOIN pg_class AS toast ON toast.reltoastrelid = coalesce(i.indrelid, c.oid)
  JOIN pg_class AS t ON t.oid = coalesce(toast.oid, i.indrelid, c.oid)
  WHERE pg_relation_filenode(c.oid) IS NOT NULL
)
SELECT coalesce(CASE WHEN relation.catalog THEN '(catalog)' ELSE relation.name END, '(' || lower(part.kind) || ')', '(other)') AS name,
       sum(part.bytes)::bigint AS bytes, sum(part.images)::bigint AS images,
       (SELECT count(*) FROM ours WHERE kind = 'Transaction COMMIT')::bigint AS commits
FROM part LEFT JOIN relation ON relation.filenode = part.relfilenode
GROUP BY 1`

const outboxTable = "outbox_events"

// count reads both sides' log and adds it up.
func (m *measurement) count(ctx context.Context, report *Report) error {
	tables := make(map[string]*Table)
	sides := []struct {
		side *Side
		of   func(*Table) *Bytes
	}{
		{&report.API, func(t *Table) *Bytes { return &t.API }},
		{&report.Worker, func(t *Table) *Bytes { return &t.Worker }},
	}
	for _, s := range sides {
		rows, err := m.owner.Query(ctx, countRecords, s.side.From.String(), s.side.To.String())
		if err != nil {
			return fmt.Errorf("read the log: %w", err)
		}
		var name string
		var bytes Bytes
		_, err = pgx.ForEachRow(rows, []any{&name, &bytes.Records, &bytes.Images, &s.side.Transactions}, func() error {
			if tables[name] == nil {
				tables[name] = &Table{Name: name}
			}
			*s.of(tables[name]) = bytes
			s.side.Records += bytes.Records
			s.side.Images += bytes.Images
			return nil
		})
		if err != nil {
			return fmt.Errorf("read the log: %w", err)
		}
	}
	for _, table := range tables {
		report.Tables = append(report.Tables, *table)
		if table.Name == outboxTable {
			report.OutboxBytes = table.records()
		}
	}
	slices.SortFunc(report.Tables, func(a, b Table) int {
		return cmp.Or(cmp.Compare(b.records(), a.records()), cmp.Compare(a.Name, b.Name))
	})
	report.OutboxShare = float64(report.OutboxBytes) / float64(max(1, report.API.Records+report.Worker.Records))

	report.Settings = make(map[string]string)
	rows, err := m.owner.Query(ctx, `SELECT name, setting FROM pg_settings
		WHERE name IN ('server_version', 'wal_level', 'full_page_writes', 'wal_compression', 'data_checksums', 'wal_log_hints')`)
	if err != nil {
		return fmt.Errorf("read settings: %w", err)
	}
	var name, value string
	_, err = pgx.ForEachRow(rows, []any{&name, &value}, func() error {
		report.Settings[name] = value
		return nil
	})
	if err != nil {
		return fmt.Errorf("read settings: %w", err)
	}
	return nil
}

func (t Table) records() int64 { return t.API.Records + t.Worker.Records }

package tenants_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/idempotency"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/orders"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
	"github.com/onceledger/onceledger/internal/tenants"
)

// TestIsolation asks the database, as the API's role, for the other tenant's
// rows, in every table that the catalogue says has a tenant: read, inserted,
// updated, taken over, deleted. A table that is added later is in the loop by
// itself, and fails until it has a row of the other tenant to ask for.
func TestIsolation(t *testing.T) {
	t.Parallel()
	database := pgtest.New(t)
	owner, api := database.Pool(t, ""), database.Pool(t, "api")
	mine, theirs := seed(t, database, "mine"), seed(t, database, "theirs")

	for _, table := range tenantTables(t, owner) {
		t.Run(table.Name, func(t *testing.T) {
			var row []byte
			err := owner.QueryRow(t.Context(), "SELECT row_to_json(r) FROM "+table.Name+" AS r WHERE tenant_id = $1 LIMIT 1", theirs).Scan(&row)
			if table.IsPartition && errors.Is(err, pgx.ErrNoRows) {
				return // of another day than the rows; the day that has them is among the tables
			}
			require.NoError(t, err, "the other tenant needs a row in it: see seed")

			as := func(tenant *uuid.UUID, sql string, args ...any) (rows int64, err error) {
				err = pgx.BeginFunc(t.Context(), api, func(tx pgx.Tx) error {
					if tenant != nil {
						_, err := tx.Exec(t.Context(), "SET LOCAL onceledger.tenant_id = '"+tenant.String()+"'")
						require.NoError(t, err)
					}
					tag, err := tx.Exec(t.Context(), sql, args...)
					rows = tag.RowsAffected()
					return err
				})
				return rows, err
			}
			none := func(t *testing.T, what string, tenant *uuid.UUID, sql string, args ...any) {
				t.Helper()
				rows, err := as(tenant, sql, args...)
				if err != nil {
					requireDenied(t, err, what)
				}
				require.Zero(t, rows, what)
			}

			for name, tenant := range map[string]*uuid.UUID{"WithNoTenant": nil, "WithAnotherTenant": &mine} {
				t.Run(name, func(t *testing.T) {
					none(t, "read", tenant, "SELECT FROM "+table.Name+" WHERE tenant_id = $1", theirs)
					if tenant == nil {
						none(t, "read all", nil, "SELECT FROM "+table.Name)
					}
					none(t, "read whole rows", tenant, "SELECT * FROM "+table.Name+" WHERE tenant_id = $1", theirs)
					none(t, "lock", tenant, "SELECT FROM "+table.Name+" WHERE tenant_id = $1 FOR UPDATE", theirs)

					_, err := as(tenant, "INSERT INTO "+table.Name+" SELECT * FROM json_populate_record(NULL::"+table.Name+", $1)", row)
					requireDenied(t, err, "insert their row as it is")
					for _, column := range table.Columns {
						none(t, "update "+column, tenant, fmt.Sprintf("UPDATE %s SET %s = %[2]s WHERE tenant_id = $1", table.Name, column), theirs)
					}
					none(t, "delete", tenant, "DELETE FROM "+table.Name+" WHERE tenant_id = $1", theirs)
					_, err = as(tenant, "TRUNCATE "+table.Name)
					requireDenied(t, err, "truncate")
				})
			}

			_, err = as(&mine, "UPDATE "+table.Name+" SET tenant_id = $1", theirs)
			requireDenied(t, err, "hand my rows to them")
		})
	}

	t.Run("TheTenantsOwnRowsAreThere", func(t *testing.T) { // or the loop above would prove nothing
		for _, table := range []string{"orders", "outbox_events", "idempotency_keys", "invoices", "ledger_entries", "ledger_lines", "processed_events", "dead_letters"} {
			require.NoError(t, tenants.InTx(t.Context(), api, theirs, func(tx pgx.Tx) error {
				var rows int
				require.NoError(t, tx.QueryRow(t.Context(), "SELECT count(*) FROM "+table).Scan(&rows))
				require.NotZero(t, rows, table)
				return nil
			}))
		}
	})

	t.Run("ATenantThatIsNoUUIDSeesNothing", func(t *testing.T) {
		err := pgx.BeginFunc(t.Context(), api, func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), "SET LOCAL onceledger.tenant_id = ''")
			require.NoError(t, err)
			var rows int
			require.NoError(t, tx.QueryRow(t.Context(), "SELECT count(*) FROM orders").Scan(&rows))
			require.Zero(t, rows)
			_, err = tx.Exec(t.Context(), "SET LOCAL onceledger.tenant_id = 'all'")
			require.NoError(t, err)
			return tx.QueryRow(t.Context(), "SELECT count(*) FROM orders").Scan(&rows)
		})
		require.ErrorContains(t, err, "invalid input syntax for type uuid")
	})
}

func requireDenied(t *testing.T, err error, what string) {
	t.Helper()
	require.Equal(t, "42501", postgres.Code(err), "%s: %v", what, err)
}

type tenantTable struct {
	Name        string
	IsPartition bool
	Columns     []string
}

// tenantTables are all tables with a column tenant_id, partitions among them.
func tenantTables(t *testing.T, owner *pgxpool.Pool) []tenantTable {
	t.Helper()
	tables := pgtest.Rows[tenantTable](t, owner, `
		SELECT c.relname AS name, c.relispartition AS is_partition, array_agg(quote_ident(a.attname) ORDER BY a.attnum) AS columns
		FROM pg_class AS c
		JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
		WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p')
		GROUP BY c.oid, c.relname, c.relispartition
		HAVING bool_or(a.attname = 'tenant_id')
		ORDER BY c.relispartition, c.relname`)
	require.Greater(t, len(tables), 15)
	return tables
}

// seed makes a tenant that has at least one row in every table: an order placed
// under an idempotency key, paid, refunded and billed, of which an event is missing, and a dead letter.
func seed(t *testing.T, database *pgtest.Database, name string) uuid.UUID {
	t.Helper()
	owner, api := database.Pool(t, ""), database.Pool(t, "api")
	key, err := tenants.CreateKey(t.Context(), owner, name, "first")
	require.NoError(t, err)
	tenant, err := tenants.Authenticate(t.Context(), api, "Bearer "+key)
	require.NoError(t, err)

	priced, err := orders.Price(orders.PlaceParams{
		CustomerID: "c-42", CustomerEmail: "a@example.com", Currency: "EUR",
		Lines: []orders.LineParams{{SKU: "book", Description: "A book", Quantity: 2, UnitAmount: 1250, TaxRate: 190_000}},
	})
	require.NoError(t, err)
	stamp := orders.Stamp{At: time.Now()}
	require.NoError(t, tenants.InTx(t.Context(), api, tenant, func(tx pgx.Tx) error {
		_, _, err := idempotency.OnceTx(t.Context(), tx, tenant, idempotency.Request{Key: "k"}, func() (idempotency.Answer, error) {
			order, err := orders.PlaceTx(t.Context(), tx, tenant, priced, stamp)
			require.NoError(t, err)
			_, err = orders.PayTx(t.Context(), tx, tenant, order.ID, orders.PayParams{Reference: "pi_1"}, stamp)
			require.NoError(t, err)
			_, err = orders.RefundTx(t.Context(), tx, tenant, order.ID, orders.RefundParams{Amount: 500, Reason: "damaged"}, stamp)
			return idempotency.Answer{Status: 200}, err
		})
		return err
	}))

	rows, err := owner.Query(t.Context(), `
		SELECT id, tenant_id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version, payload, occurred_at
		FROM outbox_events WHERE tenant_id = $1 ORDER BY aggregate_version`, tenant)
	require.NoError(t, err)
	offset := int64(strings.Count(name, "")) << 32 // a record's place is unique, whoever's it is
	records, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (event.Record, error) {
		var e event.Event
		err := row.Scan(&e.ID, &e.TenantID, &e.AggregateType, &e.AggregateID, &e.AggregateVersion, &e.Type, &e.SchemaVersion, &e.Payload, &e.OccurredAt)
		record := e.Record()
		record.Offset, record.Time = offset, e.OccurredAt
		offset++
		return record, err
	})
	require.NoError(t, err)
	bad := event.Event{
		ID: uuid.Must(uuid.NewV7()), TenantID: tenant, AggregateType: event.AggregateOrder, AggregateID: uuid.Must(uuid.NewV7()),
		AggregateVersion: 1, Type: "OrderLost", SchemaVersion: 1, OccurredAt: time.Now(), Payload: json.RawMessage(`{"a":1}`),
	}.Record()
	bad.Offset, bad.Time = offset, time.Now()
	in := inbox.New(inbox.Config{
		Consumer: billing.Consumer, Pool: database.Pool(t, "worker"), Handler: billing.Handler{Now: time.Now},
		Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry(), Now: time.Now,
	})
	require.NoError(t, in.Process(t.Context(), append(records[1:], bad))) // the first does not come: a version is missing
	_, err = database.Pool(t, "worker").Exec(t.Context(), `
		INSERT INTO version_gap_decisions (tenant_id, order_id, version, noticed_at, reason, decided_by)
		SELECT tenant_id, order_id, version, noticed_at, 'it is gone', 'ann' FROM version_gaps WHERE tenant_id = $1`, tenant)
	require.NoError(t, err)
	return tenant
}

package billing_test

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/pgtest"
)

// TestLockOrder has two transactions name the same rows in different orders,
// behind a third that holds one of them. A statement that locks rows in the order
// in which they are named would have each get one and wait for the other's: a
// deadlock, which a retry would hide and pay for.
func TestLockOrder(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		hold  string // SQL that holds the row of $1
		write func(ctx context.Context, tx pgx.Tx, ids []uuid.UUID) error
	}{
		"MarksOfEvents": {
			`INSERT INTO processed_events (consumer, event_id, tenant_id, fingerprint, topic, partition, "offset")
				VALUES ('billing', $1, $1, sha256('x'), 'order.events', 0, 0)`,
			func(ctx context.Context, tx pgx.Tx, ids []uuid.UUID) error {
				n := len(ids)
				_, err := db.New().ProcessedEventInsertMany(ctx, tx, db.ProcessedEventInsertManyParams{
					Consumer: billing.Consumer, EventIds: ids, TenantIds: ids,
					Fingerprints: slices.Repeat([][]byte{make([]byte, 32)}, n), Topics: make([]string, n),
					Partitions: make([]int32, n), Offsets: make([]int64, n),
				})
				return err
			},
		},
		"ViewsOfOrders": {
			`INSERT INTO order_billing (tenant_id, order_id, version, status, currency, total_minor, refunded_minor)
				VALUES ($1, $1, 1, 'created', 'EUR', 1, 0)`,
			func(ctx context.Context, tx pgx.Tx, ids []uuid.UUID) error {
				n := len(ids)
				_, err := db.New().OrderBillingUpsertMany(ctx, tx, db.OrderBillingUpsertManyParams{
					TenantIds: ids, OrderIds: ids, Versions: slices.Repeat([]int64{1}, n), Statuses: make([]string, n),
					Currencies: make([]string, n), TotalMinors: make([]int64, n), RefundedMinors: make([]int64, n),
				})
				return err
			},
		},
		"SeriesOfNumbers": {
			"INSERT INTO document_numbers (tenant_id, kind, year, last_number) VALUES ($1, 'invoice', 2026, 1)",
			func(ctx context.Context, tx pgx.Tx, ids []uuid.UUID) error {
				_, err := db.New().DocumentNumbersTake(ctx, tx, db.DocumentNumbersTakeParams{
					Kind: "invoice", Year: 2026, TenantIds: ids, Counts: slices.Repeat([]int64{1}, len(ids)),
				})
				return err
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			worker := w.DB.Pool(t, "worker")
			ids := []uuid.UUID{w.Tenant(t), w.Tenant(t), w.Tenant(t)} // ids that are tenants do for all
			slices.SortFunc(ids, func(a, b uuid.UUID) int { return bytes.Compare(a[:], b[:]) })

			holder, err := w.Owner.Begin(t.Context())
			require.NoError(t, err)
			defer holder.Rollback(context.WithoutCancel(t.Context())) //nolint:errcheck // rolled back below; this is for a failed test
			_, err = holder.Exec(t.Context(), test.hold, ids[0])
			require.NoError(t, err)

			var finished sync.WaitGroup
			errs := make([]error, 2)
			for i, named := range [][]uuid.UUID{{ids[1], ids[0], ids[2]}, {ids[2], ids[1], ids[0]}} {
				finished.Go(func() {
					errs[i] = pgx.BeginFunc(t.Context(), worker, func(tx pgx.Tx) error { return test.write(t.Context(), tx, named) })
				})
				require.Eventually(t, func() bool {
					return pgtest.Column[int](t, w.Owner, `
						SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`)[0] == i+1
				}, 20*time.Second, 5*time.Millisecond)
			}
			require.NoError(t, holder.Rollback(t.Context()))
			finished.Wait()
			require.NoError(t, errors.Join(errs...))
		})
	}
}

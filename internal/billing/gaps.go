package billing

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/invoices"
)

// furthestVersion is how many versions of an order may be missing before one that
// is taken. What is further ahead says a version that the order cannot have yet,
// or cannot be believed without looking at it: the view would take it for the
// newest for ever. missing_versions has the same number.
const furthestVersion = 100

// noteGapsTx keeps version_gaps: the versions that these events skip come in, and
// those that come late go out. uneven are the orders of the batch whose versions
// do not follow one on the other, with the version that each was at before.
//
// It knows an order by its events alone: what the producer's tables hold it does
// not ask.
func noteGapsTx(ctx context.Context, tx pgx.Tx, orders []orderEvent, uneven []db.OrderBillingUpsertManyRow) error {
	events := make(map[invoices.OrderKey][]orderEvent, len(uneven))
	for _, row := range uneven {
		events[invoices.OrderKey{TenantID: row.TenantID, OrderID: row.OrderID}] = nil
	}
	for _, o := range orders {
		if of, is := events[o.key()]; is {
			events[o.key()] = append(of, o)
		}
	}

	var missing, came gaps
	var refused inbox.Rejections
	for _, row := range uneven {
		key := invoices.OrderKey{TenantID: row.TenantID, OrderID: row.OrderID}
		of := events[key]
		slices.SortStableFunc(of, func(a, b orderEvent) int { return cmp.Compare(a.state.Version, b.state.Version) })
		if row.CameAfter == nil { // all of them are late
			for _, o := range of {
				came.add(key, o.state.Version)
			}
			continue
		}
		last := *row.CameAfter
		for _, o := range of {
			version := o.state.Version
			if version <= *row.CameAfter {
				came.add(key, version)
				continue
			}
			if version-last-1 > furthestVersion {
				refused = append(refused, o.refuse(inbox.ClassGap, "version %d is too far ahead: the last that is known is %d, and at most %d may be missing",
					version, last, furthestVersion))
				continue
			}
			for skipped := last + 1; skipped < version; skipped++ {
				missing.add(key, skipped)
			}
			last = max(last, version)
		}
	}
	if len(refused) > 0 {
		return refused
	}

	if len(missing.Versions) > 0 {
		params := db.VersionGapInsertManyParams{
			Consumer: Consumer, TenantIds: missing.TenantIds, OrderIds: missing.OrderIds, Versions: missing.Versions,
		}
		if err := db.New().VersionGapInsertMany(ctx, tx, params); err != nil {
			return fmt.Errorf("note missing versions: %w", err)
		}
	}
	if len(came.Versions) > 0 {
		if err := db.New().VersionGapDeleteMany(ctx, tx, came.TenantIds, came.OrderIds, came.Versions); err != nil {
			return fmt.Errorf("note versions that came late: %w", err)
		}
	}
	return nil
}

// gaps are versions of orders, as the statements take them.
type gaps db.VersionGapInsertManyParams

func (g *gaps) add(key invoices.OrderKey, version int64) {
	g.TenantIds = append(g.TenantIds, key.TenantID)
	g.OrderIds = append(g.OrderIds, key.OrderID)
	g.Versions = append(g.Versions, version)
}

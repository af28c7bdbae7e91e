package deadletters

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/db"
)

// Gap is a version of an order that billing misses: it has seen a later one.
type Gap struct {
	TenantID uuid.UUID `json:"tenant_id"`
	OrderID  uuid.UUID `json:"order_id"`
	Version  int64     `json:"version"`
	Since    time.Time `json:"missing_since"`
}

// Gaps is the versions that are missing, up to a page of them, and whether there
// are more.
func (s *Service) Gaps(ctx context.Context) (gaps []Gap, more bool, err error) {
	rows, err := db.New().MissingVersionList(ctx, s.pool, db.MissingVersionListParams{PageSize: LargestPage + 1})
	if err != nil {
		return nil, false, fmt.Errorf("list missing versions: %w", err)
	}
	gaps = make([]Gap, 0, len(rows))
	for _, row := range rows[:min(len(rows), LargestPage)] {
		gaps = append(gaps, Gap{row.TenantID, row.OrderID, row.Version, row.NoticedAt.UTC()})
	}
	return gaps, len(rows) > LargestPage, nil
}

// GiveUp decides that what is missing of an order will not come: one version, or
// with 0 all of them. It is applied if it comes all the same. What a dead letter
// waits for is seen to with the dead letter.
func (s *Service) GiveUp(ctx context.Context, orderID uuid.UUID, version int64, by, reason string) ([]Gap, error) {
	reason, err := checkReason(reason)
	if err != nil {
		return nil, fmt.Errorf("to give up a version needs a reason, a text of at most %d characters", longestReason)
	}
	if err := checkName(by); err != nil {
		return nil, err
	}
	rows, err := db.New().VersionGapGiveUp(ctx, s.pool, db.VersionGapGiveUpParams{
		OrderID: orderID, Version: pointer(version), DecidedBy: by, Reason: reason,
	})
	if err != nil {
		return nil, fmt.Errorf("give up missing versions: %w", err)
	}
	gaps := make([]Gap, len(rows))
	for i, row := range rows {
		gaps[i] = Gap{row.TenantID, row.OrderID, row.Version, row.NoticedAt.UTC()}
	}
	return gaps, nil
}

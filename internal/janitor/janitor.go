// Package janitor keeps the partitioned tables in order: it makes each day's
// partition before the day comes. It runs as a database role of its own, which
// owns those tables and nothing else.
package janitor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceledger/onceledger/internal/db"
)

// Tables are the tables with a partition for each day (UTC), by the UUIDv7 that
// is their key.
var Tables = []string{"outbox_events", "processed_events"}

// daysAhead is how many days after today have a partition. Ids more than a day
// ahead are refused, so one would do; the others are for a janitor that is away.
const daysAhead = 3

// interval is how often the janitor looks. A day is made daysAhead days early,
// so being late by hours costs nothing.
const interval = 10 * time.Minute

// Janitor makes partitions ahead of time, for as long as it runs.
type Janitor struct {
	Pool *pgxpool.Pool
	Log  *slog.Logger
	Now  func() time.Time
}

// Run works until ctx is done. A failure is logged and tried again: the days
// made ahead are the time there is to mend it, and readiness tells when they
// run out.
func (j Janitor) Run(ctx context.Context) error {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		made, err := MakePartitions(ctx, j.Pool, j.Now())
		if err != nil && ctx.Err() == nil {
			j.Log.ErrorContext(ctx, "partitions not made", "error", err)
		}
		if len(made) > 0 {
			j.Log.InfoContext(ctx, "partitions made", "partitions", strings.Join(made, " "))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// MakePartitions makes what is missing of the partitions from the oldest day that
// there is, or yesterday, to daysAhead days after now, and says which it made: a
// day on which no janitor ran is made up for, so that no event is left without a
// place. Two at once do no harm.
func MakePartitions(ctx context.Context, conn db.DBTX, now time.Time) (made []string, err error) {
	today := now.UTC().Truncate(24 * time.Hour)
	for _, table := range Tables {
		days, err := db.New().PartitionDays(ctx, conn, table)
		if err != nil {
			return made, fmt.Errorf("list partitions of %s: %w", table, err)
		}
		day := today.AddDate(0, 0, -1)
		if len(days) > 0 && days[0].Before(day) {
			day = days[0]
		}
		for ; !day.After(today.AddDate(0, 0, daysAhead)); day = day.AddDate(0, 0, 1) {
			if slices.ContainsFunc(days, day.Equal) {
				continue
			}
			isNew, err := db.New().PartitionMake(ctx, conn, table, day)
			if err != nil {
				return made, fmt.Errorf("make partition of %s for %s: %w", table, day.Format(time.DateOnly), err)
			}
			if isNew {
				made = append(made, table+"_"+day.Format("20060102"))
			}
		}
	}
	return made, nil
}

// CheckPartitions is an error if an id that is made now, or by a clock some
// hours off, would find no partition.
func CheckPartitions(ctx context.Context, conn db.DBTX, now time.Time) error {
	today := now.UTC().Truncate(24 * time.Hour)
	for _, table := range Tables {
		days, err := db.New().PartitionDays(ctx, conn, table)
		if err != nil {
			return fmt.Errorf("list partitions of %s: %w", table, err)
		}
		for _, day := range []time.Time{today, today.AddDate(0, 0, 1)} {
			if !slices.ContainsFunc(days, day.Equal) {
				return fmt.Errorf("%s has no partition for %s: %w", table, day.Format(time.DateOnly), errPartitionMissing)
			}
		}
	}
	return nil
}

var errPartitionMissing = errors.New("is a worker with the role janitor running?")

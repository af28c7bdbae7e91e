// Package janitor keeps the partitioned tables in order: it makes each day's
// partition before the day comes, and drops those that nothing needs any more.
// It also deletes idempotency keys that are past their time.
//
// Nothing is dropped for its age alone: a day of the outbox goes when every event
// in it is known to be delivered, a day of the dedupe table when no dead letter
// of it is open, and either only while the retention contract holds. What has to
// stay although its time is over is an alarm.
//
// It runs as a database role of its own, which owns those tables and nothing
// else.
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

// Janitor makes partitions ahead of time and drops old ones, for as long as it
// runs.
type Janitor struct {
	Pool *pgxpool.Pool
	Log  *slog.Logger
	Now  func() time.Time

	Drop    DropPlan
	KeepKey time.Duration // idempotency keys: IDEMPOTENCY_RETENTION
	Metrics *Metrics
}

// Run works until ctx is done. A failure is logged and tried again: the days
// made ahead are the time there is to mend it, and readiness tells when they
// run out.
func (j Janitor) Run(ctx context.Context) error {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		j.work(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// work does everything once. Each part is done whether or not another failed.
func (j Janitor) work(ctx context.Context) {
	made, err := MakePartitions(ctx, j.Pool, j.Now())
	if len(made) > 0 {
		j.Log.InfoContext(ctx, "partitions made", "partitions", strings.Join(made, " "))
	}
	ok := j.succeeded(ctx, "partitions not made", err)

	dropped, kept, err := DropPartitions(ctx, j.Pool, j.Now(), j.Drop)
	if len(dropped) > 0 {
		j.Log.InfoContext(ctx, "partitions dropped", "partitions", strings.Join(dropped, " "))
	}
	for _, k := range kept {
		j.Log.WarnContext(ctx, "partition past its time cannot be dropped", "partition", k.Partition,
			"reason", k.Reason, "detail", k.Detail, "past_their_time", k.Count)
	}
	j.Metrics.partitions(dropped, kept)
	ok = j.succeeded(ctx, "partitions not dropped", err) && ok

	deleted, err := DeleteKeys(ctx, j.Pool, j.KeepKey)
	if deleted > 0 {
		j.Log.InfoContext(ctx, "idempotency keys deleted", "keys", deleted)
	}
	j.Metrics.keys.Add(float64(deleted))
	if j.succeeded(ctx, "idempotency keys not deleted", err) && ok {
		j.Metrics.done.Set(float64(j.Now().Unix()))
	}
}

func (j Janitor) succeeded(ctx context.Context, what string, err error) bool {
	if err != nil && ctx.Err() == nil {
		j.Log.ErrorContext(ctx, what, "error", err)
	}
	return err == nil
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

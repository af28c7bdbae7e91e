package janitor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceledger/onceledger/internal/crash"
	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/postgres"
)

// DropPlan says what may be dropped.
type DropPlan struct {
	Slot   string        // the relay's, whose record tells what is delivered
	Outbox time.Duration // how long a day of outbox_events is kept at least
	Dedupe time.Duration // how long a day of processed_events is

	// Contract is asked before each drop; an error forbids it.
	Contract func(context.Context) error
}

// Why a partition is kept that is past its time, besides what the database says
// (undelivered, open-dead-letter).
const (
	reasonUndelivered = "undelivered"
	reasonDeadLetter  = "open-dead-letter"
	reasonLocked      = "locked"
	reasonContract    = "contract"
	reasonError       = "error"
)

var reasons = []string{reasonUndelivered, reasonDeadLetter, reasonLocked, reasonContract, reasonError}

// Kept is a partition that is past its time and has to stay, and with it all
// the younger ones of its table.
type Kept struct {
	Table, Partition string
	Reason, Detail   string
	Count            int // of the table's partitions that are past their time
}

// dropLockTimeout bounds each wait for whoever still reads a partition. Nobody
// waits behind the janitor meanwhile; it tries again at its next round.
const dropLockTimeout = 5 * time.Second

// DropPartitions drops the partitions that are past their time and that nothing
// needs, the oldest of a table first and none behind one that has to stay: a
// dedupe table with a hole in it would take an event of that day for a new one.
// Of several at once, one works and the others find nothing to do.
//
// It is DETACH CONCURRENTLY, a second look, and DROP, each by itself: neither an
// insert nor a reader of the parent waits for it. What an earlier run left half
// done is finished first.
func DropPartitions(ctx context.Context, pool *pgxpool.Pool, now time.Time, plan DropPlan) (dropped []string, kept []Kept, err error) {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("drop partitions: %w", err)
	}
	defer conn.Release()
	locked, err := db.New().JanitorLock(ctx, conn)
	if err != nil || !locked {
		return nil, nil, err
	}
	defer func() {
		// A connection that cannot be asked any more has let go of the lock.
		cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		_, resetErr := conn.Exec(cleanup, "RESET lock_timeout")
		if errors.Join(resetErr, db.New().JanitorUnlock(cleanup, conn)) != nil {
			_ = conn.Conn().Close(cleanup)
		}
	}()
	if _, err := conn.Exec(ctx, fmt.Sprintf("SET lock_timeout = %d", dropLockTimeout.Milliseconds())); err != nil {
		return nil, nil, fmt.Errorf("set lock_timeout: %w", err)
	}

	var errs []error
	for _, table := range Tables {
		keep := plan.Outbox
		if table == "processed_events" {
			keep = plan.Dedupe
		}
		d := dropper{conn: conn, table: table, end: now.Add(-keep), plan: plan}
		stays, err := d.run(ctx)
		dropped = append(dropped, d.dropped...)
		if stays != nil {
			kept = append(kept, *stays)
		}
		errs = append(errs, err)
	}
	return dropped, kept, errors.Join(errs...)
}

// dropper works on one table.
type dropper struct {
	conn    *pgxpool.Conn
	table   string
	end     time.Time // what ended before it is past its time
	plan    DropPlan
	dropped []string
}

func (d *dropper) past(day time.Time) bool { return !day.AddDate(0, 0, 1).After(d.end) }

func (d *dropper) name(day time.Time) string { return d.table + "_" + day.Format("20060102") }

// run drops what may go. It returns the first partition that has to stay.
func (d *dropper) run(ctx context.Context) (*Kept, error) {
	detached, err := db.New().PartitionListDetached(ctx, d.conn, d.table)
	if err != nil {
		return nil, fmt.Errorf("list detached partitions of %s: %w", d.table, err)
	}
	attached, err := db.New().PartitionDays(ctx, d.conn, d.table)
	if err != nil {
		return nil, fmt.Errorf("list partitions of %s: %w", d.table, err)
	}
	past := 0
	for _, half := range detached {
		if d.past(half.Day) {
			past++
		}
	}
	for _, day := range attached {
		if d.past(day) {
			past++
		}
	}

	for _, half := range detached {
		if !d.past(half.Day) {
			continue // taken out by hand, and not ours to drop
		}
		stays, err := d.finish(ctx, half.Day, half.Pending)
		if err != nil || stays != nil {
			return d.report(half.Day, past, stays, err)
		}
		past--
	}
	for _, day := range attached {
		if !d.past(day) {
			break
		}
		stays, err := d.drop(ctx, day)
		if err != nil || stays != nil {
			return d.report(day, past, stays, err)
		}
		past--
	}
	return nil, nil
}

// report completes what is known of a partition that stays. A lock that was not
// had is a reason and no error.
func (d *dropper) report(day time.Time, past int, stays *Kept, err error) (*Kept, error) {
	if stays == nil {
		stays = &Kept{Reason: reasonError, Detail: err.Error()}
		if postgres.LockTimedOut(err) {
			stays.Reason, err = reasonLocked, nil
		}
	}
	stays.Table, stays.Partition, stays.Count = d.table, d.name(day), past
	return stays, err
}

// drop takes an attached partition out and drops it, if it may go.
func (d *dropper) drop(ctx context.Context, day time.Time) (*Kept, error) {
	if stays, err := d.neededBy(ctx, day); err != nil || stays != nil {
		return stays, err
	}
	if err := d.alter(ctx, day, "DETACH PARTITION %s CONCURRENTLY"); err != nil {
		return nil, err
	}
	return d.dropDetached(ctx, day)
}

// finish goes on with a partition that an earlier run did not get done with.
func (d *dropper) finish(ctx context.Context, day time.Time, pending bool) (*Kept, error) {
	if pending {
		if err := d.alter(ctx, day, "DETACH PARTITION %s FINALIZE"); err != nil {
			return nil, err
		}
	}
	return d.dropDetached(ctx, day)
}

// dropDetached looks a second time, now that nobody can add to the partition any
// more, and drops it or puts it back.
func (d *dropper) dropDetached(ctx context.Context, day time.Time) (*Kept, error) {
	crash.Point(crash.JanitorDetachedNotDropped)
	stays, err := d.neededBy(ctx, day)
	if err != nil {
		return nil, err
	}
	if stays != nil {
		bounds := fmt.Sprintf(" FOR VALUES FROM ('%s') TO ('%s')", floor(day), floor(day.AddDate(0, 0, 1)))
		if err := d.alter(ctx, day, "ATTACH PARTITION %s"+bounds); err != nil {
			return nil, err
		}
		return stays, nil
	}
	if _, err := d.conn.Exec(ctx, "DROP TABLE "+pgx.Identifier{"public", d.name(day)}.Sanitize()); err != nil {
		return nil, fmt.Errorf("drop %s: %w", d.name(day), err)
	}
	d.dropped = append(d.dropped, d.name(day))
	return nil, nil
}

// neededBy asks the database, and then the contract.
func (d *dropper) neededBy(ctx context.Context, day time.Time) (*Kept, error) {
	needed, err := db.New().PartitionNeededBy(ctx, d.conn, d.table, day, d.plan.Slot)
	if err != nil {
		return nil, fmt.Errorf("ask what needs %s: %w", d.name(day), err)
	}
	if len(needed) > 0 {
		return &Kept{Reason: needed[0].Reason, Detail: needed[0].Detail}, nil
	}
	if err := d.plan.Contract(ctx); err != nil {
		return &Kept{Reason: reasonContract, Detail: err.Error()}, nil //nolint:nilerr // it is a reason, and the round goes on
	}
	return nil, nil
}

// alter runs a statement about a partition that has to be one by itself.
func (d *dropper) alter(ctx context.Context, day time.Time, action string) error {
	partition := pgx.Identifier{"public", d.name(day)}.Sanitize()
	statement := fmt.Sprintf("ALTER TABLE %s %s", pgx.Identifier{"public", d.table}.Sanitize(), fmt.Sprintf(action, partition))
	if _, err := d.conn.Exec(ctx, statement); err != nil {
		return fmt.Errorf("%s: %w", statement, err)
	}
	return nil
}

// floor is the lowest UUIDv7 of a moment, as uuidv7_floor says it in SQL.
func floor(moment time.Time) string {
	digits := fmt.Sprintf("%012x", moment.UnixMilli())
	return digits[:8] + "-" + digits[8:] + "-7000-0000-000000000000"
}

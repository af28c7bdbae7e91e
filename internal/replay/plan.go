package replay

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/janitor"
)

// Plan is what a replay comes to, before anything is done.
type Plan struct {
	Ranges   map[int32]Range
	Records  int64     // at most: markers of transactions have offsets too
	Earliest time.Time // from when on events can be told from their repeats
	Contract janitor.Retention
}

// ErrRunning is a group that has members.
var ErrRunning = errors.New("the group is not stopped")

// Plan finds out what there is to replay, and refuses what would not be safe or
// cannot be done. It changes nothing.
func (r *Replay) Plan(ctx context.Context) (Plan, error) {
	plan := Plan{Contract: r.config.Contract}
	if err := plan.Contract.Check(); err != nil {
		return Plan{}, err
	}
	spans, err := r.spans(ctx)
	if err != nil {
		return Plan{}, err
	}
	from, err := r.resolve(ctx, r.config.From, spans)
	if err != nil {
		return Plan{}, fmt.Errorf("--from %s: %w", r.config.From.text, err)
	}
	to := make(map[int32]int64)
	if r.config.To.text != "" {
		if to, err = r.resolve(ctx, r.config.To, spans); err != nil {
			return Plan{}, fmt.Errorf("--to %s: %w", r.config.To.text, err)
		}
	} else {
		for partition, s := range spans {
			to[partition] = s.committed
		}
	}
	plan.Ranges = make(map[int32]Range)
	for partition, begin := range from {
		if end, asked := to[partition]; asked && begin < end {
			plan.Ranges[partition] = Range{begin, end}
			plan.Records += end - begin
		}
	}
	if plan.Records == 0 {
		return Plan{}, fmt.Errorf("there is nothing to replay: no record lies between --from %s and %s (%s)",
			r.config.From.text, orGroup(r.config.To), describeSpans(spans))
	}
	if plan.Earliest, err = r.earliest(ctx); err != nil {
		return Plan{}, err
	}
	return plan, r.checkAge(ctx, plan)
}

func orGroup(to Point) string {
	if to.text == "" {
		return "where the group is"
	}
	return "--to " + to.text
}

func describeSpans(spans map[int32]span) string {
	var parts []string
	for _, partition := range slices.Sorted(maps.Keys(spans)) {
		parts = append(parts, fmt.Sprintf("partition %d: %d to %d", partition, spans[partition].first, spans[partition].committed))
	}
	return strings.Join(parts, ", ")
}

// spans is what can be replayed: what the group has passed, and no further.
func (r *Replay) spans(ctx context.Context) (map[int32]span, error) {
	first, err := r.config.Topic.First(ctx)
	if err != nil {
		return nil, err
	}
	committed, err := r.config.Topic.Committed(ctx)
	if err != nil {
		return nil, err
	}
	if len(committed) == 0 {
		return nil, fmt.Errorf("group %s has committed nothing in its topic: there is nothing that it has read and could read again", r.config.Consumer)
	}
	spans := make(map[int32]span)
	for partition, begin := range first {
		// What the group has not come to is its own to read.
		spans[partition] = span{begin, max(begin, committed[partition])}
	}
	return spans, nil
}

func (r *Replay) resolve(ctx context.Context, point Point, spans map[int32]span) (map[int32]int64, error) {
	var byTime map[int32]int64
	if !point.at.IsZero() {
		var err error
		if byTime, err = r.config.Topic.At(ctx, point.at); err != nil {
			return nil, err
		}
	}
	return point.resolve(spans, byTime)
}

// earliest is the moment from which on events can be replayed: the replay window
// has room for them, and the marks of what was applied reach back that far.
func (r *Replay) earliest(ctx context.Context) (time.Time, error) {
	days, err := db.New().PartitionDays(ctx, r.config.DB, "processed_events")
	if err != nil {
		return time.Time{}, fmt.Errorf("read dedupe partitions: %w", err)
	}
	if len(days) == 0 {
		return time.Time{}, errors.New("processed_events has no partition: nothing could be told from a repeat")
	}
	r.oldest = days[0]
	earliest := r.config.Now().Add(-r.config.Contract.Replay).UTC()
	if earliest.Before(days[0]) {
		earliest = days[0]
	}
	return earliest, nil
}

// checkAge refuses a range that begins with records of which it is not known any
// more whether they were applied.
func (r *Replay) checkAge(ctx context.Context, plan Plan) error {
	allowed, err := r.config.Topic.At(ctx, plan.Earliest)
	if err != nil {
		return err
	}
	for _, partition := range slices.Sorted(maps.Keys(plan.Ranges)) {
		asked := plan.Ranges[partition]
		begin, any := allowed[partition]
		if !any || begin > asked.To {
			begin = asked.To
		}
		if asked.From < begin {
			return fmt.Errorf("too old to be told from a repeat: partition %d has records in offsets %d to %d from before %s; "+
				"REPLAY_WINDOW is %s, and processed_events begins with %s (DEDUPE_WINDOW %s): the earliest is --from %s",
				partition, asked.From, begin-1, plan.Earliest.Format(time.RFC3339), r.config.Contract.Replay,
				r.oldest.Format(time.DateOnly), r.config.Contract.Dedupe, plan.Earliest.Add(time.Second).Truncate(time.Second).Format(time.RFC3339))
		}
	}
	return nil
}

// WaitStopped waits until the group has no members, for a while: a static member
// that has ended stays in it for its session timeout. ErrRunning names those that
// are still there.
func (r *Replay) WaitStopped(ctx context.Context, wait time.Duration) error {
	deadline := time.Now().Add(wait)
	said := false
	for {
		members, err := r.config.Topic.Members(ctx)
		if err != nil {
			return err
		}
		if len(members) == 0 {
			return nil
		}
		names := strings.Join(members, "; ")
		if time.Now().After(deadline) {
			return fmt.Errorf("%w: in group %s is %s. Stop the workers with the role %[2]s, or take the role from them (WORKER_ROLES)",
				ErrRunning, r.config.Consumer, names)
		}
		if !said {
			said = true
			r.config.Say("group %s has members: %s; waiting up to %s for them to leave", r.config.Consumer, names, wait)
		}
		if err := pause(ctx, 250*time.Millisecond); err != nil {
			return err
		}
	}
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

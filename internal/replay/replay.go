// Package replay reads a stretch of a consumer's topic once more and gives it to
// the consumer, through the same inbox and handler as the worker. What was applied
// is recognised and dropped, so that a replay of what was applied changes nothing;
// what was not is applied, and that is said loudly: it had been lost.
//
// It reads the partitions itself, joins no group and commits no offset: the group
// is afterwards where it was. It may be killed at any moment and run again. It
// does not go beyond what the group has committed, which is the worker's to read.
//
// It knows no Kafka client; Topic is what it asks of one.
package replay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/janitor"
)

// Range is some of a partition: from the record at From up to, and without, the
// one at To.
type Range struct{ From, To int64 }

// Topic is the consumer's topic and its group.
type Topic interface {
	// Members names who is in the group.
	Members(ctx context.Context) ([]string, error)
	// First is where each partition begins, Committed where the group is in each
	// that it has committed in, and At where the records of a moment and later
	// begin, in each partition that has some.
	First(ctx context.Context) (map[int32]int64, error)
	Committed(ctx context.Context) (map[int32]int64, error)
	At(ctx context.Context, moment time.Time) (map[int32]int64, error)
	// Read gives use the committed records of the ranges, those of a partition in
	// order and up to most at once.
	Read(ctx context.Context, ranges map[int32]Range, most int, use func([]event.Record) error) error
}

// Config is what a replay needs.
type Config struct {
	Consumer string // names the effects, and the group
	Topic    Topic
	DB       *pgxpool.Pool // the consumer's login
	Handler  inbox.Handler
	Contract janitor.Retention

	From, To Point // a zero To is where the group is
	Rate     int   // records a second at most; 0 is no limit

	Log      *slog.Logger
	Now      func() time.Time
	Say      func(format string, args ...any) // what is worth a line
	Progress func(done, of int64)             // after each batch
}

// Replay is one replay.
type Replay struct {
	config  Config
	oldest  time.Time // the first moment of the dedupe table
	assumed assumed
}

// New makes a replay, which does nothing yet.
func New(config Config) *Replay {
	r := &Replay{config: config}
	r.assumeNothing()
	return r
}

func (r *Replay) assumeNothing() {
	r.assumed = assumed{make(map[uuid.UUID]string), make(map[aggregate]bool)}
}

// batchMost bounds a batch, whatever the rate: it is one transaction.
const batchMost = 500

// batchSize is a batch of a fifth of a second, so that the rate is kept evenly.
func (r *Replay) batchSize() int {
	if r.config.Rate <= 0 {
		return batchMost
	}
	return min(batchMost, max(1, r.config.Rate/5))
}

// Rehearse says what a replay would do, and changes nothing.
func (r *Replay) Rehearse(ctx context.Context, plan Plan) (Report, error) {
	report := Report{Rehearsed: true}
	if err := r.countBefore(ctx, &report); err != nil {
		return report, err
	}
	err := r.read(ctx, plan, &report, func(batch []sorted) ([]sorted, error) { return batch, nil })
	if err == nil {
		report.After = report.Before
	}
	return report, err
}

// Run replays. With an error the report says what was done until then; the rest
// can be done by another run, which finds the first part done.
func (r *Replay) Run(ctx context.Context, plan Plan) (Report, error) {
	var report Report
	if err := r.countBefore(ctx, &report); err != nil {
		return report, err
	}
	in := inbox.New(inbox.Config{
		Consumer: r.config.Consumer,
		Pool:     r.config.DB,
		Handler:  r.config.Handler,
		Log:      r.config.Log,
		Metrics:  prometheus.NewRegistry(), // nobody scrapes it
		Now:      r.config.Now,
	})
	nextLook := time.Now()
	readErr := r.read(ctx, plan, &report, func(batch []sorted) ([]sorted, error) {
		if time.Now().After(nextLook) {
			nextLook = time.Now().Add(lookEvery)
			r.lookForMembers(ctx, &report)
		}
		r.assumeNothing() // of the next batch the database says what was done
		return r.apply(ctx, in, batch)
	})
	ctx, cancel := whatever(ctx) // what was done is counted
	defer cancel()
	after, err := r.count(ctx)
	report.After = after
	return report, errors.Join(readErr, err)
}

// whatever is a context for what is to be done even if the replay was stopped.
func whatever(ctx context.Context) (context.Context, context.CancelFunc) {
	if ctx.Err() != nil {
		return context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
	}
	return context.WithCancel(ctx)
}

func (r *Replay) countBefore(ctx context.Context, report *Report) (err error) {
	report.Before, err = r.count(ctx)
	return err
}

func (r *Replay) count(ctx context.Context) (db.ReplayCountsRow, error) {
	counts, err := db.New().ReplayCounts(ctx, r.config.DB, r.config.Consumer)
	if err != nil {
		return counts, fmt.Errorf("count: %w", err)
	}
	return counts, nil
}

// lookEvery is how often it is asked whether a worker has begun meanwhile.
const lookEvery = 2 * time.Second

// lookForMembers says so when somebody has joined the group. It is harmless: the
// member reads what lies behind, and either of the two finds done what the other
// has done. But what it applies shows in the counts.
func (r *Replay) lookForMembers(ctx context.Context, report *Report) {
	if report.Joined != "" {
		return
	}
	members, err := r.config.Topic.Members(ctx)
	if err == nil && len(members) > 0 {
		report.Joined = members[0]
		r.config.Say("%s has joined the group meanwhile. That is harmless: what one of the two has applied the other recognises. "+
			"But the counts will show its work too.", members[0])
	}
}

// read sorts the records of a plan and hands them on. use returns those of which it
// knows the end, even with an error.
func (r *Replay) read(ctx context.Context, plan Plan, report *Report, use func([]sorted) ([]sorted, error)) error {
	began := time.Now()
	var done int64
	at := make(map[int32]int64)
	return r.config.Topic.Read(ctx, plan.Ranges, r.batchSize(), func(records []event.Record) error {
		batch, err := r.sort(ctx, records)
		if err != nil {
			return err
		}
		batch, err = use(batch)
		report.add(batch)
		if err != nil {
			return err
		}
		done = 0
		for _, record := range records {
			at[record.Partition] = record.Offset + 1
		}
		for partition, offset := range at {
			done += offset - plan.Ranges[partition].From
		}
		r.config.Progress(done, plan.Records)
		if r.config.Rate > 0 {
			due := time.Duration(report.Records) * time.Second / time.Duration(r.config.Rate)
			return pause(ctx, time.Until(began.Add(due)))
		}
		return ctx.Err()
	})
}

// outage is how long a database that is away is waited for.
const outage = time.Minute

// apply gives the consumer a batch and sees what has become of it. If that was
// stopped in the middle, it is of the records on which it had an effect.
func (r *Replay) apply(ctx context.Context, in *inbox.Inbox, batch []sorted) ([]sorted, error) {
	var records []event.Record
	for _, s := range batch {
		if s.outcome != TooOld {
			records = append(records, s.record)
		}
	}
	stopped := r.process(ctx, in, records)
	ctx, cancel := whatever(ctx)
	defer cancel()
	err := r.settle(ctx, batch, stopped == nil)
	if stopped != nil || err != nil {
		batch = slices.DeleteFunc(batch, func(s sorted) bool { return s.outcome != Applied && s.outcome != NewDeadLetter })
	}
	return batch, errors.Join(stopped, err)
}

// process waits out a database that is away, as the worker would, but not for
// ever.
func (r *Replay) process(ctx context.Context, in *inbox.Inbox, records []event.Record) error {
	deadline := time.Now().Add(outage)
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
		err := in.Process(ctx, records)
		if err == nil || ctx.Err() != nil {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("stopped, for it does not get on: %w; what was done is done, and another run does the rest", err)
		}
		r.config.Say("waiting %s: %v", wait, err)
		if err := pause(ctx, wait); err != nil {
			return err
		}
	}
}

package inbox_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/postgres"
)

// clock is a time that a test moves.
type clock struct{ nanoseconds atomic.Int64 }

func (c *clock) set(at time.Time) { c.nanoseconds.Store(at.UnixNano()) }
func (c *clock) now() time.Time   { return time.Unix(0, c.nanoseconds.Load()).UTC() }

func withClock(c *clock) func(*inbox.Config) {
	return func(config *inbox.Config) { config.Now = c.now }
}

// TestArrivalTimeDoesNotMatter is field report R31: with a dedupe table that is
// partitioned by when an event arrives, one that is delivered again after
// midnight would be new.
func TestArrivalTimeDoesNotMatter(t *testing.T) {
	t.Parallel()

	var clock clock
	w := newWorld(t, withClock(&clock))
	midnight := time.Now().UTC().Truncate(24*time.Hour).AddDate(0, 0, 2) // partitions on both sides

	clock.set(midnight.Add(-100 * time.Millisecond))
	e := (&factory.Order{TenantID: w.tenant, Now: clock.now}).Created()
	records := w.Deliver(t, e)
	before := w.Contents(t)

	for _, after := range []time.Duration{-99 * time.Millisecond, 100 * time.Millisecond, time.Second, 23 * time.Hour, 30 * 24 * time.Hour} {
		clock.set(midnight.Add(after))
		w.DeliverRecords(t, records...)
		w.another(t, withClock(&clock)).DeliverRecords(t, records...) // after a crash
		require.Equal(t, before, w.Contents(t), "delivered %s from midnight", after)
	}
	require.Equal(t, ids(e), w.effects(t))
	require.Equal(t, 5, w.Counted(t, "duplicate"))
}

// TestDroppedPartition is the other half of R31: once the marks of a day are
// gone, its events cannot be told from duplicates, and are refused.
func TestDroppedPartition(t *testing.T) {
	t.Parallel()

	var clock clock
	clock.set(time.Now())
	w := newWorld(t, withClock(&clock))
	today := time.Now().UTC().Truncate(24 * time.Hour)
	order := &factory.Order{TenantID: w.tenant, Now: func() time.Time { return today.Add(-time.Hour) }}
	records := w.Deliver(t, order.Created())
	w.Exec(t, "DROP TABLE processed_events_"+today.AddDate(0, 0, -1).Format("20060102"))

	// The worker still takes yesterday for covered: it waits, and loses nothing.
	err := w.Process(t.Context(), records)
	require.True(t, postgres.MissingPartition(err), "%v", err)
	require.Empty(t, w.DeadLetters(t))

	// It looks again after a minute.
	clock.set(clock.now().Add(time.Minute))
	w.DeliverRecords(t, records...)
	letters := w.DeadLetters(t)
	require.Len(t, letters, 1)
	require.Equal(t, inbox.ClassTooOld, letters[0].Class)
	require.Contains(t, letters[0].Detail, today.Format(time.RFC3339), "what is kept")
	require.Len(t, w.effects(t), 1, "it had its effect once")

	fresh := w.order().Created()
	w.Deliver(t, fresh, (&factory.Order{TenantID: w.tenant, Now: order.Now}).Created())
	require.Equal(t, fresh.ID, w.effects(t)[1], "newer ones are applied")
	require.Equal(t, 2, w.Counted(t, "too-old"))
}

// TestClockSkew has the producer's clock minutes off the worker's: it changes no
// outcome.
func TestClockSkew(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	var events []event.Event
	for _, skew := range []time.Duration{-10 * time.Minute, 10 * time.Minute, -time.Hour, 23 * time.Hour} {
		order := &factory.Order{TenantID: w.tenant, Now: func() time.Time { return time.Now().Add(skew) }}
		events = append(events, order.Created())
	}
	w.Deliver(t, events...)
	w.requireOnce(t, events...)
}

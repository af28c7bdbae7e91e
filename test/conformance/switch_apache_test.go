//go:build apache

package conformance_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/debezium"
	"github.com/onceledger/onceledger/internal/relay"
	"github.com/onceledger/onceledger/internal/switchover"
)

func newCrewWithConnect(t *testing.T, s *services) *crew {
	t.Helper()
	c := newCrew(t, s.bootstrap)
	c.config.Connect = newClient(t, s)
	return c
}

// TestSwitchOverAtApacheKafka switches between all three relays. It runs one
// thing after another: there is one Connect.
func TestSwitchOverAtApacheKafka(t *testing.T) {
	t.Parallel()

	s := startApache(t)
	for _, from := range []relay.Kind{relay.KindWAL, relay.KindPoll, relay.KindDebezium} {
		for _, to := range []relay.Kind{relay.KindWAL, relay.KindPoll, relay.KindDebezium} {
			if from != to {
				t.Run(string(from)+" to "+string(to), func(t *testing.T) {
					newCrewWithConnect(t, s).switchUnderLoad(t, from, to)
				})
			}
		}
	}
	t.Run("AllRound", func(t *testing.T) { allRound(t, s) })
	t.Run("InterruptedInPostgres", func(t *testing.T) { interruptedInPostgres(t, s) })
	t.Run("InterruptedAtConnect", func(t *testing.T) { interruptedAtConnect(t, s) })
	t.Run("LeavingDebeziumWithoutConnect", func(t *testing.T) { leavingDebeziumWithoutConnect(t, s) })
	t.Run("ToADebeziumThatIsRefused", func(t *testing.T) { toADebeziumThatIsRefused(t, s) })
	t.Run("LeavingDebeziumBeforeItsSnapshotIsOut", func(t *testing.T) { leavingDebeziumBeforeItsSnapshotIsOut(t, s) })
	t.Run("LeavingDebeziumAfterItsSlotWasLost", func(t *testing.T) { leavingDebeziumAfterItsSlotWasLost(t, s) })
}

// Goal: as an operator would: wal, poll, debezium, wal, in one go under load.
func allRound(t *testing.T, s *services) {
	c := newCrewWithConnect(t, s)
	c.carriedBy(t, relay.KindWAL)
	l := c.startLoad(t, 4, 10*time.Millisecond)
	for _, to := range []relay.Kind{relay.KindPoll, relay.KindDebezium, relay.KindWAL} {
		l.advance(t, 100)
		c.switchTo(t, to)
		c.requireSettled(t, to)
	}
	l.advance(t, 50)
	l.finish(t)
	c.receiveAll(t)
	t.Logf("%d events, %d duplicates", len(c.world.order), c.duplicates())
}

// Goal: as TestSwitchOverIsInterrupted, to Debezium and from it.
func interruptedInPostgres(t *testing.T, s *services) {
	c := newCrewWithConnect(t, s)
	c.carriedBy(t, relay.KindWAL)
	l := c.startLoad(t, 3, 20*time.Millisecond)
	for _, pair := range [][2]relay.Kind{{relay.KindWAL, relay.KindDebezium}, {relay.KindDebezium, relay.KindPoll}} {
		from, to := pair[0], pair[1]
		cuts := 0
		for n := 1; n < 50; n += 6 {
			interrupted := c.interrupt(t, to, n)
			if !interrupted {
				break
			}
			cuts++
			c.switchTo(t, []relay.Kind{from, to}[cuts%2])
			c.requireSettled(t, []relay.Kind{from, to}[cuts%2])
			c.switchTo(t, from)
			c.requireSettled(t, from)
			l.advance(t, 5)
		}
		require.Greater(t, cuts, 2)
		c.switchTo(t, to)
		c.requireSettled(t, to)
		t.Logf("%s to %s was interrupted at %d points", from, to, cuts)
	}
	l.finish(t)
	c.receiveAll(t)
	t.Logf("%d events, %d duplicates", len(c.world.order), c.duplicates())
}

// Goal: a switch that ends, or whose Connect dies, between what it says it does
// is finished by another one.
func interruptedAtConnect(t *testing.T, s *services) {
	c := newCrewWithConnect(t, s)
	c.carriedBy(t, relay.KindWAL)
	l := c.startLoad(t, 3, 20*time.Millisecond)
	for _, step := range []struct {
		from, to relay.Kind
		says     string
		killed   bool
	}{
		{relay.KindWAL, relay.KindDebezium, "registering", false},
		{relay.KindWAL, relay.KindDebezium, "registering", true},
		{relay.KindDebezium, relay.KindWAL, "waiting", false},
		{relay.KindDebezium, relay.KindWAL, "stopping", false},
		{relay.KindDebezium, relay.KindPoll, "stopping", true},
	} {
		c.switchTo(t, step.from)
		c.requireSettled(t, step.from)
		l.advance(t, 10)
		ctx, cancel := context.WithCancel(t.Context())
		config := c.config
		config.Say = func(format string, args ...any) {
			if !strings.HasPrefix(format, step.says) {
				return
			}
			if step.killed {
				s.connect.Kill()
			} else {
				cancel()
			}
		}
		_, err := switchover.Switch(ctx, config, step.to)
		require.Error(t, err)
		t.Logf("%s to %s, while %s, Connect killed %v: %v", step.from, step.to, step.says, step.killed, err)
		cancel()
		require.NoError(t, s.connect.Start(t.Context()))
		c.switchTo(t, step.to)
		c.requireSettled(t, step.to)
	}
	l.finish(t)
	c.receiveAll(t)
	t.Logf("%d events, %d duplicates", len(c.world.order), c.duplicates())
}

// Goal: without Connect, Debezium is not left by accident; abandoned, it loses
// nothing either.
func leavingDebeziumWithoutConnect(t *testing.T, s *services) {
	for _, to := range []relay.Kind{relay.KindWAL, relay.KindPoll} {
		require.NoError(t, s.connect.Start(t.Context()))
		c := newCrewWithConnect(t, s)
		c.carriedBy(t, relay.KindWAL)
		c.switchTo(t, relay.KindDebezium)
		l := c.startLoad(t, 3, 20*time.Millisecond)
		l.advance(t, 50)
		s.connect.Kill()
		_, err := switchover.Switch(t.Context(), c.config, to)
		require.ErrorIs(t, err, debezium.ErrUnreachable)
		require.ErrorContains(t, err, "nothing was changed")
		kind, err := relay.Assigned(t.Context(), c.pool, c.slot)
		require.NoError(t, err)
		require.Equal(t, relay.KindDebezium, kind)

		c.config.Abandon = true
		c.switchTo(t, to)
		c.requireSettled(t, to)
		l.advance(t, 20)
		l.finish(t)
		c.receiveAll(t)
		t.Logf("abandoned for %s: %d events, %d duplicates", to, len(c.world.order), c.duplicates())
	}
}

func toADebeziumThatIsRefused(t *testing.T, s *services) {
	c := newCrewWithConnect(t, s)
	c.carriedBy(t, relay.KindWAL)
	l := c.startLoad(t, 3, 20*time.Millisecond)
	l.advance(t, 20)
	c.config.ConnectorURL = strings.Replace(c.config.URL, "onceledger-test@", "wrong-secret@", 1)
	require.NotEqual(t, c.config.URL, c.config.ConnectorURL)
	_, err := switchover.Switch(t.Context(), c.config, relay.KindDebezium)
	require.ErrorIs(t, err, debezium.ErrRefused)
	require.ErrorContains(t, err, "poll goes on")
	require.NotContains(t, err.Error(), "wrong-secret")
	c.requireSettled(t, relay.KindPoll)
	l.advance(t, 20)
	l.finish(t)
	c.receiveAll(t)
}

// Goal: what a snapshot of Debezium's has not brought out yet is not taken for
// delivered, wherever it is interrupted.
func leavingDebeziumBeforeItsSnapshotIsOut(t *testing.T, s *services) {
	for round := range 3 {
		w := newWorld(t, s.bootstrap)
		client := newClient(t, s)
		c := &crew{world: w, config: switchover.Config{
			URL: w.database.URL("relay"), Slot: w.slot, Publication: relay.DefaultPublication,
			Connect: client, Wait: waiting, Say: t.Logf,
		}}
		o := c.orders(500)
		for range 20 {
			c.commit(t, o.events(1000)...)
		}
		c.assign(t, relay.KindDebezium)
		require.NoError(t, client.Register(t.Context(), debezium.Params{
			DatabaseURL: c.config.URL, Slot: debeziumSlot(t, w), Publication: relay.DefaultPublication,
		}))
		if round > 0 {
			c.receive(t, round*5_000)
		}
		slot, err := db.New().SlotGet(t.Context(), c.pool, debeziumSlot(t, w))
		require.NoError(t, err)
		if round == 2 {
			s.connect.Kill()
			require.NoError(t, s.connect.Start(t.Context()))
		}
		report := c.switchTo(t, relay.KindPoll)
		t.Logf("left after %d of %d, slot confirmed to %d, oldest %d: since %d", len(w.order), w.expected(), uint64(slot.Confirmed), slot.OldestXid, report.Since)
		newWorker(t, w, relay.KindPoll, "worker").start(t)
		c.receiveAll(t)
		t.Logf("%d events, %d duplicates", len(w.order), w.duplicates())
	}
}

// Goal: a connector whose slot was lost makes another one at once, and publishes
// what was written meanwhile only after that. Until then the new slot says
// nothing of those rows, and nor does the position that Connect still remembers.
// Method: the new slot is made by hand, as the connector would, while it is away.
func leavingDebeziumAfterItsSlotWasLost(t *testing.T, s *services) {
	c := newCrewWithConnect(t, s)
	c.carriedBy(t, relay.KindWAL)
	c.switchTo(t, relay.KindDebezium)
	o := c.orders(10)
	c.commit(t, o.events(50)...)
	c.receiveAll(t)
	require.Eventually(t, func() bool {
		past, err := c.config.Connect.PastSnapshot(t.Context(), 0)
		return err == nil && past
	}, waiting, 50*time.Millisecond)

	require.NoError(t, c.config.Connect.Stop(t.Context()))
	slot := debeziumSlot(t, c.world)
	require.Eventually(t, func() bool {
		_, err := c.pool.Exec(t.Context(), "SELECT pg_drop_replication_slot($1)", slot)
		return err == nil
	}, waiting, 50*time.Millisecond)
	c.commit(t, o.events(50)...) // in the hole
	c.exec(t, fmt.Sprintf("SELECT pg_create_logical_replication_slot('%s', 'pgoutput')", slot))
	past, err := c.config.Connect.PastSnapshot(t.Context(), 0)
	require.NoError(t, err)
	require.True(t, past, "Connect remembers the position of before")

	c.switchTo(t, relay.KindPoll)
	c.requireSettled(t, relay.KindPoll)
	c.receiveAll(t)
	t.Logf("%d events, %d duplicates", len(c.world.order), c.duplicates())
}

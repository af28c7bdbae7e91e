//go:build apache && contest

package conformance_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/relay"
)

// The contest is run by hand, on a machine that does nothing else:
//
//	go test -tags 'apache contest' -run TestContest -timeout 2h -v ./test/conformance \
//	  -kills 30 -drain 100000 -out "$PWD/bench/results/relays.json"
var (
	contestKills = flag.Int("kills", 30, "kill -9 of each relay in the contest")
	contestDrain = flag.Int("drain", 100_000, "events that each relay drains in the contest")
	contestSeed  = flag.Uint64("contest-seed", 1, "of the moments of the kills")
	contestOut   = flag.String("out", "", "write the contest's figures to this file")
	contestOnly  = flag.String("only", "", "one relay alone")
)

// score is what was seen of one relay in the contest.
type score struct {
	Relay string `json:"relay"`
	Kills int    `json:"kills"`
	// Lost and reordered must be 0. Recovery is from the kill, which is followed
	// by a start at once, until an event that was committed after it has come.
	Events     int     `json:"events"`
	Lost       int     `json:"lost"`
	Duplicated int     `json:"duplicated"`
	Reordered  int     `json:"reordered"`
	Recovery   seconds `json:"recovery_seconds"`
	// SlotDropped is the same with the slot dropped while the relay is down.
	SlotDropped *dropped `json:"slot_dropped,omitempty"`
	CPU         float64  `json:"cpu_seconds_in_the_kills"`
	Drain       drained  `json:"drain"`
}

type seconds struct {
	Median float64 `json:"median"`
	Max    float64 `json:"max"`
}

type dropped struct {
	Hole       int     `json:"events_in_the_hole"`
	Lost       int     `json:"lost"`
	Duplicated int     `json:"duplicated"`
	Reordered  int     `json:"reordered"`
	Recovery   float64 `json:"recovery_seconds"`
}

type drained struct {
	Events    int     `json:"events"`
	First     float64 `json:"seconds_to_first_record"`
	PerSecond float64 `json:"events_per_second"` // from the first record to the last
	CPU       float64 `json:"cpu_seconds_per_100k"`
	RSS       int64   `json:"rss_bytes"`
}

// TestContest puts each relay through the same kills and the same backlog, at one
// Apache Kafka and on one Postgres that syncs, one after another.
func TestContest(t *testing.T) {
	t.Parallel()

	s := startApache(t)
	server := pgtest.Server(t)
	var scores []score
	for _, kind := range []relay.Kind{relay.KindWAL, relay.KindPoll, relay.KindDebezium} {
		if *contestOnly != "" && *contestOnly != string(kind) {
			continue
		}
		t.Run(string(kind), func(t *testing.T) {
			w := newWorldOn(t, server.New(t), s.bootstrap)
			for _, statement := range []string{"ALTER SYSTEM SET fsync = on", "ALTER SYSTEM SET full_page_writes = on", "SELECT pg_reload_conf()"} {
				w.exec(t, statement)
			}
			w.tolerant = true
			w.assign(t, kind)
			b := &contender{bench: &bench{world: w, kind: kind}}
			if kind == relay.KindDebezium {
				c := &connector{w: w, connect: s.connect, client: newClient(t, s), slot: debeziumSlot(t, w)}
				b.carrier, b.pid, b.slot = c, func() int { return c.connect.Pid() }, c.slot
			} else {
				r := newWorker(t, w, kind, "relay")
				b.carrier, b.pid = r, r.Pid
				if kind == relay.KindWAL {
					b.slot = w.slot
				}
			}
			scores = append(scores, b.compete(t))
			b.carrier.stop(t)
		})
	}
	text, err := json.MarshalIndent(scores, "", "  ")
	require.NoError(t, err)
	t.Logf("%s", text)
	if *contestOut != "" {
		require.NoError(t, os.WriteFile(*contestOut, append(text, '\n'), 0o644))
	}
}

type contender struct {
	*bench

	carrier carrier
	pid     func() int
	slot    string // "" for one that has none
}

func (c *contender) compete(t *testing.T) score {
	of := score{Relay: string(c.kind), Kills: *contestKills}
	random := rand.New(rand.NewPCG(*contestSeed, 0))
	c.carrier.start(t)
	c.carrier.waitCarrying(t)
	l := c.startLoad(t, 4, 10*time.Millisecond)
	var recoveries []float64
	for range *contestKills {
		l.advance(t, 20+random.IntN(400))
		of.CPU += cpuSeconds(t, c.pid())
		recoveries = append(recoveries, c.killAndRecover(t, func() {}))
	}
	l.finish(t)
	c.receiveAll(t)
	slices.Sort(recoveries)
	of.Recovery = seconds{recoveries[len(recoveries)/2], recoveries[len(recoveries)-1]}
	of.CPU += cpuSeconds(t, c.pid())
	of.Events, of.Duplicated, of.Reordered = len(c.world.order), c.duplicates(), c.reordered
	of.Lost = c.expected() - len(c.world.order)
	t.Logf("%+v", of)

	if c.slot != "" {
		of.SlotDropped = c.dropSlot(t)
		t.Logf("%+v", *of.SlotDropped)
	}
	of.Drain = c.drain(t)
	t.Logf("%+v", of.Drain)
	return of
}

// killAndRecover kills the relay, and returns how long it takes until an event
// that is committed after that has come.
func (c *contender) killAndRecover(t *testing.T, meanwhile func()) float64 {
	t.Helper()
	began := time.Now()
	c.carrier.kill(t)
	meanwhile()
	mark := c.orders(1).event()
	c.commit(t, mark)
	c.carrier.start(t)
	c.waitFor(t, mark.ID)
	return time.Since(began).Seconds()
}

// waitFor waits until an event has come.
func (c *contender) waitFor(t *testing.T, id uuid.UUID) {
	t.Helper()
	for c.seen[id] == 0 {
		c.receive(t, len(c.world.order)+1)
	}
}

// dropSlot drops the slot while the relay is down, with events in the hole.
func (c *contender) dropSlot(t *testing.T) *dropped {
	t.Helper()
	of := &dropped{Hole: 1000}
	duplicates, reordered := c.duplicates(), c.reordered
	o := c.orders(20)
	of.Recovery = c.killAndRecover(t, func() {
		require.Eventually(t, func() bool {
			_, err := c.pool.Exec(t.Context(), "SELECT pg_drop_replication_slot($1)", c.slot)
			return err == nil
		}, waiting, 20*time.Millisecond)
		for range 10 {
			c.commit(t, o.events(of.Hole/10)...)
		}
	})
	c.commit(t, o.events(10)...)
	c.receiveAll(t)
	of.Lost = c.expected() - len(c.world.order)
	of.Duplicated, of.Reordered = c.duplicates()-duplicates, c.reordered-reordered
	return of
}

// drain measures how fast a backlog goes out, from a start of the relay.
func (c *contender) drain(t *testing.T) drained {
	t.Helper()
	// What is still to be confirmed is, so that the backlog is all there is.
	c.carrier.stop(t)
	o := c.orders(*contestDrain / 20)
	first := o.event()
	c.commit(t, first)
	for left := *contestDrain - 1; left > 0; left -= 100 {
		c.commit(t, o.events(min(left, 100))...)
	}
	began := time.Now()
	c.carrier.start(t)
	c.waitFor(t, first.ID)
	of := drained{Events: *contestDrain, First: time.Since(began).Seconds()}
	cpu, already, from := cpuSeconds(t, c.pid()), len(c.world.order), time.Now()
	c.receiveAll(t)
	of.PerSecond = float64(c.expected()-already) / time.Since(from).Seconds()
	of.CPU = (cpuSeconds(t, c.pid()) - cpu) * 100_000 / float64(c.expected()-already)
	of.RSS = peakRSS(t, c.pid())
	return of
}

// cpuSeconds is what a process has used so far.
func cpuSeconds(t *testing.T, pid int) float64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	require.NoError(t, err)
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	var ticks float64
	for _, field := range fields[11:13] { // utime and stime
		n, err := strconv.ParseFloat(field, 64)
		require.NoError(t, err)
		ticks += n
	}
	return ticks / 100
}

// peakRSS is the most memory that a process has had.
func peakRSS(t *testing.T, pid int) int64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	require.NoError(t, err)
	for line := range strings.Lines(string(text)) {
		if rest, is := strings.CutPrefix(line, "VmHWM:"); is {
			n, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			require.NoError(t, err)
			return n * 1024
		}
	}
	require.FailNow(t, "no VmHWM")
	return 0
}

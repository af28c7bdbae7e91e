package conformance_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/debezium"
	"github.com/onceledger/onceledger/internal/relay"
	"github.com/onceledger/onceledger/internal/switchover"
)

// crew is two workers that stay through all switches, as they do in earnest.
type crew struct {
	*world

	config switchover.Config
}

func newCrew(t *testing.T, bootstrap string) *crew {
	t.Helper()
	w := newWorld(t, bootstrap)
	for _, name := range []string{"worker-a", "worker-b"} {
		newWorker(t, w, relay.KindWAL, name).start(t)
	}
	return &crew{world: w, config: switchover.Config{
		URL: w.database.URL("relay"), Slot: w.slot, Publication: relay.DefaultPublication, Wait: waiting, Say: t.Logf,
	}}
}

// carriedBy waits until a relay is at work.
func (c *crew) carriedBy(t *testing.T, kind relay.Kind) {
	t.Helper()
	require.Eventually(t, func() bool {
		now, err := db.New().RelayAssignmentGet(t.Context(), c.pool, c.slot)
		if err != nil && !errors.Is(err, pgx.ErrNoRows) || err == nil && now.Relay != string(kind) {
			return false
		}
		var working bool
		err = c.pool.QueryRow(t.Context(), `
			SELECT CASE $2 WHEN 'debezium' THEN EXISTS (
			         SELECT FROM pg_replication_slots WHERE slot_name = relay_debezium_slot($1) AND active)
			       ELSE EXISTS (SELECT FROM relay_status WHERE slot_name = $1 AND state = 'streaming') END`,
			c.slot, string(kind)).Scan(&working)
		return err == nil && working
	}, waiting, 20*time.Millisecond, "%s never carries the outbox", kind)
}

// switchTo is a switch that has to work.
func (c *crew) switchTo(t *testing.T, to relay.Kind) switchover.Report {
	t.Helper()
	report, err := switchover.Switch(t.Context(), c.config, to)
	require.NoError(t, err)
	return report
}

// requireSettled looks at what a switch leaves: one relay with the job, and no
// slot that nobody reads.
func (c *crew) requireSettled(t *testing.T, kind relay.Kind) {
	t.Helper()
	c.carriedBy(t, kind)
	var slots []string
	require.NoError(t, c.pool.QueryRow(t.Context(), `
		SELECT coalesce(array_agg(slot_name::text), '{}') FROM pg_replication_slots WHERE database = current_database()`).Scan(&slots))
	want := map[relay.Kind][]string{
		relay.KindWAL: {c.slot}, relay.KindPoll: {}, relay.KindDebezium: {c.slot + "_debezium"},
	}
	require.Equal(t, want[kind], slots)
}

// switchUnderLoad moves the outbox from a relay to another one while writers
// commit, and while a transaction is open that had written an event before.
func (c *crew) switchUnderLoad(t *testing.T, from, to relay.Kind) {
	t.Helper()
	if from != relay.KindWAL {
		c.carriedBy(t, relay.KindWAL)
		c.switchTo(t, from)
	}
	c.carriedBy(t, from)
	l := c.startLoad(t, 4, 5*time.Millisecond)
	l.advance(t, 100)
	c.receive(t, 100)
	slow := c.orders(1)
	tx, err := c.pool.Begin(t.Context())
	require.NoError(t, err)
	c.append(t, tx, slow.event())
	l.advance(t, 50)

	switched := make(chan error, 1)
	began := time.Now()
	go func() {
		report, err := switchover.Switch(t.Context(), c.config, to)
		if err == nil && (report.From != from || report.To != to) {
			err = fmt.Errorf("it switched %+v", report)
		}
		switched <- err
	}()
	l.advance(t, 200)
	c.append(t, tx, slow.event())
	require.NoError(t, tx.Commit(t.Context())) // a new slot waits for that
	require.NoError(t, <-switched)
	took := time.Since(began)
	c.commit(t, slow.event())
	l.advance(t, 100)
	c.requireSettled(t, to)
	l.finish(t)
	c.receiveAll(t)
	(&bench{world: c.world}).requireNothingElse(t)
	t.Logf("%s to %s in %.1f s: %d events, %d duplicates, none lost", from, to, took.Seconds(), len(c.world.order), c.duplicates())
}

func TestSwitchOver(t *testing.T) {
	t.Parallel()

	for _, pair := range [][2]relay.Kind{{relay.KindWAL, relay.KindPoll}, {relay.KindPoll, relay.KindWAL}} {
		t.Run(string(pair[0])+" to "+string(pair[1]), func(t *testing.T) {
			t.Parallel()

			newCrew(t, embedded(t)).switchUnderLoad(t, pair[0], pair[1])
		})
	}
}

// Goal: a switch that is interrupted after any of its steps is finished by
// another, to the same relay or back, and nothing is lost meanwhile.
// Method: between the switch and Postgres is a connection that breaks after the
// n-th statement was carried out, for each n there is.
func TestSwitchOverIsInterrupted(t *testing.T) {
	t.Parallel()

	for _, again := range []string{"ToTheSame", "ToTheOther"} {
		t.Run(again, func(t *testing.T) {
			t.Parallel()

			c := newCrew(t, embedded(t))
			c.carriedBy(t, relay.KindWAL)
			l := c.startLoad(t, 3, 10*time.Millisecond)
			now := relay.KindWAL
			for n, interrupted := 1, true; interrupted; n++ {
				to := map[relay.Kind]relay.Kind{relay.KindWAL: relay.KindPoll, relay.KindPoll: relay.KindWAL}[now]
				interrupted = c.interrupt(t, to, n)
				if again == "ToTheOther" && interrupted {
					to = now
				}
				c.switchTo(t, to)
				c.requireSettled(t, to)
				l.advance(t, 5)
				now = to
			}
			l.finish(t)
			c.receiveAll(t)
			t.Logf("%d events, %d duplicates", len(c.world.order), c.duplicates())
		})
	}
}

// interrupt switches over a connection that breaks after n statements, and
// reports whether that came in the way.
func (c *crew) interrupt(t *testing.T, to relay.Kind, n int) bool {
	t.Helper()
	broken := c.config
	cut, address := breakAfter(t, c.config.URL, n)
	broken.URL = address
	if broken.ConnectorURL == "" {
		broken.ConnectorURL = c.config.URL
	}
	_, err := switchover.Switch(t.Context(), broken, to)
	require.Equal(t, cut.Load(), err != nil, "broken after %d: %v", n, err)
	return cut.Load()
}

// breakAfter is an address of a database at which each connection breaks when n
// statements, beside those of the log-in, have been answered.
func breakAfter(t *testing.T, databaseURL string, n int) (cut *atomic.Bool, address string) {
	t.Helper()
	parsed, err := url.Parse(databaseURL)
	require.NoError(t, err)
	server := parsed.Host
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	parsed.Host = listener.Addr().String()
	query := parsed.Query()
	query.Set("sslmode", "disable")
	query.Set("default_query_exec_mode", "simple_protocol") // a statement is one message
	parsed.RawQuery = query.Encode()

	cut = new(atomic.Bool)
	var connections sync.WaitGroup
	connections.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			connections.Go(func() { carry(client, server, n, cut) })
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		connections.Wait()
	})
	return cut, parsed.String()
}

// carry passes on what client and server say, until the server has answered n
// statements (message type Q), and hangs up on both then.
func carry(client net.Conn, address string, n int, cut *atomic.Bool) {
	defer client.Close()
	server, err := net.Dial("tcp", address)
	if err != nil {
		return
	}
	defer server.Close()
	var statements atomic.Int64
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer client.Close()
		buffer := make([]byte, 64<<10)
		for {
			size, err := server.Read(buffer)
			if err != nil {
				return
			}
			if statements.Load() >= int64(n) { // this is the answer to the last one
				cut.Store(true)
				return
			}
			if _, err := client.Write(buffer[:size]); err != nil {
				return
			}
		}
	}()
	buffer := make([]byte, 64<<10)
	for {
		size, err := client.Read(buffer)
		if err != nil {
			break
		}
		if buffer[0] == 'Q' {
			statements.Add(1)
		}
		if _, err := server.Write(buffer[:size]); err != nil {
			break
		}
	}
	_ = server.Close()
	<-done
}

// Goal: a relay that does not let go of its job holds the switch up, and a switch
// that is given up then leaves it to be run again.
func TestSwitchOverIsGivenUp(t *testing.T) {
	t.Parallel()

	c := newCrew(t, embedded(t))
	c.carriedBy(t, relay.KindWAL)
	holder, err := pgx.Connect(t.Context(), c.config.URL)
	require.NoError(t, err)
	defer holder.Close(context.WithoutCancel(t.Context()))
	l := c.startLoad(t, 3, 10*time.Millisecond)
	l.advance(t, 20)

	// The workers stop in time, but somebody else has the turn before the switch.
	require.NoError(t, db.New().RelayAssignmentBegin(t.Context(), c.pool, c.slot, string(relay.KindPoll)))
	require.Eventually(t, func() bool {
		mine, err := relay.TakeTurn(t.Context(), holder.PgConn(), c.slot)
		return err == nil && mine
	}, waiting, 10*time.Millisecond)
	ctx, cancel := context.WithCancel(t.Context())
	config := c.config
	config.Say = func(string, ...any) { cancel() }
	_, err = switchover.Switch(ctx, config, relay.KindPoll)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "the switch has not ended")
	config = c.config
	config.Wait = time.Second
	_, err = switchover.Switch(t.Context(), config, relay.KindPoll)
	require.ErrorContains(t, err, "does not stop after 1s")

	require.NoError(t, holder.Close(t.Context()))
	c.switchTo(t, relay.KindPoll)
	c.requireSettled(t, relay.KindPoll)
	l.advance(t, 20)
	l.finish(t)
	c.receiveAll(t)
}

// Goal: a switch to Debezium that is interrupted while poll still has the job
// leaves a slot that nobody reads; the next switch, though it is to poll, drops it.
func TestSwitchOverToDebeziumIsInterrupted(t *testing.T) {
	t.Parallel()

	c := newCrew(t, embedded(t))
	c.config.Connect = connectWithoutDebezium(t).Client
	c.carriedBy(t, relay.KindWAL)
	l := c.startLoad(t, 3, 10*time.Millisecond)
	c.switchTo(t, relay.KindPoll)
	left := 0
	for n := 1; n <= 13; n++ {
		require.True(t, c.interrupt(t, relay.KindDebezium, n))
		if _, err := db.New().SlotGet(t.Context(), c.pool, c.slot+"_debezium"); err == nil {
			left++
		}
		c.switchTo(t, relay.KindPoll)
		c.requireSettled(t, relay.KindPoll)
		l.advance(t, 5)
	}
	require.Positive(t, left, "it was never interrupted where it leaves a slot")
	l.finish(t)
	c.receiveAll(t)
	t.Logf("%d events, %d duplicates; a slot was left %d times", len(c.world.order), c.duplicates(), left)
}

// Goal: where Debezium cannot begin, poll goes on, by way of which the switch is,
// and the reason is told. Where no Connect answers nothing is changed.
func TestSwitchOverToAConnectWithoutDebezium(t *testing.T) {
	t.Parallel()

	for _, in := range []relay.Kind{relay.KindWAL, relay.KindPoll} {
		t.Run(string(in), func(t *testing.T) {
			t.Parallel()

			c := newCrew(t, embedded(t))
			c.carriedBy(t, relay.KindWAL)
			if in != relay.KindWAL {
				c.switchTo(t, in)
			}
			c.carriedBy(t, in)
			l := c.startLoad(t, 3, 10*time.Millisecond)
			l.advance(t, 20)

			_, err := switchover.Switch(t.Context(), c.config, relay.KindDebezium)
			require.ErrorContains(t, err, "nothing was changed: Debezium runs in Kafka Connect: say where that is")
			connect := connectWithoutDebezium(t)
			c.config.Connect = connect.Client
			_, err = switchover.Switch(t.Context(), c.config, relay.KindDebezium)
			require.ErrorIs(t, err, debezium.ErrNoPlugin)
			require.ErrorContains(t, err, "poll goes on")
			c.requireSettled(t, relay.KindPoll)
			connect.server.Close()
			_, err = switchover.Switch(t.Context(), c.config, relay.KindDebezium)
			require.ErrorIs(t, err, debezium.ErrUnreachable)
			require.ErrorContains(t, err, "nothing was changed")
			c.requireSettled(t, relay.KindPoll)

			l.advance(t, 20)
			l.finish(t)
			c.receiveAll(t)
		})
	}
}

// fakeConnect is a Connect without the plugin, as far as a switch asks.
type fakeConnect struct {
	*debezium.Client

	server *httptest.Server
}

func connectWithoutDebezium(t *testing.T) fakeConnect {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/connector-plugins" {
			fmt.Fprint(w, `[{"class":"org.apache.kafka.connect.mirror.MirrorSourceConnector"}]`)
			return
		}
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprint(w, `{"error_code":404,"message":"No status found for connector"}`)
	}))
	t.Cleanup(server.Close)
	client, err := debezium.NewClient(debezium.ClientConfig{URL: server.URL})
	require.NoError(t, err)
	return fakeConnect{client, server}
}

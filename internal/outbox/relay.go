package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"regexp"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/postgres"
)

// Publisher sends records to the broker: the records of one key in the order of
// Publish, and none after one that failed.
type Publisher interface {
	// Publish queues a record and returns. Reports.Delivered is told of it by
	// seq; with an error it is not queued.
	Publish(record event.Record, seq uint64) error
	// Close gives up what is not delivered. Nothing is reported afterwards.
	Close()
}

// Reports is told what becomes of the records. An error with a method
// Refused() bool that returns true says that sending again is of no use.
type Reports interface {
	Delivered(seq uint64, err error)
	Reachable(err error)
}

// Config is what a Relay needs. Zero values have a default where one is named.
type Config struct {
	URL         string // of the database, for a role with REPLICATION
	Slot        string // default DefaultSlot
	Publication string // default DefaultPublication

	// NewPublisher is called for each session with the slot, so that after a
	// failure nothing of the last one is left.
	NewPublisher func(Reports) (Publisher, error)

	Log      *slog.Logger
	Registry prometheus.Registerer

	WindowEvents int           // in flight at most; default 5,000
	WindowBytes  int           // their payloads at most; default 32 MiB
	StopTimeout  time.Duration // for what is in flight at the end; default 3 s
}

// The names that the migrations and the relay agree on.
const (
	DefaultSlot        = "onceledger_outbox"
	DefaultPublication = "onceledger_outbox"
)

// State is what a relay is doing.
type State string

// The states. All but standby are shown in relay_status, by the relay whose
// turn it is.
const (
	StateStarting   State = "starting"
	StateStandby    State = "standby" // another relay is active
	StateStreaming  State = "streaming"
	StateBrokerAway State = "broker-away"
	StateStuck      State = "stuck" // somebody has to do something
	StateStopped    State = "stopped"
)

var states = []State{StateStarting, StateStandby, StateStreaming, StateBrokerAway, StateStuck, StateStopped}

// Relay publishes what is committed to outbox_events, in commit order, each
// event at least once. Any number may run; one is active.
type Relay struct {
	config  Config
	metrics *metrics

	mutex  sync.Mutex
	now    State
	detail string
}

var plainName = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,62}$`)

// NewRelay makes a relay. It connects to nothing yet.
func NewRelay(config Config) (*Relay, error) {
	orDefault(&config.Slot, DefaultSlot)
	orDefault(&config.Publication, DefaultPublication)
	orDefault(&config.WindowEvents, 5_000)
	orDefault(&config.WindowBytes, 32<<20)
	orDefault(&config.StopTimeout, 3*time.Second)
	for _, name := range []string{config.Slot, config.Publication} {
		if !plainName.MatchString(name) { // they are put into replication commands
			return nil, fmt.Errorf("slot and publication are named by a-z, 0-9 and _ alone, not %q", name)
		}
	}
	return &Relay{config: config, metrics: newMetrics(config.Registry), now: StateStarting}, nil
}

func orDefault[T comparable](value *T, fallback T) {
	var zero T
	if *value == zero {
		*value = fallback
	}
}

// How often a relay that waits for its turn tries; a take-over takes this much
// longer than Postgres needs to see that the other one is gone.
const standbyRetry = 250 * time.Millisecond

// Run relays until ctx is done, then returns nil. It waits out whatever may
// pass: a database or broker that is away, another relay, a record that the
// broker refuses (state stuck: it tries again and never leaves it out). An error
// is returned for what only somebody else can put right, such as a publication
// that is missing; nothing is lost meanwhile.
func (r *Relay) Run(ctx context.Context) error {
	failures := 0
	for {
		moved, err := r.session(ctx)
		if moved {
			failures = 0
		}
		var pause time.Duration
		switch {
		case ctx.Err() != nil:
			r.setState(ctx, nil, StateStopped, "")
			return nil
		case isSetupError(err):
			r.setState(ctx, nil, StateStuck, err.Error())
			return fmt.Errorf("relay: %w", err)
		case postgres.Code(err) == "55006": // the slot is in use
			r.setState(ctx, nil, StateStandby, err.Error())
			pause = standbyRetry
		case refused(err):
			pause = backOff(failures, time.Second, 30*time.Second)
			failures++
		default:
			r.setState(ctx, nil, StateStarting, err.Error())
			pause = backOff(failures, 250*time.Millisecond, 5*time.Second)
			failures++
			r.config.Log.Warn("relay: starting over", "error", err, "in", pause)
		}
		sleep(ctx, pause)
	}
}

// backOff doubles with each failure and is spread, so that relays that fail
// together do not come back together.
func backOff(failures int, first, most time.Duration) time.Duration {
	pause := min(first<<min(failures, 10), most)
	return pause/2 + rand.N(pause/2)
}

func sleep(ctx context.Context, pause time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(pause):
	}
}

// session waits for its turn, takes the slot and relays until something ends
// it. It reports whether the confirmed position has moved.
func (r *Relay) session(ctx context.Context) (moved bool, err error) {
	conn, err := connectForReplication(ctx, r.config.URL)
	if err != nil {
		return false, err
	}
	defer closeConn(ctx, conn)
	if err := r.waitForTurn(ctx, conn); err != nil {
		return false, err
	}
	pool, err := postgres.Open(ctx, r.config.URL, postgres.Options{ApplicationName: "onceledger-relay", MaxConns: 2})
	if err != nil {
		return false, err
	}
	defer pool.Close()
	defer func() {
		switch {
		case ctx.Err() != nil:
			r.setState(ctx, pool, StateStopped, "")
		case refused(err) || isSetupError(err):
			r.setState(ctx, pool, StateStuck, err.Error())
		}
	}()

	if r.state() != StateStuck {
		r.setState(ctx, pool, StateStarting, "")
	}
	source, mark, err := openSource(ctx, r.config, conn, pool)
	if err != nil {
		return false, err
	}
	defer source.close(ctx)
	if source.gap != nil {
		r.announce(source.gap)
	}

	s := &session{
		relay:    r,
		pool:     pool,
		source:   source,
		mark:     mark,
		progress: newProgress(window{r.config.WindowEvents, r.config.WindowBytes}, mark.position.Lsn),
		signal:   make(chan struct{}, 1),
	}
	if s.publisher, err = r.config.NewPublisher(s); err != nil {
		return false, err
	}
	defer s.publisher.Close()
	if r.state() != StateStuck {
		r.setState(ctx, pool, StateStreaming, "")
	}
	err = s.run(ctx)
	s.finish(ctx, errors.Is(err, errStop))
	return s.moved, err
}

// announce says what comes from the table, and when it has been read.
func (r *Relay) announce(gap *gap) {
	r.metrics.gaps.Inc()
	r.config.Log.Warn("relay: the slot is new, sending what it will not bring from the table",
		"reason", gap.reason, "since_xid", gap.since)
	gap.done = func(events int) {
		r.metrics.resent.Add(float64(events))
		r.config.Log.Warn("relay: the table is read, going on with the log", "events", events)
	}
}

// waitForTurn returns when no other relay of this slot is active.
func (r *Relay) waitForTurn(ctx context.Context, conn *pgconn.PgConn) error {
	for {
		mine, err := takeTurn(ctx, conn, r.config.Slot)
		if err != nil || mine {
			return err
		}
		r.setState(ctx, nil, StateStandby, "another relay is active")
		sleep(ctx, standbyRetry)
	}
}

// closeConn gives slot and lock back, and waits a little until Postgres has
// them: the next relay need not try twice.
func closeConn(ctx context.Context, conn *pgconn.PgConn) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = conn.Conn().SetReadDeadline(time.Time{})
	conn.Frontend().Send(&pgproto3.Terminate{})
	for err := conn.Frontend().Flush(); err == nil; {
		_, err = conn.ReceiveMessage(ctx)
	}
	_ = conn.Close(ctx)
}

// Ready reports whether events get through, or would if another relay were not
// at it; if not, why.
func (r *Relay) Ready() (bool, string) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	switch r.now {
	case StateStreaming, StateStandby:
		return true, r.detail
	}
	return false, string(r.now) + ": " + r.detail
}

func (r *Relay) state() State {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.now
}

// setState says what the relay is doing: to Ready, the metrics and the log and,
// given a pool, to relay_status.
func (r *Relay) setState(ctx context.Context, pool *pgxpool.Pool, state State, detail string) {
	r.mutex.Lock()
	changed := r.now != state || r.detail != detail
	r.now, r.detail = state, detail
	r.mutex.Unlock()
	r.metrics.setState(state)
	if changed {
		level := slog.LevelInfo
		if state == StateStuck {
			level = slog.LevelError
		}
		r.config.Log.Log(ctx, level, "relay: "+string(state), "detail", detail)
	}
	if pool == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeTimeout)
	defer cancel()
	if err := db.New().RelayStatusSet(ctx, pool, r.config.Slot, string(state), detail); err != nil {
		r.config.Log.Warn("relay: could not write relay_status", "state", state, "error", err)
	}
}

// setupError is what somebody else has to put right.
type setupError struct{ text string }

func (e *setupError) Error() string { return e.text }

func setupErrorf(format string, args ...any) error {
	return &setupError{fmt.Sprintf(format, args...)}
}

func isSetupError(err error) bool {
	if _, ok := errors.AsType[*setupError](err); ok {
		return true
	}
	switch postgres.Code(err) {
	case "28000", "28P01", "3D000", "42501", "42P01": // log-in, password, database, right, table
		return true
	}
	return false
}

// refused reports that the broker will not take a record however often it is
// sent.
func refused(err error) bool {
	r, ok := errors.AsType[interface {
		error
		Refused() bool
	}](err)
	return ok && r.Refused()
}

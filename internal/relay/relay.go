package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"regexp"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/postgres"
)

// Publisher sends records to the broker: those of one key in the order of
// Publish, and none behind one that failed.
type Publisher interface {
	// Publish queues a record and returns. Reports.Delivered is told of it by
	// seq; with an error it is not queued.
	Publish(record event.Record, seq uint64) error
	// Close gives up what is not delivered. Nothing is reported afterwards.
	Close()
}

// Reports is told what becomes of the records, and whether a broker answers. An
// error with a method Refused() bool that returns true says that sending the
// record again is of no use.
type Reports interface {
	Delivered(seq uint64, err error)
	Reachable(err error)
}

// Config is what a Relay needs. Zero values have a default where one is named.
type Config struct {
	URL         string // of the database; wal needs a role with REPLICATION
	Slot        string // default DefaultSlot; also the name of this relay's records
	Publication string // default DefaultPublication

	// NewPublisher is called whenever the relay starts over, so that nothing is
	// left of what failed.
	NewPublisher func(Reports) (Publisher, error)

	Log      *slog.Logger
	Registry prometheus.Registerer

	WindowEvents int           // in flight at most; default 5,000
	WindowBytes  int           // their payloads at most; default 32 MiB
	ConfirmEvery time.Duration // while there is something to confirm; default 1 s
	KeptEvery    time.Duration // how often wal looks at what log is kept for it; default 30 s
	PollEvery    time.Duration // how often poll looks when there was nothing; default 100 ms
	StopTimeout  time.Duration // for what is in flight at the end; default 3 s
}

// The names that the migrations and the relay agree on.
const (
	DefaultSlot        = "onceledger_outbox"
	DefaultPublication = "onceledger_outbox"
)

// State is what a relay is doing.
type State string

// The states. relay_status shows that of the relay whose turn it is, so never
// standby or delegated.
const (
	StateStarting   State = "starting"
	StateStandby    State = "standby" // another relay is active
	StateStreaming  State = "streaming"
	StateBrokerAway State = "broker-away"
	StateStuck      State = "stuck"     // until somebody does something
	StateDelegated  State = "delegated" // it is Debezium's job, or a switch is under way
	StateStopped    State = "stopped"
)

var states = []State{StateStarting, StateStandby, StateStreaming, StateBrokerAway, StateStuck, StateDelegated, StateStopped}

// Relay publishes what is committed to outbox_events, each event at least once,
// as wal or as poll, as relay_assignment says. Any number may run; one is active.
type Relay struct {
	config  Config
	metrics *metrics

	mutex  sync.Mutex
	now    State
	detail string
}

// plainName is what can stand in a replication command, which has no parameters.
var plainName = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,62}$`)

// NewRelay makes a relay. It connects to nothing yet.
func NewRelay(config Config) (*Relay, error) {
	orDefault(&config.Slot, DefaultSlot)
	orDefault(&config.Publication, DefaultPublication)
	orDefault(&config.WindowEvents, 5_000)
	orDefault(&config.WindowBytes, 32<<20)
	orDefault(&config.ConfirmEvery, time.Second)
	orDefault(&config.KeptEvery, 30*time.Second)
	orDefault(&config.PollEvery, 100*time.Millisecond)
	orDefault(&config.StopTimeout, 3*time.Second)
	for _, name := range []string{config.Slot, config.Publication} {
		if !plainName.MatchString(name) {
			return nil, fmt.Errorf("slot and publication are named with a-z, 0-9 and _ only, not %q", name)
		}
	}
	r := &Relay{config: config, metrics: newMetrics(config.Registry), now: StateStarting}
	r.metrics.setState(StateStarting)
	return r, nil
}

func orDefault[T comparable](value *T, fallback T) {
	var zero T
	if *value == zero {
		*value = fallback
	}
}

// Run relays until ctx is done, then returns nil. It waits out whatever may
// pass: a database or broker that is away, another relay, a record that the
// broker refuses (it is stuck, tries again and never leaves the record out). An
// error is returned for what only somebody else can put right, such as a missing
// publication; nothing is lost meanwhile.
func (r *Relay) Run(ctx context.Context) error {
	failures := 0
	for ctx.Err() == nil {
		moved, err := r.session(ctx)
		if moved {
			failures = 0
		}
		pause := backOff(failures, 250*time.Millisecond, 5*time.Second)
		switch {
		case ctx.Err() != nil: // it was told to stop
		case errors.Is(err, errReassigned):
			r.config.Log.Info("relay: the job goes to another")
			pause = 0
		case isSetupError(err):
			r.setState(ctx, nil, StateStuck, err.Error())
			return fmt.Errorf("relay: %w", err)
		case postgres.Code(err) == "55006": // somebody else uses the slot
			r.setState(ctx, nil, StateStandby, err.Error())
			pause = standbyRetry
		case refused(err):
			pause = backOff(failures, time.Second, 30*time.Second)
			failures++
		default:
			r.config.Log.Warn("relay: starting over", "error", err, "in", pause)
			r.setState(ctx, nil, StateStarting, err.Error())
			failures++
		}
		sleep(ctx, pause)
	}
	r.setState(ctx, nil, StateStopped, "")
	return nil
}

// standbyRetry is how often a relay tries whether it is its turn.
const standbyRetry = 250 * time.Millisecond

// backOff doubles with each failure and is spread, so that those who fail
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

// session does the job that is assigned, until something ends it. It reports
// whether the confirmed position has moved.
func (r *Relay) session(ctx context.Context) (moved bool, err error) {
	pool, err := postgres.Open(ctx, r.config.URL, postgres.Options{ApplicationName: "onceledger-relay", MaxConns: 3})
	if err != nil {
		return false, err
	}
	defer pool.Close()
	kind, err := Assigned(ctx, pool, r.config.Slot)
	if err != nil {
		return false, err
	}
	switch kind {
	case KindWAL, KindPoll:
		working, stop := r.untilReassigned(ctx, pool, kind)
		defer stop()
		moved, err = r.carry(working, pool, kind)
		if working.Err() != nil && ctx.Err() == nil {
			return moved, errReassigned
		}
		return moved, err
	default:
		return false, r.standAside(ctx, pool, kind)
	}
}

// carry waits for its turn and relays until something ends it.
func (r *Relay) carry(ctx context.Context, pool *pgxpool.Pool, kind Kind) (moved bool, err error) {
	open, hangUp, err := r.takeTurn(ctx, pool, kind)
	if err != nil {
		return false, err
	}
	defer hangUp()
	defer func() {
		switch {
		case ctx.Err() != nil:
			r.setState(ctx, pool, StateStopped, "")
		case refused(err) || isSetupError(err):
			r.setState(ctx, pool, StateStuck, err.Error())
		}
	}()
	if err := r.begin(ctx, pool); err != nil {
		return false, err
	}
	source, confirmed, err := open(ctx)
	if err != nil {
		return false, err
	}
	defer source.close(ctx)

	s := newSession(r, pool, source, confirmed)
	if s.publisher, err = r.config.NewPublisher(s); err != nil {
		return false, err
	}
	defer s.publisher.Close()
	err = s.run(ctx)
	s.finish(ctx, errors.Is(err, errStop))
	return s.moved, err
}

// takeTurn connects and waits until this is the one active relay. Whoever loses
// that connection has lost its turn.
func (r *Relay) takeTurn(ctx context.Context, pool *pgxpool.Pool, kind Kind) (open func(context.Context) (source, position, error), hangUp func(), err error) {
	var conn *pgconn.PgConn
	if kind == KindWAL {
		if conn, err = connectForReplication(ctx, r.config.URL); err != nil {
			return nil, nil, err
		}
		open = func(ctx context.Context) (source, position, error) {
			l, err := r.openLog(ctx, conn, pool)
			if err != nil {
				return nil, 0, err
			}
			return l, position(l.mark.position.Lsn), nil
		}
	} else {
		turn, err := connectForPolling(ctx, r.config.URL)
		if err != nil {
			return nil, nil, err
		}
		conn = turn.PgConn()
		open = func(ctx context.Context) (source, position, error) {
			p, err := r.openPoller(ctx, turn, pool)
			return p, 0, err
		}
	}
	hangUp = func() { hangUpOrderly(ctx, conn) }
	for ctx.Err() == nil {
		mine, err := TakeTurn(ctx, conn, r.config.Slot)
		if err != nil {
			hangUp()
			return nil, nil, err
		}
		if mine {
			// It is given away under the same lock.
			if now, err := Assigned(ctx, pool, r.config.Slot); err != nil || now != kind {
				hangUp()
				return nil, nil, errors.Join(err, errReassigned)
			}
			return open, hangUp, nil
		}
		r.setState(ctx, nil, StateStandby, "another relay is active")
		sleep(ctx, standbyRetry)
	}
	hangUp()
	return nil, nil, ctx.Err()
}

// begin shows that the relay is starting. One that was stuck, this one or the
// one before it, stays so until something gets through.
func (r *Relay) begin(ctx context.Context, pool *pgxpool.Pool) error {
	status, err := db.New().RelayStatusGet(ctx, pool, r.config.Slot)
	switch {
	case err != nil && !errors.Is(err, pgx.ErrNoRows):
		return fmt.Errorf("read relay_status: %w", err)
	case status.State == string(StateStuck):
		r.setState(ctx, nil, StateStuck, status.Detail)
	default:
		r.setState(ctx, pool, StateStarting, "")
	}
	return nil
}

// Ready reports whether events get through, by this relay or the one whose turn
// it is; if not, why.
func (r *Relay) Ready() (bool, string) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if r.now == StateStreaming || r.now == StateStandby {
		return true, r.detail
	}
	if r.now == StateDelegated {
		return r.detail == "", r.detail
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
	if changed {
		level := slog.LevelInfo
		if state == StateStuck {
			level = slog.LevelError
		}
		r.config.Log.Log(ctx, level, "relay: "+string(state), "detail", detail)
		r.metrics.setState(state)
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

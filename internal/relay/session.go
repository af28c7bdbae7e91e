package relay

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceledger/onceledger/internal/crash"
	"github.com/onceledger/onceledger/internal/event"
)

// session is what happens between taking the turn and giving it up:
//
//	source ──── read ──> publish ──> broker
//	    ^                              │ Delivered, in any order
//	    └── confirm <── progress <─────┘
//
// What is confirmed does not come again. confirm goes as far as progress allows
// and no further, so a crash at any point means that events are sent twice, and
// none is left out. Any error ends the session; the next one starts from the
// confirmed position.
type session struct {
	relay     *Relay
	pool      *pgxpool.Pool
	source    source
	progress  *progress
	publisher Publisher
	committed time.Time // of the transaction that is being read
	moved     bool      // the confirmed position, in this session
	heard     time.Time // when the source last brought something, if it could
	counted   uint64    // events that are in the metrics
	stopBy    time.Time // after the order to stop

	// What the publisher has to say, from goroutines of its own.
	signal  chan struct{}
	mutex   sync.Mutex
	failure error
	away    error // no broker answers
}

// storeTimeout is below wal_sender_timeout: a database that hangs ends the
// session by this error and not by a broken connection.
const storeTimeout = 3 * time.Second

// A server that was silent for askAfter is asked for a sign of life, and taken
// for gone after goneAfter.
const askAfter, goneAfter = 3 * time.Second, 15 * time.Second

// errStop ends a session in order.
var errStop = errors.New("the relay is to stop")

func newSession(r *Relay, pool *pgxpool.Pool, source source, confirmed position) *session {
	return &session{
		relay:    r,
		pool:     pool,
		source:   source,
		progress: newProgress(window{r.config.WindowEvents, r.config.WindowBytes}, confirmed),
		heard:    time.Now(),
		signal:   make(chan struct{}, 1),
	}
}

// run reads, publishes and confirms until ctx is done or something fails.
func (s *session) run(ctx context.Context) error {
	reading, stopReading := context.WithCancel(context.WithoutCancel(ctx))
	batches := make(chan []message, 4)
	var readErr error
	go func() {
		defer close(batches)
		readErr = s.source.read(reading, batches)
	}()
	defer func() {
		stopReading()
		for range batches { // until it is closed
		}
	}()

	if s.relay.state() != StateStuck {
		s.relay.setState(ctx, s.pool, StateStreaming, "")
	}
	ticker := time.NewTicker(s.relay.config.ConfirmEvery)
	defer ticker.Stop()
	// Soon at first, so that one that dies young again and again gets ahead.
	early := time.After(s.relay.config.ConfirmEvery / 10)
	told := ctx.Done()
	var late <-chan time.Time
	for {
		next := batches
		if s.progress.crowded() {
			next = nil // the source waits until the broker has caught up
		}
		var err error
		select {
		case batch, more := <-next:
			if !more {
				return readErr
			}
			err = s.handleBatch(ctx, batch)
		case <-early:
			err = s.tick(ctx, next != nil)
		case <-ticker.C:
			err = s.tick(ctx, next != nil)
		case <-s.signal:
			err = s.heed(ctx)
		case <-told:
			told = nil
			s.stopBy = time.Now().Add(s.relay.config.StopTimeout)
			late = time.After(s.relay.config.StopTimeout)
		case <-late:
			err = errStop
		}
		if err == nil && told == nil && (s.hopeless() || !s.progress.midTransaction()) {
			err = errStop // not before: half a transaction would come again whole
		}
		if err != nil {
			return err
		}
	}
}

func (s *session) handleBatch(ctx context.Context, batch []message) error {
	s.heard = time.Now()
	for _, m := range batch {
		if err := s.handle(ctx, m); err != nil {
			return err
		}
	}
	return nil
}

func (s *session) handle(ctx context.Context, m message) error {
	switch m.kind {
	case kindBegin:
		s.committed = m.committed
		s.progress.begin()
	case kindInsert:
		return s.publish(m.event)
	case kindCommit:
		s.progress.commit(m.at)
	case kindKeepalive:
		if s.progress.keepalive(m.at) {
			s.unstick(ctx)
		}
		if m.asked {
			return s.confirm(ctx, true)
		}
	}
	return nil
}

func (s *session) publish(e *event.Event) error {
	crash.Point(crash.RelayDecodedNotProduced)
	seq := s.progress.event(len(e.Payload), s.committed)
	if err := s.publisher.Publish(e.Record(), seq); err != nil {
		return err
	}
	crash.Point(crash.RelayProducedNotAcked)
	return nil
}

// tick confirms, and watches whether the server is still there.
func (s *session) tick(ctx context.Context, listening bool) error {
	if !listening {
		s.heard = time.Now()
	}
	if silence := time.Since(s.heard); silence > goneAfter {
		return fmt.Errorf("Postgres has been silent for %s", silence)
	}
	return s.confirm(ctx, false)
}

// confirm lets the source forget what is delivered. urgent is set when the
// server wants to hear of it now, and at the end.
func (s *session) confirm(ctx context.Context, urgent bool) error {
	now := s.progress.summary()
	moved, err := s.source.confirm(ctx, now, urgent, time.Since(s.heard) > askAfter)
	if moved {
		s.moved = true
		s.unstick(ctx)
	}
	s.observe(now)
	return err
}

// unstick is called when something has got through, or nothing is left to send.
func (s *session) unstick(ctx context.Context) {
	if s.relay.state() == StateStuck {
		s.relay.setState(ctx, s.pool, StateStreaming, "")
	}
}

func (s *session) observe(now summary) {
	metrics := s.relay.metrics
	metrics.published.Add(float64(now.delivered - s.counted))
	s.counted = now.delivered
	metrics.inFlight.Set(float64(now.inFlight))
	metrics.lag.Set(s.source.lag(now))
	metrics.oldest.Set(0)
	if now.inFlight > 0 {
		metrics.oldest.Set(float64(now.oldest.UnixMilli()) / 1000)
	}
}

// heed acts on what the publisher has said.
func (s *session) heed(ctx context.Context) error {
	failure, away := s.trouble()
	switch {
	case failure != nil:
		return failure
	case away != nil:
		s.relay.setState(ctx, s.pool, StateBrokerAway, away.Error())
	case s.relay.state() == StateBrokerAway:
		s.relay.setState(ctx, s.pool, StateStreaming, "")
	}
	return nil
}

func (s *session) trouble() (failure, away error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return s.failure, s.away
}

// hopeless reports that waiting for what is in flight is of no use for now.
func (s *session) hopeless() bool {
	failure, away := s.trouble()
	return failure != nil || away != nil
}

// Delivered is called by the publisher when the broker has an event, or will
// not get it.
func (s *session) Delivered(seq uint64, err error) {
	if err == nil {
		if worthwhile := s.progress.delivered(seq); worthwhile {
			s.wake()
		}
		return
	}
	s.relay.metrics.failures.WithLabelValues(strconv.FormatBool(refused(err))).Inc()
	s.mutex.Lock()
	if s.failure == nil || refused(err) && !refused(s.failure) {
		s.failure = err // what is refused says more than what failed behind it
	}
	s.mutex.Unlock()
	s.wake()
}

// Reachable is called by the publisher when no broker answers any more, and
// with nil when one does again.
func (s *session) Reachable(err error) {
	s.mutex.Lock()
	s.away = err
	s.mutex.Unlock()
	s.wake()
}

func (s *session) wake() {
	select {
	case s.signal <- struct{}{}:
	default: // it will look anyway
	}
}

// finish confirms what got through. After an order to stop it waits for what is
// still in flight, within StopTimeout.
func (s *session) finish(ctx context.Context, stopping bool) {
	ctx = context.WithoutCancel(ctx)
	deadline := time.After(time.Until(s.stopBy))
	for waiting := stopping; waiting && s.progress.summary().inFlight > 0; {
		if s.hopeless() {
			break
		}
		select {
		case <-s.signal:
		case <-deadline:
			waiting = false
		}
	}
	if err := s.confirm(ctx, true); err != nil {
		s.relay.config.Log.Info("relay: could not confirm at the end, some events will be sent twice", "error", err)
	}
}

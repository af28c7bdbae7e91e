package outbox

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceledger/onceledger/internal/crash"
	"github.com/onceledger/onceledger/internal/event"
)

// session is what happens between taking the slot and giving it up:
//
//	Postgres ── log ──> publish ──> broker
//	    ^                             │ Delivered, in any order
//	    └── confirm <── progress <────┘
//
// Only confirm lets Postgres forget. It goes as far as progress allows, and
// after the relay's own record, so a crash at any point means that events are
// sent twice, and none is left out. Any error ends the session; the next one
// starts from the confirmed position.
type session struct {
	relay     *Relay
	pool      *pgxpool.Pool
	source    source
	progress  *progress
	publisher Publisher
	moved     bool   // the confirmed position, in this session
	counted   uint64 // events that are in the metrics

	// What the publisher's goroutines and ctx have to say.
	news    atomic.Bool
	signal  chan struct{}
	mutex   sync.Mutex
	failure error
	away    error // no broker answers
}

// errStop ends a session in order.
var errStop = errors.New("the relay is to stop")

// run reads, publishes and confirms until ctx is done or something fails.
func (s *session) run(ctx context.Context) error {
	defer context.AfterFunc(ctx, s.wake)()

	if err := s.confirm(ctx, false); err != nil { // the first tick
		return err
	}
	if s.source.gap != nil {
		if err := s.publishGap(ctx, s.source.gap); err != nil {
			return err
		}
	}
	var committed time.Time // of the transaction that is being read
	for {
		if err := s.check(ctx); err != nil {
			return err
		}
		message, err := s.source.stream.next(ctx)
		if err != nil {
			return err
		}
		switch message.kind {
		case kindBegin:
			committed = message.committed
			s.progress.begin()
		case kindInsert:
			if err := s.publish(ctx, message.event, committed); err != nil {
				return err
			}
		case kindCommit:
			s.progress.commit(message.lsn)
		case kindKeepalive:
			s.progress.keepalive(message.lsn)
		}
		if err := s.confirmWhenDue(ctx, message.asked); err != nil {
			return err
		}
	}
}

// publish gives an event to the publisher, waiting while the window is full.
func (s *session) publish(ctx context.Context, e event.Event, committed time.Time) error {
	for wait := s.progress.full(); wait; wait = !s.progress.roomy() {
		if err := s.pause(ctx); err != nil {
			return err
		}
	}
	crash.Point(crash.RelayDecodedNotProduced)
	seq := s.progress.event(len(e.Payload), committed)
	if err := s.publisher.Publish(e.Record(), seq); err != nil {
		return err
	}
	crash.Point(crash.RelayProducedNotAcked)
	return nil
}

// publishGap sends what the slot will not bring, as if it were one transaction
// that ends where the slot begins.
func (s *session) publishGap(ctx context.Context, gap *gap) error {
	ctx, cancel := context.WithCancel(ctx)
	pages := make(chan []event.Event)
	result := make(chan error, 1)
	go func() { result <- gap.read(ctx, pages) }()

	s.progress.begin()
	sent, err := s.publishPages(ctx, pages)
	cancel()
	for range pages { // until the reader is done
	}
	if err = errors.Join(err, <-result); err != nil {
		return err
	}
	s.progress.commit(gap.end)
	s.relay.config.Log.Warn("relay: sent what the slot will not bring", "reason", gap.reason, "events", sent)
	s.relay.metrics.resent.Add(float64(sent))
	return nil
}

func (s *session) publishPages(ctx context.Context, pages <-chan []event.Event) (sent int, err error) {
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for {
		select {
		case page, more := <-pages:
			if !more {
				return sent, nil
			}
			for _, e := range page {
				if err := s.publish(ctx, e, e.OccurredAt); err != nil {
					return sent, err
				}
			}
			sent += len(page)
		case <-ticker.C: // the query may take long: Postgres is to see that we live
		case <-s.signal:
		}
		if err := errors.Join(s.confirmWhenDue(ctx, false), s.check(ctx)); err != nil {
			return sent, err
		}
	}
}

// confirmWhenDue does so once in a tick, or at once when the server asks.
func (s *session) confirmWhenDue(ctx context.Context, asked bool) error {
	if !asked && !s.source.stream.due() {
		return nil
	}
	return s.confirm(ctx, asked)
}

// confirm lets Postgres forget what is delivered: first the relay's own record,
// then the slot.
func (s *session) confirm(ctx context.Context, asked bool) error {
	now := s.progress.summary()
	mark := &s.source.mark
	if mark.due(now, asked) {
		crash.Point(crash.RelayAckedNotConfirmed)
		storing, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeTimeout)
		defer cancel()
		if err := mark.store(storing, s.pool, now); err != nil {
			return err
		}
		s.moved = true
		if s.relay.state() == StateStuck {
			s.relay.setState(ctx, s.pool, StateStreaming, "")
		}
	}
	s.observe(now)
	return s.source.stream.confirm(ctx, mark.position.Lsn)
}

func (s *session) observe(now summary) {
	metrics := s.relay.metrics
	metrics.published.Add(float64(now.delivered - s.counted))
	s.counted = now.delivered
	metrics.inFlight.Set(float64(now.inFlight))
	metrics.lag.Set(float64(max(s.source.stream.serverEnd, now.confirmable) - s.source.mark.position.Lsn))
	metrics.oldest.Set(0)
	if now.inFlight > 0 {
		metrics.oldest.Set(float64(now.oldest.UnixMilli()) / 1000)
	}
}

// storeTimeout is below wal_sender_timeout: a database that hangs ends the
// session by this error and not by a broken connection.
const storeTimeout = 3 * time.Second

// pause waits for news or the next tick.
func (s *session) pause(ctx context.Context) error {
	select {
	case <-s.signal:
	case <-time.After(time.Until(s.source.stream.deadline)):
	}
	return errors.Join(s.confirmWhenDue(ctx, false), s.check(ctx))
}

// check acts on news. It is called for each message, so no news is quick.
func (s *session) check(ctx context.Context) error {
	if !s.news.Load() {
		return nil
	}
	s.news.Store(false)
	if err := s.source.stream.arm(); err != nil { // before looking: what comes now wakes again
		return err
	}
	if ctx.Err() != nil {
		return errStop
	}
	s.mutex.Lock()
	failure, away := s.failure, s.away
	s.mutex.Unlock()
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

// wake makes whatever waits look at the news.
func (s *session) wake() {
	s.news.Store(true)
	s.nudge()
	s.source.stream.wake()
}

func (s *session) nudge() {
	select {
	case s.signal <- struct{}{}:
	default:
	}
}

// Delivered is called by the publisher when the broker has an event, or will
// not get it.
func (s *session) Delivered(seq uint64, err error) {
	if err == nil {
		if roomy := s.progress.delivered(seq); roomy {
			s.nudge()
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

// finish confirms what got through. After an order to stop it waits a little
// for what is still in flight.
func (s *session) finish(ctx context.Context, stopping bool) {
	ctx = context.WithoutCancel(ctx)
	deadline := time.After(s.relay.config.StopTimeout)
	for waiting := stopping; waiting && s.progress.summary().inFlight > 0; {
		s.mutex.Lock()
		hopeless := s.failure != nil || s.away != nil
		s.mutex.Unlock()
		select {
		case <-s.signal:
		case <-deadline:
			hopeless = true
		}
		waiting = !hopeless
	}
	if err := s.confirm(ctx, true); err != nil {
		s.relay.config.Log.Info("relay: could not confirm at the end, some events will be sent twice", "error", err)
	}
}

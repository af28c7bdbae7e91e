// Package drill breaks a running system on purpose, and accounts for what became
// of it: an operator sees that it mends itself, on the very system it is about.
package drill

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/relay"
	"github.com/onceledger/onceledger/internal/verify"
)

// Config says which system, and how hard.
type Config struct {
	RelayURL    string        // the database, with the login onceledger_relay
	DB          *pgxpool.Pool // the same, with the login onceledger_verify
	Brokers     string
	Slot        string // the relay's
	Publication string
	Consumer    string // that applies the events of orders

	API    string // where orders are placed, such as http://127.0.0.1:8080
	Key    string // an API key
	Orders int    // are made meanwhile; 0: others make them
	// Away is how long no relay gets a turn after the slot is gone; longer, until
	// something was written to the outbox.
	Away time.Duration
	// Wait bounds the wait for the relay, and for what is in flight at the end.
	Wait time.Duration

	// Lag is as verify's.
	Lag func(ctx context.Context) (committed, end map[int32]int64, err error)
	Say func(format string, args ...any)
}

// Report is the account of SlotLoss, for the events that were written while it
// ran.
type Report struct {
	Slot   string        `json:"slot"`
	Events int           `json:"events"`
	Orders int           `json:"orders"` // of which these events are
	Back   time.Duration `json:"back_after"`

	// InTheHole were committed while there was no slot: no slot will ever bring
	// them. Resent are records that the relay took from the table instead: those,
	// and events that were published before and were not known to be.
	InTheHole int `json:"in_the_hole"`
	HoleSent  int `json:"in_the_hole_and_sent"`
	Again     int `json:"sent_again"`

	Seen       int `json:"records_for_the_consumer"`
	Applied    int `json:"applied"`
	Suppressed int `json:"duplicates_suppressed"`
	Lost       int `json:"lost"`

	Findings []verify.Finding `json:"findings"` // of these orders
}

// OK tells whether nothing is lost or wrong.
func (r Report) OK() bool { return r.Lost == 0 && len(r.Findings) == 0 }

// WriteText prints the account.
func (r Report) WriteText(w io.Writer) error {
	text := fmt.Sprintf(`slot %s was dropped, and was back and everything known to be delivered after %.1f s

written meanwhile      %6d events of %d orders
in the hole            %6d written while there was no slot
re-sent                %6d %d of the hole, %d published before
seen by the consumer   %6d records
applied                %6d
duplicates suppressed  %6d
lost                   %6d
`, r.Slot, r.Back.Seconds(), r.Events, r.Orders, r.InTheHole, r.HoleSent+r.Again, r.HoleSent, r.Again,
		r.Seen, r.Applied, r.Suppressed, r.Lost)
	for _, finding := range r.Findings {
		text += fmt.Sprintf("%s: order %s: %s\n", finding.Kind, finding.OrderID, finding.Detail)
	}
	_, err := io.WriteString(w, text)
	return err
}

// SlotLoss takes the slot away from the relay at work, lets orders go on, and
// waits until the relay has found what the next slot does not bring. The relay
// must be wal: poll has no slot, and Debezium's is its own.
func SlotLoss(ctx context.Context, config Config) (Report, error) {
	conn, err := pgx.Connect(ctx, config.RelayURL)
	if err != nil {
		return Report{}, fmt.Errorf("reach database: %w", err)
	}
	s := slotLoss{Config: config, conn: conn, clients: newClients(config), report: Report{Slot: config.Slot}}
	defer func() { _ = s.conn.Close(context.WithoutCancel(ctx)) }()
	if kind, err := relay.Assigned(ctx, conn, config.Slot); err != nil {
		return Report{}, err
	} else if kind != relay.KindWAL {
		return Report{}, fmt.Errorf("the relay is %s: only wal has a slot to lose; switch first: onceledger relay switch --to wal", kind)
	}
	if err := s.checkWorking(ctx); err != nil {
		return Report{}, fmt.Errorf("nothing was done: %w", err)
	}
	if config.Orders > 0 {
		if err := s.clients.check(ctx); err != nil {
			return Report{}, fmt.Errorf("nothing was done: the API (ONCELEDGER_ADDR): %w", err)
		}
	}
	topics, err := openTopics(ctx, config.Brokers)
	if err != nil {
		return Report{}, fmt.Errorf("nothing was done: %w", err)
	}
	defer topics.Close()
	if err := s.run(ctx); err != nil {
		return Report{}, err
	}
	return s.report, s.settle(ctx, topics)
}

type slotLoss struct {
	Config

	conn    *pgx.Conn // the relay's login; it may hold the turn
	clients *clients
	report  Report
	began   string // snapshots: before the first order,
	dropped string // when the slot is gone,
	allowed string // when a relay may make another, and at the end
	ended   string
}

// checkWorking is whether what is to be lost is there.
func (s *slotLoss) checkWorking(ctx context.Context) error {
	fault, err := db.New().RelayFault(ctx, s.conn, s.Publication, s.Slot)
	if err != nil {
		return fmt.Errorf("ask for the relay: %w", err)
	}
	if fault != "" {
		return errors.New(fault)
	}
	return nil
}

func (s *slotLoss) run(ctx context.Context) (err error) {
	if s.began, err = db.New().SnapshotNow(ctx, s.conn); err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	s.clients.start(ctx)
	defer s.clients.stop()
	if err := s.untilWritten(ctx, s.began, "no event is written", time.Now()); err != nil {
		return err
	}
	if err := s.takeAway(ctx); err != nil {
		return err
	}
	if err := s.leaveAway(ctx); err != nil {
		return err
	}
	if s.allowed, err = db.New().SnapshotNow(ctx, s.conn); err != nil {
		return fmt.Errorf("look at the hole: %w", err)
	}
	began := time.Now()
	if err := s.conn.Close(ctx); err != nil { // and with it, the turn
		return fmt.Errorf("give the turn back: %w", err)
	}
	again, err := pgx.Connect(ctx, s.RelayURL)
	if err != nil {
		return fmt.Errorf("reach database: %w", err)
	}
	s.conn = again
	s.Say("waiting until the relay has mended it")
	if err := s.waitDelivered(ctx, s.allowed); err != nil {
		return err
	}
	s.report.Back = time.Since(began).Round(time.Millisecond)
	return s.clients.finish()
}

// waitDelivered waits until a relay has on record that all is delivered that a
// snapshot saw.
func (s *slotLoss) waitDelivered(ctx context.Context, snapshot string) error {
	return s.until(ctx, "the relay does not mend it", func() (bool, error) {
		done, err := db.New().RelayCaughtUp(ctx, s.conn, s.Publication, s.Slot, snapshot)
		if errors.Is(err, pgx.ErrNoRows) {
			return false, nil
		}
		return done, err
	})
}

// takeAway ends the relay's connection, takes its turn before it or another can,
// and drops the slot.
func (s *slotLoss) takeAway(ctx context.Context) error {
	s.Say("dropping slot %s under the relay", s.Slot)
	err := s.until(ctx, "the relay's turn cannot be had", func() (bool, error) {
		if _, err := db.New().SlotUserEnd(ctx, s.conn, s.Slot); err != nil {
			return false, err
		}
		return relay.TakeTurn(ctx, s.conn.PgConn(), s.Slot)
	})
	if err != nil {
		return err
	}
	err = s.until(ctx, "slot "+s.Slot+" cannot be dropped", func() (bool, error) {
		slot, err := db.New().SlotGet(ctx, s.conn, s.Slot)
		if errors.Is(err, pgx.ErrNoRows) {
			return true, nil
		}
		if err != nil || slot.Active {
			return false, err
		}
		return false, db.New().SlotDrop(ctx, s.conn, s.Slot) // and look again
	})
	if err != nil {
		return err
	}
	s.dropped, err = db.New().SnapshotNow(ctx, s.conn)
	if err != nil {
		return fmt.Errorf("look at what was before: %w", err)
	}
	return nil
}

// leaveAway keeps every relay from its turn for a while.
func (s *slotLoss) leaveAway(ctx context.Context) error {
	s.Say("no relay gets a turn for %s", s.Away)
	return s.untilWritten(ctx, s.dropped, "nothing was written while there was no slot", time.Now().Add(s.Away))
}

// untilWritten waits until something was written since a snapshot, and until a
// time, and says why nothing was: the drill has nothing to show without orders.
func (s *slotLoss) untilWritten(ctx context.Context, since, otherwise string, enough time.Time) error {
	err := s.until(ctx, otherwise, func() (bool, error) {
		if err := s.clients.failed(); err != nil {
			return false, err
		}
		found, err := db.New().OutboxListUnseen(ctx, s.conn, since)
		return len(found.Ids) > 0 && !time.Now().Before(enough), err
	})
	if !errors.Is(err, errTooLong) {
		return err
	}
	if fault := s.clients.fault(); fault != nil {
		return fmt.Errorf("%w: %w", err, fault)
	}
	if s.Orders == 0 {
		return fmt.Errorf("%w: nobody makes orders", err)
	}
	return fmt.Errorf("%w: there are too few orders, or the API at %s has another database", err, s.API)
}

// settle waits for what is in flight, and adds up.
func (s *slotLoss) settle(ctx context.Context, topics *topics) error {
	s.Say("checking the books")
	books, err := verify.Run(ctx, verify.Config{DB: s.DB, Slot: s.Slot, Wait: s.Wait, Lag: s.Lag})
	if err != nil {
		return fmt.Errorf("verify: %w", err)
	}
	if s.ended, err = db.New().SnapshotNow(ctx, s.DB); err != nil {
		return fmt.Errorf("end: %w", err)
	}
	if err := s.waitDelivered(ctx, s.ended); err != nil {
		return err
	}
	var events []db.DrillEventListRow
	applied := func() (bool, error) {
		events, err = db.New().DrillEventList(ctx, s.DB, db.DrillEventListParams{
			Began: s.began, Dropped: s.dropped, Allowed: s.allowed, Ended: s.ended, Consumer: s.Consumer,
		})
		waiting := func(e db.DrillEventListRow) bool { return e.AggregateType == event.AggregateOrder && !e.Applied }
		return !slices.ContainsFunc(events, waiting), err
	}
	// What is not applied by then counts as lost.
	if err := s.until(ctx, "not everything is applied", applied); err != nil && !errors.Is(err, errTooLong) {
		return err
	}
	records, err := topics.count(ctx)
	if err != nil {
		return err
	}
	s.report.account(events, records, books)
	return nil
}

var errTooLong = errors.New("it took too long")

// until asks again and again, for Wait at most.
func (s *slotLoss) until(ctx context.Context, otherwise string, done func() (bool, error)) error {
	deadline := time.After(s.Wait)
	for {
		ok, err := done()
		if err != nil {
			return fmt.Errorf("%s: %w", otherwise, err)
		}
		if ok {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-deadline:
			return fmt.Errorf("%s: %w (%s)", otherwise, errTooLong, s.Wait)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

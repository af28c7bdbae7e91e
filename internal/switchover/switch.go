// Package switchover moves the outbox from one relay to another while orders
// come in.
//
// Nothing is lost and no aggregate's events get out of order: the relay in office
// finishes and says what it has delivered, and the next one begins there. What
// one has published and could not record any more the other publishes again,
// with the same event ids.
package switchover

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/debezium"
	"github.com/onceledger/onceledger/internal/relay"
)

// Config says where.
type Config struct {
	// URL is the database, with the login onceledger_relay.
	URL         string
	Slot        string // of wal; it names the relay's records, too
	Publication string

	// Connect is where Debezium runs; nil if there is none. It reaches the
	// database at ConnectorURL, or at URL if that is "".
	Connect      *debezium.Client
	ConnectorURL string
	// Abandon leaves Debezium without a word to Connect, which may be gone: all
	// that it was given to publish is published again.
	Abandon bool

	// Wait bounds each step; default two minutes.
	Wait time.Duration
	Say  func(format string, args ...any)
}

// Report is what was done.
type Report struct {
	From, To relay.Kind
	// Since bounds what is published twice: every row of an older transaction was
	// delivered before, and is left alone.
	Since uint64
}

// Switch has another relay carry the outbox. It can be run again after it was
// interrupted. Workers need not be told: they look it up.
func Switch(ctx context.Context, config Config, to relay.Kind) (Report, error) {
	if config.Wait == 0 {
		config.Wait = 2 * time.Minute
	}
	conn, err := pgx.Connect(ctx, config.URL)
	if err != nil {
		return Report{}, fmt.Errorf("reach database: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))

	s := &switching{Config: config, conn: conn}
	if s.from, err = relay.Assigned(ctx, conn, config.Slot); err != nil {
		return Report{}, err
	}
	if s.debezium, err = db.New().DebeziumSlot(ctx, conn, config.Slot); err != nil {
		return Report{}, fmt.Errorf("name Debezium's slot: %w", err)
	}
	if s.from == to {
		return Report{From: s.from, To: to}, nil
	}
	if err := s.check(ctx, to); err != nil {
		return Report{}, fmt.Errorf("nothing was changed: %w", err)
	}
	since, err := s.run(ctx, to)
	if err != nil {
		return Report{}, err
	}
	return Report{From: s.from, To: to, Since: since}, nil
}

// switching is one Switch.
type switching struct {
	Config
	conn     *pgx.Conn
	from     relay.Kind
	debezium string // its slot
}

// check looks for what would stop the switch half-way.
func (s *switching) check(ctx context.Context, to relay.Kind) error {
	if to != relay.KindPoll {
		if err := relay.CheckLog(ctx, s.conn, s.Slot, s.Publication); err != nil {
			return err
		}
	}
	if to == relay.KindDebezium || s.from == relay.KindDebezium && !s.Abandon {
		if s.Connect == nil {
			return errors.New("Debezium runs in Kafka Connect: say where that is") //nolint:staticcheck // a name
		}
		if _, err := s.Connect.Status(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (s *switching) run(ctx context.Context, to relay.Kind) (since uint64, err error) {
	if err := db.New().RelayAssignmentBegin(ctx, s.conn, s.Slot, string(to)); err != nil {
		return 0, fmt.Errorf("take the job from %s: %w", s.from, err)
	}
	s.Say("waiting until %s has finished", s.from)
	if err := s.takeTurn(ctx); err != nil {
		return 0, err
	}
	if since, err = s.leave(ctx); err != nil {
		return 0, s.unfinished(to, err)
	}
	if to == relay.KindDebezium {
		s.Say("registering the connector")
		if err := s.register(ctx, since); err != nil {
			return 0, s.giveBack(ctx, err)
		}
	}
	if to != relay.KindWAL {
		// A slot that nobody reads would keep all the log from now on.
		if err := s.dropSlot(ctx, s.Slot); err != nil {
			return 0, s.unfinished(to, err)
		}
	}
	if err := db.New().RelayAssignmentSettle(ctx, s.conn, since, s.Slot, string(to)); err != nil {
		return 0, s.unfinished(to, err)
	}
	return since, nil
}

func (s *switching) unfinished(to relay.Kind, err error) error {
	return fmt.Errorf("the switch has not ended, and nobody carries the outbox: run it again, to %s or another: %w", to, err)
}

// takeTurn waits for the relays of this slot to stop: while the turn is ours none
// can begin.
func (s *switching) takeTurn(ctx context.Context) error {
	return s.until(ctx, "the relay in office does not stop", func() (bool, error) {
		return relay.TakeTurn(ctx, s.conn.PgConn(), s.Slot)
	})
}

// leave makes sure that Debezium publishes nothing any more, and finds out which
// rows are delivered. Its slot being there is what tells that it had the job.
func (s *switching) leave(ctx context.Context) (since uint64, err error) {
	slot, err := db.New().SlotGet(ctx, s.conn, s.debezium)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
	case err != nil:
		return 0, fmt.Errorf("look for slot %s: %w", s.debezium, err)
	default:
		if err := s.leaveDebezium(ctx, slot); err != nil {
			return 0, err
		}
	}
	server, err := db.New().ServerIdentity(ctx, s.conn)
	if err != nil {
		return 0, fmt.Errorf("identify the server: %w", err)
	}
	record, err := db.New().RelayPositionGet(ctx, s.conn, s.Slot)
	if errors.Is(err, pgx.ErrNoRows) || err == nil && (record.SystemID != server.SystemID || record.Timeline != server.Timeline) {
		return 0, nil // as a first start, and as after a restore: everything
	}
	if err != nil {
		return 0, fmt.Errorf("read the relay's record: %w", err)
	}
	return record.SnapshotXmin, nil
}

func (s *switching) leaveDebezium(ctx context.Context, slot db.SlotGetRow) error {
	if s.Connect != nil && !s.Abandon {
		s.Say("stopping the connector")
		if err := s.Connect.Stop(ctx); err != nil {
			return err
		}
	}
	err := s.until(ctx, "slot "+s.debezium+" is still in use", func() (bool, error) {
		var err error
		slot, err = db.New().SlotGet(ctx, s.conn, s.debezium)
		return err == nil && !slot.Active, err
	})
	if err != nil {
		return err
	}
	past := false
	if s.Connect != nil && !s.Abandon {
		if past, err = s.Connect.PastSnapshot(ctx, uint64(slot.Confirmed)); err != nil {
			return err
		}
	}
	// Before its snapshot is published the slot says nothing of the rows that were
	// there when it was made. Then the record of the relay before Debezium counts.
	if past && slot.OldestXid > 0 {
		server, err := db.New().ServerIdentity(ctx, s.conn)
		if err != nil {
			return fmt.Errorf("identify the server: %w", err)
		}
		err = db.New().RelayPositionHandOver(ctx, s.conn, db.RelayPositionHandOverParams{
			SlotName:     s.Slot,
			SystemID:     server.SystemID,
			Timeline:     server.Timeline,
			SnapshotXmin: slot.OldestXid,
		})
		if err != nil {
			return fmt.Errorf("record what Debezium has delivered: %w", err)
		}
	}
	if s.Connect != nil && !s.Abandon {
		if err := s.Connect.Remove(ctx); err != nil {
			return err
		}
	}
	return s.dropSlot(ctx, s.debezium)
}

// register has Debezium begin, and waits until it reads its slot.
func (s *switching) register(ctx context.Context, since uint64) error {
	url := s.ConnectorURL
	if url == "" {
		url = s.URL
	}
	err := s.Connect.Register(ctx, debezium.Params{
		DatabaseURL: url,
		Slot:        s.debezium,
		Publication: s.Publication,
		Since:       since,
	})
	if err != nil {
		return err
	}
	return s.until(ctx, "the connector does not get to read slot "+s.debezium, func() (bool, error) {
		slot, err := db.New().SlotGet(ctx, s.conn, s.debezium)
		if errors.Is(err, pgx.ErrNoRows) {
			return false, nil
		}
		return slot.Active, err
	})
}

// giveBack undoes a switch to Debezium that did not work out.
func (s *switching) giveBack(ctx context.Context, cause error) error {
	ctx = context.WithoutCancel(ctx)
	err := s.Connect.Remove(ctx)
	if err == nil {
		err = s.dropSlot(ctx, s.debezium)
	}
	if err == nil && s.from != relay.KindNone {
		if err = db.New().RelayAssignmentBegin(ctx, s.conn, s.Slot, string(s.from)); err == nil {
			err = db.New().RelayAssignmentSettle(ctx, s.conn, 0, s.Slot, string(s.from))
		}
		if err == nil {
			return fmt.Errorf("%s goes on: %w", s.from, cause)
		}
	}
	return s.unfinished(relay.KindDebezium, errors.Join(cause, err))
}

func (s *switching) dropSlot(ctx context.Context, slot string) error {
	return s.until(ctx, "slot "+slot+" is still in use", func() (bool, error) {
		found, err := db.New().SlotGet(ctx, s.conn, slot)
		if errors.Is(err, pgx.ErrNoRows) {
			return true, nil
		}
		if err != nil || found.Active {
			return false, err
		}
		return false, db.New().SlotDrop(ctx, s.conn, slot) // and look again
	})
}

// until asks again and again, for Wait at most.
func (s *switching) until(ctx context.Context, otherwise string, done func() (bool, error)) error {
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
			return fmt.Errorf("%s after %s", otherwise, s.Wait)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

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
	"github.com/onceledger/onceledger/internal/postgres"
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
	report := Report{From: s.from, To: to}
	if s.from == to {
		if left, err := s.leftSlot(ctx, to); err != nil || !left {
			return report, err
		}
	}
	if err := s.check(ctx, to); err != nil {
		return Report{}, fmt.Errorf("nothing was changed: %w", err)
	}
	if to == relay.KindDebezium {
		report.Since, err = s.toDebezium(ctx)
	} else {
		report.Since, err = s.run(ctx, to)
	}
	return report, err
}

// switching is one Switch.
type switching struct {
	Config
	conn     *pgx.Conn
	from     relay.Kind
	debezium string // its slot
}

// leftSlot reports whether there is a slot that nobody reads, from a switch that
// was interrupted. To take the job once more drops it.
func (s *switching) leftSlot(ctx context.Context, to relay.Kind) (bool, error) {
	unused := map[relay.Kind][]string{relay.KindWAL: {s.debezium}, relay.KindPoll: {s.debezium, s.Slot}}
	for _, slot := range unused[to] {
		_, err := db.New().SlotGet(ctx, s.conn, slot)
		if err == nil {
			return true, nil
		}
		if !errors.Is(err, pgx.ErrNoRows) {
			return false, fmt.Errorf("look for slot %s: %w", slot, err)
		}
	}
	return false, nil
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

// run takes the job from whoever has it and gives it to wal or poll.
func (s *switching) run(ctx context.Context, to relay.Kind) (since uint64, err error) {
	if err := s.takeOver(ctx, to); err != nil {
		return 0, err
	}
	if err := s.leaveDebezium(ctx); err != nil {
		return 0, s.unfinished(to, err)
	}
	if since, err = s.delivered(ctx); err != nil {
		return 0, s.unfinished(to, err)
	}
	if err := s.settle(ctx, to, since); err != nil {
		return 0, err
	}
	if to == relay.KindPoll {
		return since, s.dropParked(ctx)
	}
	return since, nil
}

// dropParked drops wal's slot: one that nobody reads keeps all the log from now
// on. A login that has lost REPLICATION may not.
func (s *switching) dropParked(ctx context.Context) error {
	err := s.dropSlot(ctx, s.Slot)
	if postgres.Code(err) == "42501" {
		s.Say("%s may not drop slot %s, which now keeps the log for nobody; as a superuser: SELECT pg_drop_replication_slot('%[2]s')",
			s.conn.Config().User, s.Slot)
		return nil
	}
	if err != nil {
		return fmt.Errorf("poll carries the outbox, and the slot stays, which keeps the log; switch to poll again: %w", err)
	}
	return nil
}

// toDebezium gives the job to Debezium, by way of poll. Debezium cannot read the
// table and the log as of the same moment once its slot is there, so it reads the
// log alone, and poll goes on until nothing is missing that lies before.
func (s *switching) toDebezium(ctx context.Context) (since uint64, err error) {
	if s.from != relay.KindPoll {
		if _, err := s.run(ctx, relay.KindPoll); err != nil {
			return 0, err
		}
		if err := s.letGo(ctx); err != nil {
			return 0, err
		}
	}
	from, err := s.makeSlot(ctx)
	if err != nil {
		err = errors.Join(err, s.dropSlot(context.WithoutCancel(ctx), s.debezium))
		return 0, fmt.Errorf("poll goes on: %w", err)
	}
	if err := s.takeOver(ctx, relay.KindDebezium); err != nil {
		return 0, err
	}
	if since, err = s.delivered(ctx); err != nil {
		return 0, s.giveBack(ctx, err)
	}
	s.Say("registering the connector")
	if err := s.register(ctx, from, since); err != nil {
		return 0, s.giveBack(ctx, err)
	}
	return since, s.settle(ctx, relay.KindDebezium, since)
}

// makeSlot makes Debezium's slot and waits until poll has delivered all that the
// slot will not bring: whatever was written by transactions before one that
// began after the slot was there.
func (s *switching) makeSlot(ctx context.Context) (from uint64, err error) {
	if err := s.dropSlot(ctx, s.debezium); err != nil {
		return 0, err
	}
	s.Say("making slot %s, which waits for open transactions", s.debezium)
	made, err := db.New().SlotMake(ctx, s.conn, s.debezium)
	if err != nil {
		return 0, fmt.Errorf("make slot %s: %w", s.debezium, err)
	}
	after, err := db.New().TransactionID(ctx, s.conn)
	if err != nil {
		return 0, fmt.Errorf("begin after the slot: %w", err)
	}
	s.Say("waiting until poll has delivered what was there before")
	return uint64(made), s.until(ctx, "poll does not get there; does a worker with the role relay run, or is a transaction open?", func() (bool, error) {
		record, err := db.New().RelayPositionGet(ctx, s.conn, s.Slot)
		if errors.Is(err, pgx.ErrNoRows) {
			return false, nil
		}
		return record.SnapshotXmin > after, err
	})
}

// takeOver takes the job from whoever has it. From then on nobody carries the
// outbox, until settle.
func (s *switching) takeOver(ctx context.Context, to relay.Kind) error {
	if err := db.New().RelayAssignmentBegin(ctx, s.conn, s.Slot, string(to)); err != nil {
		return fmt.Errorf("take the job from %s: %w", s.from, err)
	}
	s.Say("waiting until %s has finished", s.from)
	// While the turn is ours none can begin.
	err := s.until(ctx, "the relay in office does not stop", func() (bool, error) {
		return relay.TakeTurn(ctx, s.conn.PgConn(), s.Slot)
	})
	if err != nil {
		return s.unfinished(to, err)
	}
	return nil
}

func (s *switching) settle(ctx context.Context, to relay.Kind, since uint64) error {
	settled, err := db.New().RelayAssignmentSettle(ctx, s.conn, since, s.Slot, string(to))
	if err == nil && settled == 0 {
		// Another switch was there meanwhile, perhaps to the same end.
		var now relay.Kind
		if now, err = relay.Assigned(ctx, s.conn, s.Slot); err == nil && now != to {
			err = errors.New("another switch has begun meanwhile")
		}
	}
	if err != nil {
		return s.unfinished(to, err)
	}
	return nil
}

// letGo lets the relay that was given the job begin.
func (s *switching) letGo(ctx context.Context) error {
	if err := relay.EndTurn(ctx, s.conn.PgConn(), s.Slot); err != nil {
		return err
	}
	s.from = relay.KindPoll
	return nil
}

func (s *switching) unfinished(to relay.Kind, err error) error {
	return fmt.Errorf("the switch has not ended, and nobody carries the outbox: run it again, to %s or another: %w", to, err)
}

// delivered tells which rows are delivered, by the relay's record: all of
// transactions older than this.
func (s *switching) delivered(ctx context.Context) (since uint64, err error) {
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

// leaveDebezium makes sure that Debezium publishes nothing any more, and records
// which rows it has delivered. Its slot being there is what tells that it had the
// job, or was about to get it.
func (s *switching) leaveDebezium(ctx context.Context) error {
	slot, err := db.New().SlotGet(ctx, s.conn, s.debezium)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look for slot %s: %w", s.debezium, err)
	}
	if s.Connect != nil && !s.Abandon {
		s.Say("stopping the connector")
		if err := s.Connect.Stop(ctx); err != nil {
			return err
		}
	}
	err = s.until(ctx, "slot "+s.debezium+" is still in use", func() (bool, error) {
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
	// A slot that Debezium made anew, after one that was lost, says nothing of the
	// rows that were there before, until the snapshot of them is published. Then
	// the record of the relay before Debezium counts.
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
func (s *switching) register(ctx context.Context, from, since uint64) error {
	url := s.ConnectorURL
	if url == "" {
		url = s.URL
	}
	err := s.Connect.Register(ctx, debezium.Params{
		DatabaseURL: url,
		Slot:        s.debezium,
		Publication: s.Publication,
		From:        from,
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
	if err == nil {
		err = db.New().RelayAssignmentBegin(ctx, s.conn, s.Slot, string(relay.KindPoll))
	}
	if err == nil {
		err = s.settle(ctx, relay.KindPoll, 0)
	}
	if err != nil {
		return s.unfinished(relay.KindDebezium, errors.Join(cause, err))
	}
	return fmt.Errorf("poll goes on: %w", cause)
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

package relay

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceledger/onceledger/internal/crash"
	"github.com/onceledger/onceledger/internal/db"
)

// poller brings what a look at the table shows and the look before did not.
//
// What was seen is a snapshot (pg_snapshot) and no highest id or transaction:
// transactions end in another order than they begin, so there is no number below
// which everything is there. A round is the rows whose transactions the last
// snapshot did not see as committed and this one does. It leaves nothing out,
// and no open transaction, here or in another database, holds it up.
//
// Who writes an aggregate's version 2 has waited for the commit of version 1, so
// a snapshot that sees 2 sees 1: within a round the versions go in order, and
// rounds follow each other. A round is never cut: it is confirmed whole.
type poller struct {
	turn   *pgx.Conn // holds the turn; whoever loses it can record nothing
	pool   *pgxpool.Pool
	server db.ServerIdentityRow
	slot   string
	every  time.Duration
	seen   string // snapshot, the reader's

	mutex  sync.Mutex
	rounds []round // not recorded yet, in order

	recorded struct {
		at     time.Time
		events uint64
	}
}

type round struct {
	at       position
	snapshot string
	empty    bool
}

// idleRecord is how often a poller that finds nothing records that: what is
// recorded is what lets old partitions go, and what a switch waits for.
const idleRecord = 5 * time.Second

// connectForPolling makes the connection that holds the turn. A poller that
// hangs loses it: it has something to say at each tick.
func connectForPolling(ctx context.Context, url string) (*pgx.Conn, error) {
	config, err := pgx.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("read database address: %w", err)
	}
	config.RuntimeParams["application_name"] = "onceledger-relay"
	config.RuntimeParams["idle_session_timeout"] = "5s"
	if config.ConnectTimeout == 0 {
		config.ConnectTimeout = answerTimeout
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	return conn, nil
}

// openPoller goes on where the last relay left off, whichever it was.
func (r *Relay) openPoller(ctx context.Context, turn *pgx.Conn, pool *pgxpool.Pool) (*poller, error) {
	server, err := db.New().ServerIdentity(ctx, pool)
	if err != nil {
		return nil, fmt.Errorf("identify the server: %w", err)
	}
	record, err := db.New().RelayPositionGet(ctx, pool, r.config.Slot)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return nil, fmt.Errorf("read the relay's record: %w", err)
	}
	p := &poller{turn: turn, pool: pool, server: server, slot: r.config.Slot, every: r.config.PollEvery}
	p.recorded.at = time.Now()
	switch {
	case record.SlotName == "":
		p.seen = snapshotBelow(0)
		r.config.Log.InfoContext(ctx, "relay: sending the whole outbox", "reason", firstStart)
	case record.SystemID != server.SystemID || record.Timeline != server.Timeline:
		p.seen = snapshotBelow(0)
		r.metrics.gaps.Inc()
		r.config.Log.WarnContext(ctx, "relay: sending the whole outbox again",
			"reason", "this is another database server than last time, or it was restored or failed over")
	case record.Snapshot != nil:
		p.seen = *record.Snapshot
	default:
		p.seen = snapshotBelow(record.SnapshotXmin)
	}
	return p, nil
}

// snapshotBelow sees the transactions below xmin and no other. There is none
// below 3: these numbers have a meaning of their own.
func snapshotBelow(xmin uint64) string {
	xmin = max(xmin, 3)
	return fmt.Sprintf("%d:%[1]d:", xmin)
}

func (p *poller) read(ctx context.Context, batches chan<- []message) error {
	bring := bringTo(ctx, batches)
	for at := position(1); ; at++ {
		found, err := db.New().OutboxListUnseen(ctx, p.pool, p.seen)
		if err != nil {
			return fmt.Errorf("look for new events: %w", err)
		}
		p.seen = found.Snapshot
		p.remember(round{at: at, snapshot: found.Snapshot, empty: len(found.Ids) == 0})
		if len(found.Ids) > 0 {
			err = bringRows(ctx, p.pool, found.Ids, at, bring)
		} else if err = bring([]message{{kind: kindKeepalive, at: at}}); err == nil {
			sleep(ctx, p.every)
		}
		if err != nil {
			return fmt.Errorf("read new events: %w", err)
		}
	}
}

// remember takes in a round. Of empty ones in a row the last says it all.
func (p *poller) remember(r round) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if n := len(p.rounds); r.empty && n > 0 && p.rounds[n-1].empty {
		p.rounds[n-1] = r
		return
	}
	p.rounds = append(p.rounds, r)
}

// delivered is the last round that is wholly delivered.
func (p *poller) delivered(confirmable position) (last round, ok bool) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	for len(p.rounds) > 0 && p.rounds[0].at <= confirmable {
		last, ok = p.rounds[0], true
		p.rounds = p.rounds[1:]
	}
	if ok { // until it is recorded
		p.rounds = append([]round{last}, p.rounds...)
	}
	return last, ok
}

func (p *poller) confirm(ctx context.Context, now summary, urgent, _ bool) (moved bool, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeTimeout)
	defer cancel()
	last, ok := p.delivered(now.confirmable)
	news := now.delivered > p.recorded.events
	if !ok || !news && !urgent && time.Since(p.recorded.at) < idleRecord {
		return false, p.turn.Ping(ctx)
	}
	crash.Point(crash.RelayAckedNotConfirmed)
	err = db.New().RelaySnapshotStore(ctx, p.turn, db.RelaySnapshotStoreParams{
		SlotName: p.slot,
		SystemID: p.server.SystemID,
		Timeline: p.server.Timeline,
		Snapshot: last.snapshot,
	})
	if err != nil {
		return false, fmt.Errorf("record what is delivered: %w", err)
	}
	p.recorded.at, p.recorded.events = time.Now(), now.delivered
	return true, nil
}

func (p *poller) lag(summary) float64 { return 0 }

func (p *poller) close(context.Context) {}

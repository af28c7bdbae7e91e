package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/postgres"
)

// TakeTurn makes this connection the one that may carry the outbox, or reports
// that another is. wal's slot belongs to the same connection as the lock, so
// whoever loses one loses both; the lock also covers the time in which a slot is
// made.
func TakeTurn(ctx context.Context, conn *pgconn.PgConn, slot string) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	// A pooler's connection is the next one's after each statement, and the lock
	// with it. A pooler gives process ids of its own.
	results, err := conn.Exec(ctx, fmt.Sprintf("SELECT CASE WHEN pg_backend_pid() = %d "+
		"THEN pg_try_advisory_lock(hashtextextended('onceledger.relay.%s', 0)) END", conn.PID(), slot)).ReadAll()
	if err != nil {
		return false, fmt.Errorf("take the relay's lock: %w", err)
	}
	answer := results[0].Rows[0][0]
	if answer == nil {
		return false, setupErrorf("a pooler stands between the relay and Postgres: give it Postgres' own address")
	}
	return string(answer) == "t", nil
}

// EndTurn gives back what TakeTurn took.
func EndTurn(ctx context.Context, conn *pgconn.PgConn, slot string) error {
	_, err := conn.Exec(ctx, "SELECT pg_advisory_unlock(hashtextextended('onceledger.relay."+slot+"', 0))").ReadAll()
	if err != nil {
		return fmt.Errorf("give back the relay's lock: %w", err)
	}
	return nil
}

// answerTimeout bounds the wait for a server that may have vanished without a
// word.
const answerTimeout = 5 * time.Second

// connectForReplication makes the connection that the log is read from. A relay
// that hangs loses it, and with it the slot, after wal_sender_timeout.
func connectForReplication(ctx context.Context, url string) (*pgconn.PgConn, error) {
	config, err := pgconn.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("read database address: %w", err)
	}
	config.RuntimeParams["replication"] = "database"
	config.RuntimeParams["application_name"] = "onceledger-relay"
	config.RuntimeParams["wal_sender_timeout"] = "5s"
	// The same where it has the turn and does not read yet.
	config.RuntimeParams["idle_session_timeout"] = "5s"
	config.RuntimeParams["idle_in_transaction_session_timeout"] = "5s"
	config.RuntimeParams["timezone"] = "UTC"
	config.RuntimeParams["datestyle"] = "ISO"
	if config.ConnectTimeout == 0 {
		config.ConnectTimeout = answerTimeout
	}
	conn, err := pgconn.ConnectConfig(ctx, config)
	if postgres.Code(err) == "42501" {
		return nil, mayNotRead(config.User)
	}
	if err != nil {
		return nil, fmt.Errorf("connect for replication: %w", err)
	}
	return conn, nil
}

func mayNotRead(login string) error {
	return setupErrorf("the login %s may not read the log: give it REPLICATION (ALTER ROLE), or have the table polled: "+
		"onceledger relay switch --to poll", login)
}

// hangUpOrderly gives slot and lock back, and waits a little until Postgres has them:
// the next relay need not try twice.
func hangUpOrderly(ctx context.Context, conn *pgconn.PgConn) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_ = conn.Conn().SetReadDeadline(time.Time{})
	conn.Frontend().Send(&pgproto3.Terminate{})
	for err := conn.Frontend().Flush(); err == nil; {
		_, err = conn.ReceiveMessage(ctx)
	}
	_ = conn.Close(ctx)
}

// openLog begins to stream. Where the slot is missing, lost or not the one
// that the relay left off at, it makes a new one, and the rows that this one
// will not bring come first.
func (r *Relay) openLog(ctx context.Context, conn *pgconn.PgConn, pool *pgxpool.Pool) (*logReader, error) {
	slot, publication := r.config.Slot, r.config.Publication
	system, err := pglogrepl.IdentifySystem(ctx, conn)
	if err != nil {
		return nil, fmt.Errorf("identify the server: %w", err)
	}
	setup, err := lookUpSetup(ctx, pool, slot, publication)
	if err != nil {
		return nil, err
	}
	record, err := db.New().RelayPositionGet(ctx, pool, slot)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return nil, fmt.Errorf("read the relay's record: %w", err)
	}

	l := &logReader{
		conn:      conn,
		pool:      pool,
		looked:    time.Now(),
		keptEvery: r.config.KeptEvery,
		decoder:   decoder{relations: make(map[uint32][]column)},
		gap:       findGap(system, setup, record),
		mark: mark{position: db.RelayPositionStoreParams{
			SlotName:       slot,
			SystemID:       system.SystemID,
			Timeline:       system.Timeline,
			PublicationOid: setup.PublicationOid,
			Lsn:            record.Lsn,
			SnapshotXmin:   record.SnapshotXmin,
		}},
	}
	if l.gap != nil {
		r.announce(ctx, l.gap)
		if err := l.makeSlot(ctx, setup.SlotExists); err != nil {
			l.close(ctx)
			return nil, err
		}
	}
	// From 0/0 is from what is confirmed. Never from a position of our own:
	// Postgres would leave out what is before it.
	err = pglogrepl.StartReplication(ctx, conn, slot, 0, pglogrepl.StartReplicationOptions{
		PluginArgs: []string{"proto_version '1'", "publication_names '" + publication + "'"},
	})
	if err != nil {
		l.close(ctx)
		return nil, fmt.Errorf("start replication: %w", err)
	}
	return l, nil
}

// firstStart is the reason that is no fault.
const firstStart = "there is no record of an earlier relay"

// announce says what comes from the table, and later how much it was.
func (r *Relay) announce(ctx context.Context, gap *gap) {
	level := slog.LevelWarn
	if gap.reason == firstStart {
		level = slog.LevelInfo
	}
	r.metrics.gaps.Inc()
	r.config.Log.Log(ctx, level,
		"relay: making a slot, which waits for open transactions; what it will not bring comes from the table",
		"reason", gap.reason, "since_xid", gap.since)
	gap.done = func(events int) {
		r.metrics.resent.Add(float64(events))
		r.config.Log.Log(ctx, level, "relay: the table is read, going on with the log", "events", events)
	}
}

// close lets go of the gap's snapshot, if it is still held.
func (l *logReader) close(ctx context.Context) {
	if l.gap != nil && l.gap.snapshot != nil {
		_ = l.gap.snapshot.Rollback(context.WithoutCancel(ctx))
	}
}

const makePublication = "CREATE PUBLICATION " + DefaultPublication + " FOR TABLE outbox_events " +
	"WITH (publish = 'insert', publish_via_partition_root = true)"

// CheckLog says why the log cannot be read, and what to do; nil if it can.
func CheckLog(ctx context.Context, conn db.DBTX, slot, publication string) error {
	_, err := lookUpSetup(ctx, conn, slot, publication)
	return err
}

func lookUpSetup(ctx context.Context, conn db.DBTX, slot, publication string) (db.RelaySetupRow, error) {
	setup, err := db.New().RelaySetup(ctx, conn, publication, slot)
	if err != nil {
		return setup, fmt.Errorf("look up publication and slot: %w", err)
	}
	switch {
	case setup.WalLevel != "logical":
		return setup, setupErrorf("wal_level is %s: set it to logical and restart Postgres, or have the table polled: onceledger relay switch --to poll", setup.WalLevel)
	case !setup.MayReplicate:
		return setup, mayNotRead(setup.Login)
	case setup.PublicationOid == 0:
		return setup, setupErrorf("there is no publication %s: run the migrations, or make it again with %s", publication, makePublication)
	case !setup.PublicationFits:
		return setup, setupErrorf("publication %s is not what the relay needs: drop it and make it with %s", publication, makePublication)
	case setup.SlotExists && !setup.SlotFits:
		return setup, setupErrorf("slot %s is not a pgoutput slot of this database: drop it, or give the relay another name", slot)
	}
	return setup, nil
}

// findGap compares the relay's own record with the server and the slot. The
// relay writes its record before it confirms to the slot, so a slot that is
// ahead of the record has lost or skipped events: somebody made it anew.
func findGap(system pglogrepl.IdentifySystemResult, setup db.RelaySetupRow, record db.RelayPosition) *gap {
	switch {
	case record.SlotName == "":
		return &gap{reason: firstStart}
	case record.SystemID != system.SystemID:
		return &gap{reason: "this is another database server than last time"}
	case record.Timeline != system.Timeline:
		return &gap{reason: "the server was restored or failed over since last time"}
	case record.Lsn > system.XLogPos:
		return &gap{reason: "the server's log has gone back since last time"}
	case !setup.SlotExists:
		return &gap{reason: "the slot is gone", since: record.SnapshotXmin}
	case setup.SlotLost:
		return &gap{reason: "the slot was invalidated", since: record.SnapshotXmin}
	case record.PublicationOid != setup.PublicationOid:
		return &gap{reason: "the publication was made anew", since: record.SnapshotXmin}
	case setup.SlotConfirmed > record.Lsn:
		return &gap{reason: "the slot was made anew or moved", since: record.SnapshotXmin}
	}
	return nil
}

// makeSlot makes the slot and takes hold of the snapshot that goes with it.
// Until the relay's record is stored for it, each start finds the gap again.
func (l *logReader) makeSlot(ctx context.Context, replace bool) error {
	slot, pool := l.mark.position.SlotName, l.pool
	if l.gap.since == 0 {
		if err := db.New().RelayPositionForget(ctx, pool, slot); err != nil {
			return fmt.Errorf("forget the relay's record: %w", err)
		}
	}
	if replace {
		err := pglogrepl.DropReplicationSlot(ctx, l.conn, slot, pglogrepl.DropReplicationSlotOptions{})
		if err != nil {
			return fmt.Errorf("drop the slot: %w", err)
		}
	}
	// This waits for the transactions that are open now.
	created, err := pglogrepl.CreateReplicationSlot(ctx, l.conn, slot, "pgoutput",
		pglogrepl.CreateReplicationSlotOptions{SnapshotAction: "EXPORT_SNAPSHOT"})
	if err != nil {
		return fmt.Errorf("make the slot: %w", err)
	}
	if l.gap.end, err = pglogrepl.ParseLSN(created.ConsistentPoint); err != nil {
		return fmt.Errorf("make the slot: %w", err)
	}
	l.gap.pool = pool
	l.gap.snapshot, err = pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	if _, err := l.gap.snapshot.Exec(ctx, "SET TRANSACTION SNAPSHOT '"+created.SnapshotName+"'"); err != nil {
		return fmt.Errorf("take the slot's snapshot: %w", err)
	}
	xmin, err := db.New().SnapshotXmin(ctx, l.gap.snapshot)
	if err != nil {
		return fmt.Errorf("read the slot's snapshot: %w", err)
	}
	l.mark.position.Lsn = 0
	l.mark.next = milestone{xmin: xmin, lsn: l.gap.end}
	return nil
}

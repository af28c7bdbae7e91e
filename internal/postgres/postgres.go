// Package postgres opens connection pools, runs transactions and reads Postgres'
// error codes. It knows no table.
package postgres

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	pgxuuid "github.com/vgarvardt/pgx-google-uuid/v5"
)

// Options are the limits of a pool's connections. Each bounds how long a fault
// elsewhere can hold this process, so each has a value that is not "for ever".
type Options struct {
	ApplicationName    string        // shown in pg_stat_activity
	MaxConns           int32         // at most this many connections
	TransactionTimeout time.Duration // a transaction is ended after it
	LockTimeout        time.Duration // waiting for one lock; 0 is only the transaction's limit
	Direct             bool          // no pooler may stand between: locks of the session are taken

	Wrap func(net.Conn) net.Conn // stands between pgx and the network; nil for nothing
}

var errAddress = errors.New("read database address: it is not of the form " +
	"postgres://user:password@host:5432/name?option=value with special characters of the password percent-encoded")

// Open makes a pool and asks the server once, so that a wrong address or
// password is an error now and not at the first request.
func Open(ctx context.Context, url string, options Options) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, errAddress // err quotes the address, and of a malformed one the password too
	}
	if options.MaxConns > 0 {
		config.MaxConns = options.MaxConns
	}
	milliseconds := func(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }
	params := config.ConnConfig.RuntimeParams
	params["application_name"] = options.ApplicationName
	params["timezone"] = "UTC"
	params["idle_in_transaction_session_timeout"] = "10000"
	params["transaction_timeout"] = milliseconds(options.TransactionTimeout)
	params["lock_timeout"] = milliseconds(options.LockTimeout)

	// Without this each UUID goes through text, which is most of what encoding
	// a batch's parameters costs.
	config.AfterConnect = func(_ context.Context, conn *pgx.Conn) error {
		pgxuuid.Register(conn.TypeMap())
		return nil
	}

	if options.Wrap != nil {
		dial := config.ConnConfig.DialFunc
		config.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := dial(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return options.Wrap(conn), nil
		}
	}

	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	if err := pool.Ping(ctx); err != nil {
		pool.Close()
		return nil, fmt.Errorf("reach database: %w", refusedByPooler(err))
	}
	if pooled, err := behindPooler(ctx, pool); !pooled || err != nil {
		if err != nil {
			pool.Close()
			return nil, err
		}
		return pool, nil
	}
	defer pool.Close()
	return poolThroughPooler(ctx, pool, options)
}

// Beginner begins transactions: a pool or a connection.
type Beginner interface {
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

// maxAttempts bounds how often InTx runs a transaction that loses to others.
// With full jitter, hundreds of writers on one row come through in a few.
const maxAttempts = 12

// InTx runs fn in a transaction: commit when it returns nil, roll back when it
// returns an error or panics.
//
// A transaction that Postgres aborts for a serialization failure or a deadlock
// is run again from the start, so fn must change nothing but the database: no
// Kafka, no HTTP, no appending to a slice it did not make.
//
// An error from the commit itself can mean "unknown": the connection broke and
// the commit may have happened. It is never retried here; the caller finds out
// by doing the same again under the same idempotency key or event id.
func InTx(ctx context.Context, conn Beginner, fn func(tx pgx.Tx) error) error {
	return InTxOptions(ctx, conn, pgx.TxOptions{}, fn)
}

// InTxOptions is InTx with another isolation level or begin statement.
func InTxOptions(ctx context.Context, conn Beginner, options pgx.TxOptions, fn func(tx pgx.Tx) error) error {
	for attempt := 1; ; attempt++ {
		err := once(ctx, conn, options, fn)
		if err == nil || !LostToAnother(err) || attempt == maxAttempts {
			return err
		}
		pause := time.Duration(rand.Int64N(int64(2*time.Millisecond) << min(attempt, 7)))
		select {
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-time.After(pause):
		}
	}
}

func once(ctx context.Context, conn Beginner, options pgx.TxOptions, fn func(tx pgx.Tx) error) error {
	tx, err := conn.BeginTx(ctx, options)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	// With the caller's ctx a cancelled request would cost the connection.
	// After a commit this does nothing.
	defer func() {
		cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		_ = tx.Rollback(cleanup)
	}()

	if err := fn(tx); err != nil {
		return err
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}

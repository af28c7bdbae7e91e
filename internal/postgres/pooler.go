package postgres

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Between this process and Postgres may stand a pooler that gives each transaction
// another of its server connections (PgBouncer's transaction mode). What belongs
// to a connection is then lost or somebody else's: prepared statements, settings,
// locks of the session. So none of it is used there: statements are described and
// not prepared, settings are the login's, and who needs a lock of the session is
// refused.

// ErrPooled is a connection that is a pooler's, where one to Postgres itself is
// needed.
var ErrPooled = errors.New("a pooler stands between this process and Postgres")

// poolerSettings are those that a pooler does not pass on.
var poolerSettings = []string{"idle_in_transaction_session_timeout", "transaction_timeout", "lock_timeout"}

// behindPooler finds out whether another than Postgres answers: a pooler gives its
// clients process ids of its own. The question prepares nothing.
func behindPooler(ctx context.Context, pool *pgxpool.Pool) (bool, error) {
	var pooled bool
	err := pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error {
		return conn.QueryRow(ctx, "SELECT pg_backend_pid() <> $1::bigint", pgx.QueryExecModeSimpleProtocol,
			int64(conn.Conn().PgConn().PID())).Scan(&pooled)
	})
	if err != nil {
		return false, fmt.Errorf("reach database: %w", err)
	}
	return pooled, nil
}

// poolThroughPooler opens the pool in the way that suits a pooler. Limits that it
// keeps from being set have to be the login's, or nothing would bound a hang.
func poolThroughPooler(ctx context.Context, pool *pgxpool.Pool, options Options) (*pgxpool.Pool, error) {
	if options.Direct {
		return nil, fmt.Errorf("%w: what this login does needs a connection of its own, give it Postgres' own address", ErrPooled)
	}
	var unset []string
	for _, name := range poolerSettings {
		if name == "transaction_timeout" && options.TransactionTimeout == 0 || name == "lock_timeout" && options.LockTimeout == 0 {
			continue
		}
		var value string
		if err := pool.QueryRow(ctx, "SELECT current_setting($1)", pgx.QueryExecModeSimpleProtocol, name).Scan(&value); err != nil {
			return nil, fmt.Errorf("reach database: %w", err)
		}
		if value == "0" {
			unset = append(unset, name)
		}
	}
	if len(unset) > 0 {
		return nil, fmt.Errorf("%w, and keeps %s from being set: give them to the login with ALTER ROLE … SET (docs/configuration.md)",
			ErrPooled, strings.Join(unset, ", "))
	}
	config := pool.Config()
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
	described, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("open database: %w", err)
	}
	return described, nil
}

// refusedByPooler adds what to do to the error of a pooler that does not know our
// settings.
func refusedByPooler(err error) error {
	if Code(err) != "08P01" {
		return err
	}
	return fmt.Errorf("%w: have the pooler ignore these settings (PgBouncer: ignore_startup_parameters = %s) and give them to the login with ALTER ROLE … SET",
		err, strings.Join(poolerSettings, ","))
}

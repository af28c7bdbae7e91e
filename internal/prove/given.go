package prove

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/twmb/franz-go/pkg/kgo"
)

// checkGiven looks at services that run already, before anything there is touched.
func (o Options) checkGiven(ctx context.Context) error {
	if o.DatabaseURL == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	return errors.Join(o.checkDatabase(ctx), o.checkBrokers(ctx))
}

func (o Options) checkBrokers(ctx context.Context) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(o.KafkaBrokers, ",")...), kgo.DialTimeout(3*time.Second), kgo.RequestRetries(1))
	if err != nil {
		return fmt.Errorf("--kafka-brokers: want host:port, separated by commas: %w", err)
	}
	defer client.Close()
	pingCtx, cancel := context.WithTimeout(ctx, 8*time.Second)
	defer cancel()
	if err := client.Ping(pingCtx); err != nil {
		return fmt.Errorf("no Kafka broker answers at %s (--kafka-brokers): is the stack running? %w", o.KafkaBrokers, err)
	}
	return nil
}

func (o Options) checkDatabase(ctx context.Context) error {
	config, err := pgx.ParseConfig(o.DatabaseURL)
	if err != nil {
		return errors.New("--database: want postgres://user:password@host:5432/name") // what err quotes may be a password
	}
	config.ConnectTimeout = 5 * time.Second
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return fmt.Errorf("the database %s at %s:%d does not answer (--database): is the stack running? %w", config.Database, config.Host, config.Port, err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if err := checkTenants(ctx, conn, o.OnRealData); err != nil {
		return err
	}
	rows, err := conn.Query(ctx, `
		SELECT DISTINCT application_name FROM pg_stat_activity
		WHERE datname = current_database() AND application_name LIKE 'onceledger-%' AND application_name <> 'onceledger-prove'`)
	if err != nil {
		return fmt.Errorf("look for what is connected to the database: %w", err)
	}
	programs, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("look for what is connected to the database: %w", err)
	}
	if len(programs) > 0 {
		return fmt.Errorf("a onceledger is at work on this database (%s): stop its api and worker, for prove starts its own and kills them", strings.Join(programs, ", "))
	}
	return nil
}

// checkTenants refuses a database in which somebody keeps something.
func checkTenants(ctx context.Context, conn *pgx.Conn, allowed bool) error {
	rows, err := conn.Query(ctx, "SELECT name FROM tenants WHERE name !~ '^prove-[0-9]+-[a-z]$' ORDER BY name")
	var names []string
	if err == nil {
		names, err = pgx.CollectRows(rows, pgx.RowTo[string])
	}
	if fault, ok := errors.AsType[*pgconn.PgError](err); ok && fault.Code == "42P01" { // there is no such table yet
		return nil
	}
	if err != nil {
		return fmt.Errorf("look for tenants in the database: %w", err)
	}
	if len(names) == 0 || allowed {
		return nil
	}
	return fmt.Errorf("the database holds the data of %d tenants that are not prove's (%s): nothing was done. prove puts orders into it and kills what works on it; "+
		"use an empty database, or say --on-real-data if that is what you want", len(names), strings.Join(names[:min(3, len(names))], ", "))
}

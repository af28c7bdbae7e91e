package faults

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// EndSessions ends the sessions of a program, by the name that it gives Postgres
// (application_name), and says how many there were. Only those that match where,
// a condition on pg_stat_activity such as "state <> 'idle'"; "" is all.
func EndSessions(ctx context.Context, owner *pgxpool.Pool, application, where string) (int, error) {
	if where == "" {
		where = "true"
	}
	var ended int
	err := owner.QueryRow(ctx, `
		SELECT count(*) FILTER (WHERE pg_terminate_backend(pid))
		FROM pg_stat_activity
		WHERE application_name = $1 AND pid <> pg_backend_pid() AND (`+where+`)`, application).Scan(&ended)
	if err != nil {
		return 0, fmt.Errorf("end the sessions of %s: %w", application, err)
	}
	return ended, nil
}

// Connections are sessions that are held so that nobody else gets one.
type Connections struct{ held []*pgx.Conn }

// Held is how many there are.
func (c *Connections) Held() int { return len(c.held) }

// Release lets go of them.
func (c *Connections) Release(ctx context.Context) {
	for _, conn := range c.held {
		_ = conn.Close(ctx)
	}
	c.held = nil
}

// Fill takes connections until the server refuses one for having no more, or
// until there are as many as most.
func (c *Connections) Fill(ctx context.Context, url string, most int) error {
	for len(c.held) < most {
		conn, err := pgx.Connect(ctx, url)
		if refused, ok := errors.AsType[*pgconn.PgError](err); ok && refused.Code == "53300" {
			return nil
		}
		if err != nil {
			return fmt.Errorf("take the connections of the server: %w", err)
		}
		c.held = append(c.held, conn)
	}
	return fmt.Errorf("the server has more than %d connections to give", most)
}

// Raiser has a table refuse writes with an error of its own, now and then.
type Raiser struct {
	owner *pgxpool.Pool
	table string
	name  string
}

// Raise has one in so many inserts into a table fail with a SQLSTATE, at random,
// as if the transaction had lost to another: "40001" or "40P01".
//
// How often it struck is counted by a sequence, which a rollback leaves as it is.
// Nobody but the owner is given anything: the trigger runs as its owner.
func Raise(ctx context.Context, owner *pgxpool.Pool, table, sqlstate string, oneIn int) (*Raiser, error) {
	r := &Raiser{owner: owner, table: table, name: "fault_" + strings.ToLower(sqlstate)}
	if len(sqlstate) != 5 || strings.ContainsFunc(sqlstate, func(c rune) bool { return (c < '0' || c > '9') && (c < 'A' || c > 'Z') }) {
		return nil, fmt.Errorf("%q is no SQLSTATE", sqlstate)
	}
	_, err := owner.Exec(ctx, fmt.Sprintf(`
		BEGIN;
		SET LOCAL lock_timeout = '10s';
		DROP SCHEMA IF EXISTS %[1]s CASCADE;
		CREATE SCHEMA %[1]s;
		CREATE SEQUENCE %[1]s.struck MINVALUE 0 START 0;
		SELECT nextval('%[1]s.struck');
		CREATE FUNCTION %[1]s.raise() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
			SET search_path = pg_catalog, pg_temp AS $$
		BEGIN
			IF random() * %[3]d < 1 THEN
				PERFORM nextval('%[1]s.struck');
				RAISE EXCEPTION 'lost to another, by order' USING ERRCODE = '%[4]s';
			END IF;
			RETURN NULL;
		END $$;
		CREATE TRIGGER %[1]s AFTER INSERT ON public.%[2]s FOR EACH STATEMENT EXECUTE FUNCTION %[1]s.raise();
		COMMIT`, r.name, pgx.Identifier{table}.Sanitize(), max(1, oneIn), sqlstate))
	if err != nil {
		return nil, fmt.Errorf("have %s raise %s: %w", table, sqlstate, err)
	}
	return r, nil
}

// Struck is how often it has raised its error.
func (r *Raiser) Struck(ctx context.Context) (times int, err error) {
	err = r.owner.QueryRow(ctx, "SELECT last_value FROM "+r.name+".struck").Scan(&times)
	return times, err
}

// Remove takes it away.
func (r *Raiser) Remove(ctx context.Context) error {
	_, err := r.owner.Exec(ctx, fmt.Sprintf(`
		BEGIN;
		DROP TRIGGER IF EXISTS %[1]s ON public.%[2]s;
		DROP SCHEMA IF EXISTS %[1]s CASCADE;
		COMMIT`, r.name, pgx.Identifier{r.table}.Sanitize()))
	if err != nil {
		return fmt.Errorf("have %s raise nothing any more: %w", r.table, err)
	}
	return nil
}

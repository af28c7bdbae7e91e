package lab

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// byVersion lets a row only go forward, in one statement: duplicates and late old versions change nothing.
const byVersion = `
	INSERT INTO order_view AS mine (order_name, version, status) VALUES ($1, $2, $3)
	ON CONFLICT (order_name) DO UPDATE SET version = excluded.version, status = excluded.status
	WHERE mine.version < excluded.version`

// byTime is the same guard with a clock in the place of the version.
const byTime = `
	INSERT INTO order_view_by_time AS mine (order_name, updated_at, status) VALUES ($1, $2, $3)
	ON CONFLICT (order_name) DO UPDATE SET updated_at = excluded.updated_at, status = excluded.status
	WHERE mine.updated_at < excluded.updated_at`

func runVersionGuard(ctx context.Context, r *room) error {
	if err := r.exec(ctx, `
		CREATE TABLE order_view (order_name text PRIMARY KEY, version bigint NOT NULL, status text NOT NULL);
		CREATE TABLE order_view_by_time (order_name text PRIMARY KEY, updated_at timestamptz(3) NOT NULL, status text NOT NULL);
		CREATE TABLE orders (order_name text PRIMARY KEY, version bigint NOT NULL, updated_at timestamptz(3) NOT NULL, status text NOT NULL)`); err != nil {
		return err
	}
	r.part("one statement: ON CONFLICT DO UPDATE … WHERE mine.version < excluded.version")
	for _, arrival := range []struct {
		version int
		status  string
		what    string
	}{
		{5, "paid", "version 5 arrives"},
		{3, "created", "version 3 arrives late"},
		{5, "paid", "version 5 arrives again"},
	} {
		tag, err := r.db.Exec(ctx, byVersion, "order-1", arrival.version, arrival.status)
		if err != nil {
			return fmt.Errorf("upsert: %w", err)
		}
		r.line("%-26s %s", arrival.what, tag)
	}
	if err := r.query(ctx, `SELECT order_name AS "order", version, status FROM order_view`); err != nil {
		return err
	}

	r.part("the same guard, with updated_at in milliseconds in the place of the version")
	updates, tries, err := r.twoUpdatesInOneMillisecond(ctx)
	if err != nil {
		return err
	}
	r.beside("two updates fell into one millisecond at try %d", tries)
	r.step("an order is paid and cancelled at once; both updates carry updated_at and the order's next version")
	for _, update := range updates {
		tag, err := r.db.Exec(ctx, byTime, "order-2", update.at, update.status)
		if err != nil {
			return fmt.Errorf("upsert by time: %w", err)
		}
		r.line("by time,    %s %-10s %s", update.at.Format("15:04:05.000"), update.status, tag)
	}
	for _, update := range updates {
		tag, err := r.db.Exec(ctx, byVersion, "order-2", update.version, update.status)
		if err != nil {
			return fmt.Errorf("upsert by version: %w", err)
		}
		r.line("by version, %-12d %-10s %s", update.version, update.status, tag)
	}
	if err := r.query(ctx, `
		SELECT truth.status AS "the order is", by_time.status AS "by time", by_version.status AS "by version"
		FROM orders AS truth JOIN order_view_by_time AS by_time USING (order_name) JOIN order_view AS by_version USING (order_name)
		WHERE order_name = 'order-2'`); err != nil {
		return err
	}
	r.why("a guard needs a number that is another for each change; a version that is counted under the row's lock is " +
		"one, and a clock that two changes can read in the same millisecond is not: the second change is taken for a duplicate.")
	return nil
}

type update struct {
	version int
	at      time.Time
	status  string
}

// twoUpdatesInOneMillisecond changes an order twice, one update right behind the other, until the clock shows both
// the same millisecond: usually at the first try.
func (r *room) twoUpdatesInOneMillisecond(ctx context.Context) (updates [2]update, tries int, err error) {
	for tries = 1; tries <= 1000; tries++ {
		err := r.exec(ctx, `INSERT INTO orders VALUES ('order-2', 1, clock_timestamp(), 'created')
			ON CONFLICT (order_name) DO UPDATE SET version = 1, updated_at = clock_timestamp(), status = 'created'`)
		if err != nil {
			return updates, tries, err
		}
		for i, status := range []string{"paid", "cancelled"} {
			updates[i].status = status
			err := r.db.QueryRow(ctx, `
				UPDATE orders SET version = version + 1, updated_at = date_trunc('milliseconds', clock_timestamp()), status = $1
				WHERE order_name = 'order-2' RETURNING version, updated_at`, status).Scan(&updates[i].version, &updates[i].at)
			if err != nil {
				return updates, tries, fmt.Errorf("update order: %w", err)
			}
		}
		if updates[0].at.Equal(updates[1].at) {
			return updates, tries, nil
		}
	}
	return updates, tries, errors.New("two updates never fell into one millisecond")
}

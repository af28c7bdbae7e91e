package lab

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/postgres"
)

// markThenWork has the mark and the work in two transactions, the mark first.
func markThenWork(ctx context.Context, c *consumer, record *kgo.Record) error {
	isNew, err := markTx(ctx, c.db, c.Group, idOf(record)) // WRONG: commits by itself
	if err != nil {
		return err
	}
	if !isNew {
		c.say("%s: duplicate, skipped", orderOf(record))
		return c.commitOffset(ctx, record)
	}
	c.say("%s: mark committed", orderOf(record))

	c.crashPoint(record) // marked, not done: lost

	if err := insertInvoice(ctx, c.db, c.Way, orderOf(record)); err != nil {
		return err
	}
	c.say("%s: invoice committed", orderOf(record))
	return c.commitOffset(ctx, record)
}

// workThenMark has the two transactions the other way round.
func workThenMark(ctx context.Context, c *consumer, record *kgo.Record) error {
	var marked bool
	if err := c.db.QueryRow(ctx, "SELECT EXISTS (SELECT FROM marks WHERE consumer = $1 AND event_id = $2)", c.Group, idOf(record)).Scan(&marked); err != nil {
		return err
	}
	if marked {
		c.say("%s: duplicate, skipped", orderOf(record))
		return c.commitOffset(ctx, record)
	}
	if err := insertInvoice(ctx, c.db, c.Way, orderOf(record)); err != nil {
		return err
	}
	c.say("%s: invoice committed", orderOf(record))

	c.crashPoint(record) // done, not marked: twice

	if _, err := markTx(ctx, c.db, c.Group, idOf(record)); err != nil { // WRONG: commits by itself
		return err
	}
	c.say("%s: mark committed", orderOf(record))
	return c.commitOffset(ctx, record)
}

// ttl is how long the filter in Redis remembers an event.
const ttl = time.Hour

// filter is the Redis that the consumer was given. Its connections end with the process.
func (c *consumer) filter() *redis.Client { return redis.NewClient(&redis.Options{Addr: c.Redis}) }

// redisFirst claims the event in Redis and then does the work.
func redisFirst(ctx context.Context, c *consumer, record *kgo.Record) error {
	filter := c.filter()
	reply, err := filter.SetArgs(ctx, idOf(record), "1", redis.SetArgs{Mode: "NX", TTL: ttl}).Result() // WRONG: says "done" before it is
	if errors.Is(err, redis.Nil) {
		c.say("%s: SET NX: nil, so it is a duplicate, skipped", orderOf(record))
		return c.commitOffset(ctx, record)
	}
	if err != nil {
		return fmt.Errorf("ask the filter: %w", err)
	}
	c.say("%s: SET NX: %s", orderOf(record), reply)
	if err := insertInvoice(ctx, c.db, c.Way, orderOf(record)); err != nil {
		return err // the record comes again, and Redis says that it was done
	}
	c.say("%s: invoice committed", orderOf(record))
	return c.commitOffset(ctx, record)
}

// redisAlone marks the event in Redis when the work is done, and trusts it.
func redisAlone(ctx context.Context, c *consumer, record *kgo.Record) error {
	filter := c.filter()
	known, err := filter.Exists(ctx, idOf(record)).Result()
	if err != nil {
		return fmt.Errorf("ask the filter: %w", err)
	}
	if known == 1 { // WRONG as soon as Redis has forgotten, which is what a TTL is for
		c.say("%s: known to Redis: duplicate, skipped", orderOf(record))
		return c.commitOffset(ctx, record)
	}
	if err := insertInvoice(ctx, c.db, c.Way, orderOf(record)); err != nil {
		return err
	}
	if err := filter.Set(ctx, idOf(record), "1", ttl).Err(); err != nil {
		return fmt.Errorf("tell the filter: %w", err)
	}
	c.say("%s: invoice committed, SET", orderOf(record))
	c.crashPoint(record)
	return c.commitOffset(ctx, record)
}

// redisInFront spares Postgres most duplicates, and has Postgres decide: the mark is in the work's transaction, and
// Redis is told after the commit.
func redisInFront(ctx context.Context, c *consumer, record *kgo.Record) error {
	filter := c.filter()
	if known, err := filter.Exists(ctx, idOf(record)).Result(); err == nil && known == 1 {
		c.say("%s: known to Redis: duplicate, skipped", orderOf(record))
		return c.commitOffset(ctx, record)
	}
	isNew := false
	err := postgres.InTx(ctx, c.db, func(tx pgx.Tx) error {
		var err error
		isNew, err = markTx(ctx, tx, c.Group, idOf(record)) // RIGHT: what Redis does not know, the index does
		if err != nil || !isNew {
			return err
		}
		return insertInvoice(ctx, tx, c.Way, orderOf(record))
	})
	if err != nil {
		return err // rolled back, and Redis knows nothing: the record comes again as new
	}
	if isNew {
		c.say("%s: mark and invoice committed", orderOf(record))
	} else {
		c.say("%s: unknown to Redis; INSERT 0 0: duplicate, skipped", orderOf(record))
	}
	if err := filter.Set(ctx, idOf(record), "1", ttl).Err(); err != nil {
		return fmt.Errorf("tell the filter: %w", err)
	}
	c.crashPoint(record)
	return c.commitOffset(ctx, record)
}

// refuseOnce has Postgres refuse the first invoice for order-2 of some ways. A sequence is not rolled back, so the
// second time is another.
const refuseOnce = `
	CREATE SEQUENCE refused_first; CREATE SEQUENCE refused_front;
	CREATE FUNCTION refuse_once() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, public, pg_temp AS $$
	BEGIN
	  IF NEW.order_name = 'order-2' AND (NEW.way = 'Redis: SET NX, then work' AND nextval('refused_first') = 1
	      OR NEW.way = 'Redis in front of the mark' AND nextval('refused_front') = 1) THEN
	    RAISE disk_full USING MESSAGE = 'no space left on device';
	  END IF;
	  RETURN NEW;
	END $$;
	CREATE TRIGGER refuse_once BEFORE INSERT ON order_invoices FOR EACH ROW EXECUTE FUNCTION refuse_once()`

func runSplitTransaction(ctx context.Context, r *room) error {
	if err := r.exec(ctx, invoicesTable+";"+marksTable+";"+refuseOnce); err != nil {
		return err
	}
	filter, err := miniredis.Run()
	if err != nil {
		return fmt.Errorf("start the Redis-protocol server: %w", err)
	}
	r.onClose(func(context.Context) { filter.Close() })
	if err := r.publishOrders(ctx, 3); err != nil {
		return err
	}
	forget := func(context.Context) error {
		filter.FastForward(2 * ttl)
		r.step("two hours later: the filter's TTL of one hour is over")
		return nil
	}

	r.part("the mark commits, then the work: killed between, at order-2")
	if err := r.crashAndRestart(ctx, spec{Role: "mark-then-work", Way: "mark, then work", CrashAt: 2, Until: 3}, nil); err != nil {
		return err
	}
	r.part("the work commits, then the mark: killed between, at order-2")
	if err := r.crashAndRestart(ctx, spec{Role: "work-then-mark", Way: "work, then mark", CrashAt: 2, Until: 3}, nil); err != nil {
		return err
	}
	r.part("Redis: SET NX, then the work, which fails once at order-2")
	if err := r.failAndRestart(ctx, spec{Role: "redis-first", Way: "Redis: SET NX, then work", Until: 3, Redis: filter.Addr()}); err != nil {
		return err
	}
	filter.FlushAll()
	r.part("Redis: the work, then SET with a TTL: killed before the offset at order-2, back when the TTL is over")
	if err := r.crashAndRestart(ctx, spec{Role: "redis-alone", Way: "Redis: work, then SET", CrashAt: 2, Until: 3, Redis: filter.Addr()}, forget); err != nil {
		return err
	}
	filter.FlushAll()
	r.part("Redis in front, the mark in the work's transaction behind it: all of these failures")
	behind := spec{Role: "redis-in-front", Way: "Redis in front of the mark", CrashAt: 3, Until: 3, Redis: filter.Addr()}
	if err := r.failAndRestart(ctx, spec{Role: behind.Role, Way: behind.Way, Until: 2, Redis: behind.Redis}); err != nil {
		return err
	}
	r.step("and now killed before the offset, at order-3")
	if err := r.crashAndRestart(ctx, behind, forget); err != nil {
		return err
	}

	if err := r.query(ctx, `
		SELECT way, count(*) FILTER (WHERE order_name = 'order-1') AS "order-1",
		       count(*) FILTER (WHERE order_name = 'order-2') AS "order-2", count(*) FILTER (WHERE order_name = 'order-3') AS "order-3"
		FROM order_invoices GROUP BY way ORDER BY min(id)`); err != nil {
		return err
	}
	r.why("a mark that commits apart from the work is wrong about it after a crash between the two, in the direction of " +
		"the order they have; Redis is always apart, so it may spare the database a question but never answer it. " +
		"(What SET NX before the work has lost no constraint behind it brings back: the record does not get there.)")
	return nil
}

// failAndRestart runs a consumer that ends with an error, and again until everything is read.
func (r *room) failAndRestart(ctx context.Context, s spec) error {
	s.Name = "A"
	first, err := r.start(ctx, s)
	if err != nil {
		return err
	}
	if err := first.ended(ctx); err != nil {
		return err
	}
	if first.process.Err() == nil {
		return errors.New("A was to fail, and did not")
	}
	r.step("A ended with an error: %s", first.errors())
	_, err = r.again(ctx, s)
	return err
}

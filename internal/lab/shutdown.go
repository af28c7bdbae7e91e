package lab

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/postgres"
)

const (
	batchSize   = 10
	deploys     = 4
	gracePeriod = time.Second
)

// The ways to deploy.
const (
	byKill  = "kill -9"
	byTerm  = "SIGTERM, drained"
	byGrace = "SIGTERM, one batch longer than the grace period"
	byInbox = "kill -9, with the product's inbox"
)

// batches applies batches, each in one transaction, and commits the offset after each. Told to stop (SIGTERM), it
// finishes what it has in hand.
func batches(ctx context.Context, c *consumer) error {
	apply := c.applyBatch // knows no duplicates
	if c.Way == byInbox {
		apply = inbox.New(inbox.Config{
			Consumer: c.Group, Pool: c.db, Handler: invoicing{c.Way}, Now: time.Now,
			Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry(),
		}).Process // RIGHT: each event once, however often it comes
	}
	inHand := context.WithoutCancel(ctx) // RIGHT: what is begun is finished
	for n := 1; ctx.Err() == nil; n++ {
		records, last, err := c.nextBatch(ctx)
		if err != nil {
			return err
		}
		if err := c.noteDeliveries(inHand, records); err != nil {
			return err
		}
		if err := apply(inHand, records); err != nil {
			return err
		}
		if n == c.HoldAt {
			c.say("batch of offsets %d to %d committed in Postgres, not yet in Kafka", records[0].Offset, last.Offset)
			<-ctx.Done() // the deploy comes here
			if c.Way == byGrace && c.CrashAt == n {
				select {} // the batch takes too long
			}
		}
		if err := c.commitOffset(inHand, last); err != nil {
			return err
		}
		if int(last.Offset)+1 >= c.Until {
			return nil
		}
		c.kafka.AllowRebalance()
	}
	c.say("told to stop: the batch's offset is committed")
	return nil
}

// applyBatch is the work without anything that would know what was done before.
func (c *consumer) applyBatch(ctx context.Context, records []event.Record) error {
	return postgres.InTx(ctx, c.db, func(tx pgx.Tx) error {
		for _, record := range records {
			if err := insertInvoice(ctx, tx, c.Way, string(record.Key)); err != nil {
				return err
			}
		}
		return nil
	})
}

// invoicing is the same work, called by the product's inbox with the events that were not applied before.
type invoicing struct{ way string }

func (i invoicing) Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	for _, e := range events {
		if err := insertInvoice(ctx, tx, i.way, e.AggregateID.String()); err != nil {
			return err
		}
	}
	return nil
}

// nextBatch waits for a whole batch, or for the last records.
func (c *consumer) nextBatch(ctx context.Context) (batch []event.Record, last *kgo.Record, err error) {
	for len(batch) < batchSize {
		fetches := c.kafka.PollRecords(ctx, batchSize-len(batch))
		if err := errors.Join(fetches.Err(), ctx.Err()); err != nil {
			return nil, nil, fmt.Errorf("read the topic: %w", err)
		}
		for _, record := range fetches.Records() {
			batch, last = append(batch, fromKafka(record)), record
		}
		if last != nil && int(last.Offset)+1 >= c.Until {
			break
		}
	}
	return batch, last, nil
}

// noteDeliveries counts what Kafka delivers, in a transaction of its own.
func (c *consumer) noteDeliveries(ctx context.Context, records []event.Record) error {
	var offsets []int64
	for _, record := range records {
		offsets = append(offsets, record.Offset)
	}
	_, err := c.db.Exec(ctx, `INSERT INTO deliveries (way, "offset") SELECT $1, unnest($2::bigint[])`, c.Way, offsets)
	return err
}

func runShutdown(ctx context.Context, r *room) error {
	const events = 100
	if err := r.migrate(ctx); err != nil {
		return err
	}
	if err := r.exec(ctx, invoicesTable+`;
		CREATE TABLE deliveries (id bigint GENERATED ALWAYS AS IDENTITY, way text, "offset" bigint)`); err != nil {
		return err
	}
	if err := r.topic(ctx, orderEvents, nil); err != nil {
		return err
	}
	for n := range events {
		if err := r.publish(ctx, orderEvents, paid(n+1)); err != nil {
			return err
		}
	}
	r.step("%d events on one partition, batches of %d; %d deploys, each in the second batch of the process, after its commit in Postgres", events, batchSize, deploys)
	for _, way := range []string{byKill, byTerm, byGrace, byInbox} {
		r.part(way)
		if err := r.deployed(ctx, way, events); err != nil {
			return err
		}
	}
	if err := r.query(ctx, `
		WITH delivered AS (SELECT way, min(id) AS at, count(*) - count(DISTINCT "offset") AS again FROM deliveries GROUP BY way),
		     invoiced AS (SELECT way, count(*) AS invoices, count(*) - count(DISTINCT order_name) AS twice FROM order_invoices GROUP BY way)
		SELECT way AS deploys, again AS "delivered again", invoices, twice AS "too many" FROM delivered JOIN invoiced USING (way) ORDER BY at`); err != nil {
		return err
	}
	r.why("draining makes repeats rare, since what is in hand gets its offset; it cannot make them stop, since nobody can " +
		"promise that a batch ends before the patience of whoever stops it; so repeats have to be harmless, and then it does " +
		"not matter how many there are.")
	return nil
}

// deployed runs one consumer after the other, each until the deploy, the last one to the end.
func (r *room) deployed(ctx context.Context, way string, events int) error {
	for n := range deploys + 1 {
		s := spec{Role: "batches", Way: way, Group: "shutdown-" + strings.Map(letters, way), Name: string(rune('A' + n)), Until: events}
		last := n == deploys
		tooLong := way == byGrace && n == 1
		if !last {
			s.HoldAt = 2
		}
		if tooLong {
			s.CrashAt = s.HoldAt
		}
		consumer, err := r.start(ctx, s)
		if err != nil {
			return err
		}
		if last {
			if err := consumer.finished(ctx); err != nil {
				return err
			}
			r.step("%s has read the rest", s.Name)
			continue
		}
		if err := consumer.waitLine(ctx, "not yet in Kafka"); err != nil {
			return err
		}
		if err := r.deploy(ctx, consumer, way, tooLong); err != nil {
			return err
		}
	}
	return nil
}

// deploy ends a consumer, as what deploys does it.
func (r *room) deploy(ctx context.Context, consumer *child, way string, tooLong bool) error {
	if way == byKill || way == byInbox {
		consumer.kill()
		return consumer.killed(ctx)
	}
	if err := consumer.signal(syscall.SIGTERM); err != nil {
		return err
	}
	if !tooLong {
		return consumer.finished(ctx)
	}
	select {
	case <-consumer.process.Done():
	case <-time.After(gracePeriod):
		r.step("the grace period of %s is over: kill -9", gracePeriod)
		consumer.kill()
	}
	return consumer.killed(ctx)
}

// letters is what a group may be called.
func letters(char rune) rune {
	if char >= 'a' && char <= 'z' || char >= 'A' && char <= 'Z' || char >= '0' && char <= '9' {
		return char
	}
	return '-'
}

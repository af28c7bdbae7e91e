package lab

import (
	"context"
	"crypto/sha256"
	"fmt"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/postgres"
)

// ids are the ways to name an event. Only the last one names the fact.
var ids = []struct {
	way string
	of  func(*kgo.Record) string
}{
	{"made at each send", func(r *kgo.Record) string { return headerOf(r, "message_id") }},                         // WRONG: sent twice, named twice
	{"topic, partition, offset", func(r *kgo.Record) string { return fmt.Sprint(r.Topic, r.Partition, r.Offset) }}, // WRONG: so is this
	{"hash of the payload", func(r *kgo.Record) string { return fmt.Sprintf("%x", sha256.Sum256(r.Value)) }},       // WRONG: two facts may read the same
	{"made in the outbox row", func(r *kgo.Record) string { return headerOf(r, event.HeaderID) }},                  // RIGHT: made once, with the fact
}

// resendingRelay publishes what is not marked as sent, row by row. Killed between Kafka's acknowledgement and its
// mark it sends the row again: every relay does.
func resendingRelay(ctx context.Context, c *consumer) error {
	rows, err := c.db.Query(ctx, "SELECT seq, event_id, payload FROM outbox WHERE NOT sent ORDER BY seq")
	if err != nil {
		return err
	}
	type row struct {
		Seq     int
		EventID uuid.UUID
		Payload string
	}
	unsent, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
	if err != nil {
		return fmt.Errorf("read the outbox: %w", err)
	}
	producer, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(c.Brokers, ",")...))
	if err != nil {
		return err
	}
	defer producer.Close()
	for _, row := range unsent {
		record := &kgo.Record{Topic: c.Topic, Value: []byte(row.Payload), Headers: []kgo.RecordHeader{
			{Key: event.HeaderID, Value: []byte(row.EventID.String())},
			{Key: "message_id", Value: []byte(uuid.NewString())}, // made anew for each send
		}}
		if err := producer.ProduceSync(ctx, record).FirstErr(); err != nil {
			return fmt.Errorf("publish: %w", err)
		}
		c.say("row %d: published, at offset %d", row.Seq, record.Offset)

		c.crashPointAt(row.Seq)

		if _, err := c.db.Exec(ctx, "UPDATE outbox SET sent = true WHERE seq = $1", row.Seq); err != nil {
			return fmt.Errorf("mark as sent: %w", err)
		}
	}
	return nil
}

// credit adds a top-up to its account, once for each id, whatever the id is.
func credit(ctx context.Context, c *consumer, record *kgo.Record) error {
	var id string
	for _, known := range ids {
		if known.way == c.Way {
			id = known.of(record)
		}
	}
	topUp, isNew := paymentOf(record), false
	err := postgres.InTx(ctx, c.db, func(tx pgx.Tx) error {
		var err error
		if isNew, err = markTx(ctx, tx, c.Group, id); err != nil || !isNew {
			return err
		}
		_, err = tx.Exec(ctx, "INSERT INTO credits (way, account, amount) VALUES ($1, $2, $3)", c.Way, topUp.Order, topUp.Amount)
		return err
	})
	if err != nil {
		return err
	}
	said := "credited"
	if !isNew {
		said = "duplicate, skipped"
	}
	c.say("offset %d, %s tops up %d: %s", record.Offset, topUp.Order, topUp.Amount, said)
	return c.commitOffset(ctx, record)
}

func runEventID(ctx context.Context, r *room) error {
	if err := r.exec(ctx, marksTable+`;
		CREATE TABLE outbox (seq int PRIMARY KEY, event_id uuid NOT NULL DEFAULT uuidv7(), payload text NOT NULL, sent boolean NOT NULL DEFAULT false);
		CREATE TABLE credits (id bigint GENERATED ALWAYS AS IDENTITY, way text, account text, amount bigint);
		INSERT INTO outbox (seq, payload) VALUES
		  (1, '{"order":"c-42","amount":5000}'), (2, '{"order":"c-42","amount":5000}'), (3, '{"order":"c-7","amount":2000}')`); err != nil {
		return err
	}
	if err := r.topic(ctx, "top-ups", nil); err != nil {
		return err
	}
	r.step("three facts in the outbox: c-42 tops up 5000, c-42 tops up 5000 again, c-7 tops up 2000")
	r.step("the relay publishes them; it is killed when row 3 is on the topic and not yet marked as sent")
	if err := r.crashAndRestart(ctx, spec{Role: "resending-relay", Topic: "top-ups", CrashAt: 3}, nil); err != nil {
		return err
	}
	r.step("four records for three facts; now one consumer for each way to name them")
	for i, id := range ids {
		r.part("the id is: " + id.way)
		consumer, err := r.start(ctx, spec{Role: "credit", Way: id.way, Name: string(rune('C' + i)), Topic: "top-ups", Group: fmt.Sprintf("credit-%d", i), Until: 4})
		if err != nil {
			return err
		}
		if err := consumer.finished(ctx); err != nil {
			return err
		}
	}
	if err := r.query(ctx, `
		WITH fact AS (SELECT sum((payload::json->>'amount')::bigint)::bigint AS amount FROM outbox)
		SELECT way AS "the id is", count(*) AS credits, sum(credits.amount)::bigint AS credited, fact.amount AS right,
		       CASE WHEN sum(credits.amount) = fact.amount THEN '' WHEN sum(credits.amount) > fact.amount THEN 'TWICE' ELSE 'MERGED' END AS verdict
		FROM credits, fact GROUP BY way, fact.amount ORDER BY min(id)`); err != nil {
		return err
	}
	r.why("an id has to name the fact: what is made at a send or taken from the topic names a copy of it, a hash names " +
		"what it looks like, and only the id that was written with the fact is the same for each copy and another for each fact.")
	return nil
}

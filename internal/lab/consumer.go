package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/postgres"
)

// orderEvents is the topic of the experiments, unless they say otherwise.
const orderEvents = event.OrderEvents

// sessionTimeout is the shortest that brokers allow.
const sessionTimeout = 6 * time.Second

// Child is what `onceledger lab-consumer` is given, each field by a flag or a variable.
type Child struct {
	spec
	DatabaseURL string
	Brokers     string
	Stdout      io.Writer
}

// roles are what a child can be.
var roles = map[string]func(ctx context.Context, c *consumer) error{
	"at-most-once":     eachRecord(atMostOnce),
	"naive":            eachRecord(naive),
	"dedupe":           eachRecord(dedupe),
	"mark-then-work":   eachRecord(markThenWork),
	"work-then-mark":   eachRecord(workThenMark),
	"redis-first":      eachRecord(redisFirst),
	"redis-alone":      eachRecord(redisAlone),
	"redis-in-front":   eachRecord(redisInFront),
	"resending-relay":  resendingRelay,
	"credit":           eachRecord(credit),
	"subtract":         eachRecord(subtract),
	"subtract-once":    eachRecord(subtractOnce),
	"post-to-ledger":   eachRecord(postToLedger),
	"with-index":       eachRecord(withIndex),
	"look-then-insert": eachRecord(lookThenInsert),
	"database-first":   databaseFirst,
	"kafka-first":      kafkaFirst,
	"hang":             hang,
	"batches":          batches,
}

// consumer is a child at work.
type consumer struct {
	Child
	db    *pgxpool.Pool
	kafka *kgo.Client // a member of the group; offsets are committed by hand
}

// RunChild is the process of a child.
func RunChild(ctx context.Context, role string, child Child) error {
	work, known := roles[role]
	if !known {
		return fmt.Errorf("there is no role %q: an experiment starts this (onceledger lab list)", role)
	}
	child.Role = role
	c := &consumer{Child: child}
	var err error
	if c.db, err = postgres.Open(ctx, child.DatabaseURL, postgres.Options{ApplicationName: "consumer " + child.Name, MaxConns: 2}); err != nil {
		return fmt.Errorf("DATABASE_URL: %w", err)
	}
	defer c.db.Close()
	c.kafka, err = kgo.NewClient(
		kgo.SeedBrokers(strings.Split(child.Brokers, ",")...),
		kgo.ConsumerGroup(child.Group),
		kgo.InstanceID(child.Member),
		kgo.ConsumeTopics(child.Topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.DisableAutoCommit(),    // the order of work and offset is what this is about
		kgo.BlockRebalanceOnPoll(), // no partition goes, and none comes, before what was read is done
		kgo.SessionTimeout(sessionTimeout),
		kgo.HeartbeatInterval(sessionTimeout/10),
	)
	if err != nil {
		return fmt.Errorf("KAFKA_BROKERS: %w", err)
	}
	defer c.kafka.CloseAllowingRebalance()
	return work(ctx, c)
}

// eachRecord reads record by record and ends when the last one is done.
func eachRecord(handle func(context.Context, *consumer, *kgo.Record) error) func(context.Context, *consumer) error {
	return func(ctx context.Context, c *consumer) error {
		if done, err := c.caughtUp(ctx); done || err != nil {
			return err
		}
		for {
			fetches := c.kafka.PollRecords(ctx, 1)
			if err := errors.Join(fetches.Err(), ctx.Err()); err != nil {
				return fmt.Errorf("read the topic: %w", err)
			}
			for _, record := range fetches.Records() {
				if err := handle(ctx, c, record); err != nil {
					return fmt.Errorf("%s: %w", orderOf(record), err)
				}
				if int(record.Offset)+1 >= c.Until {
					return nil
				}
			}
			c.kafka.AllowRebalance()
		}
	}
}

// caughtUp says whether the group has committed everything: nothing would come.
func (c *consumer) caughtUp(ctx context.Context) (bool, error) {
	committed, err := kadm.NewClient(c.kafka).FetchOffsets(ctx, c.Group)
	if err != nil && !errors.Is(err, kerr.GroupIDNotFound) {
		return false, fmt.Errorf("read committed offsets: %w", err)
	}
	at, known := committed.Lookup(c.Topic, 0)
	return known && int(at.At) >= c.Until, nil
}

// say prints a line of its own account.
func (c *consumer) say(format string, args ...any) { fmt.Fprintf(c.Stdout, format+"\n", args...) }

// commitOffset tells Kafka that everything up to this record is done.
func (c *consumer) commitOffset(ctx context.Context, record *kgo.Record) error {
	if err := c.kafka.CommitRecords(ctx, record); err != nil {
		return fmt.Errorf("commit offset: %w", err)
	}
	return nil
}

// crashPoint kills this process here, if this is the record for it: no deferred call runs, nothing is flushed.
func (c *consumer) crashPoint(record *kgo.Record) { c.crashPointAt(int(record.Offset) + 1) }

func (c *consumer) crashPointAt(n int) {
	if n == c.CrashAt {
		c.say("kill -9")
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // until the signal arrives
	}
}

// payment is the payload of the experiments' events.
type payment struct {
	Order  string `json:"order"`
	Amount int64  `json:"amount"`
}

// paid is OrderPaid for an order, as the outbox would have it.
func paid(n int) event.Event { return paidAt(n, time.Now()) }

func paidAt(n int, at time.Time) event.Event {
	payload := fmt.Appendf(nil, `{"order":"order-%d","amount":2975}`, n)
	id := uuid.Must(uuid.NewV7())
	return event.Event{
		ID: id, TenantID: tenant, AggregateType: event.AggregateOrder, AggregateID: id, AggregateVersion: 1,
		Type: event.OrderPaid, SchemaVersion: event.SchemaVersion, OccurredAt: at.UTC(), Payload: payload,
	}
}

// tenant is whose orders they are.
var tenant = uuid.MustParse("0190b2f0-0000-7000-8000-000000000001")

func toKafka(e event.Event) *kgo.Record {
	record := e.Record()
	out := &kgo.Record{Topic: record.Topic, Key: record.Key, Value: record.Value}
	for _, header := range record.Headers {
		out.Headers = append(out.Headers, kgo.RecordHeader{Key: header.Key, Value: header.Value})
	}
	return out
}

func fromKafka(record *kgo.Record) event.Record {
	out := event.Record{Topic: record.Topic, Partition: record.Partition, Offset: record.Offset,
		Key: record.Key, Value: record.Value, Time: record.Timestamp}
	for _, header := range record.Headers {
		out.Headers = append(out.Headers, event.Header{Key: header.Key, Value: header.Value})
	}
	return out
}

// paymentOf reads a record's payload, which this package wrote.
func paymentOf(record *kgo.Record) (p payment) {
	_ = json.Unmarshal(record.Value, &p)
	return p
}

func orderOf(record *kgo.Record) string { return paymentOf(record).Order }

// idOf is the event's id, which was made once, in the outbox.
func idOf(record *kgo.Record) string { return headerOf(record, event.HeaderID) }

func headerOf(record *kgo.Record, key string) string {
	for _, header := range record.Headers {
		if header.Key == key {
			return string(header.Value)
		}
	}
	return ""
}

// executor is a pool or a transaction.
type executor interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// insertInvoice is the work: it happens as often as it is called.
func insertInvoice(ctx context.Context, db executor, way, order string) error {
	if _, err := db.Exec(ctx, "INSERT INTO order_invoices (way, order_name) VALUES ($1, $2)", way, order); err != nil {
		return fmt.Errorf("insert invoice: %w", err)
	}
	return nil
}

// The tables of most experiments. order_invoices has no unique index on purpose: what is shown is what keeps the work from
// being done twice, and not what refuses the result.
const (
	invoicesTable = `CREATE TABLE paid_orders (order_name text PRIMARY KEY);
		CREATE TABLE order_invoices (id bigint GENERATED ALWAYS AS IDENTITY, way text NOT NULL, order_name text NOT NULL)`
	marksTable = `CREATE TABLE marks (consumer text, event_id text, PRIMARY KEY (consumer, event_id))`
)

package lab

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// transactionTimeout is how long the broker lets a transaction be open (transaction.timeout.ms).
const transactionTimeout = 10 * time.Second

// transaction writes records in one transaction, and commits or aborts it.
func (r *room) transaction(ctx context.Context, end kgo.TransactionEndTry, keys ...string) error {
	producer, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(r.brokers, ",")...), kgo.TransactionalID("lab"), kgo.DefaultProduceTopic("balances"))
	if err != nil {
		return err
	}
	defer producer.Close()
	if err := producer.BeginTransaction(); err != nil {
		return fmt.Errorf("begin transaction: %w", err)
	}
	for _, key := range keys {
		if err := producer.ProduceSync(ctx, &kgo.Record{Key: []byte(key)}).FirstErr(); err != nil {
			return fmt.Errorf("produce: %w", err)
		}
	}
	if err := producer.EndTransaction(ctx, end); err != nil {
		return fmt.Errorf("end transaction: %w", err)
	}
	return nil
}

// hang writes a record in a transaction and dies before it ends it.
func hang(ctx context.Context, c *consumer) error {
	producer, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(c.Brokers, ",")...), kgo.TransactionalID("lab-hang"),
		kgo.TransactionTimeout(transactionTimeout), kgo.DefaultProduceTopic(c.Topic))
	if err != nil {
		return err
	}
	defer producer.Close()
	if err := producer.BeginTransaction(); err != nil {
		return fmt.Errorf("begin transaction: %w", err)
	}
	if err := producer.ProduceSync(ctx, &kgo.Record{Key: []byte("hanging")}).FirstErr(); err != nil {
		return fmt.Errorf("produce: %w", err)
	}
	c.say("record \"hanging\" written, transaction open")
	c.crashPointAt(1)
	return errors.New("it was to be killed")
}

func runKafkaTransaction(ctx context.Context, r *room) error {
	if err := r.topic(ctx, "balances", nil); err != nil {
		return err
	}
	r.part("aborted and committed records, and who sees them")
	if err := r.transaction(ctx, kgo.TryAbort, "a-1", "a-2"); err != nil {
		return err
	}
	r.step("a transaction writes a-1 and a-2 and aborts")
	if err := r.transaction(ctx, kgo.TryCommit, "b-1", "b-2"); err != nil {
		return err
	}
	r.step("a transaction writes b-1 and b-2 and commits")
	if err := r.seen(ctx); err != nil {
		return err
	}

	r.part("a transaction that hangs")
	r.step("a producer with transaction.timeout.ms=%d dies in its transaction", transactionTimeout.Milliseconds())
	producer, err := r.start(ctx, spec{Role: "hang", Name: "P", Topic: "balances", CrashAt: 1})
	if err != nil {
		return err
	}
	if err := producer.killed(ctx); err != nil {
		return err
	}
	began := time.Now()
	for _, key := range []string{"c-1", "c-2", "c-3"} {
		if err := r.kafka.ProduceSync(ctx, &kgo.Record{Topic: "balances", Key: []byte(key)}).FirstErr(); err != nil {
			return fmt.Errorf("produce: %w", err)
		}
	}
	r.step("another producer, which knows of no transaction, writes c-1, c-2 and c-3, each acknowledged")
	if err := r.seen(ctx); err != nil {
		return err
	}
	r.step("wait until the broker ends the transaction")
	if err := r.wait(ctx, "the last stable offset moves on", func(ctx context.Context) (bool, error) {
		stable, high, err := r.ends(ctx)
		return stable == high, err
	}); err != nil {
		return err
	}
	r.step("the last stable offset is at the end again after %s", time.Since(began).Round(100*time.Millisecond))
	if err := r.seen(ctx); err != nil {
		return err
	}
	r.why("a transaction is written to the log as it goes and only its end says whether it counts, so a reader of committed " +
		"records can go no further than the first that is open; its timeout is how long one dead producer may hold up everybody, " +
		"and a reader of uncommitted records, which Kafka's own client is unless it is told otherwise, does not wait and takes what was aborted.")
	return nil
}

// ends are where the topic ends for readers of committed records (the last stable offset), and for all (the high
// watermark).
func (r *room) ends(ctx context.Context) (stable, high int64, err error) {
	committed, err := r.admin.ListCommittedOffsets(ctx, "balances")
	if err = errors.Join(err, committed.Error()); err != nil {
		return 0, 0, fmt.Errorf("ask for the last stable offset: %w", err)
	}
	all, err := r.admin.ListEndOffsets(ctx, "balances")
	if err = errors.Join(err, all.Error()); err != nil {
		return 0, 0, fmt.Errorf("ask for the high watermark: %w", err)
	}
	lso, _ := committed.Lookup("balances", 0)
	hw, _ := all.Lookup("balances", 0)
	return lso.Offset, hw.Offset, nil
}

// seen prints what each kind of reader gets.
func (r *room) seen(ctx context.Context) error {
	stable, high, err := r.ends(ctx)
	if err != nil {
		return err
	}
	var rows [][]any
	for _, reader := range []struct {
		name  string
		level kgo.IsolationLevel
		end   int64
	}{{"read_uncommitted (not waiting)", kgo.ReadUncommitted(), high}, {"read_committed", kgo.ReadCommitted(), stable}} {
		records, err := r.records(ctx, "balances", reader.level)
		if err != nil {
			return err
		}
		var keys []string
		for _, record := range records {
			keys = append(keys, string(record.Key))
		}
		rows = append(rows, []any{reader.name, reader.end, strings.Join(keys, " ")})
	}
	r.table([]string{"reader", "ends at", "sees"}, rows)
	return nil
}

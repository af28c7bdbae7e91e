// Command relays sets the product's relay that reads the log (wal) beside
// Debezium and beside the one that polls, on one Postgres that syncs to disk, one
// broker of Apache Kafka and one Kafka Connect worker at a time.
//
// Drain: each contender publishes one backlog of the outbox, in transactions of
// one row and of a hundred, wal in turn with each other one. The topic has the
// broker date the records, and the clock runs from the first of them to the last:
// nobody's start-up counts, and nobody's own word for it is taken. Latency: from a
// commit to the arrival of the record, at a steady rate.
//
// acks=all, lz4, one partitioner and the same topic settings for all; after each
// leg the topic must hold every event, once, each order's versions in turn.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/bench/drain"
	"github.com/onceledger/onceledger/bench/stack"
	"github.com/onceledger/onceledger/internal/devstack"
)

const (
	database = "relays" // also what the benchmark's own connections are called
	saved    = "relays-drain.json"
)

type result struct {
	Events      int               `json:"events"`
	ConnectHeap string            `json:"connect_heap"`
	Tuning      map[string]string `json:"debezium_tuning"`
	Series      []series          `json:"series"`
	Latency     latency           `json:"latency"`
}

type bench struct {
	*stack.Stack
	conn  *pgx.Conn
	admin *kadm.Client

	events int
	heap   string
	pairs  struct{ tuned, cold, defaults, plain, poll int }

	connect             *devstack.Connect
	stopConnect         func()
	workers, connectors int // made so far
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	drain.Be()

	b := &bench{stopConnect: func() {}}
	flag.IntVar(&b.events, "events", 400_000, "rows in the backlog")
	flag.IntVar(&b.pairs.tuned, "pairs", 5, "pairs of wal and Debezium, warm and tuned")
	flag.IntVar(&b.pairs.cold, "cold", 3, "pairs of wal and Debezium in a worker just started")
	flag.IntVar(&b.pairs.defaults, "defaults", 3, "pairs of wal and Debezium with its own defaults")
	flag.IntVar(&b.pairs.plain, "plain", 3, "pairs of wal and Debezium without exactly-once")
	flag.IntVar(&b.pairs.poll, "poll", 5, "pairs of wal and poll")
	flag.StringVar(&b.heap, "heap", "512m", "most memory for Connect's objects")
	rounds := flag.Int("rounds", 5, "rounds of the latency; 0 leaves it out")
	rate := flag.Int("rate", 100, "events a second, for the latency")
	seconds := flag.Int("seconds", 20, "how long, for the latency")
	show := flag.Bool("print", false, "print what is saved, and measure nothing")
	flag.Parse()
	run := func() error { return b.run(ctx, *rate, *seconds, *rounds) }
	if *show {
		run = printSaved
	}
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "bench relays:", err)
		os.Exit(1)
	}
}

func (b *bench) run(ctx context.Context, rate, seconds, rounds int) (err error) {
	if b.events < 1000 || b.events%100 != 0 {
		return errors.New("-events must be a multiple of 100, and 1,000 or more")
	}
	var stop func()
	if b.Stack, stop, err = stack.StartApache(ctx); err != nil {
		return err
	}
	defer stop()
	defer func() { b.stopConnect() }()
	if err := b.Database(ctx, database); err != nil {
		return err
	}
	if b.conn, err = pgx.Connect(ctx, b.Postgres.AdminURL(database)+"&application_name="+database); err != nil {
		return err
	}
	defer b.conn.Close(context.WithoutCancel(ctx))
	client, err := kgo.NewClient(kgo.SeedBrokers(b.Brokers))
	if err != nil {
		return err
	}
	defer client.Close()
	b.admin = kadm.NewClient(client)

	r := result{Events: b.events, ConnectHeap: b.heap, Tuning: tuning}
	for _, rows := range []int{1, 100} {
		one, err := b.series(ctx, rows)
		if err != nil {
			return fmt.Errorf("transactions of %d: %w", rows, err)
		}
		r.Series = append(r.Series, one)
	}
	if rounds > 0 {
		if r.Latency, err = b.latency(ctx, rate, seconds, rounds); err != nil {
			return err
		}
	}
	print(r)
	return stack.Save(saved, r)
}

func printSaved() error {
	encoded, err := os.ReadFile(filepath.Join("bench", "results", saved))
	if err != nil {
		return err
	}
	var r result
	if err := json.Unmarshal(encoded, &r); err != nil {
		return err
	}
	print(r)
	return nil
}

package lab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"github.com/onceledger/onceledger/internal/devstack"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/migrate"
	"github.com/onceledger/onceledger/internal/postgres"
)

const (
	databaseName = "lab"
	// patience bounds each wait for something that is to happen.
	patience    = 2 * time.Minute
	stopTimeout = 15 * time.Second
)

// room is where one experiment happens: a folder, a Postgres, a broker, and the children that use them.
type room struct {
	config Config
	dir    string

	postgres *devstack.Postgres
	db       *pgxpool.Pool // as the owner of the database
	brokers  string
	kafka    *kgo.Client
	admin    *kadm.Client

	blank   bool // the last line printed was empty
	mutex   sync.Mutex
	closers []func(context.Context) // in the order in which things were opened
}

func newRoom(config Config) (*room, error) {
	dir, err := os.MkdirTemp("", "onceledger-lab-")
	if err != nil {
		return nil, fmt.Errorf("make a folder for the experiment: %w", err)
	}
	r := &room{config: config, dir: dir}
	r.onClose(func(context.Context) {
		if config.Keep {
			r.beside("kept: %s", dir)
			return
		}
		_ = os.RemoveAll(dir)
	})
	return r, nil
}

// beside tells what goes on beside the experiment itself.
func (r *room) beside(format string, args ...any) {
	fmt.Fprintf(r.config.Stderr, "lab: "+format+"\n", args...)
}

func (r *room) onClose(closer func(context.Context)) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.closers = append(r.closers, closer)
}

// close ends everything, the last opened first: children, broker, database, folder.
func (r *room) close(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	for len(r.closers) > 0 {
		last := len(r.closers) - 1
		closer := r.closers[last]
		r.closers = r.closers[:last]
		closer(ctx)
	}
}

// open starts Postgres and the broker.
func (r *room) open(ctx context.Context) error {
	began := time.Now()
	r.beside("starting Postgres and Kafka (%s) in %s", r.config.Kafka, r.dir)
	group, groupCtx := errgroup.WithContext(ctx)
	group.Go(func() error { return r.openPostgres(groupCtx, ctx) })
	group.Go(func() error {
		if r.config.Kafka == KafkaApache {
			return r.openApache(groupCtx)
		}
		return r.openEmbedded(groupCtx)
	})
	if err := group.Wait(); err != nil {
		return err
	}
	var err error
	if r.kafka, err = kgo.NewClient(kgo.SeedBrokers(strings.Split(r.brokers, ",")...), kgo.RecordPartitioner(kgo.ManualPartitioner())); err != nil {
		return fmt.Errorf("connect to Kafka: %w", err)
	}
	r.onClose(func(context.Context) { r.kafka.Close() })
	r.admin = kadm.NewClient(r.kafka)
	if err := r.wait(ctx, "Kafka coordinates groups", func(ctx context.Context) (bool, error) {
		// The first question has a new Kafka make the topic in which it keeps offsets.
		_, err := r.admin.FetchOffsets(ctx, "nobody")
		if errors.Is(err, kerr.GroupIDNotFound) {
			err = nil
		}
		if kerr.IsRetriable(err) {
			return false, nil
		}
		return err == nil, err
	}); err != nil {
		return err
	}
	r.beside("ready after %s", time.Since(began).Round(100*time.Millisecond))
	return nil
}

func (r *room) logf(format string, args ...any) { r.beside(format, args...) }

// openPostgres starts the server. The pool outlives the start.
func (r *room) openPostgres(startCtx, ctx context.Context) error {
	binDir, err := devstack.FindPostgres(startCtx, devstack.BinariesConfig{BinDir: r.config.PostgresBin, FallbackDir: r.dir, Logf: r.logf})
	if err != nil {
		return err
	}
	if r.postgres, err = devstack.StartPostgres(startCtx, devstack.PostgresConfig{Dir: filepath.Join(r.dir, "postgres"), BinDir: binDir}); err != nil {
		return err
	}
	r.onClose(func(ctx context.Context) { _ = r.postgres.Stop(ctx) })
	conn, err := pgx.Connect(startCtx, r.postgres.AdminURL("postgres"))
	if err != nil {
		return fmt.Errorf("connect to Postgres: %w", err)
	}
	_, err = conn.Exec(startCtx, "CREATE DATABASE "+databaseName)
	if err = errors.Join(err, conn.Close(startCtx)); err != nil {
		return fmt.Errorf("create the database: %w", err)
	}
	if r.db, err = postgres.Open(ctx, r.databaseURL(), postgres.Options{ApplicationName: "lab", MaxConns: 4}); err != nil {
		return err
	}
	r.onClose(func(context.Context) { r.db.Close() })
	return nil
}

func (r *room) databaseURL() string { return r.postgres.AdminURL(databaseName) }

// roleURL is the database with the login of one of the service's roles, which migrate made.
func (r *room) roleURL(ctx context.Context, role string) (string, error) {
	name := "onceledger_" + role
	if _, err := r.db.Exec(ctx, "ALTER ROLE "+name+" PASSWORD 'lab'"); err != nil {
		return "", fmt.Errorf("set the password of %s: %w", name, err)
	}
	return r.postgres.URL(databaseName, name, "lab"), nil
}

func (r *room) openApache(ctx context.Context) error {
	cluster, err := devstack.StartKafka(ctx, devstack.KafkaConfig{
		Dir: filepath.Join(r.dir, "kafka"), JavaHome: r.config.JavaHome, Logf: r.logf,
		// The broker looks for transactions that are open for too long this often.
		Settings: map[string]string{"transaction.abort.timed.out.transaction.cleanup.interval.ms": "500"},
	})
	if err != nil {
		return err
	}
	r.onClose(func(ctx context.Context) { _ = cluster.Stop(ctx) })
	r.brokers = cluster.Bootstrap()
	return nil
}

// openEmbedded starts the embedded broker as a process of its own, which says "ready host:port".
func (r *room) openEmbedded(ctx context.Context) error {
	read, write := io.Pipe()
	cmd := command(ctx, r.config.Command, "broker", "--dir", filepath.Join(r.dir, "kafka"))
	cmd.Env, cmd.Stdout = r.config.Environ, write
	log, err := os.Create(filepath.Join(r.dir, "broker.log"))
	if err != nil {
		return fmt.Errorf("open the broker's log: %w", err)
	}
	defer log.Close()
	cmd.Stderr = log
	process, err := devstack.StartProcess(cmd, syscall.SIGKILL)
	if err != nil {
		return err
	}
	r.onClose(func(ctx context.Context) { _ = process.Stop(ctx, syscall.SIGTERM) })
	ready := make(chan string, 1)
	go func() {
		for lines := bufio.NewScanner(read); lines.Scan(); {
			if addr, ok := strings.CutPrefix(lines.Text(), "ready "); ok {
				ready <- addr
			}
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	select {
	case r.brokers = <-ready:
		return nil
	case <-process.Done():
		said, _ := os.ReadFile(log.Name())
		return fmt.Errorf("the broker did not start: %w: %s", process.Err(), strings.TrimSpace(string(said)))
	case <-ctx.Done():
		return fmt.Errorf("the broker is not ready: %w", ctx.Err())
	}
}

// exec runs statements that set the stage.
func (r *room) exec(ctx context.Context, sql string) error {
	if _, err := r.db.Exec(ctx, sql); err != nil {
		return fmt.Errorf("set up: %w", err)
	}
	return nil
}

// migrate makes the product's own tables.
func (r *room) migrate(ctx context.Context) error { return migrate.Up(ctx, r.databaseURL()) }

// topic makes a topic with one partition, so that there is one order of events.
func (r *room) topic(ctx context.Context, name string, config map[string]*string) error {
	created, err := r.admin.CreateTopic(ctx, 1, 1, config, name)
	if err = errors.Join(err, created.Err); err != nil {
		return fmt.Errorf("make topic %s: %w", name, err)
	}
	return nil
}

// publish writes events to a topic's only partition and waits for the acknowledgements.
func (r *room) publish(ctx context.Context, topic string, events ...event.Event) error {
	for _, e := range events {
		record := toKafka(e)
		record.Topic, record.Timestamp = topic, e.OccurredAt
		if err := r.kafka.ProduceSync(ctx, record).FirstErr(); err != nil {
			return fmt.Errorf("publish: %w", err)
		}
	}
	return nil
}

// records reads a topic's only partition up to where it ends for that reader.
func (r *room) records(ctx context.Context, topic string, level kgo.IsolationLevel) (records []*kgo.Record, err error) {
	list := r.admin.ListEndOffsets
	if level == kgo.ReadCommitted() {
		list = r.admin.ListCommittedOffsets
	}
	ends, err := list(ctx, topic)
	if err = errors.Join(err, ends.Error()); err != nil {
		return nil, fmt.Errorf("ask where %s ends: %w", topic, err)
	}
	end, _ := ends.Lookup(topic, 0)
	if end.Offset == 0 {
		return nil, nil
	}
	reader, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(r.brokers, ",")...), kgo.ConsumeTopics(topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.FetchIsolationLevel(level), kgo.KeepControlRecords())
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", topic, err)
	}
	defer reader.Close()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		fetches := reader.PollFetches(ctx)
		if err := errors.Join(fetches.Err(), ctx.Err()); err != nil {
			return nil, fmt.Errorf("read %s: %w", topic, err)
		}
		for _, record := range fetches.Records() {
			if !record.Attrs.IsControl() { // the end of a transaction is a record too
				records = append(records, record)
			}
			if record.Offset+1 >= end.Offset {
				return records, nil
			}
		}
	}
}

// wait asks until done says so.
func (r *room) wait(ctx context.Context, what string, done func(context.Context) (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		ok, err := done(ctx)
		if err != nil || ok {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until %s: %w", what, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

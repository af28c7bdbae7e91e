package kafka

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/confluentinc/confluent-kafka-go/v2/kafka"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/onceledger/onceledger/internal/event"
)

// ConsumerConfig says what a Consumer reads, and as whom. Brokers, Group,
// Topics and Log are required.
type ConsumerConfig struct {
	Brokers  string // host:port, comma separated
	Group    string
	Topics   []string
	ClientID string

	// InstanceID makes a static member: a process that ends and comes back as
	// the same instance within SessionTimeout finds its partitions waiting for
	// it, and the other members do not notice. Two processes must not share
	// one. Empty makes an ordinary member.
	InstanceID string

	// MaxBatch bounds a batch. Default 1,000 records.
	MaxBatch int

	// SessionTimeout is how long partitions wait for a member that has died
	// without a word. Default 10 s: a supervisor has restarted the process by
	// then, and heartbeats come from a thread of their own every tenth of it,
	// so a busy process does not lose its partitions by mistake.
	SessionTimeout time.Duration

	// MaxPollInterval is how long one call of the handler may take before the
	// member counts as stuck and loses its partitions. Default 2 min, four
	// times the longest transaction of the worker.
	MaxPollInterval time.Duration

	// DrainTimeout is how much longer a handler may work on its batch when the
	// consumer is to stop. Default 10 s.
	DrainTimeout time.Duration

	Log     *slog.Logger
	Metrics prometheus.Registerer // nil for none

	// OnCommitted is called after each commit of offsets. It must not wait for
	// anything.
	OnCommitted func()
}

// Handler makes the effects of a batch durable. The records of a partition are
// in order, and the handler's until it returns.
//
// Nil means: done for good, and their offsets may be committed. An error means
// an outage: the same records come again later. What is wrong with a record
// itself, so that it would fail every time, is for the handler to deal with.
type Handler func(ctx context.Context, batch []event.Record) error

// Consumer reads topics as a member of a consumer group.
type Consumer struct {
	config     ConsumerConfig
	metrics    *consumerMetrics
	transactor *Transactor // nil unless offsets move in transactions

	// For Ready.
	joined      atomic.Bool
	doubtful    atomic.Bool // the brokers may be away
	unreachable atomic.Bool // they are
	outage      atomic.Pointer[string]
	inHand      atomic.Pointer[time.Time] // since when there is something in hand; nil when there is nothing
	longInHand  time.Duration             // what is too long for that

	topicIDs  *topicIDs
	lookEvery time.Duration

	// Only the member's goroutine touches these.
	fenced []time.Time       // when, lately
	told   map[string]string // by topic: the id of the new one that was told of
}

// NewConsumer makes a consumer, which joins its group in Run.
func NewConsumer(config ConsumerConfig) (*Consumer, error) {
	config.MaxBatch = cmp.Or(config.MaxBatch, 1000)
	config.SessionTimeout = cmp.Or(config.SessionTimeout, 10*time.Second)
	config.MaxPollInterval = cmp.Or(config.MaxPollInterval, 2*time.Minute)
	config.DrainTimeout = cmp.Or(config.DrainTimeout, 10*time.Second)
	config.Log = config.Log.With("group", config.Group)
	if config.OnCommitted == nil {
		config.OnCommitted = func() {}
	}
	c := &Consumer{config: config, longInHand: longInHand, topicIDs: newTopicIDs(), lookEvery: lookEvery, told: make(map[string]string)}
	var err error
	c.metrics, err = newConsumerMetrics(config.Metrics, config.Group, func() float64 { return c.inHandFor().Seconds() })
	if err != nil {
		return nil, fmt.Errorf("metrics of consumer group %s: %w", config.Group, err)
	}
	return c, nil
}

// inHandFor is how long the batch in hand, or the state that is restored, has
// been in hand.
func (c *Consumer) inHandFor() time.Duration {
	if since := c.inHand.Load(); since != nil {
		return time.Since(*since)
	}
	return 0
}

// Run hands batches to handle until ctx is done, and then returns nil: after
// the handler has finished what it has begun and its offsets are committed. A
// batch is what is there, up to MaxBatch; it never waits to fill.
//
// An error means that this process cannot go on, and a new one can. Nothing is
// lost then either.
func (c *Consumer) Run(ctx context.Context, handle Handler) error {
	return c.runMembers(ctx, func(*member) Handler { return handle })
}

// runMembers makes a handler for each membership, one after the other.
func (c *Consumer) runMembers(ctx context.Context, handler func(*member) Handler) error {
	watchCtx, cancel := context.WithCancel(ctx)
	watching := make(chan struct{})
	go func() {
		defer close(watching)
		c.watchTopics(watchCtx)
	}()
	defer func() {
		cancel()
		select {
		case <-watching:
		case <-time.After(patience): // nobody answers it
		}
	}()
	c.topicIDs.await(ctx)
	for {
		member, err := c.join()
		if err != nil {
			return fmt.Errorf("join consumer group %s: %w", c.config.Group, err)
		}
		err = member.run(ctx, handler(member))
		if !joinsAgain(err) {
			return err
		}
		c.config.Log.Warn("joining again", "error", err)
		if errors.Is(err, errStartOver) {
			c.leaveForGood(ctx)
		}
	}
}

// Ready says if the consumer does its work, and if not, why.
func (c *Consumer) Ready() (bool, string) {
	switch outage := c.outage.Load(); {
	case outage != nil:
		return false, *outage
	case c.unreachable.Load():
		return false, "no Kafka broker can be reached at " + c.config.Brokers
	case !c.joined.Load():
		return false, "not a member of consumer group " + c.config.Group
	case c.inHandFor() > c.longInHand:
		return false, fmt.Sprintf("a batch of consumer group %s has been in hand for %s", c.config.Group, c.inHandFor().Round(time.Second))
	}
	return true, ""
}

func (c *Consumer) join() (*member, error) {
	settings := kafka.ConfigMap{
		"bootstrap.servers": c.config.Brokers,
		"client.id":         cmp.Or(c.config.ClientID, "onceledger"),
		"group.id":          c.config.Group,

		// Offsets move when this package says so, and by nothing else.
		"enable.auto.commit":       false,
		"enable.auto.offset.store": false,
		"auto.offset.reset":        "earliest",
		"isolation.level":          "read_committed",

		"group.protocol":                "classic",
		"partition.assignment.strategy": "cooperative-sticky",
		"session.timeout.ms":            int(c.config.SessionTimeout.Milliseconds()),
		"heartbeat.interval.ms":         int(c.config.SessionTimeout.Milliseconds() / 10),
		"max.poll.interval.ms":          int(c.config.MaxPollInterval.Milliseconds()),

		// Memory is bounded; with the default back-off of one second a queue
		// of this size would run empty.
		"queued.max.messages.kbytes": 16 << 10,
		"fetch.queue.backoff.ms":     10,

		// Partitions that are added are read soon, and not only after minutes.
		"topic.metadata.refresh.interval.ms": 10_000,

		// A broker that is silent or back is noticed soon.
		"socket.timeout.ms":        10_000,
		"reconnect.backoff.max.ms": 1_000,

		"enable.metrics.push":    false,
		"go.logs.channel.enable": true,
	}
	if c.config.InstanceID != "" {
		settings["group.instance.id"] = c.config.InstanceID
	}
	client, err := kafka.NewConsumer(&settings)
	if err != nil {
		return nil, err
	}
	go forwardLogs(c.config.Log, client.Logs())

	m := &member{
		Consumer: c,
		client:   client,
		tracker:  newTracker(),
		origins:  &origins{ids: make(map[place]string)},
		applied:  make(chan struct{}, 1),
		flushes:  make(chan chan struct{}),
		stop:     make(chan struct{}),
	}
	if err := client.SubscribeTopics(c.config.Topics, m.rebalanced); err != nil {
		return nil, errors.Join(err, client.Close())
	}
	return m, nil
}

// forwardLogs writes what the client library has to say. What matters to an
// operator comes as an error or a rebalance too.
func forwardLogs(log *slog.Logger, entries <-chan kafka.LogEvent) {
	for entry := range entries {
		log.Debug("Kafka client: "+entry.Message, "tag", entry.Tag)
	}
}

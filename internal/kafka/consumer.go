package kafka

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/confluentinc/confluent-kafka-go/v2/kafka"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/onceledger/onceledger/internal/event"
)

// ConsumerConfig says what a Consumer reads, and as whom. Brokers, Group,
// Topics and Log are required.
type ConsumerConfig struct {
	Brokers  string // host:port, separated by commas
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

// Between two attempts at a batch.
const (
	minBackOff = 100 * time.Millisecond
	maxBackOff = 10 * time.Second
)

// tick is how often the consumer looks up while nothing arrives.
const tick = 100 * time.Millisecond

// Handler makes the effects of a batch durable. The records of a partition are
// in order. They are the handler's until it returns.
//
// Nil means: done for good, and their offsets may be committed. An error means
// an outage: the same records come again later. What is wrong with a record
// itself, so that it would fail every time, is for the handler to deal with.
type Handler func(ctx context.Context, batch []event.Record) error

// Consumer reads topics as one member of a consumer group.
//
// One goroutine polls Kafka and calls the handler in turn, so one batch is in
// hand at a time, and Kafka can take partitions away only between two calls of
// the handler: whatever the handler began, it has finished. Where nothing is
// lost is visible in four places: work (an offset moves only after the handler
// has returned nil), commit, rebalanced (what becomes of partitions that go),
// and the tracker, which all three use.
type Consumer struct {
	config  ConsumerConfig
	client  *kafka.Consumer
	tracker *tracker
	metrics *consumerMetrics

	// Of the goroutine in Run alone.
	paused bool
	fatal  error

	// Wakes the committing goroutine; committing is held during a commit, so
	// that offsets reach Kafka in order.
	applied    chan struct{}
	committing sync.Mutex

	// For Ready.
	joined      atomic.Bool
	doubtful    atomic.Bool // the brokers may be away
	unreachable atomic.Bool // they are
	outage      atomic.Pointer[string]
}

// NewConsumer makes a consumer. It joins its group in Run, which must be called
// for its resources to be freed.
func NewConsumer(config ConsumerConfig) (*Consumer, error) {
	config.MaxBatch = cmp.Or(config.MaxBatch, 1000)
	config.SessionTimeout = cmp.Or(config.SessionTimeout, 10*time.Second)
	config.MaxPollInterval = cmp.Or(config.MaxPollInterval, 2*time.Minute)
	config.DrainTimeout = cmp.Or(config.DrainTimeout, 10*time.Second)
	if config.OnCommitted == nil {
		config.OnCommitted = func() {}
	}
	config.Log = config.Log.With("group", config.Group)

	settings := kafka.ConfigMap{
		"bootstrap.servers": config.Brokers,
		"client.id":         cmp.Or(config.ClientID, "onceledger"),
		"group.id":          config.Group,

		// Offsets move when this code says so, and by nothing else.
		"enable.auto.commit":       false,
		"enable.auto.offset.store": false,
		"auto.offset.reset":        "earliest",
		"isolation.level":          "read_committed",

		"group.protocol":                "classic",
		"partition.assignment.strategy": "cooperative-sticky",
		"session.timeout.ms":            int(config.SessionTimeout.Milliseconds()),
		"heartbeat.interval.ms":         int(config.SessionTimeout.Milliseconds() / 10),
		"max.poll.interval.ms":          int(config.MaxPollInterval.Milliseconds()),

		// Memory is bounded; with the default back-off of one second a queue
		// of this size would run empty.
		"queued.max.messages.kbytes": 16 << 10,
		"fetch.queue.backoff.ms":     10,

		// A broker that is silent or back is noticed soon.
		"socket.timeout.ms":        10_000,
		"reconnect.backoff.max.ms": 1_000,

		"enable.metrics.push":    false,
		"go.logs.channel.enable": true,
	}
	if config.InstanceID != "" {
		settings["group.instance.id"] = config.InstanceID
	}

	metrics, err := newConsumerMetrics(config.Metrics, config.Group)
	if err != nil {
		return nil, fmt.Errorf("consumer of group %s: %w", config.Group, err)
	}
	client, err := kafka.NewConsumer(&settings)
	if err != nil {
		return nil, fmt.Errorf("consumer of group %s: %w", config.Group, err)
	}
	return &Consumer{
		config:  config,
		client:  client,
		tracker: newTracker(),
		metrics: metrics,
		applied: make(chan struct{}, 1),
	}, nil
}

// Run hands batches to handle until ctx is done, and then returns nil: after
// the handler has finished what it has begun and its offsets are committed. A
// batch is what is there, up to MaxBatch; it never waits to fill.
//
// An error means that this member cannot go on, and a new process can. Nothing
// is lost then either.
func (c *Consumer) Run(ctx context.Context, handle Handler) error {
	stopCommitting := c.startCommitting()
	defer func() {
		stopCommitting()
		if err := c.client.Close(); err != nil {
			c.config.Log.Warn("leave the consumer group", "error", err)
		}
	}()
	if err := c.client.SubscribeTopics(c.config.Topics, c.rebalanced); err != nil {
		return fmt.Errorf("subscribe to %v: %w", c.config.Topics, err)
	}

	// The handler's context ends later than ours, so that it can finish.
	handlerCtx, stop := outlive(ctx, c.config.DrainTimeout)
	defer stop()

	for ctx.Err() == nil && c.fatal == nil {
		c.read()
		c.work(ctx, handlerCtx, handle)
	}
	return c.fatal
}

// read waits a moment for a record and takes what else is there.
func (c *Consumer) read() {
	for wait := tick; len(c.tracker.batch()) < c.config.MaxBatch && c.poll(wait); wait = 0 {
	}
}

// work hands the batch to handle until its effects are durable. Meanwhile
// nothing else is read, but Kafka is polled, so that this member stays in its
// group. Work ends early when ctx is done or when the group gave all of the
// batch's partitions to others; the offsets have then not moved.
func (c *Consumer) work(ctx, handlerCtx context.Context, handle Handler) {
	for attempt := 1; ; attempt++ {
		batch := c.tracker.batch()
		if len(batch) == 0 || c.fatal != nil {
			break
		}
		started := time.Now()
		err := handle(handlerCtx, batch)
		if err == nil {
			c.tracker.applied()
			c.wakeCommitting()
			c.metrics.applied(len(batch), time.Since(started))
			break
		}
		if ctx.Err() != nil {
			c.config.Log.Warn("stopped with a batch undone; it will be read again", "records", len(batch), "error", err)
			return
		}
		c.waitOut(ctx, err, attempt)
	}
	c.setPaused(false)
}

// waitOut pauses all partitions and polls until it is time for another attempt.
func (c *Consumer) waitOut(ctx context.Context, cause error, attempt int) {
	delay := backOff(attempt)
	c.setPaused(true)
	reason := fmt.Sprintf("paused after %d failed attempts at a batch: %v", attempt, cause)
	c.outage.Store(&reason)
	c.metrics.retries.Inc()
	c.config.Log.Warn("batch failed, trying again", "error", cause, "attempt", attempt, "in", delay)

	again := time.Now().Add(delay)
	for ctx.Err() == nil && c.fatal == nil && len(c.tracker.batch()) > 0 {
		left := time.Until(again)
		if left <= 0 {
			return
		}
		c.poll(min(left, tick))
	}
}

// backOff is how long to wait after a failed attempt: at random, so that the
// members do not come back together, and below a bound that doubles.
func backOff(attempt int) time.Duration {
	bound := min(maxBackOff, minBackOff<<min(attempt, 10))
	return minBackOff + rand.N(bound-minBackOff)
}

// setPaused stops or starts reading from all partitions.
func (c *Consumer) setPaused(paused bool) {
	if c.paused == paused {
		return
	}
	c.paused = paused
	if !paused {
		c.outage.Store(nil)
	}
	c.metrics.setPaused(paused)
	c.applyPaused(topicPartitions(c.tracker.partitions()))
}

func (c *Consumer) applyPaused(partitions []kafka.TopicPartition) {
	set := c.client.Resume
	if c.paused {
		set = c.client.Pause
	}
	if err := set(partitions); err != nil {
		c.fatal = fmt.Errorf("pause or resume partitions: %w", err)
	}
}

// poll waits for one thing from Kafka and says if there was one. Rebalances
// happen here: the client calls rebalanced from within.
func (c *Consumer) poll(wait time.Duration) bool {
	milliseconds := (wait + time.Millisecond - 1) / time.Millisecond
	switch e := c.client.Poll(int(milliseconds)).(type) {
	case nil:
		return false
	case *kafka.Message:
		if err := e.TopicPartition.Error; err != nil {
			c.config.Log.Warn("partition cannot be read", "partition", e.String(), "error", err)
			break
		}
		c.tracker.take(toRecord(e))
	case kafka.Error:
		c.failed(e)
	}
	return true
}

func (c *Consumer) failed(err kafka.Error) {
	switch {
	case err.Code() == kafka.ErrFencedInstanceID:
		c.fatal = fmt.Errorf("another process has joined group %s as instance %q, and this one must stop; "+
			"every process needs an id of its own: %w", c.config.Group, c.config.InstanceID, err)
	case err.IsFatal():
		c.fatal = fmt.Errorf("consumer of group %s: %w", c.config.Group, err)
	case err.Code() == kafka.ErrAllBrokersDown:
		c.doubtful.Store(true)
	default:
		c.config.Log.Warn("Kafka client", "error", err)
	}
}

// rebalanced is told which partitions come and go.
func (c *Consumer) rebalanced(client *kafka.Consumer, change kafka.Event) error {
	var err error
	switch change := change.(type) {
	case kafka.AssignedPartitions:
		c.metrics.rebalances.WithLabelValues("assigned").Inc()
		c.config.Log.Info("partitions assigned", "partitions", change.String())
		c.tracker.assign(places(change.Partitions))
		err = client.IncrementalAssign(change.Partitions)
		// A partition keeps its pause from when it was last ours.
		c.applyPaused(change.Partitions)
		c.joined.Store(true)

	case kafka.RevokedPartitions:
		// What is in hand was not begun, or has failed: its next owner reads it
		// again. What is done gets committed while the partition is ours, and
		// if it is not any more, its offsets are its new owner's.
		kind := "revoked"
		if client.AssignmentLost() {
			kind = "lost"
			c.joined.Store(false)
		} else {
			c.commit()
		}
		c.metrics.rebalances.WithLabelValues(kind).Inc()
		c.config.Log.Info("partitions "+kind, "partitions", change.String())
		c.tracker.release(places(change.Partitions))
		err = client.IncrementalUnassign(change.Partitions)
	}
	if err != nil { // the group would wait for ever for the answer
		c.fatal = fmt.Errorf("answer a rebalance of group %s: %w", c.config.Group, err)
	}
	return nil
}

// startCommitting starts the goroutine that commits what was applied, so that
// the next batch need not wait for Kafka. While one commit is under way, the
// offsets of further batches become one commit. The function it returns commits
// what is left and returns when that is done.
func (c *Consumer) startCommitting() (stop func()) {
	done := make(chan struct{})
	var group sync.WaitGroup
	group.Go(func() {
		ticker := time.NewTicker(time.Second)
		defer ticker.Stop()
		for {
			select {
			case <-done:
				c.commit()
				return
			case <-c.applied:
				c.commit()
			case <-ticker.C:
				c.lookAround()
				c.commit() // what failed, again
			case entry := <-c.client.Logs():
				c.config.Log.Debug("Kafka client: "+entry.Message, "tag", entry.Tag)
			}
		}
	})
	return func() {
		close(done)
		group.Wait()
	}
}

func (c *Consumer) wakeCommitting() {
	select {
	case c.applied <- struct{}{}:
	default: // it is awake, and will see this batch too
	}
}

// commit tells Kafka which offsets are applied. If it fails nothing is lost:
// the offsets stay pending, and if this member dies or loses the partition, the
// records are read again and the handler knows them. It takes no longer than
// the time-outs of the session and the socket.
func (c *Consumer) commit() {
	c.committing.Lock()
	defer c.committing.Unlock()

	offsets := c.tracker.pending()
	if len(offsets) == 0 || c.client.AssignmentLost() {
		return
	}
	var partitions []kafka.TopicPartition
	for place, offset := range offsets {
		partitions = append(partitions, kafka.TopicPartition{Topic: &place.topic, Partition: place.partition, Offset: kafka.Offset(offset)})
	}
	if _, err := c.client.CommitOffsets(partitions); err != nil {
		c.metrics.commitFailures.Inc()
		c.config.Log.Warn("offsets not committed; records may be read again", "error", err)
		return
	}
	c.tracker.committed(offsets)
	c.config.OnCommitted()
}

// lookAround measures how far behind each partition is, and finds out whether
// brokers that seemed away are (the client says so of an idle connection too)
// or are back (which it does not say).
func (c *Consumer) lookAround() {
	c.metrics.lag.Reset()
	for place, offset := range c.tracker.positions() {
		if _, end, err := c.client.GetWatermarkOffsets(place.topic, place.partition); err == nil && end >= 0 {
			c.metrics.setLag(place, end-offset)
		}
	}
	if c.doubtful.Load() {
		_, err := c.client.GetMetadata(&c.config.Topics[0], false, 1000)
		c.unreachable.Store(err != nil)
		c.doubtful.Store(err != nil)
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
	}
	return true, ""
}

// outlive is ctx with its end put off by grace.
func outlive(ctx context.Context, grace time.Duration) (context.Context, context.CancelFunc) {
	longer, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() { time.AfterFunc(grace, cancel) })
	return longer, func() {
		stop()
		cancel()
	}
}

// toRecord keeps the difference between no value (a tombstone) and an empty one.
func toRecord(message *kafka.Message) event.Record {
	headers := make([]event.Header, len(message.Headers))
	for i, header := range message.Headers {
		headers[i] = event.Header(header)
	}
	return event.Record{
		Topic:     *message.TopicPartition.Topic,
		Partition: message.TopicPartition.Partition,
		Offset:    int64(message.TopicPartition.Offset),
		Time:      message.Timestamp,
		Key:       message.Key,
		Value:     message.Value,
		Headers:   headers,
	}
}

func places(partitions []kafka.TopicPartition) []place {
	places := make([]place, len(partitions))
	for i, partition := range partitions {
		places[i] = place{*partition.Topic, partition.Partition}
	}
	return places
}

func topicPartitions(places []place) []kafka.TopicPartition {
	partitions := make([]kafka.TopicPartition, len(places))
	for i, place := range places {
		partitions[i] = kafka.TopicPartition{Topic: &place.topic, Partition: place.partition}
	}
	return partitions
}

package kafka

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/confluentinc/confluent-kafka-go/v2/kafka"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/event"
)

// ProducerConfig says where to produce and who is told what became of it. The
// functions are called from the producer's own goroutines, not after Close has
// returned, and must not block.
type ProducerConfig struct {
	Brokers  string // host:port, comma separated
	ClientID string
	Log      *slog.Logger

	// Delivered is told, by its seq, that the broker has a record, or why it
	// has not: see Refused. After an error the Producer is done.
	Delivered func(seq uint64, err error)
	// Reachable is told when no broker answers any more (an error) and when
	// one does again (nil).
	Reachable func(err error)

	// TopicTimeout is how long a topic may be unknown to the brokers before a
	// record for it is refused: a new topic takes a moment. 0 means 10 s.
	TopicTimeout time.Duration
}

// Producer sends records, each at least once and, in one partition, in the
// order of Publish: a record that cannot be sent holds up the ones behind it.
// Within its lifetime the broker drops what it sends again by itself
// (idempotence); a new Producer knows nothing of the old one's records.
//
// A broker that is away is waited for without end. When a record is refused, or a
// topic was deleted and made again, the Producer is done: what comes behind fails
// too, whatever it is, and its user closes it and starts over with another.
type Producer struct {
	config  ProducerConfig
	client  *kafka.Producer
	topics  map[string]*string
	names   sync.Map       // of topics, for watchTopics
	headers []kafka.Header // reused: the client copies them
	down    chan error     // brokers may be away
	closed  chan struct{}
	workers sync.WaitGroup
}

// queueKilobytes bounds what the client holds. The user's own bound on what is
// in flight is to be lower; this one is there for when it is not.
const queueKilobytes = 128 << 10

// NewProducer makes a producer. It does not wait for the brokers.
func NewProducer(config ProducerConfig) (*Producer, error) {
	config.TopicTimeout = cmp.Or(config.TopicTimeout, 10*time.Second)
	client, err := kafka.NewProducer(&kafka.ConfigMap{
		"bootstrap.servers": config.Brokers,
		"client.id":         config.ClientID,

		// What the guarantee rests on. In-flight requests up to 5 keep their
		// order with idempotence. A refused record is a fatal error and not a
		// gap that later records of its partition could be seen behind.
		"acks":                                  "all",
		"enable.idempotence":                    true,
		"enable.gapless.guarantee":              true,
		"max.in.flight.requests.per.connection": 5,
		"message.timeout.ms":                    0, // never give up a record because time has passed
		"topic.metadata.propagation.max.ms":     int(config.TopicTimeout.Milliseconds()),
		"message.max.bytes":                     8 << 20, // how large is too large is the broker's to say

		// The partition that the Java clients pick for a key, so that all
		// relays agree.
		"partitioner": "murmur2_random",

		"linger.ms":                    0, // what waits goes in one batch anyway
		"compression.type":             "lz4",
		"queue.buffering.max.messages": 100_000,
		"queue.buffering.max.kbytes":   queueKilobytes,
		"reconnect.backoff.ms":         50,
		"reconnect.backoff.max.ms":     1000,
		"retry.backoff.max.ms":         1000,
		"socket.keepalive.enable":      true,
		"enable.metrics.push":          false,

		"go.delivery.report.fields": "none",
		"go.events.channel.size":    1000,
		"go.produce.channel.size":   0, // not used
		"go.logs.channel.enable":    true,
	})
	if err != nil {
		return nil, fmt.Errorf("make producer: %w", err)
	}
	p := &Producer{
		config: config,
		client: client,
		topics: make(map[string]*string),
		down:   make(chan error, 1),
		closed: make(chan struct{}),
	}
	p.workers.Go(p.readEvents)
	p.workers.Go(p.watchBrokers)
	p.workers.Go(p.watchTopics)
	return p, nil
}

// Publish queues a record and returns; Delivered is told of it by seq. With an
// error it is not queued. It is for one goroutine at a time.
func (p *Producer) Publish(record event.Record, seq uint64) error {
	topic, known := p.topics[record.Topic]
	if !known {
		topic = &record.Topic
		p.topics[record.Topic] = topic
		p.names.Store(record.Topic, struct{}{})
	}
	p.headers = p.headers[:0]
	for _, header := range record.Headers {
		p.headers = append(p.headers, kafka.Header(header))
	}
	err := p.client.Produce(&kafka.Message{
		TopicPartition: kafka.TopicPartition{Topic: topic, Partition: kafka.PartitionAny},
		Key:            record.Key,
		Value:          record.Value,
		Headers:        p.headers,
		Opaque:         seq,
	}, nil)
	if err != nil {
		return p.describe(err, record.Topic)
	}
	return nil
}

// Close gives up what is not delivered yet. Afterwards nothing is reported.
func (p *Producer) Close() {
	close(p.closed)
	p.workers.Wait() // first, so that none of them uses a client that is gone
	p.client.Close()
}

func (p *Producer) readEvents() {
	for {
		select {
		case <-p.closed:
			return
		case entry := <-p.client.Logs():
			p.config.Log.Debug("kafka client: "+entry.Message, "client", entry.Name)
		case e := <-p.client.Events():
			switch e := e.(type) {
			case *kafka.Message:
				p.report(e)
			case kafka.Error:
				// An error of the client as a whole. What it means for a record
				// is in the record's own report.
				if e.Code() == kafka.ErrAllBrokersDown {
					select {
					case p.down <- e:
					default: // known already
					}
				}
			}
		}
	}
}

func (p *Producer) report(message *kafka.Message) {
	seq, _ := message.Opaque.(uint64)
	if err := message.TopicPartition.Error; err != nil {
		p.config.Delivered(seq, p.describe(err, *message.TopicPartition.Topic))
		return
	}
	p.config.Delivered(seq, nil)
}

// watchBrokers finds out when brokers answer again, which the client does not
// say, and that they are away at all: a connection that was only idle too long
// is reported in the same way.
func (p *Producer) watchBrokers() {
	const patience = 500 * time.Millisecond // Close waits for it
	for {
		var down error
		select {
		case <-p.closed:
			return
		case down = <-p.down:
		}
		for away := false; ; {
			_, err := p.client.GetMetadata(nil, false, int(patience.Milliseconds()))
			if err == nil {
				if away {
					p.config.Reachable(nil)
				}
				break
			}
			if !away {
				away = true
				p.config.Reachable(fmt.Errorf("no broker of %s answers: %w", p.config.Brokers, down))
			}
			select {
			case <-p.closed:
				return
			case <-time.After(patience):
			}
		}
	}
}

// watchTopics fails the producer when one of its topics was deleted and made again.
// The client would go on, but not always: a partition's leaders are counted anew
// with the topic, and where it knows a later one it takes the news for old, asks
// the wrong broker, and records wait without end.
func (p *Producer) watchTopics() {
	client, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(p.config.Brokers, ",")...), kgo.ClientID("onceledger-admin"))
	if err != nil {
		p.config.Log.Error("topics are not watched for being made anew", "error", err)
		return
	}
	defer client.Close()
	ctx, cancel := context.WithCancel(context.Background()) //nolint:forbidigo // its life is the Producer's, which Close ends
	go func() {
		<-p.closed
		cancel()
	}()
	known := make(map[string]string)
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if topic := p.remade(ctx, kadm.NewClient(client), known); topic != "" {
			p.config.Delivered(0, fmt.Errorf("topic %s was deleted and made again: what it has not is sent by another producer", topic))
			return
		}
	}
}

// remade is a topic whose id is not the one known of it, if there is one.
func (p *Producer) remade(ctx context.Context, admin *kadm.Client, known map[string]string) string {
	var names []string
	p.names.Range(func(name, _ any) bool {
		names = append(names, name.(string))
		return true
	})
	if len(names) == 0 {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, 2*patience)
	defer cancel()
	present, err := readTopicIDs(ctx, admin, names)
	if err != nil {
		p.config.Log.Debug("ids of topics not read", "error", err)
		return ""
	}
	for topic, id := range present {
		if was := known[topic]; was != "" && was != id {
			return topic
		}
		known[topic] = id
	}
	return ""
}

// RefusedError says that the broker will not take a record however often it is
// sent: too large, not allowed, no such topic. Somebody has to change something.
type RefusedError struct {
	Topic string
	Err   error
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("the broker refuses a record for topic %s: %v", e.Topic, e.Err)
}

func (e *RefusedError) Unwrap() error { return e.Err }

// Refused lets a user recognise the error without knowing this package.
func (e *RefusedError) Refused() bool { return true }

// refusals are the errors that come again however often a record is sent.
// Everything else may pass.
var refusals = []kafka.ErrorCode{
	kafka.ErrMsgSizeTooLarge, kafka.ErrInvalidMsgSize, kafka.ErrRecordListTooLarge,
	kafka.ErrInvalidMsg, kafka.ErrInvalidRecord, kafka.ErrInvalidTimestamp, kafka.ErrPolicyViolation,
	kafka.ErrUnsupportedForMessageFormat, kafka.ErrUnsupportedCompressionType, kafka.ErrUnsupportedVersion,
	kafka.ErrUnknownTopic, kafka.ErrUnknownTopicOrPart, kafka.ErrTopicException, kafka.ErrUnknownPartition,
	kafka.ErrTopicAuthorizationFailed, kafka.ErrClusterAuthorizationFailed,
	kafka.ErrSaslAuthenticationFailed, kafka.ErrAuthentication,
	kafka.ErrInvalidRequiredAcks, kafka.ErrInvalidConfig, kafka.ErrInvalidArg,
}

func (p *Producer) describe(err error, topic string) error {
	fault, ok := errors.AsType[kafka.Error](err)
	if !ok {
		return err
	}
	if fault.Code() == kafka.ErrFatal {
		// Behind a fatal error every record fails alike; the cause says more.
		if cause, ok := errors.AsType[kafka.Error](p.client.GetFatalError()); ok {
			fault = cause
		}
	}
	if slices.Contains(refusals, fault.Code()) {
		return &RefusedError{Topic: topic, Err: fault}
	}
	return fmt.Errorf("deliver to topic %s: %w", topic, fault)
}

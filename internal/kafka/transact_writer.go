package kafka

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/confluentinc/confluent-kafka-go/v2/kafka"

	"github.com/onceledger/onceledger/internal/event"
)

// writer is a transactional producer: one session, in which Kafka drops what
// the client sends again by itself.
type writer struct {
	client      *kafka.Producer
	initialised bool
	doubtful    atomic.Bool // a request may still be under way, though it was given up
	abandoned   bool        // a call has not come back (see call); not to be used or closed
	closed      chan struct{}
	workers     sync.WaitGroup
}

func newWriter(config TransactorConfig) (*writer, error) {
	timeout := int(config.TransactionTimeout.Milliseconds())
	client, err := kafka.NewProducer(&kafka.ConfigMap{
		"bootstrap.servers": config.Brokers,
		"client.id":         config.ClientID,

		// What the guarantee rests on. Retries are without end within
		// message.timeout.ms; a transaction with a record that was given up
		// cannot be committed.
		"transactional.id":                      config.TransactionalID,
		"transaction.timeout.ms":                timeout,
		"message.timeout.ms":                    timeout,
		"socket.timeout.ms":                     min(10_000, timeout),
		"enable.idempotence":                    true,
		"acks":                                  "all",
		"max.in.flight.requests.per.connection": 5,
		"retries":                               2147483647,

		// The stage names the partition of each record; for one that has none,
		// the choice of all our producers.
		"partitioner": "murmur2_random",

		"linger.ms":                    0,
		"compression.type":             "lz4",
		"queue.buffering.max.messages": 1_000_000,
		"queue.buffering.max.kbytes":   queueKilobytes,
		"message.max.bytes":            8 << 20,
		"reconnect.backoff.ms":         50,
		"reconnect.backoff.max.ms":     1000,
		"retry.backoff.max.ms":         1000,
		"socket.keepalive.enable":      true,
		"enable.metrics.push":          false,
		"go.delivery.report.fields":    "none",
		"go.produce.channel.size":      0,
		"go.logs.channel.enable":       true,
	})
	if err != nil {
		return nil, fmt.Errorf("make transactional producer: %w", err)
	}
	w := &writer{client: client, closed: make(chan struct{})}
	w.workers.Go(func() {
		for {
			select {
			case <-w.closed:
				return
			case entry := <-client.Logs():
				config.Log.Debug("kafka client: "+entry.Message, "client", entry.Name)
			case e := <-client.Events():
				if err, ok := e.(kafka.Error); ok {
					w.doubtful.Store(true)
					config.Log.Debug("transactional producer", "error", err)
				}
			}
		}
	})
	return w, nil
}

// writtenAt is where a record lies.
type writtenAt struct {
	place
	offset int64
}

// write sends records and waits until the brokers have all of them.
func (w *writer) write(ctx context.Context, records []event.Record) ([]writtenAt, error) {
	reports := make(chan kafka.Event, len(records))
	for _, record := range records {
		headers := make([]kafka.Header, len(record.Headers))
		for i, header := range record.Headers {
			headers[i] = kafka.Header(header)
		}
		err := w.client.Produce(&kafka.Message{
			TopicPartition: kafka.TopicPartition{Topic: &record.Topic, Partition: record.Partition},
			Key:            record.Key,
			Value:          record.Value,
			Headers:        headers,
		}, reports)
		if err != nil {
			return nil, fmt.Errorf("write to %s[%d]: %w", record.Topic, record.Partition, err)
		}
	}
	written := make([]writtenAt, 0, len(records))
	for range records {
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("write %d records: %w", len(records), ctx.Err())
		case e := <-reports:
			message, ok := e.(*kafka.Message)
			if !ok {
				return nil, fmt.Errorf("write records: unexpected report %v", e)
			}
			at := message.TopicPartition
			if at.Error != nil {
				return nil, fmt.Errorf("write to %s[%d]: %w", *at.Topic, at.Partition, at.Error)
			}
			written = append(written, writtenAt{place{*at.Topic, at.Partition}, int64(at.Offset)})
		}
	}
	return written, nil
}

// close gives up what is open. A client whose brokers are silent may take long;
// its end is not waited for then.
func (w *writer) close() {
	done := make(chan struct{})
	go func() {
		defer close(done)
		close(w.closed)
		w.workers.Wait()
		w.client.Close()
	}()
	select {
	case <-done:
	case <-time.After(patience):
	}
}

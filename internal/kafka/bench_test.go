package kafka_test

import (
	"bytes"
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/kafka"
)

// BenchmarkConsumer reads events like ours, 400 bytes and 10 headers, with a
// handler that does nothing. The broker runs in the same process and takes its
// part of the processor.
func BenchmarkConsumer(b *testing.B) {
	world := newWorld(b, 6)
	client, err := kgo.NewClient(kgo.SeedBrokers(world.broker.Brokers()), kgo.DefaultProduceTopic(world.topic))
	require.NoError(b, err)
	sample := event.Event{
		ID: uuid.New(), TenantID: uuid.New(), AggregateType: event.AggregateOrder, AggregateID: uuid.New(), AggregateVersion: 1,
		Type: event.OrderPaid, SchemaVersion: event.SchemaVersion, OccurredAt: time.Now(),
		Traceparent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", Payload: bytes.Repeat([]byte("x"), 400),
	}.Record()
	var headers []kgo.RecordHeader
	for _, header := range sample.Headers {
		headers = append(headers, kgo.RecordHeader{Key: header.Key, Value: header.Value})
	}
	for range b.N {
		key := uuid.New()
		client.Produce(b.Context(), &kgo.Record{Key: key[:], Value: sample.Value, Headers: headers}, nil)
	}
	require.NoError(b, client.Flush(b.Context()))
	client.Close()

	consumer, err := kafka.NewConsumer(kafka.ConsumerConfig{
		Brokers: world.broker.Brokers(), Group: group, Topics: []string{world.topic}, Log: slog.New(slog.DiscardHandler),
	})
	require.NoError(b, err)
	ctx, cancel := context.WithCancel(b.Context())
	records, batches := 0, 0
	var started time.Time
	b.ReportAllocs()
	b.ResetTimer()
	require.NoError(b, consumer.Run(ctx, func(_ context.Context, batch []event.Record) error {
		if records == 0 {
			started = time.Now() // joining the group is not what is measured
		}
		records += len(batch)
		batches++
		if records == b.N {
			cancel()
		}
		return nil
	}))
	elapsed := time.Since(started)
	b.ReportMetric(float64(records)/elapsed.Seconds(), "records/s")
	b.ReportMetric(float64(records)/float64(batches), "records/batch")
}

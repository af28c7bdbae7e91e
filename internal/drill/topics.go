package drill

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/event"
)

// topics reads what is written to the topics from a moment on, as a consumer that
// reads committed records does.
type topics struct {
	*kgo.Client

	admin *kadm.Client
	read  kadm.Offsets // up to here
}

func openTopics(ctx context.Context, brokers string) (*topics, error) {
	t := &topics{read: make(kadm.Offsets)}
	client, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(brokers, ",")...))
	if err != nil {
		return nil, fmt.Errorf("KAFKA_BROKERS: %w", err)
	}
	defer client.Close()
	ends, err := kadm.NewClient(client).ListEndOffsets(ctx, event.OrderEvents, event.BillingEvents)
	if err = errors.Join(err, ends.Error()); err != nil {
		return nil, fmt.Errorf("ask the brokers where the topics end: %w", err)
	}
	t.read = ends.Offsets()
	t.Client, err = kgo.NewClient(
		kgo.SeedBrokers(strings.Split(brokers, ",")...),
		kgo.ConsumePartitions(ends.KOffsets()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.KeepControlRecords(), // one may be the last
	)
	if err != nil {
		return nil, fmt.Errorf("KAFKA_BROKERS: %w", err)
	}
	t.admin = kadm.NewClient(t.Client)
	return t, nil
}

// count reads up to where the topics end now, and counts each event's records.
func (t *topics) count(ctx context.Context) (map[uuid.UUID]int, error) {
	ends, err := t.admin.ListCommittedOffsets(ctx, event.OrderEvents, event.BillingEvents)
	if err = errors.Join(err, ends.Error()); err != nil {
		return nil, fmt.Errorf("ask the brokers where the topics end: %w", err)
	}
	counts := make(map[uuid.UUID]int)
	for !t.reached(ends) {
		fetches := t.PollFetches(ctx)
		if err := errors.Join(ctx.Err(), fetches.Err()); err != nil {
			return nil, fmt.Errorf("read the topics: %w", err)
		}
		fetches.EachRecord(func(record *kgo.Record) {
			t.read.Add(kadm.Offset{Topic: record.Topic, Partition: record.Partition, At: record.Offset + 1})
			if id, err := uuid.Parse(header(record, event.HeaderID)); err == nil && !record.Attrs.IsControl() {
				counts[id]++
			}
		})
	}
	return counts, nil
}

func (t *topics) reached(ends kadm.ListedOffsets) bool {
	done := true
	ends.Each(func(end kadm.ListedOffset) {
		at, _ := t.read.Lookup(end.Topic, end.Partition)
		done = done && at.At >= end.Offset
	})
	return done
}

func header(record *kgo.Record, key string) string {
	for _, header := range record.Headers {
		if header.Key == key {
			return string(header.Value)
		}
	}
	return ""
}

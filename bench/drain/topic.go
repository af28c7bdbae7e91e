package drain

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/event"
)

// partitions is how many the topic has.
const partitions = 6

// MakeTopic makes order.events anew, and returns when it is there. Apache Kafka
// takes a moment to delete what was there, and to tell everybody.
func MakeTopic(ctx context.Context, admin *kadm.Client, configs map[string]*string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	_, err := admin.DeleteTopic(ctx, event.OrderEvents)
	if err != nil && !errors.Is(err, kerr.UnknownTopicOrPartition) {
		return err
	}
	err = repeat(ctx, kerr.TopicAlreadyExists, func() error {
		_, err := admin.CreateTopic(ctx, partitions, 1, configs, event.OrderEvents)
		return err
	})
	if err != nil {
		return err
	}
	return repeat(ctx, kerr.UnknownTopicOrPartition, func() error {
		n, err := Count(ctx, admin)
		if err == nil && n > 0 {
			err = kerr.UnknownTopicOrPartition // that was the old one's
		}
		return err
	})
}

// repeat tries again what fails for a reason that passes.
func repeat(ctx context.Context, passing error, try func() error) error {
	for {
		err := try()
		if !errors.Is(err, passing) {
			return err
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// Published is what Check has found.
type Published struct {
	// First and Last are the records' earliest and latest time, as the topic has it.
	First, Last time.Time
	// LZ4 is how many records are compressed with it.
	LZ4 int
}

// lz4 is Kafka's number for it.
const lz4 = 3

// Check reads back what is committed on order.events, to its end. It is an error
// if it is not every event, once, with the versions of each order in turn.
func Check(ctx context.Context, brokers string, events int) (p Published, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	client, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(brokers, ",")...), kgo.ConsumeTopics(event.OrderEvents),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.KeepControlRecords()) // the last record may be one
	if err != nil {
		return p, err
	}
	defer client.Close()
	unread, err := ends(ctx, kadm.NewClient(client))
	if err != nil {
		return p, err
	}

	ids := make(map[uuid.UUID]bool, events)
	versions := make(map[uuid.UUID]int64)
	for len(unread) > 0 {
		fetches := client.PollFetches(ctx)
		if err := errors.Join(ctx.Err(), fetches.Err()); err != nil {
			return p, fmt.Errorf("read the topic: %d of %d events are there: %w", len(ids), events, err)
		}
		for record := range fetches.RecordsAll() {
			if record.Offset+1 >= unread[record.Partition] {
				delete(unread, record.Partition)
			}
			if record.Attrs.IsControl() {
				continue
			}
			e, err := event.Decode(toRecord(record))
			switch {
			case err != nil:
				return p, err
			case ids[e.ID]:
				return p, fmt.Errorf("event %s is there twice", e.ID)
			case e.AggregateVersion != versions[e.AggregateID]+1:
				return p, fmt.Errorf("version %d of order %s follows version %d", e.AggregateVersion, e.AggregateID, versions[e.AggregateID])
			}
			ids[e.ID] = true
			versions[e.AggregateID] = e.AggregateVersion
			p.see(record)
		}
	}
	if len(ids) != events {
		return p, fmt.Errorf("%d events are on the topic, not %d", len(ids), events)
	}
	return p, nil
}

func (p *Published) see(record *kgo.Record) {
	if p.First.IsZero() || record.Timestamp.Before(p.First) {
		p.First = record.Timestamp
	}
	if record.Timestamp.After(p.Last) {
		p.Last = record.Timestamp
	}
	if record.Attrs.CompressionType() == lz4 {
		p.LZ4++
	}
}

// ends are the end offsets of the partitions that hold something.
func ends(ctx context.Context, admin *kadm.Client) (map[int32]int64, error) {
	listed, err := admin.ListEndOffsets(ctx, event.OrderEvents)
	if err := errors.Join(err, listed.Error()); err != nil {
		return nil, fmt.Errorf("find the end of the topic: %w", err)
	}
	ends := make(map[int32]int64)
	listed.Each(func(end kadm.ListedOffset) {
		if end.Offset > 0 {
			ends[end.Partition] = end.Offset
		}
	})
	return ends, nil
}

// Count is how many records are on order.events. Ends of transactions count too.
func Count(ctx context.Context, admin *kadm.Client) (n int64, err error) {
	ends, err := ends(ctx, admin)
	for _, end := range ends {
		n += end
	}
	return n, err
}

func toRecord(record *kgo.Record) event.Record {
	headers := make([]event.Header, len(record.Headers))
	for i, header := range record.Headers {
		headers[i] = event.Header(header)
	}
	return event.Record{Topic: record.Topic, Key: record.Key, Value: record.Value, Headers: headers}
}

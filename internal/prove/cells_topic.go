package prove

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/sandbox"
)

// topicCells put on the topics what no relay would, and take topics away.
func topicCells() []Cell {
	return []Cell{
		{
			Name:  "topic-duplicates",
			About: "events that were sent are on the topic again, byte for byte, while others are sent",
			Bites: []Bite{BiteRedelivery},
			Run: func(ctx context.Context, w *World) error {
				return w.sendAgain(ctx, func(records []event.Record) {})
			},
		},
		{
			Name:  "topic-reordered",
			About: "old events of each order come again after newer ones, the newest first",
			Bites: []Bite{BiteRedelivery, BiteStale},
			Run: func(ctx context.Context, w *World) error {
				return w.sendAgain(ctx, slices.Reverse[[]event.Record])
			},
		},
		{
			Name:  "topic-stale-state",
			About: "an order's first state comes once more as an event of its own, after its later ones",
			Bites: []Bite{BiteStale},
			Run: func(ctx context.Context, w *World) error {
				records, err := w.someEvents(ctx, event.OrderCreated, 5)
				if err != nil {
					return err
				}
				w.Begun()
				for i, record := range records {
					records[i] = withHeader(record, event.HeaderID, uuid.Must(uuid.NewV7()).String())
				}
				if err := w.put(ctx, Injected{Applied: true}, records...); err != nil {
					return err
				}
				w.Bit(BiteStale, len(records))
				return w.marked(ctx, records)
			},
		},
		{
			Name:  "topic-undecodable",
			About: "records that are no event, of no order, between those that are",
			Bites: []Bite{BiteDeadLetters},
			Run: func(ctx context.Context, w *World) error {
				records, err := w.someEvents(ctx, event.OrderCreated, 3)
				if err != nil {
					return err
				}
				w.Begun()
				for i, record := range records {
					record.Key = []byte(uuid.NewString())
					record.Value = []byte(`{"not an event"`)
					record = withHeader(record, event.HeaderID, uuid.Must(uuid.NewV7()).String())
					record = withHeader(record, event.HeaderSubject, string(record.Key))
					records[i] = withHeader(record, "ce_specversion", "0.3")
				}
				if err := w.put(ctx, Injected{DeadLetter: "undecodable"}, records...); err != nil {
					return err
				}
				w.Bit(BiteDeadLetters, len(records))
				return nil
			},
		},
		{
			Name: "topic-recreated", Groups: []string{"kafka"},
			About: "order.events is deleted and made again, empty, once all that was on it is applied",
			Run: func(ctx context.Context, w *World) error {
				return w.remake(ctx, w.Sandbox.Config.Partitions)
			},
		},
		{
			Name: "topic-4-to-16-partitions", Groups: []string{"kafka"},
			About: "order.events has 4 partitions, and then 16, each time once all that was on it is applied",
			Run: func(ctx context.Context, w *World) error {
				if err := w.remake(ctx, 4); err != nil {
					return err
				}
				if err := w.Advance(ctx, 40); err != nil {
					return err
				}
				if err := w.grow(ctx, 16); err != nil {
					return err
				}
				if err := w.Advance(ctx, 40); err != nil {
					return err
				}
				// All of them have an owner, and events come from the new ones too.
				return until(ctx, "billing has all 16 partitions", func() (bool, error) { return w.groupOwns(ctx, 1) })
			},
		},
	}
}

// sendAgain puts the newest events of the topic on it once more, arranged, under
// load, and waits until billing has known them for what they are.
func (w *World) sendAgain(ctx context.Context, arrange func([]event.Record)) error {
	most := 60 + w.Rand.IntN(60)
	var records []event.Record
	if err := until(ctx, "there are events to send again", func() (_ bool, err error) {
		records, err = w.SentEvents(ctx, event.OrderEvents, most)
		return len(records) > 0, err
	}); err != nil {
		return err
	}
	arrange(records)
	before, err := w.Billing.Metric("onceledger_inbox_records_total", `outcome="duplicate"`)
	if err != nil {
		return err
	}
	w.Begun()
	older := 0
	newest := make(map[string]int)
	for _, record := range records {
		version, err := strconv.Atoi(headerValue(record, event.HeaderAggregateVersion))
		if err != nil {
			return fmt.Errorf("read the version of a record that was sent: %w", err)
		}
		if key := string(record.Key); version < newest[key] {
			older++
		} else {
			newest[key] = version
		}
	}
	if err := w.put(ctx, Injected{Again: true}, records...); err != nil {
		return err
	}
	w.Bit(BiteStale, older)
	return until(ctx, "billing has known all duplicates", func() (bool, error) {
		now, err := w.Billing.Metric("onceledger_inbox_records_total", `outcome="duplicate"`)
		return now >= before+float64(len(records)), err
	})
}

// someEvents are events of a type that were sent, of orders that have gone on
// since.
func (w *World) someEvents(ctx context.Context, kind event.Type, most int) (chosen []event.Record, err error) {
	err = until(ctx, "there are events to send again", func() (bool, error) {
		chosen, err = w.findEvents(ctx, kind, most)
		return len(chosen) > 0, err
	})
	return chosen, err
}

func (w *World) findEvents(ctx context.Context, kind event.Type, most int) ([]event.Record, error) {
	all, err := w.SentEvents(ctx, event.OrderEvents, 500)
	if err != nil {
		return nil, err
	}
	later := make(map[string]bool)
	var chosen []event.Record
	for _, record := range slices.Backward(all) {
		is := headerValue(record, event.HeaderType) == string(kind)
		if is && later[string(record.Key)] && len(chosen) < most {
			chosen = append(chosen, record)
		}
		later[string(record.Key)] = true
	}
	return chosen, nil
}

// put puts records on order.events one by one, each into the partition that a
// relay would pick for its key, however many there are by now.
func (w *World) put(ctx context.Context, want Injected, records ...event.Record) error {
	partitions, err := w.partitions(ctx)
	if err != nil {
		return err
	}
	byKey := kgo.StickyKeyPartitioner(nil).ForTopic(event.OrderEvents)
	for _, record := range records {
		record.Partition = int32(byKey.Partition(&kgo.Record{Key: record.Key}, partitions))
		if _, err := w.Inject(ctx, record, want); err != nil {
			return err
		}
	}
	return nil
}

// partitions is how many order.events has.
func (w *World) partitions(ctx context.Context) (count int, err error) {
	err = w.admin(func(admin *kadm.Client) error {
		topics, err := admin.ListTopics(ctx, event.OrderEvents)
		count = len(topics[event.OrderEvents].Partitions)
		return err
	})
	if err == nil && count == 0 {
		err = fmt.Errorf("%s is not there", event.OrderEvents)
	}
	return count, err
}

func headerValue(record event.Record, key string) string {
	for _, header := range record.Headers {
		if header.Key == key {
			return string(header.Value)
		}
	}
	return ""
}

func withHeader(record event.Record, key, value string) event.Record {
	record.Headers = slices.Clone(record.Headers)
	for i, header := range record.Headers {
		if header.Key == key {
			record.Headers[i].Value = []byte(value)
		}
	}
	return record
}

// admin asks the brokers something.
func (w *World) admin(fn func(*kadm.Client) error) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(w.Sandbox.KafkaAddr(), ",")...))
	if err != nil {
		return err
	}
	defer client.Close()
	return fn(kadm.NewClient(client))
}

// remake deletes order.events and makes it again, with so many partitions, while
// nothing is on its way. Relay and billing run, and are told nothing. Until billing
// has noticed, the clients wait: what it read by then would come to it in another
// order, and a refund before its payment is a dead letter.
func (w *World) remake(ctx context.Context, partitions int) error {
	return w.Quiet(ctx, func() error {
		if _, err := w.SentEvents(ctx, event.OrderEvents, 1); err != nil {
			return err
		}
		before, err := w.Billing.Metric("onceledger_consumer_topics_remade_total", `group="billing"`)
		if err != nil {
			return err
		}
		w.Begun()
		err = w.admin(func(admin *kadm.Client) error {
			_, err := admin.DeleteTopic(ctx, event.OrderEvents)
			return err
		})
		if err != nil {
			return fmt.Errorf("delete %s: %w", event.OrderEvents, err)
		}
		specs := kafka.ServiceTopics(partitions, max(1, w.Sandbox.Brokers))
		specs = slices.DeleteFunc(specs, func(spec kafka.TopicSpec) bool { return spec.Name != event.OrderEvents })
		settings := make(map[string]*string)
		for key, value := range specs[0].Config {
			settings[key] = &value
		}
		err = until(ctx, event.OrderEvents+" is made again", func() (bool, error) {
			err := w.admin(func(admin *kadm.Client) error {
				_, err := admin.CreateTopic(ctx, int32(partitions), int16(specs[0].ReplicationFactor), settings, event.OrderEvents)
				return err
			})
			return err == nil, err // it may be on its way out still
		})
		if err != nil {
			return err
		}
		w.TopicRemade(event.OrderEvents)
		return until(ctx, "billing has noticed that "+event.OrderEvents+" was made anew", func() (bool, error) {
			now, err := w.Billing.Metric("onceledger_consumer_topics_remade_total", `group="billing"`)
			return now > before, err
		})
	})
}

// grow gives order.events more partitions, while nothing is on its way: an order's
// next event may be in another one than its last.
func (w *World) grow(ctx context.Context, partitions int) error {
	return w.Quiet(ctx, func() error {
		w.Begun()
		err := w.admin(func(admin *kadm.Client) error {
			responses, err := admin.UpdatePartitions(ctx, partitions, event.OrderEvents)
			if err != nil {
				return err
			}
			if err := responses.Error(); err != nil && !errors.Is(err, kerr.InvalidPartitions) {
				return err
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("give %s %d partitions: %w", event.OrderEvents, partitions, err)
		}
		w.TopicRemade(event.OrderEvents)
		// The relay is to pick partitions by their new number from the first event
		// on, and not from some moment on.
		return errors.Join(w.Relay.Stop(), w.Relay.Start(), w.readsAll(ctx, partitions))
	})
}

// readsAll waits until the group has noticed how many partitions there are.
func (w *World) readsAll(ctx context.Context, partitions int) error {
	return sandbox.WaitAtMost(ctx, time.Minute, func() (bool, error) {
		owned, _, err := w.group(ctx)
		if err == nil && owned < partitions { // it keeps those that are gone, and reads nothing from them
			err = fmt.Errorf("of %d partitions billing has %d", partitions, owned)
		}
		return err == nil, err
	})
}

// marked waits until billing has marked these events as applied, each by its id.
func (w *World) marked(ctx context.Context, records []event.Record) error {
	ids := make([]string, len(records))
	for i, record := range records {
		ids[i] = headerValue(record, event.HeaderID)
	}
	return until(ctx, "billing has applied what was put on the topic", func() (bool, error) {
		var count int
		err := w.Sandbox.Owner.QueryRow(ctx, "SELECT count(*) FROM processed_events WHERE event_id = ANY ($1::uuid[])", ids).Scan(&count)
		return count == len(ids), err
	})
}

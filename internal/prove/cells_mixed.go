package prove

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/faults"
)

// mixedCells need two things to go wrong together: each by itself does no harm to
// a service that has a hole just there.
func mixedCells() []Cell {
	return []Cell{
		{
			Name: "kill-relay-with-a-partition-lost", Groups: []string{"relay", "kafka"}, Needs: []Need{NeedWAL},
			Bites: []Bite{BiteCrash, BiteBroker},
			About: "one partition's records are lost on their way, the others' arrive; the relay confirms what it may, and is killed",
			Run: func(ctx context.Context, w *World) error {
				return w.throughKafka(ctx, w.Relay, func(proxy *faults.KafkaProxy) error {
					if err := w.Advance(ctx, 5); err != nil {
						return err
					}
					proxy.Swallow(event.OrderEvents, int32(w.Rand.IntN(w.Sandbox.Config.Partitions)))
					defer proxy.Release()
					err := until(ctx, "records are lost", func() (bool, error) { return proxy.Swallowed() > 0, nil })
					if err != nil {
						return err
					}
					w.Bit(BiteBroker, 1)
					if err := w.confirms(ctx, 3); err != nil {
						return err
					}
					if err := w.Relay.Kill(); err != nil {
						return err
					}
					proxy.Release()
					w.Ended()
					return w.Relay.StartReady("KAFKA_BROKERS=" + proxy.Brokers())
				})
			},
		},
		{
			Name: "kill-relay-among-transactions", Groups: []string{"relay"}, Needs: []Need{NeedWAL}, Bites: []Bite{BiteCrash},
			About: "SIGKILL to the relay right after it has confirmed, three times, while slow transactions lie among each other in the log",
			Run: func(ctx context.Context, w *World) error {
				link, err := faults.StartLink(w.Sandbox.PostgresAddr())
				if err != nil {
					return err
				}
				defer link.Close()
				if err := link.Latency(150*time.Millisecond, 100*time.Millisecond); err != nil {
					return err
				}
				return w.under(w.API, w.postgresEnv(w.API, link.Addr()), func() error {
					return w.Burst(func() error {
						for range 3 {
							if err := w.Advance(ctx, 8); err != nil {
								return err
							}
							if err := w.confirms(ctx, 1); err != nil {
								return err
							}
							if err := w.Kill(w.Relay); err != nil {
								return err
							}
							if err := w.Relay.WaitReady(); err != nil {
								return err
							}
						}
						return nil
					})
				})
			},
		},
		{
			Name: "topic-same-version", Bites: []Bite{BiteStale},
			About: "an order's first state comes once more as an event of its own, with the version of its last",
			Run: func(ctx context.Context, w *World) error {
				var records []event.Record
				err := until(ctx, "an order is paid and done with, and its first event read", func() (_ bool, err error) {
					records, err = w.againAsTheirLast(ctx, 5)
					return len(records) > 0, err
				})
				if err != nil {
					return err
				}
				w.Begun()
				if err := w.put(ctx, Injected{Applied: true}, records...); err != nil {
					return err
				}
				w.Bit(BiteStale, len(records))
				return w.marked(ctx, records)
			},
		},
	}
}

// confirms waits until the relay has spoken to Postgres so many times more: each
// time it has confirmed what it holds for delivered.
func (w *World) confirms(ctx context.Context, times int) error {
	var last time.Time
	return until(ctx, "the relay has confirmed to Postgres", func() (bool, error) {
		var now time.Time
		err := w.Sandbox.Owner.QueryRow(ctx, "SELECT coalesce(max(reply_time), 'epoch') FROM pg_stat_replication").Scan(&now)
		if err == nil && now.After(last) {
			last = now
			times--
		}
		return times < 0, err
	})
}

// againAsTheirLast are first states of paid orders that the clients will not
// change any more, as events of their own with the orders' last versions.
func (w *World) againAsTheirLast(ctx context.Context, most int) ([]event.Record, error) {
	versions := make(map[string]int64)
	for _, order := range w.Orders("paid", 50) {
		versions[order.ID.String()] = order.Version
	}
	all, err := w.SentEvents(ctx, event.OrderEvents, 500)
	if err != nil {
		return nil, err
	}
	var chosen []event.Record
	for _, record := range all {
		version, known := versions[string(record.Key)]
		if !known || headerValue(record, event.HeaderType) != string(event.OrderCreated) || len(chosen) == most {
			continue
		}
		var state map[string]json.RawMessage
		if err := json.Unmarshal(record.Value, &state); err != nil {
			return nil, fmt.Errorf("read an event that was sent: %w", err)
		}
		state["version"] = json.RawMessage(fmt.Sprint(version))
		if record.Value, err = json.Marshal(state); err != nil {
			return nil, fmt.Errorf("write an event anew: %w", err)
		}
		record = withHeader(record, event.HeaderID, uuid.Must(uuid.NewV7()).String())
		chosen = append(chosen, withHeader(record, event.HeaderAggregateVersion, fmt.Sprint(version)))
	}
	return chosen, nil
}

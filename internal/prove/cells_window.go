package prove

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/faults"
)

// windowBytes is above what the relay lets be in flight (32 MiB).
const windowBytes = 36 << 20

// windowCells fill what the relay lets be in flight.
func windowCells() []Cell {
	return []Cell{{
		Name: "kill-relay-with-a-full-window", Groups: []string{"relay", "kafka"}, Needs: []Need{NeedWAL},
		Bites: []Bite{BiteCrash, BiteBroker},
		About: "the broker is silent until the relay takes in no more; then all but one partition's records arrive, the relay confirms what it may, and is killed",
		Run: func(ctx context.Context, w *World) error {
			return w.throughKafka(ctx, w.Relay, func(proxy *faults.KafkaProxy) error {
				if err := w.Advance(ctx, 5); err != nil {
					return err
				}
				proxy.Silence()
				w.Bit(BiteBroker, 1)
				err := w.fillWindow(ctx)
				proxy.Swallow(event.OrderEvents, int32(w.Rand.IntN(w.Sandbox.Config.Partitions)))
				defer proxy.Release()
				proxy.Open()
				if err == nil {
					err = until(ctx, "records are lost", func() (bool, error) { return proxy.Swallowed() > 0, nil })
				}
				if err == nil {
					err = w.confirms(ctx, 3)
				}
				if err = errors.Join(err, w.Relay.Kill()); err != nil {
					return err
				}
				proxy.Release()
				w.Ended()
				return w.Relay.StartReady("KAFKA_BROKERS=" + proxy.Brokers())
			})
		},
	}}
}

// fillWindow places large orders until the relay takes in no more.
func (w *World) fillWindow(ctx context.Context) error {
	body := placeBody{CustomerID: "probe", CustomerEmail: "probe@example.com", Currency: "EUR"}
	for i := range 200 {
		body.Lines = append(body.Lines, lineBody{
			SKU: fmt.Sprintf("tome-%d", i), Description: strings.Repeat("long ", 195), Quantity: 1, UnitAmount: 100, TaxRate: "0.19",
		})
	}
	tenants := len(w.run.load.clients)
	before, err := w.outboxBytes(ctx)
	if err != nil {
		return err
	}
	full := func() (bool, error) {
		bytes, err := w.outboxBytes(ctx)
		return bytes > before+windowBytes, err
	}
	var placed atomic.Int64
	for {
		if is, err := full(); err != nil || is {
			if err != nil {
				return err
			}
			break
		}
		group, groupCtx := errgroup.WithContext(ctx)
		for range 12 {
			group.Go(func() error {
				order, err := w.placeOne(groupCtx, int(placed.Add(1))%tenants, body)
				if err != nil {
					return err
				}
				line, err := w.run.load.journal.put(entry{Kind: entryLife, Order: order.ID})
				if err == nil {
					err = w.run.known.learn(line)
				}
				return err
			})
		}
		if err := group.Wait(); err != nil {
			return err
		}
	}
	w.Note("%d large orders", placed.Load())
	return until(ctx, "the relay takes in no more", func() (bool, error) {
		before, err := w.Relay.Metric("onceledger_relay_in_flight_events")
		if err != nil {
			return false, err
		}
		if err := w.Advance(ctx, 40); err != nil {
			return false, err
		}
		now, err := w.Relay.Metric("onceledger_relay_in_flight_events")
		return err == nil && now > 0 && now == before, err
	})
}

// outboxBytes is what the payloads of the outbox weigh.
func (w *World) outboxBytes(ctx context.Context) (bytes int64, err error) {
	err = w.Sandbox.Owner.QueryRow(ctx, "SELECT coalesce(sum(octet_length(payload::text)), 0) FROM outbox_events").Scan(&bytes)
	return bytes, err
}

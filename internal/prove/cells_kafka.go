package prove

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/onceledger/onceledger/internal/faults"
	"github.com/onceledger/onceledger/internal/sandbox"
)

// kafkaCells have brokers be away, silent, killed and too few. What kills one
// needs Apache Kafka: the embedded broker is stopped in order or not at all.
func kafkaCells() []Cell {
	outage := func(name, about string, of func(*World) *sandbox.Process, away func(*faults.KafkaProxy), kill bool) Cell {
		cell := Cell{
			Name: "kafka-" + name, About: about, Bites: []Bite{BiteBroker},
			Run: func(ctx context.Context, w *World) error {
				process := of(w)
				return w.throughKafka(ctx, process, func(proxy *faults.KafkaProxy) error {
					if err := w.Advance(ctx, 5); err != nil {
						return err
					}
					before := proxy.Passed()
					away(proxy)
					w.Bit(BiteBroker, 1)
					// What is committed meanwhile waits; what was on its way is in doubt.
					err := w.Advance(ctx, 20)
					if err == nil && proxy.Passed() > before+10 {
						err = errors.New("the broker was not away: something got through")
					}
					if err == nil && kill {
						// It ends with records in flight that nobody has acknowledged.
						err = process.Kill()
					}
					proxy.Open()
					w.Ended()
					if err == nil && kill {
						err = process.Start("KAFKA_BROKERS=" + proxy.Brokers())
					}
					return errors.Join(err, process.WaitReady())
				})
			},
		}
		if kill {
			cell.Bites = append(cell.Bites, BiteCrash)
		}
		return cell
	}
	relay := func(w *World) *sandbox.Process { return w.Relay }
	billing := func(w *World) *sandbox.Process { return w.Billing }

	return []Cell{
		outage("away-from-relay", "the broker cannot be reached by the relay", relay, (*faults.KafkaProxy).Shut, false),
		outage("away-from-billing", "the broker cannot be reached by billing and balances", billing, (*faults.KafkaProxy).Shut, false),
		outage("silent-to-relay", "the broker says nothing to the relay, and later everything", relay, (*faults.KafkaProxy).Silence, false),
		outage("silent-to-billing", "the broker says nothing to billing and balances, and later everything", billing, (*faults.KafkaProxy).Silence, false),
		outage("silent-and-relay-killed", "the relay is killed while the broker is silent", relay, (*faults.KafkaProxy).Silence, true),
		{
			Name: "kafka-kill", Groups: []string{"apache"}, Needs: []Need{NeedApache}, Bites: []Bite{BiteBroker},
			About: "SIGKILL to a broker, and it comes back",
			Run: func(ctx context.Context, w *World) error {
				return w.brokerOut(ctx, func(node int) error { w.Sandbox.Kafka.Kill(node); return nil }, 0)
			},
		},
		{
			Name: "kafka-stop", Groups: []string{"apache"}, Needs: []Need{NeedApache}, Bites: []Bite{BiteBroker},
			About: "a broker is stopped in order, and started again",
			Run: func(ctx context.Context, w *World) error {
				return w.brokerOut(ctx, func(node int) error { return syscall.Kill(w.Sandbox.Kafka.Pid(node), syscall.SIGTERM) }, 0)
			},
		},
		{
			Name: "kafka-freeze", Groups: []string{"apache"}, Needs: []Need{NeedApache}, Bites: []Bite{BiteBroker},
			About: "SIGSTOP to a broker for a while, then CONT: it does not know that it was away",
			Run: func(ctx context.Context, w *World) error {
				node := 1 + w.Rand.IntN(w.Sandbox.Kafka.Brokers())
				w.Begun()
				err := w.Sandbox.Kafka.Pause(node)
				if err == nil {
					w.Bit(BiteBroker, 1)
					err = w.Burst(func() error { return w.Advance(ctx, 30) })
				}
				err = errors.Join(err, w.Sandbox.Kafka.Resume(node))
				w.Ended()
				return errors.Join(err, w.Sandbox.Kafka.WaitReady(ctx))
			},
		},
		{
			Name: "kafka-lose-one-of-three", Groups: []string{"apache"}, Needs: []Need{NeedApache, NeedThree}, Bites: []Bite{BiteBroker},
			About: "one of three brokers is lost, and work goes on without it",
			Run: func(ctx context.Context, w *World) error {
				return w.brokerOut(ctx, func(node int) error { w.Sandbox.Kafka.Kill(node); return nil }, 60)
			},
		},
		{
			Name: "kafka-below-min-isr", Groups: []string{"apache"}, Needs: []Need{NeedApache, NeedThree}, Bites: []Bite{BiteBroker},
			About: "two of three brokers are frozen: nothing can be acknowledged until one is back",
			Run: func(ctx context.Context, w *World) error {
				first := 1 + w.Rand.IntN(3)
				nodes := []int{first, 1 + first%3}
				w.Begun()
				var err error
				for _, node := range nodes {
					err = errors.Join(err, w.Sandbox.Kafka.Pause(node))
				}
				w.Bit(BiteBroker, len(nodes))
				if err == nil {
					err = w.Burst(func() error {
						// Orders are still taken, and their events wait.
						return until(ctx, "events wait for their acknowledgement", func() (bool, error) {
							waiting, err := w.Relay.Metric("onceledger_relay_in_flight_events")
							return waiting >= 20, err
						})
					})
				}
				for _, node := range nodes {
					err = errors.Join(err, w.Sandbox.Kafka.Resume(node))
				}
				w.Ended()
				return errors.Join(err, w.Sandbox.Kafka.WaitReady(ctx))
			},
		},
	}
}

// brokerOut ends a broker under load and starts it again once the clients have
// got so many answers. With goesOn they count receipts, which need Kafka.
func (w *World) brokerOut(ctx context.Context, end func(node int) error, goesOn int64) error {
	if w.Sandbox.Kafka.Brokers() == 1 && goesOn > 0 {
		return fmt.Errorf("there is one broker: without it nothing goes on")
	}
	node := 1 + w.Rand.IntN(w.Sandbox.Kafka.Brokers())
	w.Note("broker %d", node)
	return w.Burst(func() error {
		if err := w.Advance(ctx, 10); err != nil {
			return err
		}
		w.Begun()
		if err := end(node); err != nil {
			return err
		}
		select {
		case <-w.Sandbox.Kafka.Done(node):
			w.Bit(BiteBroker, 1)
		case <-time.After(sandbox.Patience):
			return fmt.Errorf("broker %d has not ended", node)
		}
		err := w.Advance(ctx, 10)
		if err == nil && goesOn > 0 {
			err = w.applies(ctx, goesOn)
		}
		err = errors.Join(err, w.Sandbox.Kafka.Start(context.WithoutCancel(ctx), node))
		w.Ended()
		return err
	})
}

// applies waits until billing has applied so many events more.
func (w *World) applies(ctx context.Context, events int64) error {
	count := func() (applied int64, err error) {
		err = w.Sandbox.Owner.QueryRow(ctx, "SELECT count(*) FROM processed_events").Scan(&applied)
		return applied, err
	}
	before, err := count()
	if err != nil {
		return err
	}
	return until(ctx, "billing applies events", func() (bool, error) {
		now, err := count()
		return now >= before+events, err
	})
}

package prove

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/onceledger/onceledger/internal/faults"
	"github.com/onceledger/onceledger/internal/sandbox"
)

// networkCells put a bad network between a process and Postgres, or Kafka.
func networkCells() []Cell {
	api := func(w *World) *sandbox.Process { return w.API }
	relay := func(w *World) *sandbox.Process { return w.Relay }
	billing := func(w *World) *sandbox.Process { return w.Billing }
	reset := badNetwork{
		name: "reset", about: "connections are reset, again and again",
		make: (*faults.Link).Reset, breaks: true,
	}
	cut := badNetwork{
		name: "cut", about: "connections end after 3,000 bytes more, in the middle of whatever it is",
		make: func(l *faults.Link) error { return l.CutAfter(3000) }, breaks: true,
	}
	slow := badNetwork{
		name: "latency", about: "every answer takes 150 ms longer, more or less",
		make: func(l *faults.Link) error { return l.Latency(150*time.Millisecond, 100*time.Millisecond) },
	}
	thin := badNetwork{
		name: "thin", about: "20 kB a second get through",
		make: func(l *faults.Link) error { return l.Bandwidth(20) },
	}

	var cells []Cell
	for _, bad := range []badNetwork{reset, cut, slow} {
		cells = append(cells,
			bad.toPostgres("api", api), bad.toPostgres("relay", relay), bad.toPostgres("billing", billing),
			bad.toKafka("relay", relay), bad.toKafka("billing", billing),
		)
	}
	return append(cells,
		thin.toKafka("billing", billing),
		Cell{
			Name: "network-unheard-acks", Groups: []string{"kafka"},
			About: "the relay's connection is cut between a write to Kafka and its acknowledgement",
			Bites: []Bite{BiteBroker},
			Run: func(ctx context.Context, w *World) error {
				return w.throughKafka(ctx, w.Relay, func(proxy *faults.KafkaProxy) error {
					proxy.CutAnswers(kmsg.Produce, 5)
					err := until(ctx, "acknowledgements are cut off", func() (bool, error) { return proxy.Cut() >= 5, nil })
					w.Bit(BiteBroker, proxy.Cut())
					return err
				})
			},
		},
		Cell{
			Name: "network-unheard-offsets", Groups: []string{"kafka"},
			About: "billing's connection is cut between a commit of offsets and its answer",
			Bites: []Bite{BiteBroker},
			Run: func(ctx context.Context, w *World) error {
				return w.throughKafka(ctx, w.Billing, func(proxy *faults.KafkaProxy) error {
					proxy.CutAnswers(kmsg.OffsetCommit, 5)
					err := until(ctx, "commits of offsets are cut off", func() (bool, error) { return proxy.Cut() >= 5, nil })
					w.Bit(BiteBroker, proxy.Cut())
					return err
				})
			},
		},
	)
}

// badNetwork is what a network may be.
type badNetwork struct {
	name, about string
	make        func(*faults.Link) error
	breaks      bool // connections, so that new ones are made
}

func (b badNetwork) toPostgres(name string, of func(*World) *sandbox.Process) Cell {
	cell := Cell{
		Name: "network-" + b.name + "-postgres-" + name, Groups: []string{b.name, "postgres"},
		About: b.about + ", between " + name + " and Postgres",
		Run: func(ctx context.Context, w *World) error {
			gate, err := faults.OpenGate(ctx, w.Sandbox.PostgresAddr())
			if err != nil {
				return err
			}
			defer gate.Close()
			link, err := faults.StartLink(gate.Addr())
			if err != nil {
				return err
			}
			defer link.Close()
			return w.under(of(w), w.postgresEnv(of(w), link.Addr()), func() error {
				return b.suffer(ctx, w, link, gate, BiteServer)
			})
		},
	}
	if b.breaks {
		cell.Bites = []Bite{BiteServer}
	}
	return cell
}

func (b badNetwork) toKafka(name string, of func(*World) *sandbox.Process) Cell {
	cell := Cell{
		Name: "network-" + b.name + "-kafka-" + name, Groups: []string{b.name, "kafka"},
		About: b.about + ", between " + name + " and Kafka",
		Run: func(ctx context.Context, w *World) error {
			proxy, err := faults.StartKafkaProxy(ctx, w.Sandbox.KafkaAddr())
			if err != nil {
				return err
			}
			defer proxy.Close()
			// A bad one to the first broker; the others, if there are any, are well.
			gate := proxy.Gates()[0]
			link, err := faults.StartLink(gate.Addr())
			if err != nil {
				return err
			}
			defer link.Close()
			proxy.Name(gate, link.Addr())
			return w.under(of(w), []string{"KAFKA_BROKERS=" + proxy.Brokers()}, func() error {
				return b.suffer(ctx, w, link, gate, BiteBroker)
			})
		},
	}
	if b.breaks {
		cell.Bites = []Bite{BiteBroker}
	}
	return cell
}

// suffer has a link be bad under load: until connections were made anew a few
// times where it breaks them, and for some answers otherwise. gate is behind it.
func (b badNetwork) suffer(ctx context.Context, w *World, link *faults.Link, gate *faults.Gate, bite Bite) error {
	return w.Burst(func() error {
		if err := w.Advance(ctx, 5); err != nil {
			return err
		}
		before := gate.Opened()
		if err := b.make(link); err != nil {
			return err
		}
		var err error
		if b.breaks {
			err = until(ctx, "connections were made anew", func() (bool, error) { return gate.Opened() >= before+3, nil })
			w.Bit(bite, gate.Opened()-before)
		} else {
			passed := gate.Passed()
			err = until(ctx, "something got through slowly", func() (bool, error) { return gate.Passed() >= passed+5, nil })
			if err == nil {
				err = w.Advance(ctx, 5)
			}
		}
		if err != nil {
			err = fmt.Errorf("with a network that is bad (%s): %w", b.name, err)
		}
		return errors.Join(err, link.Heal(context.WithoutCancel(ctx)))
	})
}

// throughKafka has a process reach Kafka by way of a proxy, under load.
func (w *World) throughKafka(ctx context.Context, process *sandbox.Process, fn func(*faults.KafkaProxy) error) error {
	proxy, err := faults.StartKafkaProxy(ctx, w.Sandbox.KafkaAddr())
	if err != nil {
		return err
	}
	defer proxy.Close()
	return w.under(process, []string{"KAFKA_BROKERS=" + proxy.Brokers()}, func() error {
		return w.Burst(func() error { return fn(proxy) })
	})
}

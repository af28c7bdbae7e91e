package balances_test

import (
	"bytes"
	"log/slog"
	"math/big"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/balances"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/transact"
)

// bench drives a stage by hand: one partition of the source and of the topics
// that hold the state, with transactions that are committed or not.
type bench struct {
	*world
	stage     *balances.Stage
	log       bytes.Buffer
	registry  *prometheus.Registry
	source    []event.Record
	first     int64
	topic     string
	committed int64
	state     []event.Record
	config    balances.Config
}

func newBench(t *testing.T, config balances.Config) *bench {
	t.Helper()
	b := &bench{world: worldOn(t, ""), committed: -1, config: config}
	b.restart(t)
	return b
}

// restart is another instance, with the state from the topics.
func (b *bench) restart(t *testing.T) {
	t.Helper()
	b.log.Reset()
	b.registry = prometheus.NewRegistry()
	b.config.Log, b.config.Metrics = slog.New(slog.NewTextHandler(&b.log, nil)), b.registry
	stage, err := balances.New(b.config)
	require.NoError(t, err)
	b.stage = stage
	stage.Begin(0)
	for _, record := range b.state {
		require.NoError(t, stage.Load(record))
	}
	next, err := stage.Resume(0, transact.Source{Committed: b.committed, First: b.first, Topic: b.topic})
	require.NoError(t, err)
	b.committed = next
}

func (b *bench) metric(t *testing.T, name, label string) float64 {
	t.Helper()
	return (&instance{registry: b.registry}).metric(t, name, label)
}

// publish puts events on the source.
func (b *bench) publish(events ...event.Event) {
	for _, e := range events {
		record := e.Record()
		record.Offset = int64(len(b.source))
		b.source = append(b.source, record)
	}
}

// run takes what is there through transactions of so many records, and returns
// where the partition stopped, if it did.
func (b *bench) run(t *testing.T, batch int) *transact.Stop {
	t.Helper()
	for records := range slices.Chunk(b.source[b.committed:], batch) {
		aborted, err := b.stage.Process(records) // nothing comes of it
		require.NoError(t, err)
		output, err := b.stage.Process(records)
		require.NoError(t, err)
		require.Len(t, output.Records, len(aborted.Records), "an aborted transaction left something behind")
		b.state = append(b.state, output.Records...)
		stop, stopped := output.Stops[0]
		if b.committed = records[len(records)-1].Offset + 1; stopped {
			b.committed = stop.Offset
		}
		output.Committed()
		if stopped {
			return &stop
		}
	}
	return nil
}

func (b *bench) requireBooks(t *testing.T) {
	t.Helper()
	totals, err := balances.Collect(func(use func(event.Record) error) error {
		for _, record := range b.state {
			if record.Topic == event.LedgerBalances {
				if err := use(record); err != nil {
					return err
				}
			}
		}
		return nil
	})
	require.NoError(t, err)
	text := func(sums map[balances.Account]*big.Int) map[balances.Account]string {
		texts := make(map[balances.Account]string)
		for account, sum := range sums {
			texts[account] = sum.String()
		}
		return texts
	}
	require.Equal(t, text(b.books), text(totals.Accounts))
}

func (b *bench) issueMany(t *testing.T, count int) []event.Event {
	var events []event.Event
	for range count {
		events = append(events, b.issue(t))
	}
	return events
}

// compact keeps the last record of each key.
func (b *bench) compact() {
	last := make(map[string]int)
	for i, record := range b.state {
		last[record.Topic+string(record.Key)] = i
	}
	var kept []event.Record
	for i, record := range b.state {
		if last[record.Topic+string(record.Key)] == i && record.Value != nil {
			kept = append(kept, record)
		}
	}
	b.state = kept
}

func TestStage(t *testing.T) {
	t.Parallel()

	t.Run("DropsWhatComesTwiceAlsoAfterARestart", func(t *testing.T) {
		t.Parallel()

		b := newBench(t, balances.Config{})
		events := b.issueMany(t, 100)
		b.publish(events...)
		require.Nil(t, b.run(t, 7))
		b.requireBooks(t)
		b.compact()
		b.restart(t)
		b.publish(events...)
		b.publish(events[50:]...)
		require.Nil(t, b.run(t, 13))
		b.requireBooks(t)
		require.EqualValues(t, 150, b.metric(t, "onceledger_balances_records_total", "duplicate"))
	})

	// The sums stay, what is sent again is known, and nothing of the new topic is
	// passed over, whether Kafka has kept the group's offset or not.
	t.Run("ReadsATopicThatWasMadeAnewFromItsBeginning", func(t *testing.T) {
		t.Parallel()

		for _, kept := range []bool{false, true} {
			b := newBench(t, balances.Config{})
			old := b.issueMany(t, 50) // the first by a version that knows no ids
			b.publish(old[:20]...)
			require.Nil(t, b.run(t, 7))
			b.topic = "first"
			b.restart(t)
			require.EqualValues(t, 20, b.committed)
			b.publish(old[20:]...)
			require.Nil(t, b.run(t, 7))
			require.EqualValues(t, 50, b.committed)

			b.topic, b.source = "second", nil
			if !kept {
				b.committed = -1
			}
			b.publish(old[40:]...)
			b.publish(b.issueMany(t, 60)...)
			b.restart(t)
			require.Zero(t, b.committed, "where it goes on")
			require.Contains(t, b.log.String(), "made anew")
			require.Nil(t, b.run(t, 7))
			b.requireBooks(t)
			require.EqualValues(t, 10, b.metric(t, "onceledger_balances_records_total", "duplicate"))

			b.restart(t)
			require.EqualValues(t, 70, b.committed)
			require.NotContains(t, b.log.String(), "anew")
		}
	})

	t.Run("HoldsSumsBeyond64Bits", func(t *testing.T) {
		t.Parallel()

		b := newBench(t, balances.Config{})
		b.tenants = b.tenants[:1]
		for range 9000 {
			b.orders = nil // so that it is an invoice
			b.publish(b.issue(t))
		}
		require.Nil(t, b.run(t, 1000))
		b.requireBooks(t)
		largest := new(big.Int)
		for _, sum := range b.books {
			if sum.Cmp(largest) > 0 {
				largest = sum
			}
		}
		require.False(t, largest.IsInt64(), "the largest is %v", largest)
	})

	t.Run("CountsAMissingVersionAndTakesItWhenItComes", func(t *testing.T) {
		t.Parallel()

		b := newBench(t, balances.Config{})
		var events []event.Event
		for len(b.orders) == 0 || b.orders[0].version < 4 {
			events = append(events, b.issue(t))
		}
		missing := slices.IndexFunc(events, func(e event.Event) bool {
			return e.AggregateID == b.orders[0].id && e.AggregateVersion == 2
		})
		b.publish(events[:missing]...)
		b.publish(events[missing+1:]...)
		require.Nil(t, b.run(t, 5))
		require.EqualValues(t, 1, b.metric(t, "onceledger_balances_missing_events", ""))
		require.Contains(t, b.log.String(), "a billing event is missing")

		b.restart(t)
		require.EqualValues(t, 1, b.metric(t, "onceledger_balances_missing_events", ""))
		b.publish(events[missing], events[missing])
		require.Nil(t, b.run(t, 5))
		require.Zero(t, b.metric(t, "onceledger_balances_missing_events", ""))
		require.EqualValues(t, 1, b.metric(t, "onceledger_balances_records_total", "duplicate"))
		b.requireBooks(t)
	})

	t.Run("StopsAtWhatItCannotUnderstandUntilToldToLeaveItOut", func(t *testing.T) {
		t.Parallel()

		for name, spoil := range map[string]func(*event.Event){
			"NoJSON":        func(e *event.Event) { e.Payload = []byte("{") },
			"UnknownType":   func(e *event.Event) { e.Type = "InvoiceEaten" },
			"UnknownSchema": func(e *event.Event) { e.SchemaVersion = 2 },
			"NoVersion7":    func(e *event.Event) { e.ID = uuid.New() },
			"Future":        func(e *event.Event) { e.ID[0] = 0x7f },
			"OtherOrder":    func(e *event.Event) { e.AggregateID = uuid.Must(uuid.NewV7()) },
			"SumsThatDoNotMatch": func(e *event.Event) {
				e.Payload = bytes.Replace(e.Payload, []byte(`"total_amount":`), []byte(`"total_amount":1`), 1)
			},
			"ImplausibleVersion": func(e *event.Event) { e.AggregateVersion = 1_000_000 },
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()

				b := newBench(t, balances.Config{})
				b.publish(b.issueMany(t, 10)...)
				bad := b.issue(t)
				for bad.Type != event.CreditNoteIssued {
					b.publish(bad)
					bad = b.issue(t)
				}
				at := int64(len(b.source))
				spoil(&bad)
				b.publish(bad)
				b.publish(b.issue(t))
				stop := b.run(t, 4)
				require.NotNil(t, stop)
				require.Equal(t, at, stop.Offset)
				require.Contains(t, stop.Reason, "BALANCES_SKIP=0:")
				require.Equal(t, at, b.committed)

				b.restart(t)
				require.NotNil(t, b.run(t, 4), "it forgets at a restart")
				b.config.Skip = map[balances.Place]bool{{Offset: at}: true}
				b.restart(t)
				require.Nil(t, b.run(t, 4))
				require.EqualValues(t, 1, b.metric(t, "onceledger_balances_records_total", "skipped"))
				require.Contains(t, b.log.String(), "left out")
			})
		}
	})

	t.Run("ForgetsAnOrderAfterTheWindowAndRefusesWhatIsOlder", func(t *testing.T) {
		t.Parallel()

		b := newBench(t, balances.Config{Window: time.Hour})
		long := time.Now().Add(-3 * time.Hour)
		b.tenants = b.tenants[:1]
		old := b.issue(t)
		for id := range 2 { // both the event and the order's payment are old
			ids := []*uuid.UUID{&old.ID, &b.orders[0].invoice}
			before := ids[id].String()
			setTime(ids[id], long)
			old.Payload = bytes.ReplaceAll(old.Payload, []byte(before), []byte(ids[id].String()))
		}
		b.publish(old)
		require.Nil(t, b.run(t, 1))
		require.EqualValues(t, 1, b.metric(t, "onceledger_balances_orders", ""))
		b.orders = nil // no credit note for that one
		b.publish(b.issueMany(t, 5)...)
		require.Nil(t, b.run(t, 1))
		b.publish(b.issue(t))
		require.Nil(t, b.run(t, 1))
		b.compact()
		require.False(t, slices.ContainsFunc(b.state, func(record event.Record) bool {
			return bytes.Contains(record.Key, []byte("order/")) && bytes.Contains(record.Key, []byte(old.AggregateID.String()))
		}), "the topic remembers it")
		b.requireBooks(t)
		b.restart(t)
		b.publish(old)
		stop := b.run(t, 1)
		require.NotNil(t, stop)
		require.Contains(t, stop.Reason, "could be a repeat")
	})

	t.Run("TakesACreditNoteOfAnOrderThatIsForgotten", func(t *testing.T) {
		t.Parallel()

		b := newBench(t, balances.Config{Window: time.Hour})
		b.issue(t)
		var note event.Event
		for note.Type != event.CreditNoteIssued || note.AggregateID != b.orders[0].id {
			note = b.issue(t)
		}
		before := b.orders[0].invoice.String()
		setTime(&b.orders[0].invoice, time.Now().Add(-2*time.Hour))
		note.Payload = bytes.ReplaceAll(note.Payload, []byte(before), []byte(b.orders[0].invoice.String()))
		b.publish(note)
		require.Nil(t, b.run(t, 1))
		require.Zero(t, b.metric(t, "onceledger_balances_missing_events", ""))
		require.EqualValues(t, 1, b.metric(t, "onceledger_balances_records_total", "applied"))
	})

	for name, spoil := range map[string]func(*bench){
		"StateIsGone":          func(b *bench) { b.state = nil },
		"OrdersAreGone":        func(b *bench) { b.without(event.LedgerBalanceOrders, 0) },
		"BalancesAreGone":      func(b *bench) { b.without(event.LedgerBalances, 0) },
		"PartOfBalancesIsGone": func(b *bench) { b.compact(); b.without(event.LedgerBalances, 3) },
		"ABalanceCannotBeRead": func(b *bench) {
			b.state = append(b.state, event.Record{Topic: event.LedgerBalances, Key: []byte("none"), Value: []byte("of ours")})
		},
		"AnOrderCannotBeRead": func(b *bench) {
			last := b.state[len(b.state)-1]
			last.Value = []byte("{")
			b.state = append(b.state, last)
		},
		"OffsetsAreSetBack": func(b *bench) { b.committed = 3 },
		"OffsetsAreAhead":   func(b *bench) { b.committed++ },
	} {
		t.Run("BeginsAnewWhen"+name, func(t *testing.T) {
			t.Parallel()

			b := newBench(t, balances.Config{})
			b.publish(b.issueMany(t, 60)...)
			require.Nil(t, b.run(t, 7))
			spoil(b)
			b.restart(t)
			require.Zero(t, b.committed)
			require.Contains(t, b.log.String(), "balances are rebuilt from the oldest event")
			require.EqualValues(t, 1, b.metric(t, "onceledger_balances_rebuilds_total", ""))

			// It may die half-way, and goes on with what it has made since.
			all := b.source
			b.source = all[:20]
			require.Nil(t, b.run(t, 7))
			b.restart(t)
			require.EqualValues(t, 20, b.committed)
			require.NotContains(t, b.log.String(), "rebuilt")
			b.source = all
			b.publish(b.issueMany(t, 10)...)
			require.Nil(t, b.run(t, 7))
			b.requireBooks(t)
			b.compact()
			b.restart(t)
			b.requireBooks(t)
			require.EqualValues(t, 70, b.committed)
		})
	}

	t.Run("GoesOnWhenOnlyTheGroupsOffsetsAreGone", func(t *testing.T) {
		t.Parallel()

		b := newBench(t, balances.Config{})
		b.publish(b.issueMany(t, 20)...)
		require.Nil(t, b.run(t, 7))
		b.committed = -1
		b.restart(t)
		require.EqualValues(t, 20, b.committed)
		require.NotContains(t, b.log.String(), "rebuilt")
	})

	t.Run("MindsNothingThatWasRemovedSince", func(t *testing.T) {
		t.Parallel()

		b := newBench(t, balances.Config{})
		b.publish(b.issueMany(t, 20)...)
		require.Nil(t, b.run(t, 7))
		none := event.Record{Topic: event.LedgerBalances, Key: []byte("none"), Value: []byte("of ours")}
		gone := none
		gone.Value = nil
		b.state = append(b.state, none, gone)
		b.restart(t)
		require.EqualValues(t, 20, b.committed)
		require.NotContains(t, b.log.String(), "rebuilt")
	})

	t.Run("SaysThatEventsWereGoneBeforeItReadThem", func(t *testing.T) {
		t.Parallel()

		b := newBench(t, balances.Config{})
		b.publish(b.issueMany(t, 20)...)
		require.Nil(t, b.run(t, 7))
		b.publish(b.issueMany(t, 20)...)
		b.first = 30
		b.restart(t)
		require.EqualValues(t, 30, b.committed)
		require.Contains(t, b.log.String(), "will not be the ledger's")
		require.NotContains(t, b.log.String(), "rebuilt")
		require.Nil(t, b.run(t, 7))
		b.restart(t)
		require.EqualValues(t, 1, b.metric(t, "onceledger_balances_incomplete_partitions", ""))
	})

	t.Run("SaysThatEarlyEventsAreGone", func(t *testing.T) {
		t.Parallel()

		b := newBench(t, balances.Config{})
		b.publish(b.issueMany(t, 20)...)
		require.Nil(t, b.run(t, 7))
		b.state, b.first = nil, 10
		b.restart(t)
		require.EqualValues(t, 10, b.committed)
		require.Contains(t, b.log.String(), "will not be the ledger's")
		require.EqualValues(t, 1, b.metric(t, "onceledger_balances_incomplete_partitions", ""))
		require.Nil(t, b.run(t, 7))
		totals, err := balances.Collect(func(use func(event.Record) error) error {
			for _, record := range b.state {
				if record.Topic == event.LedgerBalances {
					if err := use(record); err != nil {
						return err
					}
				}
			}
			return nil
		})
		require.NoError(t, err)
		require.Equal(t, map[int32]int64{0: 10}, totals.Begun)
	})
}

// without removes a topic's records but the last of them.
func (b *bench) without(topic string, keep int) {
	var kept []event.Record
	left := 0
	for _, record := range slices.Backward(b.state) {
		if record.Topic == topic {
			if left++; left > keep {
				continue
			}
		}
		kept = append(kept, record)
	}
	slices.Reverse(kept)
	b.state = kept
}

// setTime makes a UUIDv7 one of another time.
func setTime(id *uuid.UUID, at time.Time) {
	milliseconds := at.UnixMilli()
	for i := range 6 {
		id[i] = byte(milliseconds >> (8 * (5 - i)))
	}
}

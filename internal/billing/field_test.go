package billing_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/inbox/inboxtest"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/kafkatest"
	"github.com/onceledger/onceledger/internal/pgtest"
)

// Field report R22: a payment of a month that is over is posted now, with both
// dates kept: when it happened and when it was recorded. What was recorded before
// is not touched, and the document is numbered where it is recorded.
func TestPaymentOfAMonthThatIsOver(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	recorded := time.Now().UTC().Truncate(time.Microsecond)
	happened := time.Date(recorded.Year(), recorded.Month(), 1, 0, 0, 0, 0, time.UTC).Add(-time.Second)
	w.clock.set(recorded)
	earlier := w.order()
	w.Deliver(t, earlier.Paid())
	before := w.documents(t, earlier)

	late := w.order()
	late.Now = func() time.Time { return happened }
	paid := late.Paid()
	paid.ID = factory.ID(recorded)
	w.Deliver(t, paid)

	d := w.documents(t, late)
	require.Equal(t, happened, d.entries[0].EffectiveAt)
	require.Equal(t, happened, d.invoice.PaidAt)
	require.Equal(t, recorded, d.invoice.IssuedAt)
	require.Equal(t, recorded.Year(), d.invoice.Year)
	require.WithinDuration(t, time.Now(), pgtest.Column[time.Time](t, w.Owner,
		"SELECT recorded_at FROM ledger_entries WHERE event_id = $1", paid.ID)[0], time.Hour, "by the database's clock")
	require.Equal(t, before, w.documents(t, earlier))
}

// slow holds the transaction of its first batch open, with all that it has written.
type slow struct {
	inbox.Handler
	written, release chan struct{}
}

func (s *slow) Apply(ctx context.Context, tx pgx.Tx, events []event.Event) error {
	if err := s.Handler.Apply(ctx, tx, events); err != nil {
		return err
	}
	select {
	case s.written <- struct{}{}: // the first time only
		<-s.release
	default:
	}
	return nil
}

// Field report R24: a worker takes longer over a batch than a member of the group
// may, and another is given its partitions while it is still at it. The second
// waits at the marks of the first, and finds them taken; the first one's offsets
// count no more, and it comes back.
func TestWorkerThatIsTooSlow(t *testing.T) {
	t.Parallel()

	database := pgtest.New(t)
	broker := kafkatest.New(t)
	topic := event.OrderEvents
	require.NoError(t, broker.CreateTopic(topic, 2, nil))
	late := &slow{Handler: billing.Handler{Now: time.Now}, written: make(chan struct{}), release: make(chan struct{})}
	first := inboxtest.On(t, database, late)
	second := inboxtest.On(t, database, billing.Handler{Now: time.Now})
	w := &world{Consumer: first, tenant: first.Tenant(t), clock: &clock{}}

	var records []kafkatest.Record
	var paid []uuid.UUID
	add := func(n int) {
		records = nil
		for range n {
			order := w.order()
			for _, e := range []event.Event{order.Created(), order.Paid()} {
				record := e.Record()
				made := kafkatest.Record{Key: record.Key, Value: record.Value}
				for _, header := range record.Headers {
					made.Headers = append(made.Headers, struct {
						Key   string
						Value []byte
					}(header))
				}
				records = append(records, made)
				if e.Type == event.OrderPaid {
					paid = append(paid, e.ID)
				}
			}
		}
		broker.Produce(t, topic, records...)
	}
	add(20)
	join := func(limit time.Duration, in *inboxtest.Consumer) (ready func() bool) {
		consumer, err := kafka.NewConsumer(kafka.ConsumerConfig{
			Brokers: broker.Brokers(), Group: billing.Consumer, Topics: []string{topic}, Log: slog.New(slog.DiscardHandler),
			SessionTimeout: time.Second, MaxPollInterval: limit,
		})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- consumer.Run(ctx, in.Process) }()
		t.Cleanup(func() {
			cancel()
			require.NoError(t, <-ended)
		})
		return func() bool {
			ok, _ := consumer.Ready()
			return ok
		}
	}
	ready := join(2*time.Second, first)
	<-late.written // and does not come to an end
	join(time.Minute, second)
	first.Waiting(t) // the second has its partitions, and stands at its marks

	close(late.release)
	behind := func() int64 {
		behind, err := kafka.Behind(t.Context(), broker.Brokers(), billing.Consumer, topic)
		require.NoError(t, err)
		return behind
	}
	require.Eventually(t, func() bool { return behind() == 0 }, time.Minute, 20*time.Millisecond)
	require.ElementsMatch(t, paid, pgtest.Column[uuid.UUID](t, w.Owner, "SELECT id FROM invoices"))
	require.ElementsMatch(t, paid, pgtest.Column[uuid.UUID](t, w.Owner, "SELECT event_id FROM ledger_entries"))
	require.Positive(t, second.Counted(t, "duplicate"), "the second was given what the first had in hand")
	require.Empty(t, w.DeadLetters(t))

	// The late one is a member again and takes its share.
	require.Eventually(t, ready, time.Minute, 20*time.Millisecond)
	add(20)
	require.Eventually(t, func() bool { return behind() == 0 }, time.Minute, 20*time.Millisecond)
	require.ElementsMatch(t, paid, pgtest.Column[uuid.UUID](t, w.Owner, "SELECT id FROM invoices"))
}

package balances_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math/big"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/balances"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/kafkatest"
	"github.com/onceledger/onceledger/internal/ledger"
	"github.com/onceledger/onceledger/internal/money"
)

const (
	partitions = 4
	patience   = time.Minute // for what must happen; nothing waits so long when all is well
)

// world is a broker with the three topics, and the documents of some tenants,
// with what the ledger has of them: the very entries that billing would post.
type world struct {
	brokers string
	random  *rand.Rand
	tenants []uuid.UUID
	orders  []order
	books   map[balances.Account]*big.Int // debit less credit
}

type order struct {
	tenant, id, invoice uuid.UUID
	currency            money.Currency
	version             int64
}

func newWorld(t testing.TB) (*world, *kafkatest.Broker) {
	t.Helper()
	broker := kafkatest.New(t)
	for _, topic := range []string{event.BillingEvents, event.LedgerBalances, event.LedgerBalanceOrders} {
		configs := map[string]string{}
		if topic != event.BillingEvents {
			configs["cleanup.policy"] = "compact"
		}
		require.NoError(t, broker.CreateTopic(topic, partitions, configs))
	}
	return worldOn(t, broker.Brokers()), broker
}

// worldOn is a world on a broker that has the topics.
func worldOn(t testing.TB, brokers string) *world {
	t.Helper()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	w := &world{
		brokers: brokers, random: rand.New(rand.NewPCG(seed, 1)),
		books: make(map[balances.Account]*big.Int),
	}
	for range 3 {
		w.tenants = append(w.tenants, uuid.Must(uuid.NewV7()))
	}
	return w
}

func tax(net, tax int64) []event.Tax {
	return []event.Tax{{Rate: 190_000, NetAmount: net, TaxAmount: tax}}
}

// issue makes a document: an invoice, or a credit note for an order that has one.
// The ledger has its entry from then on.
func (w *world) issue(t testing.TB) event.Event {
	t.Helper()
	now := time.Now().UTC().Truncate(time.Microsecond)
	net, vat := w.random.Int64N(money.MaxMinor/2)+1, w.random.Int64N(1000)
	if len(w.orders) > 0 && w.random.IntN(3) == 0 {
		o := &w.orders[w.random.IntN(len(w.orders))]
		o.version++
		n := event.CreditNote{
			CreditNoteID: uuid.Must(uuid.NewV7()), Number: "CN-1", InvoiceID: o.invoice, OrderID: o.id, RefundID: uuid.Must(uuid.NewV7()),
			CustomerID: "c", CustomerEmail: "c@example.com", Currency: o.currency, Taxes: tax(net, vat),
			NetAmount: net, TaxAmount: vat, TotalAmount: net + vat, Reason: "r", RefundedAt: now, IssuedAt: now,
		}
		w.post(ledger.Refund(o.tenant, n.CreditNoteID, o.id, o.invoice, o.currency, net, vat, now))
		return w.event(t, event.CreditNoteIssued, *o, n)
	}
	o := order{
		tenant: w.tenants[w.random.IntN(len(w.tenants))], id: uuid.Must(uuid.NewV7()), invoice: uuid.Must(uuid.NewV7()),
		currency: []money.Currency{"EUR", "JPY"}[w.random.IntN(2)], version: 1,
	}
	w.orders = append(w.orders, o)
	w.post(ledger.Payment(o.tenant, o.invoice, o.id, o.currency, net, vat, now))
	return w.event(t, event.InvoiceIssued, o, event.Invoice{
		InvoiceID: o.invoice, Number: "INV-1", OrderID: o.id, CustomerID: "c", CustomerEmail: "c@example.com", Currency: o.currency,
		Lines: []event.Line{{SKU: "s", Description: "d", Quantity: 1, UnitAmount: net, NetAmount: net, TaxRate: 190_000}},
		Taxes: tax(net, vat), NetAmount: net, TaxAmount: vat, TotalAmount: net + vat, PaidAt: now, IssuedAt: now,
	})
}

func (w *world) event(t testing.TB, typ event.Type, o order, payload any) event.Event {
	t.Helper()
	encoded, err := event.Encode(payload)
	require.NoError(t, err)
	return event.Event{
		ID: uuid.Must(uuid.NewV7()), TenantID: o.tenant, AggregateType: event.AggregateBilling, AggregateID: o.id,
		AggregateVersion: o.version, Type: typ, SchemaVersion: event.SchemaVersion, OccurredAt: time.Now(), Payload: encoded,
	}
}

func (w *world) post(entry ledger.Entry) {
	for _, line := range entry.Lines {
		for code, sign := range map[string]int64{line.Debit: 1, line.Credit: -1} {
			account := balances.Account{TenantID: entry.TenantID, Code: code, Currency: entry.Currency}
			if w.books[account] == nil {
				w.books[account] = new(big.Int)
			}
			w.books[account].Add(w.books[account], new(big.Int).Mul(big.NewInt(sign), big.NewInt(line.Amount)))
		}
	}
}

// toRecord is the record that the relay would send.
func toRecord(e event.Event) kafkatest.Record {
	record := e.Record()
	sent := kafkatest.Record{Key: record.Key, Value: record.Value}
	for _, header := range record.Headers {
		sent.Headers = append(sent.Headers, kgo.RecordHeader(header))
	}
	return sent
}

// load publishes documents, and some of them again, as a relay does that lost an
// acknowledgement: a piece of the stream once more, in its order.
func (w *world) load(t testing.TB, count int) {
	t.Helper()
	var sent []kafkatest.Record
	var piece []kafkatest.Record
	for range count {
		piece = append(piece, toRecord(w.issue(t)))
		if w.random.IntN(10) == 0 {
			sent = append(append(sent, piece...), piece...)
			piece = nil
		}
	}
	w.send(t, append(sent, piece...)...)
}

func (w *world) send(t testing.TB, records ...kafkatest.Record) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(w.brokers, ",")...), kgo.DefaultProduceTopic(event.BillingEvents),
		kgo.RecordPartitioner(kgo.StickyKeyPartitioner(nil)))
	require.NoError(t, err)
	defer client.Close()
	var pointers []*kgo.Record
	for _, record := range records {
		pointers = append(pointers, &record)
	}
	require.NoError(t, client.ProduceSync(t.Context(), pointers...).FirstErr())
}

// logLines is a log that can be read while it is written.
type logLines struct {
	mutex  sync.Mutex
	buffer bytes.Buffer
}

func (l *logLines) Write(p []byte) (int, error) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	return l.buffer.Write(p)
}

func (l *logLines) String() string {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	return l.buffer.String()
}

// instance is a running stage.
type instance struct {
	transactor *kafka.Transactor
	registry   *prometheus.Registry
	log        *logLines
	cancel     context.CancelFunc
	done       chan error
}

func (w *world) start(t testing.TB, name string, change ...func(*kafka.TransactorConfig, *balances.Config)) *instance {
	t.Helper()
	i := &instance{registry: prometheus.NewRegistry(), log: new(logLines), done: make(chan error, 1)}
	log := slog.New(slog.NewTextHandler(i.log, nil)).With("instance", name)
	config := balances.Config{Log: log, Metrics: i.registry}
	transacting := kafka.TransactorConfig{
		ConsumerConfig: kafka.ConsumerConfig{
			Brokers: w.brokers, Group: balances.Group, Topics: []string{event.BillingEvents}, ClientID: name,
			MaxBatch: 50, Log: log, Metrics: i.registry,
		},
		TransactionalID: "balances-" + name,
		State:           []string{event.LedgerBalances, event.LedgerBalanceOrders},
		WatchEvery:      100 * time.Millisecond,
	}
	for _, c := range change {
		c(&transacting, &config)
	}
	stage, err := balances.New(config)
	require.NoError(t, err)
	i.transactor, err = kafka.NewTransactor(transacting, stage)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	i.cancel = cancel
	go func() { i.done <- i.transactor.Run(ctx) }()
	t.Cleanup(func() {
		i.stop(t)
		if t.Failed() {
			t.Logf("log of %s:\n%s", name, i.log)
		}
	})
	return i
}

func (i *instance) stop(t testing.TB) {
	t.Helper()
	if i.cancel == nil {
		return
	}
	i.cancel()
	i.cancel = nil
	select {
	case err := <-i.done:
		require.NoError(t, err)
	case <-time.After(patience):
		require.FailNow(t, "the instance does not stop")
	}
}

// metric sums a metric over its labels that contain a text.
func (i *instance) metric(t testing.TB, name, label string) float64 {
	t.Helper()
	total, err := i.total(name, label)
	require.NoError(t, err)
	return total
}

// total is metric for other goroutines than the test's.
func (i *instance) total(name, label string) (float64, error) {
	families, err := i.registry.Gather()
	total := 0.0
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
		for _, metric := range family.GetMetric() {
			if strings.Contains(metric.String(), label) {
				total += metric.GetGauge().GetValue() + metric.GetCounter().GetValue() + float64(metric.GetHistogram().GetSampleCount())
			}
		}
	}
	return total, err
}

// totals reads the topic as anybody would.
func (w *world) totals(t testing.TB) balances.Totals {
	t.Helper()
	totals, err := balances.Collect(func(use func(event.Record) error) error {
		return kafka.ReadTopic(t.Context(), w.brokers, event.LedgerBalances, use)
	})
	require.NoError(t, err)
	return totals
}

// difference is how the topic differs from the books; "" if it does not.
func (w *world) difference(t testing.TB) string {
	t.Helper()
	totals := w.totals(t)
	var differs []string
	for account, want := range w.books {
		if got := totals.Accounts[account]; got == nil || got.Cmp(want) != 0 {
			differs = append(differs, fmt.Sprintf("%v is %v, want %v", account, got, want))
		}
	}
	for account := range totals.Accounts {
		if w.books[account] == nil {
			differs = append(differs, fmt.Sprintf("%v is there", account))
		}
	}
	return strings.Join(differs, "\n")
}

// waitCaughtUp waits until the group has read all, and requires the topic to
// hold what the ledger does.
func (w *world) waitCaughtUp(t testing.TB) {
	t.Helper()
	w.waitRead(t)
	require.Empty(t, w.difference(t))
}

func (w *world) waitRead(t testing.TB) {
	t.Helper()
	require.Eventually(t, func() bool {
		behind, err := kafka.Behind(t.Context(), w.brokers, balances.Group, event.BillingEvents)
		return err == nil && behind == 0
	}, patience, 50*time.Millisecond, "the group does not catch up")
}

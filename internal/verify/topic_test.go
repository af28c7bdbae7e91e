package verify_test

import (
	"bytes"
	"context"
	"errors"
	"math/big"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/balances"
	"github.com/onceledger/onceledger/internal/ledger"
	"github.com/onceledger/onceledger/internal/verify"
)

// fakeTopic is the topic ledger.balances as a test has it.
type fakeTopic struct {
	behind atomic.Int64
	reads  atomic.Int64
	totals func(read int64) map[balances.Account]*big.Int
	begun  map[int32]int64
	fault  error
}

func (f *fakeTopic) configure(wait time.Duration) func(*verify.Config) {
	return func(c *verify.Config) {
		c.Wait = wait
		c.Topic = &verify.Topic{
			Behind: func(context.Context) (int64, error) { return f.behind.Load(), f.fault },
			Read: func(context.Context) (balances.Totals, error) {
				return balances.Totals{Accounts: f.totals(f.reads.Add(1)), Begun: f.begun}, nil
			},
		}
	}
}

// sums are what paid orders of 29.75 EUR come to.
func sums(tenant uuid.UUID, orders int64) map[balances.Account]*big.Int {
	return map[balances.Account]*big.Int{
		{TenantID: tenant, Code: ledger.Cash, Currency: "EUR"}:       big.NewInt(2975 * orders),
		{TenantID: tenant, Code: ledger.Revenue, Currency: "EUR"}:    big.NewInt(-2500 * orders),
		{TenantID: tenant, Code: ledger.TaxPayable, Currency: "EUR"}: big.NewInt(-475 * orders),
	}
}

func TestRunComparesTheTopic(t *testing.T) {
	t.Parallel()

	setup := func(t *testing.T) (*world, *fakeTopic) {
		t.Helper()
		w := newWorld(t)
		for range 2 {
			w.pay(t, w.placeEUR(t))
		}
		w.deliver(t)
		return w, &fakeTopic{totals: func(int64) map[balances.Account]*big.Int { return sums(w.tenant, 2) }}
	}

	t.Run("EqualOnesPass", func(t *testing.T) {
		t.Parallel()

		w, topic := setup(t)
		w.runRelay(t)
		report := w.verify(t, topic.configure(time.Minute))
		require.True(t, report.OK, "%v", report.Findings)
		require.Equal(t, verify.TopicReport{State: verify.TopicEqual, Accounts: 3}, report.Topic)
		text := new(bytes.Buffer)
		require.NoError(t, report.WriteText(text))
		require.Contains(t, text.String(), "topic balances          3   accounts, equal to the ledger's\n")
	})

	for name, spoil := range map[string]struct {
		change func(map[balances.Account]*big.Int, uuid.UUID)
		says   string
	}{
		"ASumThatDiffers": {func(sums map[balances.Account]*big.Int, tenant uuid.UUID) {
			sums[balances.Account{TenantID: tenant, Code: ledger.Cash, Currency: "EUR"}].SetInt64(5949)
		}, "cash in EUR is 59.49 EUR on the topic, 59.50 EUR in the ledger"},
		"AnAccountThatIsMissing": {func(sums map[balances.Account]*big.Int, tenant uuid.UUID) {
			delete(sums, balances.Account{TenantID: tenant, Code: ledger.Revenue, Currency: "EUR"})
		}, "revenue in EUR is not there on the topic, -50.00 EUR in the ledger"},
		"AnAccountTooMany": {func(sums map[balances.Account]*big.Int, tenant uuid.UUID) {
			sums[balances.Account{TenantID: tenant, Code: ledger.Cash, Currency: "JPY"}], _ = new(big.Int).SetString("99999999999999999999", 10)
		}, "cash in JPY is 99999999999999999999 JPY on the topic, not there in the ledger"},
	} {
		t.Run("Finds"+name, func(t *testing.T) {
			t.Parallel()

			w, topic := setup(t)
			w.runRelay(t)
			topic.totals = func(int64) map[balances.Account]*big.Int {
				wrong := sums(w.tenant, 2)
				spoil.change(wrong, w.tenant)
				return wrong
			}
			topic.begun = map[int32]int64{4: 17}
			report := w.verify(t, topic.configure(time.Minute))
			require.False(t, report.OK)
			require.Equal(t, verify.TopicDiffers, report.Topic.State)
			require.EqualValues(t, 1, report.Violations[verify.TopicBalance])
			require.Equal(t, w.tenant, report.Findings[0].TenantID)
			require.Equal(t, spoil.says, report.Findings[0].Detail)
			require.GreaterOrEqual(t, topic.reads.Load(), int64(2), "seen once only")
			require.Contains(t, report.Notes[0], "partition 4 of billing.events begin at offset 17")
		})
	}

	t.Run("ADifferenceThatPassesIsNone", func(t *testing.T) {
		t.Parallel()

		w, topic := setup(t)
		w.runRelay(t)
		topic.totals = func(read int64) map[balances.Account]*big.Int { return sums(w.tenant, 1+min(read, 2)/2) }
		report := w.verify(t, topic.configure(time.Minute))
		require.True(t, report.OK, "%v", report.Findings)
		require.Equal(t, verify.TopicEqual, report.Topic.State)
	})

	t.Run("WaitsForWhatIsBehind", func(t *testing.T) {
		t.Parallel()

		w, topic := setup(t)
		w.runRelay(t)
		topic.behind.Store(3)
		time.AfterFunc(300*time.Millisecond, func() { topic.behind.Store(0) })
		report := w.verify(t, topic.configure(time.Minute))
		require.Equal(t, verify.TopicEqual, report.Topic.State)
	})

	t.Run("IsNotComparedWhileBehind", func(t *testing.T) {
		t.Parallel()

		w, topic := setup(t)
		w.runRelay(t)
		topic.behind.Store(3)
		topic.totals = func(int64) map[balances.Account]*big.Int { return nil }
		report := w.verify(t, topic.configure(200*time.Millisecond))
		require.True(t, report.OK)
		require.Equal(t, verify.TopicBehind, report.Topic.State)
		require.Contains(t, report.Notes[0], "they are behind by 3")
	})

	t.Run("IsNotComparedBeforeBillingsEventsArePublished", func(t *testing.T) {
		t.Parallel()

		w, topic := setup(t) // no relay
		report := w.verify(t, topic.configure(200*time.Millisecond))
		require.True(t, report.OK)
		require.Equal(t, verify.TopicBehind, report.Topic.State)
		require.Contains(t, report.Notes[0], "billing's events are not all published")
		require.Zero(t, topic.reads.Load())
	})

	t.Run("ABrokerThatIsAwayIsNoted", func(t *testing.T) {
		t.Parallel()

		w, topic := setup(t)
		w.runRelay(t)
		topic.fault = errors.New("nobody answers")
		report := w.verify(t, topic.configure(200*time.Millisecond))
		require.True(t, report.OK)
		require.Equal(t, verify.TopicBehind, report.Topic.State)
		require.Contains(t, report.Notes[0], "nobody answers")
	})
}

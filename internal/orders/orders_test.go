package orders_test

import (
	"context"
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/orders"
	"github.com/onceledger/onceledger/internal/tenants"
)

// twoRates is an order of 2975 at 19 % and 107 at 7 %.
func twoRates() orders.PlaceParams {
	p := params("EUR", 2, 1250, 190_000)
	p.Lines = append(p.Lines, params("EUR", 1, 100, 70_000).Lines...)
	p.Metadata = json.RawMessage(`{ "b": 1.0, "a": "\u00e9" }`)
	return p
}

func TestLifeOfAnOrder(t *testing.T) {
	t.Parallel()

	t.Run("WritesOneEventForEachChangeInItsTransaction", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order := w.place(twoRates())
		steps := []struct {
			typ event.Type
			do  func() error
		}{
			{event.OrderPaid, func() error { _, err := w.pay(order.ID, "pi_1"); return err }},
			{event.OrderRefunded, func() error { _, err := w.refund(order.ID, 500); return err }},
			{event.OrderRefunded, func() error { _, err := w.refund(order.ID, 2582); return err }},
		}
		want := []event.Type{event.OrderCreated}
		for i := -1; i < len(steps); i++ {
			if i >= 0 {
				require.NoError(t, steps[i].do())
				want = append(want, steps[i].typ)
			}
			facts := w.facts(order.ID)
			require.Len(t, facts, len(want))
			last := facts[len(facts)-1]
			require.Equal(t, w.lastWriter(order.ID), uint32(last.TxID), "the event and the order's row are of one transaction")

			now, err := w.get(w.tenant, order.ID)
			require.NoError(t, err)
			require.EqualValues(t, len(want), now.Version)
			require.Equal(t, now.Version, last.State.Version)
			require.EqualValues(t, now.Status, last.State.Status)
			require.Equal(t, now.RefundedAmount, last.State.RefundedAmount)
		}

		ids := make(map[uuid.UUID]bool)
		for i, fact := range w.facts(order.ID) {
			require.Equal(t, want[i], fact.Event.Type)
			require.EqualValues(t, i+1, fact.Event.AggregateVersion, "no gap")
			require.Equal(t, w.tenant, fact.Event.TenantID)
			require.Equal(t, event.AggregateOrder, fact.Event.AggregateType)
			require.Equal(t, uuid.Version(7), fact.Event.ID.Version())
			require.Contains(t, string(fact.Event.Payload), `"metadata":{"b":1.0,"a":"\u00e9"},`, "the same bytes in each event")
			require.Len(t, fact.State.Lines, 2)
			require.Equal(t, i >= 1, fact.State.Payment != nil)
			require.Equal(t, i >= 2, fact.State.Refund != nil)
			ids[fact.Event.ID] = true
		}
		require.Len(t, ids, len(want))
	})

	t.Run("IsNeverChangedBeforeItsLastChange", func(t *testing.T) { // by a request that was stamped and then waited
		t.Parallel()
		w := newWorld(t)

		placed := w.place(twoRates())
		early := orders.Stamp{At: placed.UpdatedAt.Add(-time.Second)}
		require.NoError(t, w.in(w.tenant, func(tx pgx.Tx) error {
			paid, err := orders.PayTx(t.Context(), tx, w.tenant, placed.ID, orders.PayParams{Reference: "pi_1"}, early)
			require.Equal(t, placed.UpdatedAt, paid.UpdatedAt)
			require.Equal(t, placed.UpdatedAt, paid.Payment.PaidAt)
			return err
		}))
		facts := w.facts(placed.ID)
		require.False(t, facts[1].Event.OccurredAt.Before(facts[0].Event.OccurredAt))
	})

	t.Run("ReadsBackWhatItWrote", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		placed := w.place(twoRates())
		read, err := w.get(w.tenant, placed.ID)
		require.NoError(t, err)
		requireSame(t, placed, read)

		paid, err := w.pay(placed.ID, "pi_1")
		require.NoError(t, err)
		read, err = w.get(w.tenant, placed.ID)
		require.NoError(t, err)
		requireSame(t, paid, read)
		require.Equal(t, paid.TotalAmount, read.Payment.Amount)
	})

	t.Run("CancelsWhatIsNotPaid", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order := w.place(twoRates())
		cancelled, err := w.cancel(order.ID)
		require.NoError(t, err)
		require.Equal(t, orders.StatusCancelled, cancelled.Status)
		facts := w.facts(order.ID)
		require.Len(t, facts, 2)
		require.Equal(t, event.OrderCancelled, facts[1].Event.Type)
	})

	t.Run("CarriesTheTrace", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		priced, err := orders.Price(twoRates())
		require.NoError(t, err)
		now := stamp()
		now.Traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
		var order orders.Order
		require.NoError(t, w.in(w.tenant, func(tx pgx.Tx) (err error) {
			order, err = orders.PlaceTx(t.Context(), tx, w.tenant, priced, now)
			return err
		}))
		fact := w.facts(order.ID)[0]
		require.Equal(t, now.Traceparent, fact.Event.Traceparent)
		require.True(t, now.At.Equal(fact.Event.OccurredAt))
	})
}

// requireSame compares all that is public of two orders; the JSON type keeps
// the customer's white space, and that is no difference.
func requireSame(t *testing.T, want, got orders.Order) {
	t.Helper()
	encode := func(order orders.Order) string {
		text, err := json.Marshal(order)
		require.NoError(t, err)
		return string(text)
	}
	require.Equal(t, encode(want), encode(got))
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	other := w.addTenant("other")
	created := w.place(twoRates()).ID
	paid := w.place(twoRates()).ID
	_, err := w.pay(paid, "pi_paid")
	require.NoError(t, err)
	cancelled := w.place(twoRates()).ID
	_, err = w.cancel(cancelled)
	require.NoError(t, err)
	before := w.contents()

	tests := []struct {
		name string
		do   func() error
		want error
	}{
		{"ToPayTwice", func() error { _, err := w.pay(paid, "pi_2"); return err }, orders.ErrAlreadyPaid},
		{"ToPayTwiceByTheSameReference", func() error { _, err := w.pay(paid, "pi_paid"); return err }, orders.ErrAlreadyPaid},
		{"ToPayWhatIsCancelled", func() error { _, err := w.pay(cancelled, "pi_2"); return err }, orders.ErrCancelled},
		{"ToPayByAReferenceOfAnotherOrder", func() error { _, err := w.pay(created, "pi_paid"); return err }, orders.ErrPaymentReferenceUsed},
		{"ToPayWhatIsNotThere", func() error { _, err := w.pay(uuid.Must(uuid.NewV7()), "pi_2"); return err }, orders.ErrNotFound},
		{"ToCancelWhatIsPaid", func() error { _, err := w.cancel(paid); return err }, orders.ErrAlreadyPaid},
		{"ToCancelTwice", func() error { _, err := w.cancel(cancelled); return err }, orders.ErrCancelled},
		{"ToRefundWhatIsNotPaid", func() error { _, err := w.refund(created, 1); return err }, orders.ErrNotPaid},
		{"ToRefundWhatIsCancelled", func() error { _, err := w.refund(cancelled, 1); return err }, orders.ErrNotPaid},
		{"ToRefundMoreThanWasPaid", func() error { _, err := w.refund(paid, 3083); return err }, orders.ErrRefundTooLarge},
		{"ToRefundWhatIsNotThere", func() error { _, err := w.refund(uuid.Must(uuid.NewV7()), 1); return err }, orders.ErrNotFound},
		{"AnotherTenantToReadIt", func() error { _, err := w.get(other, paid); return err }, orders.ErrNotFound},
		{"AnotherTenantToPayIt", func() error {
			return w.in(other, func(tx pgx.Tx) error {
				_, err := orders.PayTx(t.Context(), tx, other, created, orders.PayParams{Reference: "pi_3"}, stamp())
				return err
			})
		}, orders.ErrNotFound},
		{"AnotherTenantThatSaysItIsTheFirst", func() error {
			return w.in(other, func(tx pgx.Tx) error {
				_, err := orders.PayTx(t.Context(), tx, w.tenant, created, orders.PayParams{Reference: "pi_3"}, stamp())
				return err
			})
		}, orders.ErrNotFound},
	}
	for _, test := range tests {
		require.ErrorIs(t, test.do(), test.want, test.name)
		require.ErrorIs(t, test.do(), test.want, "%s a second time", test.name)
	}
	require.Equal(t, before, w.contents(), "a refusal writes nothing")
}

func TestPaymentReference(t *testing.T) {
	t.Parallel()

	t.Run("IsFreeAgainWhenThePaymentIsRolledBack", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		first, second := w.place(twoRates()), w.place(twoRates())
		w.inVain(w.tenant, func(tx pgx.Tx) error {
			_, err := orders.PayTx(t.Context(), tx, w.tenant, first.ID, orders.PayParams{Reference: "pi_1"}, stamp())
			return err
		})
		_, err := w.pay(second.ID, "pi_1")
		require.NoError(t, err)
	})

	t.Run("IsEachTenantsOwn", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order := w.place(twoRates())
		_, err := w.pay(order.ID, "pi_1")
		require.NoError(t, err)
		w.tenant = w.addTenant("other")
		order = w.place(twoRates())
		_, err = w.pay(order.ID, "pi_1")
		require.NoError(t, err)
	})
}

// TestRollback rolls each change back after it has succeeded: whatever a change
// writes, it writes in the caller's transaction.
func TestRollback(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	created, paid := w.place(twoRates()).ID, w.place(twoRates()).ID
	_, err := w.pay(paid, "pi_1")
	require.NoError(t, err)
	priced, err := orders.Price(twoRates())
	require.NoError(t, err)
	before := w.contents()

	for name, change := range map[string]func(tx pgx.Tx) error{
		"Place": func(tx pgx.Tx) error {
			_, err := orders.PlaceTx(t.Context(), tx, w.tenant, priced, stamp())
			return err
		},
		"Pay": func(tx pgx.Tx) error {
			_, err := orders.PayTx(t.Context(), tx, w.tenant, created, orders.PayParams{Reference: "pi_2"}, stamp())
			return err
		},
		"Cancel": func(tx pgx.Tx) error {
			_, err := orders.CancelTx(t.Context(), tx, w.tenant, created, stamp())
			return err
		},
		"Refund": func(tx pgx.Tx) error {
			_, err := orders.RefundTx(t.Context(), tx, w.tenant, paid, orders.RefundParams{Amount: 7, Reason: "damaged"}, stamp())
			return err
		},
	} {
		w.inVain(w.tenant, change)
		require.Equal(t, before, w.contents(), name)
	}
}

func TestRefunds(t *testing.T) {
	t.Parallel()

	t.Run("ClearTheOrderToZeroAtEachRate", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order := w.place(twoRates())
		_, err := w.pay(order.ID, "pi_1")
		require.NoError(t, err)
		given := make(map[int32]orders.Tax)
		left := order.TotalAmount
		for _, amount := range []int64{1, 1, 499, 1000, left - 1501} {
			refund, err := w.refund(order.ID, amount)
			require.NoError(t, err)
			require.Equal(t, amount, refund.NetAmount+refund.TaxAmount)
			for _, tax := range refund.Taxes {
				sum := given[int32(tax.Rate)]
				sum.Rate, sum.NetAmount, sum.TaxAmount = tax.Rate, sum.NetAmount+tax.NetAmount, sum.TaxAmount+tax.TaxAmount
				given[int32(tax.Rate)] = sum
			}
		}
		require.Len(t, given, len(order.Taxes))
		for _, tax := range order.Taxes {
			require.Equal(t, tax, given[int32(tax.Rate)])
		}
		_, err = w.refund(order.ID, 1)
		require.ErrorIs(t, err, orders.ErrRefundTooLarge)

		facts := w.facts(order.ID)
		last := facts[len(facts)-1].State
		require.Equal(t, last.TotalAmount, last.RefundedAmount)
	})

	t.Run("AtOnceNeverPassThePaymentAndLeaveNoGap", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order := w.place(twoRates()) // 3082
		_, err := w.pay(order.ID, "pi_1")
		require.NoError(t, err)
		errs := together(t.Context(), 50, func(_ context.Context, _ int) error {
			_, err := w.refund(order.ID, 100)
			return err
		})
		var done int
		for _, err := range errs {
			if err == nil {
				done++
			} else {
				require.ErrorIs(t, err, orders.ErrRefundTooLarge)
			}
		}
		require.Equal(t, 30, done, "30 of 100 go into 3082")

		facts := w.facts(order.ID)
		require.Len(t, facts, 2+done)
		for i, fact := range facts {
			require.EqualValues(t, i+1, fact.Event.AggregateVersion)
			if fact.State.Refund != nil {
				require.EqualValues(t, (i-1)*100, fact.State.RefundedAmount)
			}
		}
	})
}

func TestChangesAtOnce(t *testing.T) {
	t.Parallel()

	t.Run("PayAndCancelHaveOneWinner", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order := w.place(twoRates())
		errs := together(t.Context(), 20, func(_ context.Context, i int) error {
			if i%2 == 0 {
				_, err := w.pay(order.ID, uuid.NewString())
				return err
			}
			_, err := w.cancel(order.ID)
			return err
		})
		var won int
		for _, err := range errs {
			if err == nil {
				won++
			} else {
				require.True(t, errors.Is(err, orders.ErrAlreadyPaid) || errors.Is(err, orders.ErrCancelled), err)
			}
		}
		require.Equal(t, 1, won)
		require.Len(t, w.facts(order.ID), 2)
	})
}

func TestListTx(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	var want []uuid.UUID
	for range 5 {
		want = append([]uuid.UUID{w.place(twoRates()).ID}, want...)
	}
	list := func(tenant, before uuid.UUID, limit int) (ids []uuid.UUID) {
		require.NoError(t, tenants.ReadTx(t.Context(), w.api, tenant, func(tx pgx.Tx) error {
			page, err := orders.ListTx(t.Context(), tx, tenant, before, limit)
			for _, order := range page {
				require.Len(t, order.Lines, 2)
				require.Len(t, order.Taxes, 2)
				ids = append(ids, order.ID)
			}
			return err
		}))
		return ids
	}
	require.Equal(t, want[:2], list(w.tenant, uuid.Max, 2), "newest first")
	require.Equal(t, want[2:4], list(w.tenant, want[1], 2))
	require.Equal(t, want[4:], list(w.tenant, want[3], 2))
	require.Empty(t, list(w.tenant, want[4], 2))
	require.Empty(t, list(w.addTenant("other"), uuid.Max, 2))
}

package billing_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/ledger"
	"github.com/onceledger/onceledger/internal/money"
	"github.com/onceledger/onceledger/internal/orders"
	"github.com/onceledger/onceledger/internal/pgtest"
)

func TestPayment(t *testing.T) {
	t.Parallel()

	t.Run("MakesOneInvoiceOneEntryAndOneFact", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.clock.set(time.Now().UTC().Truncate(time.Second))

		order := w.order()
		created, paid := order.Created(), order.Paid()
		paid.Traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
		w.Deliver(t, created)
		require.Equal(t, written{}, w.written(t), "an order that is not paid is not billed")
		w.Deliver(t, paid)
		require.Equal(t, written{Invoices: 1, InvoiceLines: 1, Entries: 1, LedgerLines: 2, Facts: 1}, w.written(t))

		d, state := w.documents(t, order), order.State
		require.Equal(t, paid.ID, d.invoice.ID, "a document's id is its event's")
		require.Equal(t, state.Lines, d.invoice.Lines)
		require.Equal(t, state.Taxes, d.invoice.Taxes)
		require.Equal(t, []int64{2500, 475, 2975}, []int64{d.invoice.NetAmount, d.invoice.TaxAmount, d.invoice.TotalAmount})
		require.Equal(t, []string{"c-42", "a@example.com", "EUR"}, []string{d.invoice.CustomerID, d.invoice.CustomerEmail, string(d.invoice.Currency)})
		require.Equal(t, state.Payment.PaidAt, d.invoice.PaidAt)
		require.Equal(t, w.clock.now(), d.invoice.IssuedAt)

		entry := ledger.Payment(w.tenant, paid.ID, state.OrderID, "EUR", 2500, 475, state.Payment.PaidAt)
		entry.RecordedAt = d.entries[0].RecordedAt
		require.Equal(t, []ledger.Entry{entry}, d.entries)

		facts := w.facts(t, order)
		require.Len(t, facts, 1)
		var said event.Invoice
		require.NoError(t, json.Unmarshal(facts[0].Payload, &said))
		require.Equal(t, event.Invoice{
			InvoiceID: paid.ID, Number: d.invoice.FullNumber(), OrderID: state.OrderID,
			CustomerID: "c-42", CustomerEmail: "a@example.com", Currency: "EUR",
			Lines: state.Lines, Taxes: state.Taxes, NetAmount: 2500, TaxAmount: 475, TotalAmount: 2975,
			PaidAt: state.Payment.PaidAt, IssuedAt: w.clock.now(),
		}, said)
		require.NotEqual(t, paid.ID, facts[0].ID, "a fact of its own")
		facts[0].ID, facts[0].Payload, facts[0].OccurredAt = uuid.Nil, nil, facts[0].OccurredAt.UTC()
		require.Equal(t, event.Event{
			TenantID: w.tenant, AggregateType: event.AggregateBilling, AggregateID: state.OrderID, AggregateVersion: 1,
			Type: event.InvoiceIssued, SchemaVersion: 1, OccurredAt: w.clock.now(), Traceparent: paid.Traceparent,
		}, facts[0])
	})

	t.Run("NeedsNoOrderCreatedBeforeIt", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order := w.order()
		created, paid := order.Created(), order.Paid()
		w.Deliver(t, paid)
		require.Equal(t, &view{2, "paid", "EUR", 2975, 0}, w.view(t, order))
		w.Deliver(t, created)
		require.Equal(t, &view{2, "paid", "EUR", 2975, 0}, w.view(t, order), "a late one does not take it back")
		require.Equal(t, 1, w.written(t).Invoices)
		require.Len(t, w.Applied(t), 2, "but is applied")
	})

	t.Run("OfAnOrderThatIsPaidIsRefused", func(t *testing.T) {
		t.Parallel()

		for name, inOneBatch := range map[string]bool{"InOneBatch": true, "InALaterOne": false} {
			w := newWorld(t)
			order := w.order()
			paid := order.Paid()
			again, refunded := paid, order.Refunded(500)
			again.ID = factory.ID(w.clock.now())
			if inOneBatch {
				w.Deliver(t, paid, again, refunded)
			} else {
				w.Deliver(t, paid)
				w.Deliver(t, again)
				w.Deliver(t, refunded)
			}
			require.Equal(t, written{Invoices: 1, InvoiceLines: 1, Entries: 1, LedgerLines: 2, Facts: 1}, w.written(t), name)
			letters := w.DeadLetters(t)
			require.Len(t, letters, 2)
			require.Equal(t, again.ID, letters[0].EventID)
			require.Equal(t, inbox.ClassRule, letters[0].Class, name)
			require.Contains(t, letters[0].Detail, paid.ID.String(), "which invoice there is")
			require.Equal(t, inbox.ClassParked, letters[1].Class)
		}
	})
}

func TestRefunds(t *testing.T) {
	t.Parallel()

	t.Run("MakeACreditNoteAnEntryAndAFactEach", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order := w.order()
		paid := order.Paid()
		refunds := []event.Event{order.Refunded(500)}
		states := []event.Order{order.State}
		for range 3 {
			refunds, states = append(refunds, order.Refunded(600)), append(states, order.State)
		}
		refunds, states = append(refunds, order.Refunded(order.Left())), append(states, order.State)
		w.Deliver(t, paid, refunds[0]) // in one batch with the payment
		w.Deliver(t, refunds[1], refunds[2])
		w.Deliver(t, refunds[3])
		w.Deliver(t, refunds[4])

		require.Empty(t, w.DeadLetters(t))
		require.Equal(t, &view{7, "paid", "EUR", 2975, 2975}, w.view(t, order))
		d, facts := w.documents(t, order), w.facts(t, order)
		require.Len(t, d.creditNotes, 5)
		require.Len(t, d.entries, 6)
		require.Len(t, facts, 6)
		var net, tax int64
		for i, note := range d.creditNotes {
			refund := states[i].Refund
			require.Equal(t, refunds[i].ID, note.ID)
			require.Equal(t, d.invoice.ID, note.InvoiceID)
			require.Equal(t, refund.RefundID, note.RefundID)
			require.Equal(t, i+1, note.Ordinal)
			require.EqualValues(t, i+1, note.Number)
			require.Equal(t, refund.Taxes, note.Taxes)
			require.Equal(t, refund.RefundedAt, note.RefundedAt)
			net, tax = net+note.NetAmount, tax+note.TaxAmount

			entry := d.entries[i+1]
			require.Equal(t, ledger.KindRefund, entry.Kind)
			require.Equal(t, &paid.ID, entry.Reverses)
			require.Equal(t, refund.RefundedAt, entry.EffectiveAt)

			var said event.CreditNote
			require.NoError(t, json.Unmarshal(facts[i+1].Payload, &said))
			require.EqualValues(t, i+2, facts[i+1].AggregateVersion, "the invoice is version 1")
			require.Equal(t, event.CreditNote{
				CreditNoteID: note.ID, Number: note.FullNumber(), InvoiceID: d.invoice.ID, OrderID: order.State.OrderID,
				RefundID: refund.RefundID, CustomerID: "c-42", CustomerEmail: "a@example.com", Currency: "EUR",
				Taxes: refund.Taxes, NetAmount: refund.NetAmount, TaxAmount: refund.TaxAmount, TotalAmount: refund.Amount,
				Reason: "damaged", RefundedAt: refund.RefundedAt, IssuedAt: note.IssuedAt,
			}, said)
		}
		require.Equal(t, []int64{2500, 475}, []int64{net, tax}, "the last one clears net and tax to zero")
		require.Equal(t, []int64{0, 0, 0}, w.balances(t, w.tenant, "EUR"))
	})

	t.Run("BeforeTheirPaymentWaitAndHoldTheirOrderBack", func(t *testing.T) {
		t.Parallel()

		for name, inOneBatch := range map[string]bool{"InOneBatch": true, "InSeveral": false} {
			w := newWorld(t)
			order, other := w.order(), w.order()
			paid, first, second := order.Paid(), order.Refunded(500), order.Refunded(100)
			events := []event.Event{first, other.Paid(), paid, second, other.Refunded(1)}
			if inOneBatch {
				w.Deliver(t, events...)
			} else {
				for _, e := range events {
					w.Deliver(t, e)
				}
			}
			w.requireNothing(t, order)
			require.Equal(t, written{Invoices: 1, InvoiceLines: 1, CreditNotes: 1, Entries: 2, LedgerLines: 3, Facts: 2}, w.written(t), "the other order flows")
			require.Equal(t, map[uuid.UUID]inbox.Class{
				first.ID: inbox.ClassGap, paid.ID: inbox.ClassParked, second.ID: inbox.ClassParked,
			}, w.Classes(t), name)
		}
	})

	t.Run("OfSeveralOrdersKeepTheirOwnOrdinals", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		a, b := w.order(), w.order()
		w.Deliver(t, a.Paid(), b.Paid(), a.Refunded(1), b.Refunded(2), a.Refunded(3), b.Refunded(4), b.Refunded(5))
		require.Empty(t, w.DeadLetters(t))
		for order, want := range map[*factory.Order][]int64{a: {1, 3}, b: {2, 4, 5}} {
			var amounts []int64
			for i, note := range w.documents(t, order).creditNotes {
				require.Equal(t, i+1, note.Ordinal)
				amounts = append(amounts, note.TotalAmount)
			}
			require.Equal(t, want, amounts)
		}
		require.Equal(t, []int{1}, pgtest.Column[int](t, w.Owner, "SELECT count(DISTINCT xmin::text) FROM credit_notes"), "in one transaction")
	})

	t.Run("TwiceUnderTwoIDsAreRefused", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order := w.order()
		paid, refund := order.Paid(), order.Refunded(500)
		again := refund
		again.ID = factory.ID(w.clock.now())
		w.Deliver(t, paid, refund)
		w.Deliver(t, again)
		require.Equal(t, 1, w.written(t).CreditNotes)
		require.Equal(t, map[uuid.UUID]inbox.Class{again.ID: inbox.ClassData}, w.Classes(t))
	})
}

// TestCurrencies has orders in currencies of 0, 2, 3 and 4 decimals: what is
// billed is the same whole numbers of minor units.
func TestCurrencies(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	var all []*factory.Order
	var events []event.Event
	for _, currency := range []string{"JPY", "ISK", "EUR", "USD", "KWD", "CLF"} {
		order := w.order()
		order.Currency = currency
		order.Lines = []orders.LineParams{
			{SKU: "a", Description: "A", Quantity: 3, UnitAmount: 335, TaxRate: 72_500},
			{SKU: "b", Description: "B", Quantity: 1, UnitAmount: 35_200, TaxRate: 0},
		}
		all = append(all, order)
		events = append(events, order.Created(), order.Paid(), order.Refunded(100))
	}
	w.Deliver(t, events...)
	require.Empty(t, w.DeadLetters(t))
	for _, order := range all {
		currency := money.Currency(order.Currency)
		d := w.documents(t, order)
		require.Equal(t, currency, d.invoice.Currency)
		require.Equal(t, []int64{36_205, 73, 36_278}, []int64{d.invoice.NetAmount, d.invoice.TaxAmount, d.invoice.TotalAmount})
		require.Equal(t, currency, d.creditNotes[0].Currency)
		require.Equal(t, currency, d.entries[0].Currency)
		require.Equal(t, &view{3, "paid", order.Currency, 36_278, 100}, w.view(t, order))
		require.Equal(t, []int64{36_178, 36_105, 73}, w.balances(t, w.tenant, order.Currency))
	}
}

// balances are cash, revenue and tax-payable of a tenant in a currency.
func (w *world) balances(t *testing.T, tenant uuid.UUID, currency string) []int64 {
	t.Helper()
	return pgtest.Column[int64](t, w.Owner, `
		SELECT coalesce(sum(CASE WHEN (line.debit_account = code) = (kind = 'asset') THEN amount_minor ELSE -amount_minor END), 0)::bigint
		FROM ledger_accounts AS account
		LEFT JOIN ledger_lines AS line ON line.tenant_id = account.tenant_id AND line.currency = account.currency
			AND account.code IN (line.debit_account, line.credit_account)
		WHERE account.tenant_id = $1 AND account.currency = $2
		GROUP BY code ORDER BY code`, tenant, currency)
}

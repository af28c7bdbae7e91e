package billing_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/money"
)

// TestRules breaks one rule of a payload at a time. Each is a dead letter of
// class rule, after one try; nothing is written for it, its order's next event
// waits behind it, and its neighbours in the batch are applied.
func TestRules(t *testing.T) {
	t.Parallel()

	type change = func(s *event.Order)
	onPayment := map[string]change{
		"AnotherOrdersID":       func(s *event.Order) { s.OrderID = uuid.New() },
		"NoOrderID":             func(s *event.Order) { s.OrderID = uuid.Nil },
		"AnotherVersion":        func(s *event.Order) { s.Version++ },
		"NoCustomer":            func(s *event.Order) { s.CustomerID = "" },
		"NoStatus":              func(s *event.Order) { s.Status = "" },
		"NoLines":               func(s *event.Order) { s.Lines = nil },
		"AnUnknownCurrency":     func(s *event.Order) { s.Currency = "ABC" },
		"ACurrencyInLowerCase":  func(s *event.Order) { s.Currency = "eur" },
		"NoCurrency":            func(s *event.Order) { s.Currency = "" },
		"ATestCurrency":         func(s *event.Order) { s.Currency = "XXX" },
		"ATotalThatIsNotTheSum": func(s *event.Order) { s.TotalAmount++ },
		"ANetThatIsNotTheLines": func(s *event.Order) { s.NetAmount, s.TaxAmount = s.NetAmount+1, s.TaxAmount-1 },
		"ANegativeNet":          func(s *event.Order) { s.NetAmount, s.TaxAmount = -1, s.TotalAmount+1 },
		"ANegativeTax":          func(s *event.Order) { s.NetAmount, s.TaxAmount = s.TotalAmount+1, -1 },
		"ATotalOfZero": func(s *event.Order) {
			s.NetAmount, s.TaxAmount, s.TotalAmount, s.Lines[0].UnitAmount, s.Lines[0].NetAmount, s.Taxes = 0, 0, 0, 0, 0, nil
		},
		"ATotalBeyondTheLargest":   func(s *event.Order) { s.TotalAmount, s.TaxAmount = money.MaxMinor+1, money.MaxMinor+1-s.NetAmount },
		"ASumThatOverflows":        func(s *event.Order) { s.NetAmount, s.TaxAmount, s.TotalAmount = 1<<62, 1<<62, -1<<63 },
		"NoTaxes":                  func(s *event.Order) { s.Taxes = nil },
		"TaxesThatAreNotTheTax":    func(s *event.Order) { s.Taxes[0].TaxAmount-- },
		"TaxesThatAreNotTheNet":    func(s *event.Order) { s.Taxes[0].NetAmount++ },
		"TaxesThatCancelOut":       func(s *event.Order) { s.Taxes = append(s.Taxes, event.Tax{NetAmount: 1}, event.Tax{NetAmount: -1}) },
		"ANetThatIsNotTheProduct":  func(s *event.Order) { s.Lines[0].NetAmount++ },
		"AQuantityOfZero":          func(s *event.Order) { s.Lines = append(s.Lines, event.Line{Quantity: 0}) },
		"ANegativeQuantityAndUnit": func(s *event.Order) { s.Lines[0].Quantity, s.Lines[0].UnitAmount = -2, -1250 },
		"AProductThatOverflows":    func(s *event.Order) { s.Lines[0].Quantity, s.Lines[0].UnitAmount = 1<<40, 1<<40 },
		"LinesThatOverflow": func(s *event.Order) {
			// 2048 lines of 2^53 - 1 and one of 2048 come to 2^64, and so to 0 in 64 bits.
			s.Lines = append(s.Lines, slices.Repeat([]event.Line{{Quantity: 1, UnitAmount: money.MaxMinor, NetAmount: money.MaxMinor}}, 2048)...)
			s.Lines = append(s.Lines, event.Line{Quantity: 1, UnitAmount: 2048, NetAmount: 2048})
		},
		"ARefundAboveTheTotal": func(s *event.Order) { s.RefundedAmount = s.TotalAmount + 1 },
		"ANegativeRefund":      func(s *event.Order) { s.RefundedAmount = -1 },
		"NoPayment":            func(s *event.Order) { s.Payment = nil },
		"APaymentOfLess":       func(s *event.Order) { s.Payment.Amount-- },
		"APaymentIn1970":       func(s *event.Order) { s.Payment.PaidAt = time.Unix(1_755_933, 0) }, // milliseconds taken for seconds
		"APaymentFarAhead":     func(s *event.Order) { s.Payment.PaidAt = time.Date(2099, 1, 1, 0, 0, 0, 0, time.UTC) },
		"APaymentTwoDaysAhead": func(s *event.Order) { s.Payment.PaidAt = time.Now().Add(48 * time.Hour) },
		"APaymentWithoutATime": func(s *event.Order) { s.Payment.PaidAt = time.Time{} },
	}
	onRefund := map[string]change{
		"NoRefund":                   func(s *event.Order) { s.Refund = nil },
		"ARefundAboveWhatIsRefunded": func(s *event.Order) { s.RefundedAmount = s.Refund.Amount - 1 },
		"ARefundOfZero": func(s *event.Order) {
			*s.Refund = event.Refund{RefundID: s.Refund.RefundID, RefundedAt: s.Refund.RefundedAt}
		},
		"ARefundThatIsNotTheSum":   func(s *event.Order) { s.Refund.TaxAmount++ },
		"RefundTaxesThatDisagree":  func(s *event.Order) { s.Refund.Taxes[0].NetAmount-- },
		"ARefundIn1970":            func(s *event.Order) { s.Refund.RefundedAt = time.Unix(0, 0) },
		"ARefundFarAhead":          func(s *event.Order) { s.Refund.RefundedAt = time.Date(2099, 1, 1, 0, 0, 0, 0, time.UTC) },
		"ARefundInAnotherCurrency": func(s *event.Order) { s.Currency = "USD" },
	}
	texts := map[string]func(payload string) string{
		"AmountsAsText":    func(p string) string { return strings.Replace(p, `"net_amount":2500`, `"net_amount":"2500"`, 1) },
		"AmountsWithPoint": func(p string) string { return strings.Replace(p, `"net_amount":2500`, `"net_amount":25.00`, 1) },
		"AnAmountBeyond64": func(p string) string {
			return strings.Replace(p, `"net_amount":2500`, `"net_amount":9223372036854775808`, 1)
		},
		"ATaxRateAsNumber": func(p string) string { return strings.Replace(p, `"tax_rate":"0.19"`, `"tax_rate":0.19`, 1) },
		"ATaxRateAboveOne": func(p string) string { return strings.Replace(p, `"tax_rate":"0.19"`, `"tax_rate":"1.19"`, 1) },
		"APaymentInMicros": func(p string) string {
			return strings.Replace(p, `"paid_at":"`, `"paid_at":1755933141855875,"was":"`, 1)
		},
		"APaymentInYear10k":  func(p string) string { return strings.Replace(p, `"paid_at":"20`, `"paid_at":"120`, 1) },
		"LinesThatAreNoList": func(p string) string { return strings.Replace(p, `"lines":[`, `"lines":7,"were":[`, 1) },
		"NothingOfAnOrder":   func(string) string { return `{"hello":"world"}` },
	}

	w := newWorld(t)
	check := func(t *testing.T, order *factory.Order, bad, next event.Event) {
		t.Helper()
		left, right := w.order(), w.order()
		w.Deliver(t, left.Paid(), bad, next, right.Paid())

		letters := w.DeadLetters(t)
		letters = letters[len(letters)-2:]
		require.Equal(t, bad.ID, letters[0].EventID)
		require.Equal(t, inbox.ClassRule, letters[0].Class, letters[0].Detail)
		require.NotEmpty(t, letters[0].Detail)
		require.Equal(t, next.ID, letters[1].EventID)
		require.Equal(t, inbox.ClassParked, letters[1].Class, letters[1].Detail)
		require.Len(t, w.facts(t, left), 1)
		require.Len(t, w.facts(t, right), 1)
	}
	for name, spoil := range onPayment {
		t.Run("Payment/"+name, func(t *testing.T) {
			order := w.order()
			bad := factory.Altered(order.Paid(), spoil)
			check(t, order, bad, order.Refunded(1))
			w.requireNothing(t, order)
		})
	}
	for name, spoil := range texts {
		t.Run("Payment/"+name, func(t *testing.T) {
			order := w.order()
			bad := order.Paid()
			payload := spoil(string(bad.Payload))
			require.NotEqual(t, string(bad.Payload), payload)
			require.True(t, json.Valid([]byte(payload)), payload)
			bad.Payload = json.RawMessage(payload)
			check(t, order, bad, order.Refunded(1))
			w.requireNothing(t, order)
		})
	}
	for name, spoil := range onRefund {
		t.Run("Refund/"+name, func(t *testing.T) {
			order := w.order()
			w.Deliver(t, order.Paid())
			bad := factory.Altered(order.Refunded(500), spoil)
			check(t, order, bad, order.Refunded(1))
			d := w.documents(t, order)
			require.Empty(t, d.creditNotes)
			require.Len(t, d.entries, 1)
			require.Equal(t, &view{2, "paid", "EUR", 2975, 0}, w.view(t, order))
		})
	}
	for name, at := range map[string]time.Time{
		"From1970":      time.Unix(1_755_933, 0), // milliseconds taken for seconds
		"Of2099":        time.Date(2099, 1, 1, 0, 0, 0, 0, time.UTC),
		"TwoDaysAhead":  time.Now().Add(48 * time.Hour),
		"BeforeAnOrder": time.Date(2019, 12, 31, 23, 59, 59, 0, time.UTC),
	} {
		t.Run("Event/"+name, func(t *testing.T) {
			order := w.order()
			bad := order.Created()
			bad.OccurredAt = at
			check(t, order, bad, order.Paid())
			w.requireNothing(t, order)
		})
	}
}

// TestPlausibleTimes are those of R22 that change no outcome.
func TestPlausibleTimes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	now := time.Now()
	for _, skew := range []time.Duration{-5 * time.Minute, 10 * time.Minute, 23 * time.Hour, -24 * time.Hour} {
		order := w.order()
		order.Now = func() time.Time { return now.Add(skew) }
		paid := order.Paid()
		paid.ID = factory.ID(now)
		records := w.Partition.Append(paid)
		records[0].Time = time.UnixMilli(1_755_933_141_855_875) // the record's own time in microseconds
		w.DeliverRecords(t, records...)
		require.Equal(t, order.State.Payment.PaidAt, w.documents(t, order).entries[0].EffectiveAt, "when it happened, as it was said")
	}
	require.Empty(t, w.DeadLetters(t))
}

// TestRefundsStayWithinTheInvoice is about a producer that lost count: the ledger
// never gives back more than was paid, in one batch or in several.
func TestRefundsStayWithinTheInvoice(t *testing.T) {
	t.Parallel()

	for name, inOneBatch := range map[string]bool{"InOneBatch": true, "InSeveral": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)

			order := w.order()
			paid, first, second := order.Paid(), order.Refunded(2000), order.Refunded(975)
			more := factory.Altered(second, func(s *event.Order) {
				s.Version++
				s.Refund.RefundID = uuid.New()
			})
			more.ID, more.AggregateVersion = factory.ID(time.Now()), more.AggregateVersion+1
			if inOneBatch {
				w.Deliver(t, paid, first, second, more)
			} else {
				for _, e := range []event.Event{paid, first, second, more} {
					w.Deliver(t, e)
				}
			}
			letters := w.DeadLetters(t)
			require.Len(t, letters, 1)
			require.Equal(t, more.ID, letters[0].EventID)
			require.Equal(t, inbox.ClassRule, letters[0].Class)
			require.Contains(t, letters[0].Detail, "has 0 EUR left")
			require.Equal(t, []int64{0, 0, 0}, w.balances(t, w.tenant, "EUR"))
		})
	}
}

// TestDocumentTooLarge has a payment that fits into a record and whose invoice
// would not: the fields that it leaves out are written in the invoice.
func TestDocumentTooLarge(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	order, other := w.order(), w.order()
	bad := order.Paid()
	payload := strings.Replace(string(bad.Payload), `"lines":[`, `"lines":[`+strings.Repeat(`{"quantity":1,"tax_rate":"0"},`, 20_000), 1)
	require.Less(t, len(payload), event.MaxPayload)
	bad.Payload = json.RawMessage(payload)
	w.Deliver(t, bad, other.Paid())

	w.requireNothing(t, order)
	letters := w.DeadLetters(t)
	require.Len(t, letters, 1)
	require.Equal(t, inbox.ClassRule, letters[0].Class)
	require.Contains(t, letters[0].Detail, "InvoiceIssued would have")
	require.EqualValues(t, 1, w.documents(t, other).invoice.Number, "no number is lost")
}

// TestUnknown is about events that this build does not know, and about what it
// does not know of events that it does.
func TestUnknown(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	types := []event.Type{"OrderShipped", event.InvoiceIssued, event.CreditNoteIssued, "orderpaid"}
	for _, unknown := range types {
		order, other := w.order(), w.order()
		bad := order.Created()
		bad.Type = unknown
		w.Deliver(t, bad, order.Paid(), other.Created())
		w.requireNothing(t, order)
		require.NotNil(t, w.view(t, other))
		require.Equal(t, inbox.ClassUnknownSchema, w.Classes(t)[bad.ID], unknown)
	}
	require.Equal(t, len(types), w.Counted(t, "unknown-schema"))
	require.Equal(t, len(types), w.Counted(t, "parked"))

	// A trace is passed on; what is none must not cost a payment, nor make a
	// fact that no broker would take.
	for name, trace := range map[string]string{
		"BytesForATrace": "00-\xff\x00-01", "ALongTrace": strings.Repeat("0", 200_000), "WordsForATrace": "not sampled",
	} {
		t.Run(name, func(t *testing.T) {
			order := w.order()
			paid := order.Paid()
			paid.Traceparent = trace
			w.Deliver(t, paid)
			require.Empty(t, w.facts(t, order)[0].Traceparent)
		})
	}

	t.Run("FieldsDoNoHarm", func(t *testing.T) {
		order := w.order()
		paid := order.Paid()
		paid.Payload = json.RawMessage(strings.Replace(string(paid.Payload), "{", `{"loyalty":{"points":[1,2.5,null]},"net_amount_usd":"1.00",`, 1))
		w.Deliver(t, paid)
		require.EqualValues(t, 2975, w.documents(t, order).invoice.TotalAmount)
	})
}

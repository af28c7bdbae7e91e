package prove

import (
	"encoding/json"
	"math/big"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// What no account is needed to see: each wrong answer is noticed as it comes in.
func TestWrongAnswers(t *testing.T) {
	t.Parallel()

	placedAs := func(s *service, n int, change func(map[string]any)) map[string]any {
		body := s.body(n)
		change(body)
		return body
	}
	tests := map[string]struct {
		happens   func(*service)
		invariant string
		kind      string
	}{
		"OrderOfAnotherSum": {func(s *service) {
			s.ask(placeRequest(0, "k", 1000, "0.19"), 201, placedAs(s, 4, func(b map[string]any) { b["id"] = orderID(9); b["tax_amount"] = 189 }))
		}, "I4", "wrong amount"},
		"TwoOrdersForOneKey": {func(s *service) {
			r := placeRequest(0, "k", 200, "0.07")
			s.ask(r, 201, placedAs(s, 4, func(b map[string]any) { b["id"] = orderID(8) }))
			s.ask(r, 201, placedAs(s, 4, func(b map[string]any) { b["id"] = orderID(9) }))
		}, "I7", "another answer"},
		"OneOrderForTwoKeys":   {func(s *service) { s.ask(placeRequest(0, "k", 200, "0.07"), 201, s.body(4)) }, "I7", "shared order"},
		"KeyOfAnotherTenant":   {func(s *service) { s.ask(placeRequest(1, "place-4", 200, "0.07"), 201, s.body(4)) }, "I9", "shared order"},
		"KeyReusedAndReplayed": {func(s *service) { s.ask(s.about(1, actReuse, "pay-1"), 200, s.body(1)) }, "I7", "wrong answer"},
		"OrderOfAnotherTenant": {func(s *service) {
			r := s.about(1, actForeign, "")
			r.Method, r.Tenant = "GET", 1
			s.ask(r, 200, s.body(1))
		}, "I9", "wrong answer"},
		"ForbiddenByNoRule": {func(s *service) { s.ask(s.about(4, actPay, "k"), 403, problemBody("forbidden")) }, "I7", "wrong answer"},
		"PaymentOfAnotherSum": {func(s *service) {
			s.ask(s.about(1, actPay, "k"), 200, placedAs(s, 1, func(b map[string]any) { b["total_amount"] = 1 }))
		}, "I4", "wrong amount"},
		"RefundOfAnotherSum": {func(s *service) {
			r := s.about(1, actRefund, "k")
			r.Amount = 5
			s.ask(r, 201, map[string]any{"id": refundID(9), "order_id": orderID(1), "amount": 5, "net_amount": 5, "tax_amount": 1})
		}, "I4", "wrong amount"},
		"RefundOfAnotherOrder": {func(s *service) {
			r := s.about(1, actRefund, "k")
			r.Amount = 5
			s.ask(r, 201, map[string]any{"id": refundID(9), "order_id": orderID(2), "amount": 5, "net_amount": 5})
		}, "I4", "wrong amount"},
		"LineIsNotAsAsked": {func(s *service) {
			s.ask(placeRequest(0, "k", 200, "0.07"), 201, placedAs(s, 4, func(b map[string]any) {
				b["id"] = orderID(9)
				b["lines"].([]any)[0].(map[string]any)["sku"] = "x"
			}))
		}, "I7", "wrong contents"},
		"MetadataIsNotAsAsked": {func(s *service) {
			s.ask(placeRequest(0, "k", 200, "0.07"), 201, placedAs(s, 4, func(b map[string]any) {
				b["id"], b["metadata"] = orderID(9), map[string]any{"a": "b"}
			}))
		}, "I7", "wrong contents"},
		"ReadWithAnotherCustomer": {func(s *service) {
			r := s.about(4, actGet, "")
			r.Method = "GET"
			s.ask(r, 200, placedAs(s, 4, func(b map[string]any) { b["taxes"] = nil }))
		}, "I7", "wrong contents"},
		"NoLocation":          {func(s *service) { s.repeat(201, "", "application/json", true, true) }, "I7", "wrong location"},
		"OtherLocation":       {func(s *service) { s.repeat(201, "/v1/orders/"+orderID(9), "application/json", true, true) }, "I7", "wrong location"},
		"ReplayOfAnotherKind": {func(s *service) { s.repeat(201, "/v1/orders/"+orderID(4), "text/plain", true, false) }, "I7", "another answer"},
		"NotSaidToBeAReplay":  {func(s *service) { s.repeat(201, "/v1/orders/"+orderID(4), "application/json", false, false) }, "I7", "not a replay"},
		"AnotherAnswerTheSecondTime": {func(s *service) {
			s.write(entry{Kind: entrySend, Op: 1, Attempt: 2})
			s.write(entry{Kind: entryAnswer, Op: 1, Attempt: 2, Answer: &answer{Status: 201, Body: "{}"}})
		}, "I7", "another answer"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := soundService(t)
			require.Empty(t, s.known.violations)
			test.happens(s)
			require.NotEmpty(t, s.known.violations)
			require.Equal(t, test.invariant+" "+test.kind, s.known.violations[0].Invariant+" "+s.known.violations[0].Kind, s.known.violations[0].Detail)
		})
	}
}

// repeat is order 4's first request once more, or a request with another key that
// is answered with an order of its own.
func (s *service) repeat(status int, location, kind string, replayed, other bool) {
	body := s.body(4)
	op, r := s.ops+1, placeRequest(0, "place-4", 200, "0.07")
	r.Method = "POST"
	if other {
		r.Key, body["id"] = "k", orderID(8)
	}
	text, err := json.Marshal(body)
	require.NoError(s.t, err)
	s.write(entry{Kind: entrySend, Op: op, Attempt: 1, Request: &r})
	s.write(entry{Kind: entryAnswer, Op: op, Attempt: 1, Answer: &answer{Status: status, Replayed: replayed, Location: location, ContentType: kind, Body: string(text)}})
}

// Requests of which nobody knew what they did are counted by what came of them.
func TestUnknownOutcomes(t *testing.T) {
	t.Parallel()

	s := soundService(t)
	send := func(op int64, attempt int, r *request) {
		if r != nil {
			r = new(*r)
		}
		s.write(entry{Kind: entrySend, Op: op, Attempt: attempt, Request: r})
	}
	nothing := func(op int64, attempt int, notSent bool) {
		s.write(entry{Kind: entryNothing, Op: op, Attempt: attempt, NotSent: notSent})
	}
	finally := func(op int64, attempt, status int, replayed bool, body any) {
		text, err := json.Marshal(body)
		require.NoError(t, err)
		s.write(entry{Kind: entryAnswer, Op: op, Attempt: attempt, Answer: &answer{Status: status, Replayed: replayed, Body: string(text)}})
	}
	again := func(op int64, key string) *request {
		r := s.about(1, actPay, key)
		r.Method = "POST"
		return &r
	}
	refused := problemBody("order-already-paid")
	send(101, 1, again(101, "u1"))
	nothing(101, 1, false)
	send(101, 2, nil)
	finally(101, 2, 409, true, refused) // was refused
	send(102, 1, again(102, "u2"))
	nothing(102, 1, true) // reached nobody: known
	send(102, 2, nil)
	finally(102, 2, 409, false, refused)
	place := placeRequest(0, "u3", 200, "0.07")
	place.Method = "POST"
	send(103, 1, &place)
	finally(103, 1, 503, false, nil)
	send(103, 2, nil)
	body := s.body(4)
	body["id"] = orderID(8)
	finally(103, 2, 201, true, body) // had been done
	place.Key = "u4"
	send(104, 1, &place)
	finally(104, 1, 409, false, problemBody("request-in-progress"))
	send(104, 2, nil)
	body["id"] = orderID(9)
	finally(104, 2, 201, false, body) // had not
	// Prove itself dies while this one is under way.
	place.Key = "u5"
	send(105, 1, &place)
	s.write(entry{Kind: entryResume})

	account, _ := audit(s.evidence)
	require.Equal(t, []int{4, 1, 1, 1, 1}, []int{account.Unknown, account.HadDone, account.HadNot, account.WasRefuse, account.Unsolved})

	// Read again from the journal, it is the same.
	other := newKnown()
	for _, e := range s.entries {
		require.NoError(t, other.learn(e))
	}
	s.known = other
	same, _ := audit(s.evidence)
	require.Equal(t, account, same)
}

// A long run does not keep all that its clients have sent in memory.
func TestOldBodiesAreForgotten(t *testing.T) {
	t.Parallel()

	s := soundService(t)
	for range 3 * recentKept {
		r := s.about(4, actReuse, "place-4")
		r.Body = "{}"
		s.ask(r, 422, problemBody("idempotency-key-reused"))
	}
	bodies := 0
	for _, o := range s.known.ops {
		if o.request.Body != "" {
			bodies++
		}
	}
	require.GreaterOrEqual(t, bodies, recentKept)
	require.LessOrEqual(t, bodies, 2*recentKept)
	_, violations := audit(s.evidence)
	require.Empty(t, violations)
}

func TestLinearizable(t *testing.T) {
	t.Parallel()

	type call struct {
		what         action
		amount       int64
		from, to     int64
		status       int
		code         string
		state        string
		version      int64
		refundedThen int64
	}
	tests := map[string]struct {
		calls []call
		ok    bool
	}{
		"OneAfterTheOther": {[]call{{what: actPay, from: 10, to: 20, status: 200, state: "paid", version: 2}, {what: actGet, from: 30, to: 40, status: 200, state: "paid", version: 2}}, true},
		"ReadWhilePaying":  {[]call{{what: actPay, from: 10, to: 40, status: 200, state: "paid", version: 2}, {what: actGet, from: 20, to: 30, status: 200, state: "created", version: 1}}, true},
		"StaleRead":        {[]call{{what: actPay, from: 10, to: 20, status: 200, state: "paid", version: 2}, {what: actGet, from: 30, to: 40, status: 200, state: "created", version: 1}}, false},
		"ReadOfTheFuture":  {[]call{{what: actGet, from: 10, to: 20, status: 200, state: "paid", version: 2}, {what: actPay, from: 30, to: 40, status: 200, state: "paid", version: 2}}, false},
		"PaidTwice":        {[]call{{what: actPay, from: 10, to: 40, status: 200, state: "paid", version: 2}, {what: actPay, from: 10, to: 40, status: 200, state: "paid", version: 2}}, false},
		"PaidAndCancelled": {[]call{{what: actPay, from: 10, to: 40, status: 200, state: "paid", version: 2}, {what: actCancel, from: 10, to: 40, status: 200, state: "cancelled", version: 2}}, false},
		"OneWins":          {[]call{{what: actPay, from: 10, to: 40, status: 409, code: "order-cancelled"}, {what: actCancel, from: 10, to: 40, status: 200, state: "cancelled", version: 2}}, true},
		"RefusedTooSoon":   {[]call{{what: actPay, from: 10, to: 20, status: 409, code: "order-cancelled"}, {what: actCancel, from: 30, to: 40, status: 200, state: "cancelled", version: 2}}, false},
		"LostUpdate": {[]call{{what: actPay, from: 10, to: 20, status: 200, state: "paid", version: 2},
			{what: actRefund, amount: 60, from: 30, to: 50, status: 201}, {what: actRefund, amount: 60, from: 30, to: 50, status: 201}}, false},
		"SecondIsTooLarge": {[]call{{what: actPay, from: 10, to: 20, status: 200, state: "paid", version: 2},
			{what: actRefund, amount: 60, from: 30, to: 50, status: 201}, {what: actRefund, amount: 60, from: 30, to: 50, status: 422, code: "refund-too-large"},
			{what: actGet, from: 60, to: 70, status: 200, state: "paid", version: 3, refundedThen: 60}}, true},
		"VersionIsSkipped": {[]call{{what: actPay, from: 10, to: 20, status: 200, state: "paid", version: 3}}, false},
		"VersionGoesBack": {[]call{{what: actPay, from: 10, to: 20, status: 200, state: "paid", version: 2}, {what: actRefund, amount: 1, from: 30, to: 40, status: 201},
			{what: actGet, from: 50, to: 60, status: 200, state: "paid", version: 2}}, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			order := &knownOrder{id: "o", groups: []*group{{ops: []*op{{
				request: request{Action: actPlace}, called: 1, returned: 2,
				final: &result{status: 201, order: orderBody{ID: "o", Status: "created", Version: 1, Total: 100}},
			}}}}}
			for i, c := range test.calls {
				final := &result{status: c.status, code: c.code}
				if c.state != "" {
					final.order = orderBody{ID: "o", Status: c.state, Version: c.version, Total: 100, Refunded: c.refundedThen}
				}
				order.groups = append(order.groups, &group{ops: []*op{{
					id: int64(i), request: request{Action: c.what, Amount: c.amount}, called: c.from, returned: c.to, final: final,
				}}})
			}
			k := newKnown()
			k.orders["o"] = order
			_, violations := k.linearizable()
			require.Equal(t, test.ok, len(violations) == 0, "%v", violations)
		})
	}
}

// The clients' own arithmetic is exact where floating point is not.
func TestAmounts(t *testing.T) {
	t.Parallel()

	net, tax := placeBody{Lines: []lineBody{{Quantity: 3, UnitAmount: 333, TaxRate: "0.19"}, {Quantity: 1, UnitAmount: 1, TaxRate: "0.19"}, {Quantity: 1, UnitAmount: 50, TaxRate: "0.07"}}}.amounts()
	require.Equal(t, int64(1050), net)
	require.Equal(t, int64(190+4), tax) // 0.19 × 1000, and 3.5 rounded up

	random := rand.New(rand.NewPCG(1, 2))
	inexact := 0
	for range 200 {
		var large placeBody
		require.NoError(t, json.Unmarshal([]byte(largeBasket(random)), &large))
		net, tax := large.amounts()
		require.Less(t, net+tax, int64(1<<53))
		require.Greater(t, net+tax, int64(1<<52))
		// The sum of two such orders is more than a float64 holds to the unit.
		exact := new(big.Int).Add(big.NewInt(net+tax), big.NewInt(net+tax+1))
		if float, _ := new(big.Float).SetFloat64(float64(net+tax) + float64(net+tax+1)).Int(nil); exact.Cmp(float) != 0 {
			inexact++
		}
	}
	require.Positive(t, inexact)
}

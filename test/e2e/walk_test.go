package e2e_test

import (
	"encoding/json"
	"net/http"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/test/stack"
)

const twoBooks = `{"customer_id":"c-42","customer_email":"a@example.com","currency":"EUR",` +
	`"lines":[{"sku":"book","description":"A book","quantity":2,"unit_amount":1250,"tax_rate":"0.19"}],"metadata":{}}`

// customer is a client that says what it expects.
type customer struct {
	*stack.Client
	t *testing.T
}

func (c customer) json(answer stack.Answer, status int) map[string]any {
	c.t.Helper()
	require.Equal(c.t, status, answer.Status, answer.Body)
	var body map[string]any
	require.NoError(c.t, json.Unmarshal([]byte(answer.Body), &body))
	return body
}

func (c customer) post(status int, path, body string) map[string]any {
	c.t.Helper()
	exchange, err := c.Post(c.t.Context(), path, body)
	require.NoError(c.t, err)
	return c.json(exchange.Answer, status)
}

func (c customer) get(path string) map[string]any {
	c.t.Helper()
	answer, err := c.Get(c.t.Context(), path)
	require.NoError(c.t, err)
	return c.json(answer, http.StatusOK)
}

// receipt waits until an order's receipt is complete.
func (c customer) receipt(order string) (receipt map[string]any) {
	c.t.Helper()
	require.NoError(c.t, stack.Wait(c.t.Context(), func() (bool, error) {
		receipt = c.get(order + "/receipt")
		return receipt["complete"] == true, nil
	}), "%v", receipt)
	return receipt
}

// TestWalk is the README's walk: one order paid and refunded, one cancelled, and
// the books that come of them.
func TestWalk(t *testing.T) {
	t.Parallel()

	s := stack.New(t)
	api := s.API(t)
	stack.StartAll(t, api, s.Worker(t, "worker", stack.AllRoles))
	c := customer{s.NewClient(api), t}

	order := c.post(http.StatusCreated, "/v1/orders", twoBooks)
	require.Equal(t, "created", order["status"])
	require.EqualValues(t, 2975, order["total_amount"])
	path := "/v1/orders/" + order["id"].(string)

	pay := stack.Exchange{Path: path + "/pay", Body: `{"payment_reference":"pi_1"}`, Key: uuid.NewString()}
	require.NoError(t, c.Exchange(t.Context(), &pay))
	require.Equal(t, "paid", c.json(pay.Answer, http.StatusOK)["status"])
	require.False(t, pay.Replayed)
	again := pay
	require.NoError(t, c.Exchange(t.Context(), &again))
	require.True(t, again.Replayed)
	require.Equal(t, pay.Answer.Body, again.Answer.Body)
	pay.Body = `{"payment_reference":"pi_2"}`
	require.NoError(t, c.Exchange(t.Context(), &pay))
	require.Contains(t, c.json(pay.Answer, http.StatusUnprocessableEntity)["type"], "idempotency-key-reused")

	refund := c.post(http.StatusCreated, path+"/refunds", `{"amount":500,"reason":"damaged"}`)
	require.EqualValues(t, 420, refund["net_amount"])
	require.EqualValues(t, 80, refund["tax_amount"])
	require.Contains(t, c.post(http.StatusConflict, path+"/cancel", "")["type"], "/problems/")

	other := c.post(http.StatusCreated, "/v1/orders", twoBooks)
	otherPath := "/v1/orders/" + other["id"].(string)
	require.Equal(t, "cancelled", c.post(http.StatusOK, otherPath+"/cancel", "")["status"])

	receipt := c.receipt(path)
	require.Empty(t, receipt["waits_for"])
	require.Empty(t, receipt["dead_letters"])
	require.Len(t, receipt["events"], 5, "three of the order, two of its documents")
	require.Len(t, receipt["credit_notes"], 1)
	require.Len(t, receipt["ledger_entries"], 2)
	for _, e := range receipt["events"].([]any)[:3] {
		require.Len(t, e.(map[string]any)["applied"], 1, e)
	}
	require.Len(t, c.receipt(otherPath)["events"], 2)

	invoice := receipt["invoice"].(map[string]any)
	require.Equal(t, invoice, c.get("/v1/invoices/"+invoice["id"].(string)))
	require.Equal(t, []any{invoice}, c.get("/v1/invoices?order_id=" + order["id"].(string))["invoices"])
	require.Empty(t, c.get("/v1/invoices?order_id=" + other["id"].(string))["invoices"])
	require.Equal(t, receipt["ledger_entries"], c.get("/v1/ledger/entries?order_id=" + order["id"].(string))["entries"])
	require.Len(t, c.get("/v1/ledger/entries?account=cash")["entries"], 2)
	require.EqualValues(t, 2475, c.get("/v1/ledger/accounts/cash/balance?currency=EUR")["balance_amount"])
	trial := c.get("/v1/ledger/trial-balance")["totals"].([]any)
	require.Equal(t, []any{map[string]any{
		"currency": "EUR", "debit_amount": 3475.0, "credit_amount": 3475.0, "balanced": true,
	}}, trial)
	require.Len(t, c.get("/v1/orders")["orders"], 2)

	requireVerified(t, s, 0, map[string]any{"lost": 0.0, "duplicated": 0.0, "phantom": 0.0, "unbalanced": 0.0})
}

// TestVerifySaysWhatIsLost takes effects away behind the services' back, in a
// pipeline that is at rest: no later event shows that it is past them.
func TestVerifySaysWhatIsLost(t *testing.T) {
	t.Parallel()

	tests := map[string]string{
		"AnEntry": "DELETE FROM ledger_lines; DELETE FROM ledger_entries",
		"EveryTraceOfTheEvents": `DELETE FROM ledger_lines; DELETE FROM ledger_entries; DELETE FROM invoice_lines; DELETE FROM invoices;
			DELETE FROM document_numbers; DELETE FROM processed_events; DELETE FROM order_billing;
			DELETE FROM outbox_events WHERE aggregate_type = 'billing'`,
	}
	for name, spoil := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			s := stack.New(t)
			api := s.API(t)
			stack.StartAll(t, api, s.Worker(t, "worker", stack.AllRoles))
			c := customer{s.NewClient(api), t}
			order := c.post(http.StatusCreated, "/v1/orders", twoBooks)
			path := "/v1/orders/" + order["id"].(string)
			c.post(http.StatusOK, path+"/pay", `{"payment_reference":"pi_1"}`)
			c.receipt(path)
			requireVerified(t, s, 0, map[string]any{"lost": 0.0})

			_, err := s.Owner.Exec(t.Context(), "BEGIN; SET LOCAL session_replication_role = replica;"+spoil+"; COMMIT")
			require.NoError(t, err)
			report := requireVerified(t, s, 1, nil)
			require.Positive(t, report["lost"])
		})
	}
}

// requireVerified runs `onceledger verify` as an operator does.
func requireVerified(t *testing.T, s *stack.Stack, code int, violations map[string]any) map[string]any {
	t.Helper()
	env := []string{"DATABASE_URL=" + s.Database.URL("verify"), "KAFKA_BROKERS=" + s.Broker.Brokers()}
	said := run(t, env, "onceledger", "verify", "--json")
	require.Equal(t, code, said.code, said.stdout+said.stderr)
	var report struct {
		OK         bool           `json:"ok"`
		Violations map[string]any `json:"violations"`
	}
	require.NoError(t, json.Unmarshal([]byte(said.stdout), &report))
	require.Equal(t, code == 0, report.OK)
	require.Subset(t, report.Violations, violations)

	said = run(t, env, "onceledger", "verify")
	require.Equal(t, code, said.code, said.stdout+said.stderr)
	return report.Violations
}

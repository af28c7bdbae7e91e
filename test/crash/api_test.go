package crash_test

import (
	"encoding/json"
	"net/http"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/crash"
	"github.com/onceledger/onceledger/test/stack"
)

// Goal: each kind of request, a refused one too, is done once and answered,
// though the API dies while it is at it.
// Method: one request at a time, kill -9 just before and just after its commit;
// the client sends it again with the same key.
func TestEachRequest(t *testing.T) {
	t.Parallel()

	for _, point := range []string{crash.APIBeforeCommit, crash.APICommittedNotAnswered} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()

			s := stack.New(t)
			api := s.API(t)
			stack.StartAll(t, api, s.Worker(t, "worker", stack.AllRoles))
			client := s.NewClient(api)

			// post has the API die under a request, and returns the order's path.
			post := func(path, body string, status int) string {
				t.Helper()
				require.NoError(t, api.Stop())
				require.NoError(t, api.StartReady("ONCELEDGER_CRASH="+point))
				exchange := stack.Exchange{Path: path, Body: body, Key: uuid.NewString()}
				answered := make(chan error, 1)
				go func() { answered <- client.Exchange(t.Context(), &exchange) }()
				require.NoError(t, api.WaitKilled())
				require.NoError(t, api.StartReady())
				require.NoError(t, <-answered)
				require.Equal(t, status, exchange.Status, exchange.Answer.Body)
				require.Positive(t, exchange.Unknown)
				require.Equal(t, point == crash.APICommittedNotAnswered, exchange.Replayed)

				again := exchange
				require.NoError(t, client.Exchange(t.Context(), &again))
				require.True(t, again.Replayed)
				require.Equal(t, exchange.Answer.Body, again.Answer.Body)
				var order struct {
					ID string `json:"id"`
				}
				require.NoError(t, json.Unmarshal([]byte(exchange.Answer.Body), &order))
				return "/v1/orders/" + order.ID
			}
			const twoBooks = `{"customer_id":"c-42","customer_email":"a@example.com","currency":"EUR",` +
				`"lines":[{"sku":"book","description":"A book","quantity":2,"unit_amount":1250,"tax_rate":"0.19"}]}`

			paid := post("/v1/orders", twoBooks, http.StatusCreated)
			post(paid+"/pay", `{"payment_reference":"pi_1"}`, http.StatusOK)
			post(paid+"/pay", `{"payment_reference":"pi_2"}`, http.StatusConflict)
			post(paid+"/refunds", `{"amount":500,"reason":"damaged"}`, http.StatusCreated)
			post(paid+"/refunds", `{"amount":2476,"reason":"too much"}`, http.StatusUnprocessableEntity)
			cancelled := post("/v1/orders", twoBooks, http.StatusCreated)
			post(cancelled+"/cancel", "", http.StatusOK)

			report := s.Verify(t)
			require.True(t, report.OK, "%+v", report.Findings)
			require.EqualValues(t, 2, report.Orders.Total)
			require.EqualValues(t, 1, report.Orders.Paid)
			require.EqualValues(t, 1, report.Refunds)
			require.EqualValues(t, 2, report.LedgerEntries)
		})
	}
}

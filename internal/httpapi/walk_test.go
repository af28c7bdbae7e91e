package httpapi_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestWalk takes one order from its creation to the last cent refunded.
func TestWalk(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	created := w.post("/v1/orders", oneBook)
	require.Equal(t, http.StatusCreated, created.Code, created.Body)
	order := created.json()
	require.Equal(t, "created", order["status"])
	require.EqualValues(t, 2500, order["net_amount"])
	require.EqualValues(t, 475, order["tax_amount"])
	require.EqualValues(t, 2975, order["total_amount"])
	path := "/v1/orders/" + order["id"].(string)
	require.Equal(t, path, created.Header().Get("Location"))

	paid := w.post(path+"/pay", `{"payment_reference":"pi_1"}`)
	require.Equal(t, http.StatusOK, paid.Code, paid.Body)
	require.Equal(t, "paid", paid.json()["status"])

	waiting := w.get(path + "/receipt").json()
	require.Equal(t, false, waiting["complete"])
	require.Len(t, waiting["waits_for"], 2)

	refund := w.post(path+"/refunds", `{"amount":500,"reason":"damaged"}`)
	require.Equal(t, http.StatusCreated, refund.Code, refund.Body)
	require.EqualValues(t, 420, refund.json()["net_amount"])
	require.EqualValues(t, 80, refund.json()["tax_amount"])
	require.Equal(t, http.StatusUnprocessableEntity, w.post(path+"/refunds", `{"amount":2476,"reason":"too much"}`).Code)
	require.Equal(t, http.StatusCreated, w.post(path+"/refunds", `{"amount":2475,"reason":"all of it"}`).Code)

	w.bill()
	w.bill()

	receipt := w.get(path + "/receipt").json()
	require.Equal(t, true, receipt["complete"], receipt)
	require.Len(t, receipt["events"], 7)
	require.Len(t, receipt["ledger_entries"], 3)
	require.Len(t, receipt["credit_notes"], 2)
	require.Empty(t, receipt["dead_letters"])
	require.Contains(t, receipt["invoice"].(map[string]any)["number"], "INV-")

	balance := w.get("/v1/ledger/accounts/cash/balance?currency=EUR").json()
	require.EqualValues(t, 2975, balance["debit_amount"])
	require.EqualValues(t, 0, balance["balance_amount"])
	trial := w.get("/v1/ledger/trial-balance").json()
	require.Equal(t, true, trial["totals"].([]any)[0].(map[string]any)["balanced"])
}

// TestClocks lets the API's clock be minutes off the database's, on either side
// (R22): ids and times are then odd, and nothing else is.
func TestClocks(t *testing.T) {
	t.Parallel()

	for name, off := range map[string]time.Duration{"Behind": -4 * time.Minute, "Ahead": 4 * time.Minute} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)

			w.handler = handler(w.db.Pool(t, "api"), func() time.Time { return time.Now().Add(off) }, w.db.Name)
			path := w.paidOrder()
			require.Equal(t, http.StatusCreated, w.post(path+"/refunds", `{"amount":2975,"reason":"damaged"}`).Code)
			w.bill()
			receipt := w.get(path + "/receipt").json()
			require.Equal(t, true, receipt["complete"], receipt)
			require.Len(t, receipt["ledger_entries"], 2)
			require.Empty(t, receipt["dead_letters"])
		})
	}
}

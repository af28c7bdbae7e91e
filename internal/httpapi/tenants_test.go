package httpapi_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
)

// routes are the API's, with the paths of an order and an invoice in them.
func routes(order, invoice string) []struct{ method, path, body string } {
	id := strings.TrimPrefix(order, "/v1/orders/")
	return []struct{ method, path, body string }{
		{http.MethodPost, "/v1/orders", oneBook},
		{http.MethodGet, "/v1/orders", ""},
		{http.MethodGet, order, ""},
		{http.MethodPost, order + "/pay", `{"payment_reference":"pi_` + uuid.NewString() + `"}`},
		{http.MethodPost, order + "/cancel", ""},
		{http.MethodPost, order + "/refunds", `{"amount":1,"reason":"damaged"}`},
		{http.MethodGet, order + "/receipt", ""},
		{http.MethodGet, "/v1/invoices?order_id=" + id, ""},
		{http.MethodGet, "/v1/invoices/" + invoice, ""},
		{http.MethodGet, "/v1/ledger/entries?order_id=" + id, ""},
		{http.MethodGet, "/v1/ledger/entries?account=cash", ""},
		{http.MethodGet, "/v1/ledger/accounts/cash/balance?currency=EUR", ""},
		{http.MethodGet, "/v1/ledger/trial-balance", ""},
	}
}

func TestAuthorization(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	order := w.paidOrder()
	revoked := w.addTenant("acme")
	tag, err := w.owner.Exec(t.Context(), `
		UPDATE api_keys SET revoked_at = now() WHERE key_hash = sha256($1)`, []byte(revoked))
	require.NoError(t, err)
	require.EqualValues(t, 1, tag.RowsAffected())
	before := w.written()

	t.Run("IsNeeded", func(t *testing.T) {
		for _, route := range routes(order, uuid.NewString()) {
			t.Run(route.method+" "+route.path, func(t *testing.T) {
				t.Parallel()
				w := w.on(t)

				for _, header := range []string{
					"", "Bearer", "Bearer ", "Bearer olk_unknown", "Bearer " + revoked, "Basic " + w.key, w.key,
					"Bearer " + w.key + "x", "Bearer " + strings.ToLower(w.key) + "X", "Bearer " + strings.TrimPrefix(w.key, "olk_"),
				} {
					other := w.as("")
					a := other.send(route.method, route.path, route.body, "Authorization", header, "Idempotency-Key", uuid.NewString())
					a.requireProblem(http.StatusUnauthorized, "unauthorized")
					require.Equal(t, "Bearer", a.Header().Get("WWW-Authenticate"))
				}
			})
		}
	})
	require.Equal(t, before, w.written())

	t.Run("IsNotNeededForOperations", func(t *testing.T) {
		t.Parallel()
		w := w.on(t).as("")

		require.Equal(t, http.StatusOK, w.get("/healthz").Code)
		require.Equal(t, http.StatusServiceUnavailable, w.get("/readyz").Code, "there is no relay here")
		metrics := w.get("/metrics")
		require.Equal(t, http.StatusOK, metrics.Code)
		require.Contains(t, metrics.Body.String(), "onceledger_http_request_seconds")
		require.NotContains(t, metrics.Body.String(), strings.TrimPrefix(order, "/v1/orders/"), "a label is a route, not a path")
	})
}

// TestAnotherTenant tries every route on another tenant's order, invoice and
// books: none tells that they are there.
func TestAnotherTenant(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	order := w.paidOrder()
	w.bill()
	invoice := w.get(order + "/receipt").json()["invoice"].(map[string]any)["id"].(string)
	other := w.as(w.addTenant("other"))
	nowhere := routes("/v1/orders/"+uuid.NewString(), uuid.NewString())

	for i, route := range routes(order, invoice) {
		if i < 2 {
			continue // make and list orders: the tenant's own
		}
		theirs := other.send(route.method, route.path, route.body, "Idempotency-Key", uuid.NewString())
		same := other.send(nowhere[i].method, nowhere[i].path, nowhere[i].body, "Idempotency-Key", uuid.NewString())
		require.Equal(t, same.Code, theirs.Code, route.path)
		if theirs.Code == http.StatusOK { // a list
			require.Equal(t, same.Body.String(), theirs.Body.String(), route.path)
			for _, list := range theirs.json() {
				require.Empty(t, list, route.path)
			}
			continue
		}
		theirs.requireProblem(http.StatusNotFound, theirs.json()["type"].(string)[len(problems):len(theirs.json()["type"].(string))-len(".md")])
		require.Equal(t, same.json()["title"], theirs.json()["title"])
	}
	require.Empty(t, other.get("/v1/orders").json()["orders"])
	require.EqualValues(t, 2, w.get(order).json()["version"])

	require.Equal(t, http.StatusOK, w.get("/v1/invoices/"+invoice).Code, "they are there for their tenant")
	require.Len(t, w.get("/v1/ledger/entries?account=cash").json()["entries"], 1)
}

const problems = "https://github.com/onceledger/onceledger/blob/main/docs/problems/"

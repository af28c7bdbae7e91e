package httpapi_test

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/httpapi"
)

func TestProblems(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	order := w.order()

	for name, test := range map[string]struct {
		method, path string
		status       int
	}{
		"AnUnknownPath":        {http.MethodGet, "/v2/orders", http.StatusNotFound},
		"AnUnknownPathInside":  {http.MethodGet, "/v1/customers", http.StatusNotFound},
		"ATrailingSlash":       {http.MethodGet, "/v1/orders/", http.StatusNotFound},
		"AMethodThatIsNotMade": {http.MethodDelete, order, http.StatusMethodNotAllowed},
		"PutForPost":           {http.MethodPut, "/v1/orders", http.StatusMethodNotAllowed},
		"PatchForPost":         {http.MethodPatch, order, http.StatusMethodNotAllowed},
	} {
		t.Run("AreMadeOf"+name, func(t *testing.T) {
			t.Parallel()

			a := w.on(t).send(test.method, test.path, "").requireProblem(test.status, "about:blank")
			require.Equal(t, test.status == http.StatusMethodNotAllowed, a.Header().Get("Allow") != "")
		})
	}

	for name, id := range map[string]string{
		"Text": "42", "Nothing": "%20", "AURN": "urn:uuid:01976f00-0000-7000-8000-000000000000", "BracesAround": "%7B01976f00-0000-7000-8000-000000000000%7D",
		"NoHyphens": "01976f00000070008000000000000000", "AZeroByte": "%00", "NoUTF8": "%ff", "TheNilID": uuid.Nil.String(), "TheHighestID": uuid.Max.String(),
		"SQL": "'%20OR%20'1'='1", "ManyBytes": strings.Repeat("a", 5_000), "DotDot": "..%2f..",
	} {
		t.Run("AreNotFoundForAnIDOf"+name, func(t *testing.T) {
			t.Parallel()
			w := w.on(t)

			path := "/v1/orders/" + id
			w.get(path).requireProblem(http.StatusNotFound, "order-not-found")
			w.get(path+"/receipt").requireProblem(http.StatusNotFound, "order-not-found")
			w.post(path+"/pay", `{"payment_reference":"`+uuid.NewString()+`"}`).requireProblem(http.StatusNotFound, "order-not-found")
			w.post(path+"/cancel", "").requireProblem(http.StatusNotFound, "order-not-found")
			w.post(path+"/refunds", `{"amount":1,"reason":"x"}`).requireProblem(http.StatusNotFound, "order-not-found")
			w.get("/v1/invoices/"+id).requireProblem(http.StatusNotFound, "invoice-not-found")
		})
	}

	t.Run("CarryTheRequestsID", func(t *testing.T) {
		t.Parallel()
		w := w.on(t)

		first, second := w.get("/v1/orders/42"), w.get("/v1/orders/42")
		require.Equal(t, first.Header().Get("X-Request-Id"), first.json()["request_id"])
		require.NotEqual(t, first.json()["request_id"], second.json()["request_id"])

		given := w.send(http.MethodGet, "/v1/orders/42", "", "X-Request-Id", "client-7:1")
		require.Equal(t, "client-7:1", given.json()["request_id"])
		require.Equal(t, "client-7:1", given.Header().Get("X-Request-Id"))
	})

	for name, id := range map[string]string{"TooLong": strings.Repeat("x", 129), "Blanks": "a b", "AQuote": `a"b`, "NoASCII": "é", "NoUTF8": "\xff", "AZeroByte": "\x00"} {
		t.Run("CarryNoRequestIDOf"+name, func(t *testing.T) {
			t.Parallel()

			a := w.on(t).send(http.MethodGet, "/v1/orders/42", "", "X-Request-Id", id)
			_, err := uuid.Parse(a.json()["request_id"].(string))
			require.NoError(t, err)
		})
	}

	t.Run("TellNothingOfTheInside", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order := w.order()
		w.exec("ALTER TABLE order_taxes RENAME TO elsewhere")
		for _, a := range []answer{w.get(order), w.post("/v1/orders", oneBook), w.post(order+"/cancel", "")} {
			a.requireProblem(http.StatusInternalServerError, "internal")
			require.NotContains(t, a.Body.String(), "order_taxes")
			require.NotContains(t, a.Body.String(), "SQLSTATE")
			require.Len(t, a.json(), 4, "type, title, status, request_id")
		}
		w.exec("ALTER TABLE elsewhere RENAME TO order_taxes")
		require.Equal(t, written{Orders: 1, Events: 1, Keys: 1}, w.written())
	})

	t.Run("AreMadeOfAPanic", func(t *testing.T) {
		t.Parallel()

		handler := httpapi.New(httpapi.Config{
			Log: slog.New(slog.DiscardHandler), Now: time.Now, Metrics: prometheus.NewRegistry(),
			Operations: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("secret") }),
		})
		recorder := httptest.NewRecorder()
		handler.ServeHTTP(recorder, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/healthz", nil))
		answer{recorder, t}.requireProblem(http.StatusInternalServerError, "internal")
		require.NotContains(t, recorder.Body.String(), "secret")
	})
}

// TestNeverA500 sends what no client should to every route, in every place that
// a client can write to. Whatever it is, it is the client's fault and said so.
func TestNeverA500(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	order := w.paidOrder()
	w.bill()
	invoice := w.get(order + "/receipt").json()["invoice"].(map[string]any)["id"].(string)

	nasty := []string{
		"", " ", "\x00", "a\x00b", "\xff\xfe", "\t\r\n", "\u2028", "null", "true", "0", "-1", "1e309", "9223372036854775808", "NaN", "[]", "{}", `"`, `\`, `\u0000`,
		"'; DROP TABLE orders; --", "%", "%s%s%n", "../../etc/passwd", "${jndi:ldap://x}", "<script>", "💥", "é", "\ud7ff", strings.Repeat("A", 3_000),
		strings.Repeat("[", 5_000), uuid.Nil.String(), uuid.Max.String(), "9999-12-31T23:59:59-01:00", "infinity",
	}
	check := func(t *testing.T, a answer, what ...string) {
		t.Helper()
		require.NotZero(t, a.Code)
		require.Less(t, a.Code, 500, "%q: %s", what, a.Body)
		if a.Code >= 400 {
			require.Equal(t, "application/problem+json", a.Header().Get("Content-Type"), "%q: %s", what, a.Body)
			document := a.json()
			for _, member := range []string{"type", "title", "status", "request_id"} {
				require.NotEmpty(t, document[member], "%q: %s", what, a.Body)
			}
		}
	}

	for _, route := range routes(order, invoice) {
		t.Run(route.method+" "+route.path, func(t *testing.T) {
			t.Parallel()
			w := w.on(t)

			key := uuid.NewString()
			path, _, _ := strings.Cut(route.path, "?")
			for _, text := range nasty {
				check(t, w.send(route.method, path+"?"+url.QueryEscape(text)+"="+url.QueryEscape(text), route.body, "Idempotency-Key", key), "query", text)
				if route.method == http.MethodPost {
					check(t, w.send(route.method, path, text, "Idempotency-Key", key), "body", text)
				}
				for _, name := range []string{"limit", "cursor", "order_id", "account", "currency"} {
					if route.method == http.MethodGet && strings.Contains(route.path, "?") {
						check(t, w.get(path+"?"+name+"="+url.QueryEscape(text)), "query", name, text)
					}
				}
			}
		})
	}

	t.Run("InAPath", func(t *testing.T) {
		t.Parallel()
		w := w.on(t)

		for _, text := range nasty {
			escaped := url.PathEscape(text)
			for _, path := range []string{"/v1/orders/" + escaped, "/v1/orders/" + escaped + "/receipt", "/v1/invoices/" + escaped, "/v1/ledger/accounts/" + escaped + "/balance?currency=EUR", "/v1/" + escaped} {
				check(t, w.get(path), "path", path)
			}
			for _, path := range []string{"/v1/orders/" + escaped + "/pay", "/v1/orders/" + escaped + "/cancel", "/v1/" + escaped} {
				check(t, w.post(path, `{"payment_reference":"pi_1"}`), "path", path)
			}
		}
	})

	t.Run("InAHeader", func(t *testing.T) {
		t.Parallel()
		w := w.on(t)

		for _, text := range nasty {
			for _, name := range []string{"Idempotency-Key", "Authorization", "X-Request-Id", "Traceparent", "Content-Type", "Accept", "Content-Encoding", "X-Forwarded-For"} {
				check(t, w.send(http.MethodPost, "/v1/orders", oneBook, name, text), "header", name, text)
				check(t, w.send(http.MethodGet, order, "", name, text), "header", name, text)
			}
		}
	})

	t.Run("InAMember", func(t *testing.T) {
		t.Parallel()
		w := w.on(t)

		for _, text := range nasty {
			for path, bodies := range map[string][]string{
				"/v1/orders": {
					`{"` + text + `":1}`, oneBookWith("c-42", text), oneBookWith("A book", text), oneBookWith(`"0.19"`, text), oneBookWith("{}", text),
					oneBookWith("1250", text), oneBookWith("EUR", text), oneBookWith("{}", `{"a":"`+text+`"}`), oneBookWith("{}", `{"`+text+`":1}`),
				},
				order + "/pay":     {`{"payment_reference":"` + text + `"}`, `{"payment_reference":` + text + `}`},
				order + "/refunds": {`{"amount":` + text + `,"reason":"x"}`, `{"amount":1,"reason":"` + text + `"}`},
			} {
				for _, body := range bodies {
					check(t, w.post(path, body), "body", body)
				}
			}
		}
	})
}

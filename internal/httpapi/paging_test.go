package httpapi_test

import (
	"encoding/base64"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPages(t *testing.T) {
	t.Parallel()

	t.Run("OfOrdersAreCompleteWhileNewOnesArrive", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		var want []string
		for range 25 {
			want = append([]string{strings.TrimPrefix(w.order(), "/v1/orders/")}, want...)
		}
		var got []string
		for cursor, pages := "", 0; ; pages++ {
			require.Less(t, pages, 10)
			page := w.get("/v1/orders?limit=4" + cursor).json()
			for _, order := range page["orders"].([]any) {
				got = append(got, order.(map[string]any)["id"].(string))
			}
			w.order() // arrives between two pages: newer than all that is to come
			if page["next_cursor"] == nil {
				break
			}
			cursor = "&cursor=" + page["next_cursor"].(string)
		}
		require.Equal(t, want, got, "newest first, none twice, none left out")
	})

	t.Run("EndWithAnEmptyOneAtTheLatest", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		require.Empty(t, w.get("/v1/orders").json()["orders"])
		w.order()
		w.order()
		page := w.get("/v1/orders?limit=2").json()
		require.Len(t, page["orders"], 2)
		last := w.get("/v1/orders?limit=2&cursor=" + page["next_cursor"].(string)).json()
		require.Equal(t, []any{}, last["orders"], "an empty list, not null")
		require.Nil(t, last["next_cursor"])
	})

	t.Run("Have20OrdersUnlessAskedFor", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		for range 21 {
			w.order()
		}
		require.Len(t, w.get("/v1/orders").json()["orders"], 20)
		require.Len(t, w.get("/v1/orders?limit=100").json()["orders"], 21)
	})

	t.Run("OfLedgerEntriesAreCompleteToo", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		for range 5 {
			w.paidOrder()
		}
		w.bill()
		var got []string
		for cursor := ""; ; {
			page := w.get("/v1/ledger/entries?account=cash&limit=2" + cursor).json()
			for _, entry := range page["entries"].([]any) {
				got = append(got, entry.(map[string]any)["event_id"].(string))
			}
			if page["next_cursor"] == nil {
				break
			}
			cursor = "&cursor=" + page["next_cursor"].(string)
		}
		require.Len(t, got, 5)
		for i := 1; i < len(got); i++ {
			require.Less(t, got[i], got[i-1], "newest first, none twice")
		}
		require.Empty(t, w.get("/v1/ledger/entries?account=nowhere").json()["entries"])
	})

	w := newWorld(t)
	w.order()
	for name, query := range map[string]string{
		"LimitZero": "limit=0", "LimitBelowZero": "limit=-1", "LimitAboveTheLargest": "limit=101", "LimitWithDecimals": "limit=1.5",
		"LimitThatIsText": "limit=all", "LimitWithABlank": "limit=%201", "LimitBeyondInt64": "limit=99999999999999999999",
		"ACursorThatIsNone": "cursor=x", "ACursorThatIsAnID": "cursor=01976f00-0000-7000-8000-000000000000",
		"ACursorThatIsTooShort": "cursor=AZdvAAAAcACA", "ACursorThatIsTooLong": "cursor=" + base64.RawURLEncoding.EncodeToString(make([]byte, 17)),
		"ACursorWithAZeroByte": "cursor=%00", "ACursorThatIsNoUTF8": "cursor=%ff", "ACursorOf10kB": "cursor=" + strings.Repeat("A", 10_000),
	} {
		t.Run("RefuseA"+name, func(t *testing.T) {
			t.Parallel()
			w := w.on(t)

			for _, path := range []string{"/v1/orders?", "/v1/ledger/entries?account=cash&"} {
				a := w.get(path+query).requireProblem(http.StatusBadRequest, "page-invalid")
				require.Len(t, a.fields(), 1)
				require.Contains(t, query, a.fields()[0])
			}
		})
	}
}

func TestQueries(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.paidOrder()
	w.bill()

	for name, path := range map[string]string{
		"InvoicesOfNoOrder":               "/v1/invoices",
		"InvoicesOfWhatIsNoID":            "/v1/invoices?order_id=42",
		"EntriesOfNothing":                "/v1/ledger/entries",
		"EntriesOfAnOrderAndAnAccount":    "/v1/ledger/entries?account=cash&order_id=01976f00-0000-7000-8000-000000000000",
		"EntriesOfWhatIsNoID":             "/v1/ledger/entries?order_id=%00",
		"EntriesOfAnAccountWithAZeroByte": "/v1/ledger/entries?account=a%00b",
		"EntriesOfAnAccountThatIsNoUTF8":  "/v1/ledger/entries?account=%ff",
	} {
		t.Run("Refuse"+name, func(t *testing.T) {
			t.Parallel()

			w.on(t).get(path).requireProblem(http.StatusBadRequest, "query-invalid")
		})
	}

	for name, code := range map[string]string{
		"ThatIsNotThere": "nowhere", "InCapitals": "CASH", "WithAZeroByte": "a%00b", "ThatIsNoUTF8": "%ff", "WithAQuote": "'%20OR%20true--",
	} {
		t.Run("FindNoAccount"+name, func(t *testing.T) {
			t.Parallel()

			w.on(t).get("/v1/ledger/accounts/"+code+"/balance?currency=EUR").requireProblem(http.StatusNotFound, "account-not-found")
		})
	}

	t.Run("FindNoBalanceInACurrencyWithoutOne", func(t *testing.T) {
		t.Parallel()

		w.on(t).get("/v1/ledger/accounts/cash/balance?currency=USD").requireProblem(http.StatusNotFound, "account-not-found")
	})

	t.Run("SumEachCurrencyByItself", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		for _, currency := range []string{"EUR", "JPY", "KWD"} {
			created := w.post("/v1/orders", oneBookWith("EUR", currency))
			require.Equal(t, http.StatusOK, w.post(created.Header().Get("Location")+"/pay", `{"payment_reference":"pi_`+currency+`"}`).Code)
		}
		w.bill()
		trial := w.get("/v1/ledger/trial-balance").json()
		require.Len(t, trial["accounts"], 9)
		totals := trial["totals"].([]any)
		require.Len(t, totals, 3)
		for _, total := range totals {
			require.EqualValues(t, 2975, total.(map[string]any)["debit_amount"])
			require.EqualValues(t, 2975, total.(map[string]any)["credit_amount"])
			require.Equal(t, true, total.(map[string]any)["balanced"])
		}
	})
}

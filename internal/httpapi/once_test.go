package httpapi_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
)

// requireReplay wants the second answer to be the first one again: status, the
// headers that matter, and every byte of the body.
func requireReplay(t *testing.T, first, second answer) {
	t.Helper()
	require.Equal(t, first.Code, second.Code)
	require.Equal(t, first.Body.String(), second.Body.String())
	for _, name := range []string{"Location", "Content-Type"} {
		require.Equal(t, first.Header().Get(name), second.Header().Get(name), name)
	}
	require.Empty(t, first.Header().Get("Idempotency-Replayed"))
	require.Equal(t, "true", second.Header().Get("Idempotency-Replayed"))
}

func TestIdempotencyKey(t *testing.T) {
	t.Parallel()

	t.Run("GivesEachRoutesAnswerAgain", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		paid, cancelled := w.order(), w.order()
		for _, request := range []struct {
			path, body string
			status     int
		}{
			{"/v1/orders", oneBook, http.StatusCreated},
			{paid + "/pay", `{"payment_reference":"pi_1"}`, http.StatusOK},
			{paid + "/refunds", `{"amount":500,"reason":"damaged"}`, http.StatusCreated},
			{cancelled + "/cancel", ``, http.StatusOK},
		} {
			key := uuid.NewString()
			first := w.postKey(request.path, request.body, key)
			require.Equal(t, request.status, first.Code, first.Body)
			require.Equal(t, "application/json", first.Header().Get("Content-Type"))
			require.Equal(t, request.status == http.StatusCreated, first.Header().Get("Location") != "")
			before := w.written()
			for range 3 {
				requireReplay(t, first, w.postKey(request.path, request.body, key))
			}
			require.Equal(t, before, w.written())
		}
		require.Contains(t, w.get("/metrics").Body.String(), "onceledger_http_replayed_total 12\n")
	})

	t.Run("GivesTheFirstAnswerHoweverMuchHasHappenedSince", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		key := uuid.NewString()
		created := w.postKey("/v1/orders", oneBook, key)
		path := created.Header().Get("Location")
		require.Equal(t, http.StatusOK, w.post(path+"/pay", `{"payment_reference":"pi_1"}`).Code)
		again := w.postKey("/v1/orders", oneBook, key)
		requireReplay(t, created, again)
		require.Equal(t, "created", again.json()["status"])
	})

	t.Run("StandsForOneRequestToTheByte", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		const key = "k"
		first := w.postKey("/v1/orders", oneBook, key)
		path := first.Header().Get("Location")
		after := w.written()
		for name, other := range map[string]struct{ path, body string }{
			"OtherAmount":        {"/v1/orders", oneBookWith("1250", "2500")},
			"ReorderedMembers":   {"/v1/orders", oneBookWith(`"customer_id":"c-42","customer_email":"a@example.com"`, `"customer_email":"a@example.com","customer_id":"c-42"`)},
			"WhiteSpace":         {"/v1/orders", oneBook + "\n"},
			"OtherSpellingOfOne": {"/v1/orders", oneBookWith(`"0.19"`, `"0.190"`)},
			"EscapedCharacter":   {"/v1/orders", oneBookWith("c-42", `c-\u0034\u0032`)},
			"OtherRoute":         {path + "/pay", `{"payment_reference":"pi_1"}`},
			"OtherRouteSameBody": {path + "/cancel", `{}`},
		} {
			refused := w.postKey(other.path, other.body, key)
			refused.requireProblem(http.StatusUnprocessableEntity, "idempotency-key-reused")
			require.Empty(t, refused.Header().Get("Idempotency-Replayed"), name)
			require.NotContains(t, refused.Body.String(), strings.TrimPrefix(path, "/v1/orders/"), "the first answer is not told")
		}
		require.Equal(t, after, w.written())
		require.Equal(t, written{Orders: 1, Events: 1, Keys: 1}, after)
		requireReplay(t, first, w.postKey("/v1/orders", oneBook, key))
	})

	t.Run("StandsForOneOrderToo", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		first, second := w.order(), w.order()
		require.Equal(t, http.StatusOK, w.postKey(first+"/cancel", "", "k").Code)
		w.postKey(second+"/cancel", "", "k").requireProblem(http.StatusUnprocessableEntity, "idempotency-key-reused")
		require.Equal(t, "created", w.get(second).json()["status"])
	})

	t.Run("KeepsARefusalThatRestsOnTheState", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		open, paid := w.order(), w.order()
		require.Equal(t, http.StatusOK, w.post(paid+"/pay", `{"payment_reference":"pi_taken"}`).Code)
		nowhere := "/v1/orders/" + uuid.NewString()
		for _, test := range []struct {
			path, body string
			status     int
			code       string
		}{
			{paid + "/pay", `{"payment_reference":"pi_2"}`, http.StatusConflict, "order-already-paid"},
			{open + "/pay", `{"payment_reference":"pi_taken"}`, http.StatusConflict, "payment-reference-used"},
			{paid + "/cancel", ``, http.StatusConflict, "order-already-paid"},
			{open + "/refunds", `{"amount":1,"reason":"damaged"}`, http.StatusConflict, "order-not-paid"},
			{paid + "/refunds", `{"amount":2976,"reason":"damaged"}`, http.StatusUnprocessableEntity, "refund-too-large"},
			{nowhere + "/pay", `{"payment_reference":"pi_3"}`, http.StatusNotFound, "order-not-found"},
		} {
			key := uuid.NewString()
			before := w.written()
			first := w.postKey(test.path, test.body, key).requireProblem(test.status, test.code)
			before.Keys++
			require.Equal(t, before, w.written(), "%s leaves its answer and nothing else", test.code)
			requireReplay(t, first, w.postKey(test.path, test.body, key))
			require.Equal(t, before, w.written())
		}
	})

	t.Run("KeepsARefusalEvenIfItWouldNotBeOneAnyMore", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		path := w.order()
		body := `{"amount":1,"reason":"damaged"}`
		refused := w.postKey(path+"/refunds", body, "k").requireProblem(http.StatusConflict, "order-not-paid")
		require.Equal(t, http.StatusOK, w.post(path+"/pay", `{"payment_reference":"pi_1"}`).Code)
		requireReplay(t, refused, w.postKey(path+"/refunds", body, "k"))
		require.Equal(t, http.StatusCreated, w.post(path+"/refunds", body).Code)
	})

	t.Run("IsFreeAgainAfterARequestThatWasMalformed", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		path := w.paidOrder()
		before := w.written()
		for _, test := range []struct{ path, body string }{
			{"/v1/orders", `{`},
			{"/v1/orders", oneBookWith("1250", "12.50")},
			{"/v1/orders", oneBookWith("EUR", "eur")},
			{"/v1/orders", oneBookWith("1250", "0")},
			{path + "/refunds", `{"amount":0,"reason":"damaged"}`},
		} {
			code := w.postKey(test.path, test.body, "k").Code
			require.Contains(t, []int{http.StatusBadRequest, http.StatusUnprocessableEntity}, code)
		}
		require.Equal(t, before, w.written())
		require.Equal(t, http.StatusCreated, w.postKey(path+"/refunds", `{"amount":1,"reason":"damaged"}`, "k").Code)
	})

	t.Run("IsEachTenantsOwn", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		first := w.postKey("/v1/orders", oneBook, "k")
		other := w.as(w.addTenant("other"))
		theirs := other.postKey("/v1/orders", oneBook, "k")
		require.Equal(t, http.StatusCreated, theirs.Code)
		require.Empty(t, theirs.Header().Get("Idempotency-Replayed"))
		require.NotEqual(t, first.json()["id"], theirs.json()["id"])
		requireReplay(t, first, w.postKey("/v1/orders", oneBook, "k"))
		requireReplay(t, theirs, other.postKey("/v1/orders", oneBook, "k"))
	})

	t.Run("IsTheTenantsAndNotTheAPIKeys", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		first := w.postKey("/v1/orders", oneBook, "k")
		requireReplay(t, first, w.as(w.addTenant("acme")).postKey("/v1/orders", oneBook, "k"))
	})

	t.Run("IsNeededByEveryPost", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		path := w.paidOrder()
		before := w.written()
		for _, request := range []struct{ path, body string }{
			{"/v1/orders", oneBook}, {path + "/pay", `{"payment_reference":"pi_9"}`}, {path + "/cancel", ""}, {path + "/refunds", `{"amount":1,"reason":"x"}`},
		} {
			w.send(http.MethodPost, request.path, request.body).requireProblem(http.StatusBadRequest, "idempotency-key-missing")
		}
		require.Equal(t, before, w.written())
	})

	t.Run("AtOnceMakesOneOrder", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		answers, byStatus := together(50, func(int) answer { return w.postKey("/v1/orders", oneBook, "k") })
		require.Equal(t, 50, byStatus[http.StatusCreated]+byStatus[http.StatusConflict], byStatus)
		bodies, firsts := make(map[string]bool), 0
		for _, a := range answers {
			if a.Code == http.StatusConflict {
				a.requireProblem(http.StatusConflict, "request-in-progress")
				require.NotEmpty(t, a.Header().Get("Retry-After"))
				continue
			}
			bodies[a.Body.String()+a.Header().Get("Location")] = true
			if a.Header().Get("Idempotency-Replayed") == "" {
				firsts++
			}
		}
		require.Len(t, bodies, 1)
		require.Equal(t, 1, firsts)
		require.Equal(t, written{Orders: 1, Events: 1, Keys: 1}, w.written())
	})

	t.Run("AtOnceForTwoRequestsIsOneOfThem", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		bodies := []string{oneBook, oneBookWith("1250", "1")}
		_, byStatus := together(40, func(i int) answer { return w.postKey("/v1/orders", bodies[i%2], "k") })
		require.Equal(t, map[int]int{http.StatusCreated: 20, http.StatusUnprocessableEntity: 20}, byStatus)
		require.Equal(t, written{Orders: 1, Events: 1, Keys: 1}, w.written())
	})

	t.Run("AtOnceStoresOneRefusal", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		path := w.paidOrder()
		before := w.written()
		answers, byStatus := together(30, func(int) answer {
			return w.postKey(path+"/pay", `{"payment_reference":"pi_2"}`, "k")
		})
		require.Equal(t, map[int]int{http.StatusConflict: 30}, byStatus)
		for _, a := range answers {
			require.Equal(t, answers[0].Body.String(), a.Body.String())
		}
		before.Keys++
		require.Equal(t, before, w.written())
	})
}

// TestKeyForms sends keys over a real connection, where net/http has its say
// too. Each is refused as documented, or taken and then replayed.
func TestKeyForms(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	server := httptest.NewServer(w.handler)
	t.Cleanup(server.Close)

	send := func(t *testing.T, headers string) (*http.Response, string) {
		t.Helper()
		conn, err := net.Dial("tcp", server.Listener.Addr().String())
		require.NoError(t, err)
		defer conn.Close() //nolint:errcheck // the answer is read by then
		_, err = fmt.Fprintf(conn, "POST /v1/orders HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer %s\r\n%sContent-Length: %d\r\n\r\n%s",
			w.key, headers, len(oneBook), oneBook)
		require.NoError(t, err)
		response, err := http.ReadResponse(bufio.NewReader(conn), nil)
		require.NoError(t, err)
		body, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		return response, string(body)
	}

	for name, value := range map[string]string{
		"OneCharacter": "k", "AUUID": uuid.NewString(), "Quoted": `"k"`, "Punctuation": "!#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", "AComma": "a,b",
		"255Bytes": strings.Repeat("k", 255), "255BytesThatDifferInTheLast": strings.Repeat("k", 254) + "j", "BlanksAround": "  trimmed  ",
	} {
		t.Run("Takes"+name, func(t *testing.T) {
			t.Parallel()

			response, first := send(t, "Idempotency-Key: "+value+"\r\n")
			require.Equal(t, http.StatusCreated, response.StatusCode, first)
			require.Empty(t, response.Header.Get("Idempotency-Replayed"), "no other key of this table is the same")
			response, second := send(t, "idempotency-key: "+value+"\r\n")
			require.Equal(t, http.StatusCreated, response.StatusCode)
			require.Equal(t, "true", response.Header.Get("Idempotency-Replayed"))
			require.Equal(t, first, second)
		})
	}

	for name, headers := range map[string]string{
		"NoHeader":                   "",
		"AnEmptyKey":                 "Idempotency-Key:\r\n",
		"BlanksAlone":                "Idempotency-Key:    \r\n",
		"256Bytes":                   "Idempotency-Key: " + strings.Repeat("k", 256) + "\r\n",
		"300Bytes":                   "Idempotency-Key: " + strings.Repeat("k", 300) + "\r\n",
		"5000Bytes":                  "Idempotency-Key: " + strings.Repeat("k", 5000) + "\r\n",
		"4800HexDigits":              "Idempotency-Key: " + strings.Repeat("0123456789abcdef", 300) + "\r\n",
		"128Emoji":                   "Idempotency-Key: " + strings.Repeat("🔑", 128) + "\r\n",
		"OneEmoji":                   "Idempotency-Key: 🔑\r\n",
		"AByteThatIsNoUTF8":          "Idempotency-Key: a\xffb\r\n",
		"ATabInside":                 "Idempotency-Key: a\tb\r\n",
		"ABlankInside":               "Idempotency-Key: a b\r\n",
		"ADeleteCharacter":           "Idempotency-Key: a\x7fb\r\n",
		"TwoHeaders":                 "Idempotency-Key: a\r\nIdempotency-Key: b\r\n",
		"TwoHeadersWithTheSameValue": "Idempotency-Key: a\r\nidempotency-key: a\r\n",
	} {
		t.Run("Refuses"+name, func(t *testing.T) {
			t.Parallel()

			response, body := send(t, headers)
			require.Equal(t, http.StatusBadRequest, response.StatusCode, body)
			if name == "ADeleteCharacter" && response.Header.Get("Content-Type") != "application/problem+json" {
				return // net/http itself refuses it
			}
			require.Equal(t, "application/problem+json", response.Header.Get("Content-Type"))
			require.Contains(t, body, "idempotency-key-")
		})
	}

	t.Run("RefusesAZeroByte", func(t *testing.T) { // by net/http, before us
		t.Parallel()

		response, _ := send(t, "Idempotency-Key: a\x00b\r\n")
		require.Equal(t, http.StatusBadRequest, response.StatusCode)
	})
}

func TestChangesAtOnce(t *testing.T) {
	t.Parallel()

	t.Run("PayAnOrderOnce", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		path := w.order()
		answers, byStatus := together(50, func(i int) answer {
			return w.post(path+"/pay", fmt.Sprintf(`{"payment_reference":"pi_%d"}`, i))
		})
		require.Equal(t, map[int]int{http.StatusOK: 1, http.StatusConflict: 49}, byStatus)
		for _, a := range answers {
			if a.Code == http.StatusConflict {
				a.requireProblem(http.StatusConflict, "order-already-paid")
			}
		}
		require.Equal(t, written{Orders: 1, Events: 2, Keys: 51, Payments: 1}, w.written())
		require.EqualValues(t, 2, w.get(path).json()["version"])
	})

	t.Run("NeverRefundMoreThanWasPaid", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		path := w.paidOrder() // 2975
		answers, byStatus := together(50, func(int) answer {
			return w.post(path+"/refunds", `{"amount":100,"reason":"damaged"}`)
		})
		require.Equal(t, map[int]int{http.StatusCreated: 29, http.StatusUnprocessableEntity: 21}, byStatus)
		for _, a := range answers {
			if a.Code != http.StatusCreated {
				a.requireProblem(http.StatusUnprocessableEntity, "refund-too-large")
			}
		}
		order := w.get(path).json()
		require.EqualValues(t, 2900, order["refunded_amount"])
		require.EqualValues(t, 31, order["version"])
		require.Equal(t, written{Orders: 1, Events: 31, Keys: 52, Payments: 1, Refunds: 29}, w.written())
		require.Equal(t, http.StatusCreated, w.post(path+"/refunds", `{"amount":75,"reason":"the rest"}`).Code)
	})

	t.Run("TakeAPaymentReferenceForOneOrder", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		paths := make([]string, 10)
		for i := range paths {
			paths[i] = w.order()
		}
		answers, byStatus := together(len(paths), func(i int) answer {
			return w.post(paths[i]+"/pay", `{"payment_reference":"pi_1"}`)
		})
		require.Equal(t, map[int]int{http.StatusOK: 1, http.StatusConflict: 9}, byStatus)
		for _, a := range answers {
			if a.Code == http.StatusConflict {
				a.requireProblem(http.StatusConflict, "payment-reference-used")
			}
		}
		require.Equal(t, 1, w.written().Payments)
	})

	t.Run("PayOrCancelButNotBoth", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		path := w.order()
		_, byStatus := together(20, func(i int) answer {
			if i%2 == 0 {
				return w.post(path+"/cancel", "")
			}
			return w.post(path+"/pay", fmt.Sprintf(`{"payment_reference":"pi_%d"}`, i))
		})
		require.Equal(t, map[int]int{http.StatusOK: 1, http.StatusConflict: 19}, byStatus)
		require.Equal(t, 2, w.written().Events)
	})
}

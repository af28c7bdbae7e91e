package httpapi_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
)

// TestCurrencies orders in currencies of every exponent (R06). Amounts are minor
// units, so there are no decimals to get wrong, on the way in or out.
func TestCurrencies(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	for _, test := range []struct {
		currency       string
		unit, tax, sum int64
	}{
		{"JPY", 80, 15, 95}, {"ISK", 5, 1, 6}, {"EUR", 1999, 380, 2379}, {"USD", 820, 156, 976},
		{"KWD", 35200, 6688, 41888}, {"CLF", 12345, 2346, 14691}, {"JPY", 9007199254740991 / 2, 855683929200394, 5359283556570889},
	} {
		t.Run(fmt.Sprintf("Takes%d%s", test.unit, test.currency), func(t *testing.T) {
			t.Parallel()
			w := w.on(t)

			body := strings.NewReplacer("EUR", test.currency, "1250", fmt.Sprint(test.unit), `"quantity":2`, `"quantity":1`).Replace(oneBook)
			created := w.post("/v1/orders", body)
			require.Equal(t, http.StatusCreated, created.Code, created.Body)
			for _, order := range []map[string]any{created.json(), w.get(created.Header().Get("Location")).json()} {
				require.Equal(t, test.currency, order["currency"])
				require.EqualValues(t, test.unit, order["net_amount"])
				require.EqualValues(t, test.tax, order["tax_amount"])
				require.EqualValues(t, test.sum, order["total_amount"])
			}
		})
	}

	for name, currency := range map[string]string{
		"LowerCase": "usd", "ABlankBehind": "USD ", "FullWidthLetters": "ＵＳＤ", "NoCurrency": "XXX", "UnknownCode": "ABC", "Empty": "",
	} {
		t.Run("Refuses"+name, func(t *testing.T) {
			t.Parallel()
			w := w.on(t)

			w.post("/v1/orders", oneBookWith("EUR", currency)).requireProblem(http.StatusUnprocessableEntity, "currency-unknown")
			w.get("/v1/ledger/accounts/cash/balance?currency="+strings.ReplaceAll(currency, " ", "%20")).
				requireProblem(http.StatusUnprocessableEntity, "currency-unknown")
		})
	}

	t.Run("RefusesNone", func(t *testing.T) {
		t.Parallel()
		w := w.on(t)

		w.post("/v1/orders", oneBookWith(`"currency":"EUR",`, "")).requireProblem(http.StatusUnprocessableEntity, "currency-unknown")
		w.post("/v1/orders", oneBookWith(`"EUR"`, "null")).requireProblem(http.StatusUnprocessableEntity, "currency-unknown")
	})
}

// TestWholeNumbers writes amounts and quantities in every way there is (R07).
// One is right; each other is a 400 that names the field, and writes nothing.
func TestWholeNumbers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	paid := w.paidOrder()
	before := w.written()

	fields := []struct {
		name, path, body string // with %s for the number, and its name and comma
	}{
		{"amount", paid + "/refunds", `{%s"reason":"damaged"}`},
		{"lines[0].unit_amount", "/v1/orders", oneBookWith(`"unit_amount":1250,`, "%s")},
		{"lines[0].quantity", "/v1/orders", oneBookWith(`"quantity":2,`, "%s")},
	}
	bad := map[string]string{
		"Decimals": "19.99", "DecimalsThatFloatsLose": "8.20", "ThreeDecimals": "10.005", "AnExponent": "1e3", "ACapitalExponent": "1E3",
		"DecimalsOfZero": "1000.0", "AString": `"1000"`, "AnEmptyString": `""`, "BelowZero": "-1", "MinusZero": "-0", "Null": "null",
		"True": "true", "AnArray": "[]", "AnArrayOfOne": "[1]", "AnObject": "{}", "OneAboveTheLargest": "9007199254740992",
		"MoreThanInt64": "9223372036854775808", "MoreThanUint64WrapsTo1": "18446744073709551617", "AHundredDigits": strings.Repeat("9", 100),
	}
	t.Run("Are", func(t *testing.T) {
		for _, field := range fields {
			member := field.name[strings.LastIndex(field.name, ".")+1:]
			send := func(w *world, number string) answer {
				if number != "" {
					number = `"` + member + `":` + number + `,`
				}
				return w.post(field.path, fmt.Sprintf(field.body, number))
			}
			for name, number := range bad {
				t.Run("RefusedAs"+name+"For"+member, func(t *testing.T) {
					t.Parallel()
					w := w.on(t)

					a := send(w, number).requireProblem(http.StatusBadRequest, "order-invalid")
					require.Equal(t, []string{field.name}, a.fields())
				})
			}
			t.Run("NeededFor"+member, func(t *testing.T) {
				t.Parallel()
				w := w.on(t)

				a := send(w, "").requireProblem(http.StatusBadRequest, "order-invalid")
				require.Equal(t, []string{field.name}, a.fields())
			})
			t.Run("RefusedWithLeadingZeroFor"+member, func(t *testing.T) { // not JSON
				t.Parallel()
				w := w.on(t)

				send(w, "01").requireProblem(http.StatusBadRequest, "body-invalid")
			})
		}
		t.Run("AboveZeroForAmountAndQuantity", func(t *testing.T) {
			t.Parallel()
			w := w.on(t)

			a := w.post(paid+"/refunds", `{"amount":0,"reason":"damaged"}`).requireProblem(http.StatusBadRequest, "order-invalid")
			require.Equal(t, []string{"amount"}, a.fields())
			a = w.post("/v1/orders", oneBookWith(`"quantity":2`, `"quantity":0`)).requireProblem(http.StatusBadRequest, "order-invalid")
			require.Equal(t, []string{"lines[0].quantity"}, a.fields())
		})
	})
	require.Equal(t, before, w.written())

	require.Equal(t, http.StatusCreated, w.post(paid+"/refunds", `{"amount":1000,"reason":"damaged"}`).Code)
}

func TestTaxRates(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	for name, rate := range map[string]string{
		"ANumber": "0.19", "AnInteger": "0", "InPercent": `"19%"`, "AboveOne": `"1.5"`, "SevenDecimals": `"0.1234567"`, "Null": "null",
		"True": "true", "AnObject": "{}", "Empty": `""`, "AnExponent": `"1e-1"`, "BelowZero": `"-0.1"`, "ALeadingZero": `"00.19"`,
	} {
		t.Run("Refuses"+name, func(t *testing.T) {
			t.Parallel()
			w := w.on(t)

			a := w.post("/v1/orders", oneBookWith(`"0.19"`, rate)).requireProblem(http.StatusBadRequest, "order-invalid")
			require.Equal(t, []string{"lines[0].tax_rate"}, a.fields())
		})
	}
	for rate, tax := range map[string]int{`"0"`: 0, `"1"`: 2500, `"0.190000"`: 475, `"0.000001"`: 0} {
		t.Run("Takes"+rate, func(t *testing.T) {
			t.Parallel()
			w := w.on(t)

			created := w.post("/v1/orders", oneBookWith(`"0.19"`, rate))
			require.Equal(t, http.StatusCreated, created.Code, created.Body)
			require.EqualValues(t, tax, created.json()["tax_amount"])
		})
	}
}

func TestOrderRules(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	t.Run("NamesEveryFaultAtOnce", func(t *testing.T) {
		t.Parallel()
		w := w.on(t)

		a := w.post("/v1/orders", `{"customer_email":"nobody","currency":"EUR","metadata":[],"lines":[{"sku":"a\tb","quantity":1.5,"unit_amount":"9","tax_rate":0.1}]}`)
		a.requireProblem(http.StatusBadRequest, "order-invalid")
		require.Equal(t, []string{
			"customer_id", "customer_email", "metadata",
			"lines[0].sku", "lines[0].description", "lines[0].quantity", "lines[0].unit_amount", "lines[0].tax_rate",
		}, a.fields())
	})

	t.Run("RefusesATotalOfZero", func(t *testing.T) {
		t.Parallel()
		w := w.on(t)

		w.post("/v1/orders", oneBookWith("1250", "0")).requireProblem(http.StatusUnprocessableEntity, "order-without-amount")
	})

	t.Run("RefusesATotalThatIsTooLarge", func(t *testing.T) {
		t.Parallel()
		w := w.on(t)

		w.post("/v1/orders", oneBookWith("1250", "9007199254740991")).requireProblem(http.StatusUnprocessableEntity, "amount-too-large")
	})

	t.Run("KeepsMetadataAndTextAsTheyAre", func(t *testing.T) {
		t.Parallel()
		w := w.on(t)

		const metadata = `{"b":1.0,"a":1e3,"<&>":"\u00e9 \ud83d\ude00 \\u0000","big":12345678901234567890}`
		body := strings.Replace(oneBookWith(`"metadata":{}`, `"metadata":`+metadata), "A book", `Größe <b> & \"木\" \u2028`, 1)
		created := w.post("/v1/orders", body)
		require.Equal(t, http.StatusCreated, created.Code, created.Body)
		read := w.get(created.Header().Get("Location"))
		for _, a := range []answer{created, read} {
			require.Contains(t, a.Body.String(), `"metadata":`+metadata)
			line := a.json()["lines"].([]any)[0].(map[string]any)
			require.Equal(t, "Größe <b> & \"木\" \u2028", line["description"])
		}
	})

	t.Run("TakesALargeOrderThroughToBilling", func(t *testing.T) {
		t.Parallel()
		w := w.on(t)

		line := `{"sku":"` + strings.Repeat("s", 200) + `","description":"` + strings.Repeat(`\"`, 500) + `","quantity":1,"unit_amount":1,"tax_rate":"0.19"}`
		lines := strings.Repeat(line+",", 180) + line
		body := oneBookWith(`{"sku":"book","description":"A book","quantity":2,"unit_amount":1250,"tax_rate":"0.19"}`, lines)
		require.Less(t, len(body), 256<<10)
		created := w.post("/v1/orders", body)
		require.Equal(t, http.StatusCreated, created.Code, created.Body)
		require.Len(t, w.get(created.Header().Get("Location")).json()["lines"], 181)
	})

	for name, text := range map[string]string{
		"AZeroCharacter": `a\u0000b`, "AControlCharacter": `a\u001bb`, "ADelete": `a\u007fb`, "ANewline": `a\nb`, "Blanks": `  `, "Nothing": ``,
	} {
		t.Run("Refuses"+name+"InAnyText", func(t *testing.T) { // R10
			t.Parallel()
			w := newWorld(t)

			path := w.order()
			before := w.written()
			for _, test := range []struct{ field, path, body string }{
				{"customer_id", "/v1/orders", oneBookWith("c-42", text)},
				{"customer_email", "/v1/orders", oneBookWith("a@example.com", text)},
				{"lines[0].sku", "/v1/orders", oneBookWith(`"book"`, `"`+text+`"`)},
				{"lines[0].description", "/v1/orders", oneBookWith("A book", text)},
				{"payment_reference", path + "/pay", `{"payment_reference":"` + text + `"}`},
				{"reason", path + "/refunds", `{"amount":1,"reason":"` + text + `"}`},
			} {
				key := uuid.NewString()
				for range 2 {
					a := w.postKey(test.path, test.body, key).requireProblem(http.StatusBadRequest, "order-invalid")
					require.Equal(t, []string{test.field}, a.fields())
				}
			}
			require.Equal(t, before, w.written())
		})
	}

	for name, metadata := range map[string]string{
		"AZeroCharacter": `{"a":"\u0000"}`, "AZeroCharacterInAName": `{"\u0000":1}`, "AZeroCharacterDeepInside": `{"a":[{"b":["x\u0000"]}]}`,
		"HalfASurrogatePair": `{"a":"\ud800"}`, "Null": `null`, "AnArray": `[]`, "AString": `"x"`, "ANumber": `1`,
		"TooMuch": `{"a":"` + strings.Repeat("x", 16_384) + `"}`, "ANumberBeyondFloats": `{"a":1e400}`,
	} {
		t.Run("RefusesMetadataThatIsOrHas"+name, func(t *testing.T) {
			t.Parallel()
			w := w.on(t)

			a := w.post("/v1/orders", oneBookWith(`"metadata":{}`, `"metadata":`+metadata)).requireProblem(http.StatusBadRequest, "order-invalid")
			require.Equal(t, []string{"metadata"}, a.fields())
		})
	}

	t.Run("TakesMetadataAsDeepAsItMayBeLong", func(t *testing.T) {
		t.Parallel()
		w := w.on(t)

		deep := `{"a":` + strings.Repeat("[", 8_000) + strings.Repeat("]", 8_000) + `}`
		created := w.post("/v1/orders", oneBookWith(`"metadata":{}`, `"metadata":`+deep))
		require.Equal(t, http.StatusCreated, created.Code)
		require.Equal(t, http.StatusOK, w.get(created.Header().Get("Location")).Code)
	})
}

// TestBodies sends what is not the JSON object that is asked for, to each route
// that asks for one.
func TestBodies(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	path := w.paidOrder()
	before := w.written()

	bad := map[string]string{
		"Nothing": "", "Blanks": " \n", "Null": "null", "True": "true", "ANumber": "1", "AString": `"{}"`, "AnArray": "[]",
		"AnArrayOfObjects": "[{}]", "NoJSON": "this-is-not-json {{{", "ACutObject": `{"customer_id":"c`, "SingleQuotes": "{'a':1}",
		"ACommaTooMany": `{"amount":1,}`, "AComment": `{"amount":1 /* one */}`, "AnUnknownMember": `{"unknown":1}`,
		"AnUnknownNullMember": `{"unknown":null}`, "InvalidUTF8": "{\"customer_id\":\"\xff\"}", "AByteOrderMark": "\ufeff{}", "AnForm": "a=b&c=d",
		"UTF16": "\xff\xfe{\x00}\x00", "NotANumber": `{"amount":NaN}`, "TooDeep": `{"metadata":` + strings.Repeat("[", 20_000) + strings.Repeat("]", 20_000) + `}`,
	}
	t.Run("Of", func(t *testing.T) {
		for _, route := range []string{"/v1/orders", path + "/pay", path + "/refunds"} {
			name := route[strings.LastIndex(route, "/")+1:]
			for what, body := range bad {
				t.Run(what+"AreRefusedBy"+name, func(t *testing.T) {
					t.Parallel()
					w := w.on(t)

					w.post(route, body).requireProblem(http.StatusBadRequest, "body-invalid")
				})
			}
			t.Run("300kBAreRefusedBy"+name, func(t *testing.T) {
				t.Parallel()
				w := w.on(t)

				w.post(route, `{"a":"`+strings.Repeat("x", 300_000)+`"}`).requireProblem(http.StatusRequestEntityTooLarge, "about:blank")
			})
		}

		for what, body := range map[string]string{
			"TrailingData": oneBook + `{}`, "TrailingText": oneBook + "x", "TwoOrders": oneBook + oneBook, "ATrailingComma": oneBook + ",",
			"AMemberTwice":             oneBookWith(`"currency":"EUR"`, `"currency":"EUR","currency":"USD"`),
			"AnAmountTwice":            oneBookWith(`"unit_amount":1250`, `"unit_amount":1,"unit_amount":1250`),
			"AMemberInOtherLetters":    oneBookWith(`"currency"`, `"Currency"`),
			"AMemberInLettersThatFold": oneBookWith(`"sku"`, `"ſKU"`),
			"AMetadataMemberTwice":     oneBookWith(`"metadata":{}`, `"metadata":{"a":{"b":1,"b":2}}`),
			"AnUnknownMemberOfALine":   oneBookWith(`"unit_amount"`, `"discount":1,"unit_amount"`),
			"LinesThatAreAnObject":     `{"lines":{}}`, "ALineThatIsANumber": `{"lines":[1]}`, "ATextThatIsANumber": `{"customer_id":42}`,
			"ATextThatIsAnObject": `{"customer_email":{}}`, "ACurrencyThatIsABoolean": `{"currency":true}`,
		} {
			t.Run(what+"AreRefused", func(t *testing.T) {
				t.Parallel()
				w := w.on(t)

				w.post("/v1/orders", body).requireProblem(http.StatusBadRequest, "body-invalid")
			})
		}

		t.Run("NamesTheMemberOfTheWrongType", func(t *testing.T) {
			t.Parallel()
			w := w.on(t)

			require.Equal(t, []string{"customer_id"}, w.post("/v1/orders", `{"customer_id":42}`).fields())
			require.Equal(t, []string{"payment_reference"}, w.post(path+"/pay", `{"payment_reference":["pi_1"]}`).fields())
			require.Equal(t, []string{"reason"}, w.post(path+"/refunds", `{"amount":1,"reason":{}}`).fields())
		})

		t.Run("NamesTheMemberThatIsThereTwice", func(t *testing.T) {
			t.Parallel()
			w := w.on(t)

			require.Equal(t, []string{"lines[0].unit_amount"}, w.post("/v1/orders", oneBookWith(`"unit_amount":1250`, `"unit_amount":1,"unit_amount":1250`)).fields())
			require.Equal(t, []string{"metadata.a.b"}, w.post("/v1/orders", oneBookWith(`"metadata":{}`, `"metadata":{"a":{"b":1,"b":2}}`)).fields())
		})

		for what, body := range map[string]string{"AnObject": `{"reason":"x"}`, "Null": "null", "Text": "x", "AnArray": "[]"} {
			t.Run(what+"IsRefusedByCancel", func(t *testing.T) {
				t.Parallel()
				w := w.on(t)

				w.post(path+"/cancel", body).requireProblem(http.StatusBadRequest, "body-invalid")
			})
		}

		t.Run("ThatEndBeforeTheirTimeAreRefused", func(t *testing.T) {
			t.Parallel()
			w := w.on(t)

			request := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/orders", io.MultiReader(strings.NewReader(oneBook), failing{}))
			request.Header.Set("Authorization", "Bearer "+w.key)
			request.Header.Set("Idempotency-Key", "k")
			recorder := httptest.NewRecorder()
			w.handler.ServeHTTP(recorder, request)
			answer{recorder, t}.requireProblem(http.StatusBadRequest, "body-invalid")
		})

		t.Run("Of300kBWithNoLengthGivenAreRefused", func(t *testing.T) {
			t.Parallel()
			w := w.on(t)

			server := httptest.NewServer(w.handler)
			defer server.Close()
			body := io.MultiReader(strings.NewReader(`{"a":"`), strings.NewReader(strings.Repeat("x", 300_000)), strings.NewReader(`"}`))
			request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL+"/v1/orders", body)
			require.NoError(t, err)
			request.Header.Set("Authorization", "Bearer "+w.key)
			request.Header.Set("Idempotency-Key", "k")
			response, err := server.Client().Do(request)
			require.NoError(t, err)
			defer response.Body.Close()
			require.Equal(t, http.StatusRequestEntityTooLarge, response.StatusCode)
			require.Equal(t, "application/problem+json", response.Header.Get("Content-Type"))
		})
	})
	require.Equal(t, before, w.written())
}

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

package orders_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/failure"
	"github.com/onceledger/onceledger/internal/money"
	"github.com/onceledger/onceledger/internal/orders"
)

// params are an order of one line, in a currency and at a rate, to be changed.
func params(currency string, quantity, unit int64, rate money.Rate) orders.PlaceParams {
	return orders.PlaceParams{
		CustomerID: "c-42", CustomerEmail: "a@example.com", Currency: currency,
		Lines: []orders.LineParams{{SKU: "book", Description: "A book", Quantity: quantity, UnitAmount: unit, TaxRate: rate}},
	}
}

// Field report R35: what is rounded is the document and not its lines, so that the
// shares make the total.
func TestPrice(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name            string
		currency        string
		lines           []orders.LineParams
		net, tax, total int64
	}{
		{"TakesMinorUnitsAsTheyAre", "EUR", []orders.LineParams{{Quantity: 2, UnitAmount: 1250, TaxRate: 190_000}}, 2500, 475, 2975},
		{"TakesYenWhole", "JPY", []orders.LineParams{{Quantity: 1, UnitAmount: 80, TaxRate: 100_000}}, 80, 8, 88},
		{"TakesTenPercentOfADinar", "KWD", []orders.LineParams{{Quantity: 1, UnitAmount: 1255, TaxRate: 100_000}}, 1255, 126, 1381},
		{"TakesFourDecimals", "CLF", []orders.LineParams{{Quantity: 1, UnitAmount: 12345, TaxRate: 190_000}}, 12345, 2346, 14691},
		// Three times 0.335 KWD at 7.25 %: 72.8625 on the sum; by line it would
		// be three times 24.2875, and one unit less.
		{"RoundsOnceForThreeLines", "KWD", []orders.LineParams{
			{Quantity: 1, UnitAmount: 335, TaxRate: 72_500}, {Quantity: 1, UnitAmount: 335, TaxRate: 72_500}, {Quantity: 1, UnitAmount: 335, TaxRate: 72_500},
		}, 1005, 73, 1078},
		{"RoundsOnceForEachRate", "EUR", []orders.LineParams{
			{Quantity: 1, UnitAmount: 5, TaxRate: 100_000}, {Quantity: 1, UnitAmount: 5, TaxRate: 200_000}, {Quantity: 1, UnitAmount: 5, TaxRate: 100_000},
		}, 15, 2, 17}, // 1.0 and 1.0; by line 1 + 1 + 1
		{"TakesLinesThatCostNothing", "EUR", []orders.LineParams{
			{Quantity: 1, UnitAmount: 0, TaxRate: 190_000}, {Quantity: 3, UnitAmount: 1, TaxRate: 0},
		}, 3, 0, 3},
		{"TakesTheLargestTotal", "EUR", []orders.LineParams{{Quantity: 1, UnitAmount: money.MaxMinor, TaxRate: 0}}, money.MaxMinor, 0, money.MaxMinor},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			p := params(test.currency, 1, 1, 0)
			p.Lines = test.lines
			for i := range p.Lines {
				p.Lines[i].SKU, p.Lines[i].Description = "s", "d"
			}
			order, err := orders.Price(p)
			require.NoError(t, err)
			require.Equal(t, []int64{test.net, test.tax, test.total}, []int64{order.NetAmount, order.TaxAmount, order.TotalAmount})
			require.Equal(t, test.currency, string(order.Currency))
			require.Len(t, order.Lines, len(test.lines))

			var net, tax int64
			for i, rate := range order.Taxes {
				net, tax = net+rate.NetAmount, tax+rate.TaxAmount
				require.Equal(t, rate.Rate.Tax(rate.NetAmount), rate.TaxAmount)
				if i > 0 {
					require.Greater(t, rate.Rate, order.Taxes[i-1].Rate, "ascending, each rate once")
				}
			}
			require.Equal(t, []int64{test.net, test.tax}, []int64{net, tax})
		})
	}

	t.Run("MakesAnEmptyObjectOfNoMetadata", func(t *testing.T) {
		t.Parallel()

		order, err := orders.Price(params("EUR", 1, 1, 0))
		require.NoError(t, err)
		require.JSONEq(t, "{}", string(order.Metadata))
	})

	for _, test := range []struct {
		name   string
		params orders.PlaceParams
		want   error
	}{
		{"ATotalOfZero", params("EUR", 5, 0, 190_000), orders.ErrWithoutAmount},
		{"ALineThatOverflows", params("EUR", 1<<52, 2, 0), money.ErrAmountTooLarge},
		{"ALineThatOverflowsInt64", params("EUR", 1<<50, 1<<50, 0), money.ErrAmountTooLarge},
		{"ATotalThatOverflowsByItsTax", params("EUR", 1, money.MaxMinor, 1), money.ErrAmountTooLarge},
		{"LinesThatOverflowTogether", func() orders.PlaceParams {
			p := params("EUR", 1, money.MaxMinor, 0)
			p.Lines = append(p.Lines, params("EUR", 1, 1, 0).Lines...)
			return p
		}(), money.ErrAmountTooLarge},
		{"AnUnknownCurrency", params("ABC", 1, 1, 0), money.ErrUnknownCurrency},
		{"ALowerCaseCurrency", params("eur", 1, 1, 0), money.ErrUnknownCurrency},
		{"NoCurrency", params("", 1, 1, 0), money.ErrUnknownCurrency},
	} {
		t.Run("Refuses"+test.name, func(t *testing.T) {
			t.Parallel()

			_, err := orders.Price(test.params)
			require.ErrorIs(t, err, test.want)
			var refusal *failure.Error
			require.ErrorAs(t, err, &refusal)
			require.Equal(t, failure.RuleViolated, refusal.Kind)
		})
	}

	t.Run("NamesAllFaultsAtOnce", func(t *testing.T) {
		t.Parallel()

		_, err := orders.Price(orders.PlaceParams{
			CustomerEmail: "nobody", Currency: "EUR", Metadata: json.RawMessage(`[]`),
			Lines: []orders.LineParams{
				{SKU: "fine", Description: "fine", Quantity: 1, UnitAmount: 1},
				{SKU: "", Description: "\x00", Quantity: 0, UnitAmount: -1, TaxRate: -1},
			},
		})
		require.ErrorIs(t, err, orders.ErrInvalid)
		require.Equal(t, []string{
			"customer_id", "customer_email", "metadata",
			"lines[1].sku", "lines[1].description", "lines[1].quantity", "lines[1].unit_amount", "lines[1].tax_rate",
		}, fieldsOf(t, err))
	})

	one := func(change func(*orders.PlaceParams)) orders.PlaceParams {
		p := params("EUR", 1, 1, 0)
		change(&p)
		return p
	}
	for _, test := range []struct {
		name   string
		change func(*orders.PlaceParams)
		field  string // "" is accepted
	}{
		{"ABlankCustomer", func(p *orders.PlaceParams) { p.CustomerID = " \t" }, "customer_id"},
		{"ACustomerOf200Bytes", func(p *orders.PlaceParams) { p.CustomerID = strings.Repeat("é", 100) }, ""},
		{"ACustomerOf201Bytes", func(p *orders.PlaceParams) { p.CustomerID = strings.Repeat("é", 100) + "x" }, "customer_id"},
		{"AZeroCharacter", func(p *orders.PlaceParams) { p.CustomerID = "a\x00b" }, "customer_id"},
		{"AControlCharacter", func(p *orders.PlaceParams) { p.CustomerID = "a\x1b[2Jb" }, "customer_id"},
		{"ANewline", func(p *orders.PlaceParams) { p.CustomerEmail = "a@example.com\nBcc: b@example.com" }, "customer_email"},
		{"InvalidUTF8", func(p *orders.PlaceParams) { p.CustomerID = "a\xff" }, "customer_id"},
		{"AnEmoji", func(p *orders.PlaceParams) { p.CustomerID = "👩‍🚀" }, ""},
		{"ANameWithTheAddress", func(p *orders.PlaceParams) { p.CustomerEmail = "A <a@example.com>" }, "customer_email"},
		{"TwoAddresses", func(p *orders.PlaceParams) { p.CustomerEmail = "a@example.com, b@example.com" }, "customer_email"},
		{"AnAddressWithABlank", func(p *orders.PlaceParams) { p.CustomerEmail = " a@example.com" }, "customer_email"},
		{"AnAddressThatIsTooLong", func(p *orders.PlaceParams) { p.CustomerEmail = strings.Repeat("a", 250) + "@b.c" + "d" }, "customer_email"},
		{"NoLines", func(p *orders.PlaceParams) { p.Lines = nil }, "lines"},
		{"TwoHundredLines", func(p *orders.PlaceParams) { p.Lines = repeat(p.Lines[0], 200) }, ""},
		{"TwoHundredAndOneLines", func(p *orders.PlaceParams) { p.Lines = repeat(p.Lines[0], 201) }, "lines"},
		{"AnAmountAboveTheLargest", func(p *orders.PlaceParams) { p.Lines[0].UnitAmount = money.MaxMinor + 1 }, "lines[0].unit_amount"},
		{"AQuantityAboveTheLargest", func(p *orders.PlaceParams) { p.Lines[0].Quantity = money.MaxMinor + 1 }, "lines[0].quantity"},
		{"ADescriptionOf1001Bytes", func(p *orders.PlaceParams) { p.Lines[0].Description = strings.Repeat("d", 1001) }, "lines[0].description"},
		{"MetadataOfNull", func(p *orders.PlaceParams) { p.Metadata = json.RawMessage("null") }, "metadata"},
		{"MetadataThatIsAString", func(p *orders.PlaceParams) { p.Metadata = json.RawMessage(`"x"`) }, "metadata"},
		{"MetadataThatIsNotJSON", func(p *orders.PlaceParams) { p.Metadata = json.RawMessage(`{`) }, "metadata"},
		{"MetadataOf16KiB", func(p *orders.PlaceParams) { p.Metadata = padded(16_384) }, ""},
		{"MetadataOfMore", func(p *orders.PlaceParams) { p.Metadata = padded(16_385) }, "metadata"},
		{"MetadataWithAZeroCharacter", func(p *orders.PlaceParams) { p.Metadata = json.RawMessage(`{"a":["\u0000"]}`) }, "metadata"},
		{"MetadataWithHalfASurrogatePair", func(p *orders.PlaceParams) { p.Metadata = json.RawMessage(`{"a":"\ud800"}`) }, "metadata"},
		{"MetadataWithAnEscapedBackslash", func(p *orders.PlaceParams) { p.Metadata = json.RawMessage(`{"a":"\\u0000"}`) }, ""},
	} {
		verb := "Refuses"
		if test.field == "" {
			verb = "Accepts"
		}
		t.Run(verb+test.name, func(t *testing.T) {
			t.Parallel()

			_, err := orders.Price(one(test.change))
			if test.field == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorIs(t, err, orders.ErrInvalid)
			require.Equal(t, []string{test.field}, fieldsOf(t, err))
		})
	}
}

func TestValidate(t *testing.T) {
	t.Parallel()

	t.Run("NamesTheReferenceOfAPayment", func(t *testing.T) {
		t.Parallel()

		require.NoError(t, orders.PayParams{Reference: "pi_1"}.Validate())
		for _, reference := range []string{"", " ", "a\x00", strings.Repeat("x", 201), "\xff"} {
			err := orders.PayParams{Reference: reference}.Validate()
			require.ErrorIs(t, err, orders.ErrInvalid)
			require.Equal(t, []string{"payment_reference"}, fieldsOf(t, err))
		}
	})

	t.Run("NamesAllThatIsWrongWithARefund", func(t *testing.T) {
		t.Parallel()

		require.NoError(t, orders.RefundParams{Amount: 1, Reason: "damaged"}.Validate())
		for _, amount := range []int64{0, -1, money.MaxMinor + 1} {
			err := orders.RefundParams{Amount: amount}.Validate()
			require.ErrorIs(t, err, orders.ErrInvalid)
			require.Equal(t, []string{"amount", "reason"}, fieldsOf(t, err))
		}
	})
}

func repeat(line orders.LineParams, n int) []orders.LineParams {
	lines := make([]orders.LineParams, n)
	for i := range lines {
		lines[i] = line
	}
	return lines
}

func padded(length int) json.RawMessage {
	const frame = `{"a":""}`
	return json.RawMessage(fmt.Sprintf(`{"a":"%s"}`, strings.Repeat("x", length-len(frame))))
}

func fieldsOf(t *testing.T, err error) []string {
	t.Helper()
	var refusal *failure.Error
	require.ErrorAs(t, err, &refusal)
	var names []string
	for _, field := range refusal.Fields {
		require.NotEmpty(t, field.Detail)
		names = append(names, field.Field)
	}
	return names
}

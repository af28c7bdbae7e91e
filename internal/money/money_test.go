package money_test

import (
	"encoding/json"
	"math/big"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/onceledger/onceledger/internal/money"
)

const most = money.MaxMinor

func TestMaxMinor(t *testing.T) {
	t.Parallel()

	require.Equal(t, int64(9007199254740991), most)
}

func TestAdd(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name      string
		a, b, sum int64
		tooLarge  bool
	}{
		{name: "AddsNothing", a: 0, b: 0, sum: 0},
		{name: "AddsSmallAmounts", a: 1999, b: 820, sum: 2819},
		{name: "ReachesTheLargestAmount", a: most - 1, b: 1, sum: most},
		{name: "RefusesOneMore", a: most, b: 1, tooLarge: true},
		{name: "RefusesTwiceTheLargest", a: most, b: most, tooLarge: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			sum, err := money.Add(test.a, test.b)
			if test.tooLarge {
				require.ErrorIs(t, err, money.ErrAmountTooLarge)
				return
			}
			require.NoError(t, err)
			require.Equal(t, test.sum, sum)
		})
	}
}

func TestMultiply(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name           string
		quantity, unit int64
		product        int64
		tooLarge       bool
	}{
		{name: "MultipliesNothing", quantity: 3, unit: 0, product: 0},
		{name: "MultipliesSmallAmounts", quantity: 2, unit: 1250, product: 2500},
		{name: "KeepsTheLargestAmount", quantity: 1, unit: most, product: most},
		// 6361 * 69431 * 20394401 is 2^53-1, so this product meets it exactly.
		{name: "ReachesTheLargestAmount", quantity: 6361, unit: 69431 * 20394401, product: most},
		{name: "RefusesOneMore", quantity: 2, unit: 1 << 52, tooLarge: true},
		{name: "RefusesWhatOverflowsInt64", quantity: 1 << 40, unit: 1 << 40, tooLarge: true},
		{name: "RefusesWhatWrapsToZeroInUint64", quantity: 1 << 32, unit: 1 << 32, tooLarge: true},
		{name: "RefusesTheLargestSquared", quantity: most, unit: most, tooLarge: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			product, err := money.Multiply(test.quantity, test.unit)
			if test.tooLarge {
				require.ErrorIs(t, err, money.ErrAmountTooLarge)
				return
			}
			require.NoError(t, err)
			require.Equal(t, test.product, product)
		})
	}
}

func TestShare(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name                       string
		amount, part, whole, share int64
	}{
		{name: "ExactShare", amount: 100, part: 1, whole: 4, share: 25},
		{name: "RoundsHalfUp", amount: 5, part: 1, whole: 2, share: 3},
		{name: "RoundsHalfUpWithAnOddWhole", amount: 1, part: 3, whole: 5, share: 1},
		{name: "RoundsJustBelowHalfDown", amount: 49, part: 1, whole: 100, share: 0},
		{name: "RoundsJustAboveHalfUp", amount: 51, part: 1, whole: 100, share: 1},
		{name: "NothingOfSomething", amount: 100, part: 0, whole: 7, share: 0},
		{name: "SomethingOfNothing", amount: 0, part: 5, whole: 7, share: 0},
		{name: "AllOfTheLargest", amount: most, part: most, whole: most, share: most},
		{name: "HalfOfTheLargest", amount: most, part: 1, whole: 2, share: 1 << 52},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			require.Equal(t, test.share, money.Share(test.amount, test.part, test.whole))
		})
	}

	t.Run("IsTheExactShareRoundedHalfUp", func(t *testing.T) {
		t.Parallel()

		rapid.Check(t, func(t *rapid.T) {
			whole := rapid.Int64Range(1, most).Draw(t, "whole")
			part := rapid.Int64Range(0, whole).Draw(t, "part")
			amount := rapid.Int64Range(0, most).Draw(t, "amount")

			// floor((2·amount·part + whole) / (2·whole)), in numbers of any size
			want := new(big.Int).Mul(big.NewInt(amount), big.NewInt(part))
			want.Lsh(want, 1).Add(want, big.NewInt(whole))
			want.Quo(want, new(big.Int).Lsh(big.NewInt(whole), 1))
			require.Equal(t, want.Int64(), money.Share(amount, part, whole))
		})
	})

	t.Run("NeverDecreasesAndEndsAtThePart", func(t *testing.T) {
		t.Parallel()

		rapid.Check(t, func(t *rapid.T) {
			whole := rapid.Int64Range(1, most).Draw(t, "whole")
			part := rapid.Int64Range(0, whole).Draw(t, "part")
			less := rapid.Int64Range(0, whole).Draw(t, "less")
			more := rapid.Int64Range(less, whole).Draw(t, "more")

			require.LessOrEqual(t, money.Share(less, part, whole), money.Share(more, part, whole))
			require.LessOrEqual(t, money.Share(more, part, whole)-money.Share(less, part, whole), more-less,
				"what is given back never grows faster than the amount")
			require.Equal(t, part, money.Share(whole, part, whole))
		})
	})
}

func TestAllocate(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name    string
		amount  int64
		weights []int64
		shares  []int64
	}{
		{name: "SplitsAHundredIntoThree", amount: 100, weights: []int64{1, 1, 1}, shares: []int64{34, 33, 33}},
		{name: "GivesEqualRemaindersToTheEarlier", amount: 2, weights: []int64{5, 5, 5, 5}, shares: []int64{1, 1, 0, 0}},
		{name: "GivesTheRestToTheLargestRemainder", amount: 10, weights: []int64{1, 7, 1}, shares: []int64{1, 8, 1}},
		{name: "GivesNothingToNoWeight", amount: 7, weights: []int64{0, 3, 0}, shares: []int64{0, 7, 0}},
		{name: "SplitsNothing", amount: 0, weights: []int64{1, 2}, shares: []int64{0, 0}},
		{name: "GivesTheWeightsBackForTheirSum", amount: 6, weights: []int64{1, 2, 3}, shares: []int64{1, 2, 3}},
		{name: "SplitsTheLargest", amount: most, weights: []int64{1, most - 1}, shares: []int64{1, most - 1}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			require.Equal(t, test.shares, money.Allocate(test.amount, test.weights))
		})
	}

	t.Run("LosesNothingAndPassesNoWeight", func(t *testing.T) {
		t.Parallel()

		rapid.Check(t, func(t *rapid.T) {
			weights := rapid.SliceOfN(rapid.OneOf(
				rapid.Int64Range(0, 5), rapid.Int64Range(0, most/200),
			), 1, 200).Draw(t, "weights")
			var sum int64
			for _, weight := range weights {
				sum += weight
			}
			if sum == 0 {
				t.Skip("no weight")
			}
			amount := rapid.Int64Range(0, sum).Draw(t, "amount")

			var total int64
			for i, share := range money.Allocate(amount, weights) {
				require.GreaterOrEqual(t, share, int64(0))
				require.LessOrEqual(t, share, weights[i], "share %d", i)
				// Within one unit of the exact share.
				exact := new(big.Rat).SetFrac(
					new(big.Int).Mul(big.NewInt(amount), big.NewInt(weights[i])), big.NewInt(sum))
				off := new(big.Rat).Sub(exact, new(big.Rat).SetInt64(share))
				require.Negative(t, off.Abs(off).Cmp(big.NewRat(1, 1)), "share %d", i)
				total += share
			}
			require.Equal(t, amount, total)
		})
	})
}

func TestParseRate(t *testing.T) {
	t.Parallel()

	for text, rate := range map[string]money.Rate{
		"0": 0, "0.0": 0, "0.000000": 0,
		"0.19": 190_000, "0.190000": 190_000, "0.07": 70_000, "0.0725": 72_500, "0.08875": 88_750,
		"0.000001": 1, "0.999999": 999_999, "1": 1_000_000, "1.0": 1_000_000, "1.000000": 1_000_000,
	} {
		t.Run("Reads"+text, func(t *testing.T) {
			t.Parallel()

			got, err := money.ParseRate(text)
			require.NoError(t, err)
			require.Equal(t, rate, got)
		})
	}

	for name, text := range map[string]string{
		"Nothing": "", "NoDigitBeforeThePoint": ".19", "NoDigitBehindThePoint": "0.", "PointAlone": ".",
		"CommaForPoint": "0,19", "TwoPoints": "0.1.9", "LeadingZero": "00.19", "Percent": "19%", "NineteenPercent": "19",
		"AboveOne": "1.000001", "Two": "2", "SevenDecimals": "0.1900000", "Minus": "-0.19", "MinusZero": "-0",
		"Plus": "+0.19", "PlusForTheDigit": "+.19", "SignInTheDecimals": "0.-1", "PlusInTheDecimals": "0.+1", "BlankBefore": " 0.19",
		"BlankBehind": "0.19 ", "Exponent": "1e-1", "Underscore": "0.1_9", "Hexadecimal": "0x1", "Infinity": "Inf",
		"NotANumber": "NaN", "FullWidth": "０.１９", "Null": "null", "VeryLong": "0.19000000000000000000000000000001",
	} {
		t.Run("Refuses"+name, func(t *testing.T) {
			t.Parallel()

			_, err := money.ParseRate(text)
			require.ErrorIs(t, err, money.ErrTaxRate)
		})
	}
}

func TestRate(t *testing.T) {
	t.Parallel()

	t.Run("PrintsTheShortestFormThatIsReadBack", func(t *testing.T) {
		t.Parallel()

		for rate, text := range map[money.Rate]string{
			0: "0", 1: "0.000001", 10: "0.00001", 70_000: "0.07", 190_000: "0.19", 72_500: "0.0725", 999_999: "0.999999", 1_000_000: "1",
		} {
			require.Equal(t, text, rate.String())
		}
		rapid.Check(t, func(t *rapid.T) {
			rate := money.Rate(rapid.Int32Range(0, 1_000_000).Draw(t, "rate"))
			again, err := money.ParseRate(rate.String())
			require.NoError(t, err)
			require.Equal(t, rate, again)
		})
	})

	t.Run("IsAStringInJSON", func(t *testing.T) {
		t.Parallel()

		encoded, err := json.Marshal(map[string]money.Rate{"rate": 190_000})
		require.NoError(t, err)
		require.JSONEq(t, `{"rate":"0.19"}`, string(encoded))

		var decoded map[string]money.Rate
		require.NoError(t, json.Unmarshal(encoded, &decoded))
		require.Equal(t, money.Rate(190_000), decoded["rate"])
		require.Error(t, json.Unmarshal([]byte(`{"rate":0.19}`), &decoded), "a float")
		require.ErrorIs(t, json.Unmarshal([]byte(`{"rate":"19%"}`), &decoded), money.ErrTaxRate)
	})

	t.Run("TaxesOnceAndHalfUp", func(t *testing.T) {
		t.Parallel()

		for _, test := range []struct {
			rate string
			net  int64
			tax  int64
		}{
			{"0.19", 2500, 475},
			{"0.1", 1255, 126},                    // KWD 1.255: 0.1255
			{"0.1", 1254, 125},                    // 0.1254
			{"0.0725", 1005, 73},                  // three lines of 0.335 in thousandths: 72.8625
			{"0.0725", 335, 24},                   // one of them: 24.2875
			{"0.5", 1, 1},                         // half a unit
			{"0", most, 0},                        // free of tax
			{"1", most, most},                     // as much again
			{"0.000001", 1, 0},                    // next to nothing
			{"0.08875", 400, 36},                  // 35.5
			{"0.08875", 399, 35},                  // 35.41…
			{"0.19", 1<<53 - 1, 1711367858400788}, // …788.29
		} {
			rate, err := money.ParseRate(test.rate)
			require.NoError(t, err)
			require.Equal(t, test.tax, rate.Tax(test.net), "%s of %d", test.rate, test.net)
		}
	})
}

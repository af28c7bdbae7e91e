package orders

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/onceledger/onceledger/internal/money"
)

// TestSplitRefund gives an order back in random pieces, the way RefundTx does.
// Whatever the pieces are: no part of any is negative, each comes to its amount,
// no rate gives back more than it took, and the last one clears every rate.
func TestSplitRefund(t *testing.T) {
	t.Parallel()

	t.Run("ClearsToZeroInAnySequence", func(t *testing.T) {
		t.Parallel()

		rapid.Check(t, func(t *rapid.T) {
			sizes := rapid.OneOf(rapid.Int64Range(0, 3), rapid.Int64Range(0, 1_000), rapid.Int64Range(0, money.MaxMinor/8))
			rates := rapid.SliceOfNDistinct(rapid.Int32Range(0, rateWhole), 1, 4, rapid.ID).Draw(t, "rates")
			var lines []Line
			for _, rate := range rates {
				lines = append(lines, Line{NetAmount: sizes.Draw(t, "net"), TaxRate: money.Rate(rate)})
			}
			order := taxes(lines)
			var left int64
			for _, tax := range order {
				left += tax.NetAmount + tax.TaxAmount
			}
			if left == 0 {
				t.Skip("an order without amount is refused")
			}

			refunded := make([]Tax, len(order))
			for i, tax := range order {
				refunded[i].Rate = tax.Rate
			}
			for step := 0; left > 0; step++ {
				amount := left
				if step < 12 {
					amount = rapid.OneOf(rapid.Int64Range(1, left), rapid.Int64Range(1, min(left, 3))).Draw(t, "amount")
				}
				var sum int64
				for _, part := range splitRefund(amount, order, refunded) {
					require.GreaterOrEqual(t, part.NetAmount, int64(0))
					require.GreaterOrEqual(t, part.TaxAmount, int64(0))
					require.Positive(t, part.NetAmount+part.TaxAmount, "a rate with nothing in it is left out")
					sum += part.NetAmount + part.TaxAmount
					for i := range order {
						if order[i].Rate == part.Rate {
							refunded[i].NetAmount += part.NetAmount
							refunded[i].TaxAmount += part.TaxAmount
						}
					}
				}
				require.Equal(t, amount, sum)
				for i := range order {
					require.LessOrEqual(t, refunded[i].NetAmount, order[i].NetAmount)
					require.LessOrEqual(t, refunded[i].TaxAmount, order[i].TaxAmount)
				}
				left -= amount
			}
			require.Equal(t, order, refunded)
		})
	})

	t.Run("KeepsToTheRatesShareOfTheTax", func(t *testing.T) {
		t.Parallel()

		order := []Tax{{Rate: 190_000, NetAmount: 2500, TaxAmount: 475}}
		given := []Tax{{Rate: 190_000}}
		for _, step := range []struct{ amount, net, tax int64 }{
			{500, 420, 80},    // 475 × 500/2975 = 79.83
			{1, 1, 0},         // 79.99
			{2474, 2079, 395}, // the rest
		} {
			parts := splitRefund(step.amount, order, given)
			require.Equal(t, []Tax{{Rate: 190_000, NetAmount: step.net, TaxAmount: step.tax}}, parts)
			given[0].NetAmount += step.net
			given[0].TaxAmount += step.tax
		}
		require.Equal(t, order, given)
	})

	t.Run("LeavesOutARateThatIsGivenBackAlready", func(t *testing.T) {
		t.Parallel()

		order := []Tax{{Rate: 70_000, NetAmount: 100, TaxAmount: 7}, {Rate: 190_000, NetAmount: 100, TaxAmount: 19}}
		given := []Tax{{Rate: 70_000, NetAmount: 100, TaxAmount: 7}, {Rate: 190_000, NetAmount: 50, TaxAmount: 9}}
		require.Equal(t, []Tax{{Rate: 190_000, NetAmount: 50, TaxAmount: 10}}, splitRefund(60, order, given))
	})
}

const rateWhole = 1_000_000

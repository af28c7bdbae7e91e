package factory

import (
	"math/rand/v2"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/money"
	"github.com/onceledger/onceledger/internal/orders"
)

var (
	currencies = []string{"EUR", "USD", "JPY", "KWD", "CLF"} // 2, 2, 0, 3 and 4 decimals
	rates      = []money.Rate{0, 70_000, 190_000, 88_750, 1_000_000}
)

// Random is an order of one to four lines, in one of five currencies and at up
// to four tax rates, with a total above zero.
func Random(rng *rand.Rand, tenantID uuid.UUID) *Order {
	order := &Order{TenantID: tenantID, Currency: currencies[rng.IntN(len(currencies))]}
	for range 1 + rng.IntN(4) {
		order.Lines = append(order.Lines, orders.LineParams{
			SKU: "sku", Description: "A thing",
			Quantity:   1 + rng.Int64N(9),
			UnitAmount: 1 + rng.Int64N(20_000),
			TaxRate:    rates[rng.IntN(len(rates))],
		})
	}
	return order
}

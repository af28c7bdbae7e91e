// Package money is the arithmetic of amounts: whole minor units of one currency,
// tax rates, and how a remainder is placed. There is no float in it, nothing
// overflows in silence, and each rounding rule is stated at its function.
//
// A minor unit is the currency's smallest by ISO 4217: a cent for EUR, a yen
// for JPY, a thousandth for KWD.
package money

import (
	"errors"
	"fmt"
	"math/bits"
	"strconv"
	"strings"

	"github.com/onceledger/onceledger/internal/failure"
)

// MaxMinor is the largest amount that is accepted: 2^53-1, the largest whole
// number that every JSON reader keeps exact.
const MaxMinor int64 = 1<<53 - 1

// Failures of amounts and currencies.
var (
	ErrUnknownCurrency = failure.New(failure.RuleViolated, "currency-unknown", "The currency is not one of ISO 4217.")
	ErrAmountTooLarge  = failure.New(failure.RuleViolated, "amount-too-large", "An amount may be at most 9007199254740991 minor units.")
)

// Add is a + b for amounts from 0 to MaxMinor, or ErrAmountTooLarge.
func Add(a, b int64) (int64, error) {
	if a > MaxMinor-b {
		return 0, ErrAmountTooLarge
	}
	return a + b, nil
}

// Multiply is quantity times unit for numbers from 0 to MaxMinor, or
// ErrAmountTooLarge.
func Multiply(quantity, unit int64) (int64, error) {
	high, low := bits.Mul64(uint64(quantity), uint64(unit))
	if high != 0 || low > uint64(MaxMinor) {
		return 0, ErrAmountTooLarge
	}
	return int64(low), nil
}

// Share is amount × part / whole, rounded half up to a whole minor unit. It
// never decreases as amount grows, and gives part exactly where amount is
// whole. All are from 0 to MaxMinor; part is at most whole, whole is above 0.
func Share(amount, part, whole int64) int64 {
	high, low := bits.Mul64(uint64(amount), uint64(part))
	quotient, remainder := bits.Div64(high, low, uint64(whole))
	if remainder >= uint64(whole)-remainder {
		quotient++
	}
	return int64(quotient)
}

// Allocate splits amount over the weights in proportion and to the last minor
// unit. Each share is rounded down, and what is left goes, one unit each, to
// the largest remainders; of equal ones the earlier. No share is above its
// weight where amount is at most the weights' sum, which must be above 0.
func Allocate(amount int64, weights []int64) []int64 {
	var sum int64
	for _, weight := range weights {
		sum += weight
	}

	shares := make([]int64, len(weights))
	remainders := make([]uint64, len(weights))
	left := amount
	for i, weight := range weights {
		high, low := bits.Mul64(uint64(amount), uint64(weight))
		share, remainder := bits.Div64(high, low, uint64(sum))
		shares[i], remainders[i] = int64(share), remainder
		left -= shares[i]
	}
	for ; left > 0; left-- {
		largest := 0
		for i, remainder := range remainders {
			if remainder > remainders[largest] {
				largest = i
			}
		}
		shares[largest]++
		remainders[largest] = 0
	}
	return shares
}

// ErrTaxRate says that a text is no tax rate.
var ErrTaxRate = errors.New("a tax rate is a decimal string from 0 to 1 with at most six decimals, such as 0.19")

// Rate is a tax rate in millionths: 190000 is 19 %.
type Rate int32

const rateWhole = 1_000_000

// ParseRate reads a rate as it stands in JSON: "0.19", "0", "0.08875".
func ParseRate(text string) (Rate, error) {
	whole, decimals, hasPoint := strings.Cut(text, ".")
	if len(whole) != 1 || len(decimals) > 6 || (hasPoint && decimals == "") {
		return 0, fmt.Errorf("%q: %w", text, ErrTaxRate)
	}
	millionths, err := strconv.ParseUint(whole+decimals+strings.Repeat("0", 6-len(decimals)), 10, 32)
	if err != nil || millionths > rateWhole {
		return 0, fmt.Errorf("%q: %w", text, ErrTaxRate)
	}
	return Rate(millionths), nil
}

// String is the shortest form that ParseRate reads back: "0.19".
func (r Rate) String() string {
	digits := strconv.Itoa(rateWhole + int(r)) // 1.19 as "1190000"
	if r == rateWhole {
		return "1"
	}
	decimals := strings.TrimRight(digits[1:], "0")
	if decimals == "" {
		return "0"
	}
	return "0." + decimals
}

// MarshalText makes a Rate a JSON string.
func (r Rate) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText reads what MarshalText writes.
func (r *Rate) UnmarshalText(text []byte) (err error) {
	*r, err = ParseRate(string(text))
	return err
}

// Tax is the tax on a net amount, rounded half up to a whole minor unit. It is
// taken once per document and rate, never per line.
func (r Rate) Tax(net int64) int64 { return Share(net, int64(r), rateWhole) }

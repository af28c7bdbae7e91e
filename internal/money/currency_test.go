package money_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/money"
)

func TestParseCurrency(t *testing.T) {
	t.Parallel()

	for code, exponent := range map[string]int{
		"JPY": 0, "ISK": 0, "KRW": 0, "CLP": 0,
		"EUR": 2, "USD": 2, "GBP": 2, "ZWG": 2, "HUF": 2,
		"KWD": 3, "BHD": 3, "TND": 3,
		"CLF": 4, "UYW": 4,
	} {
		t.Run("KnowsTheExponentOf"+code, func(t *testing.T) {
			t.Parallel()

			currency, err := money.ParseCurrency(code)
			require.NoError(t, err)
			require.Equal(t, code, string(currency))
			require.Equal(t, exponent, currency.Exponent())
		})
	}

	for name, code := range map[string]string{
		"Missing":        "",
		"LowerCase":      "usd",
		"MixedCase":      "Usd",
		"BlankBehind":    "USD ",
		"BlankBefore":    " USD",
		"NewlineBehind":  "USD\n",
		"FullWidth":      "ＵＳＤ",
		"Cyrillic":       "ЕUR", // the first letter is not a Latin E
		"TooShort":       "US",
		"TooLong":        "USDT",
		"Unknown":        "ABC",
		"NoCurrency":     "XXX",
		"TestCode":       "XTS",
		"Gold":           "XAU",
		"DrawingRight":   "XDR",
		"Withdrawn":      "DEM",
		"NumericCode":    "840",
		"ZeroCharacter":  "US\x00",
		"InvalidUTF8":    "US\xff",
		"AddressOfAList": "USD,EUR",
	} {
		t.Run("Refuses"+name, func(t *testing.T) {
			t.Parallel()

			currency, err := money.ParseCurrency(code)
			require.ErrorIs(t, err, money.ErrUnknownCurrency)
			require.Empty(t, currency)
		})
	}
}

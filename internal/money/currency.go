package money

import "strings"

// Currency is an ISO 4217 code that is in use for payments, in upper case.
type Currency string

// ParseCurrency accepts exactly the codes of ISO 4217 that have a minor unit:
// no lower case, no blanks, no metals, funds or test codes. One spelling goes
// in, so one spelling is stored.
func ParseCurrency(code string) (Currency, error) {
	if _, known := exponents[Currency(code)]; !known {
		return "", ErrUnknownCurrency.Withf("%q is not a currency code of ISO 4217, such as EUR, JPY or KWD.", code)
	}
	return Currency(code), nil
}

// Exponent is the number of decimals that the minor unit stands for: 2 for EUR,
// 0 for JPY, 3 for KWD.
func (c Currency) Exponent() int { return exponents[c] }

// exponents holds the minor units of ISO 4217 list one.
var exponents = func() map[Currency]int {
	byExponent := map[int]string{
		0: "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX UYI VND VUV XAF XOF XPF",
		2: "AED AFN ALL AMD AOA ARS AUD AWG AZN BAM BBD BDT BGN BMD BND BOB BRL BSD BTN BWP BYN BZD " +
			"CAD CDF CHF CNY COP CRC CUP CVE CZK DKK DOP DZD EGP ERN ETB EUR FJD FKP GBP GEL GHS GIP " +
			"GMD GTQ GYD HKD HNL HTG HUF IDR ILS INR IRR JMD KES KGS KHR KPW KYD KZT LAK LBP LKR LRD " +
			"LSL MAD MDL MGA MKD MMK MNT MOP MRU MUR MVR MWK MXN MYR MZN NAD NGN NIO NOK NPR NZD PAB " +
			"PEN PGK PHP PKR PLN QAR RON RSD RUB SAR SBD SCR SDG SEK SGD SHP SLE SOS SRD SSP STN SVC " +
			"SYP SZL THB TJS TMT TOP TRY TTD TWD TZS UAH USD UYU UZS VED VES WST XCD XCG YER ZAR ZMW ZWG",
		3: "BHD IQD JOD KWD LYD OMR TND",
		4: "CLF UYW",
	}
	table := make(map[Currency]int)
	for exponent, codes := range byExponent {
		for code := range strings.FieldsSeq(codes) {
			table[Currency(code)] = exponent
		}
	}
	return table
}()

package event_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
)

// with sets a header of a record; a nil value makes it a null header.
func with(key string, value []byte) func(*event.Record) {
	return func(r *event.Record) {
		r.Headers = slices.Clone(r.Headers)
		for i, header := range r.Headers {
			if header.Key == key {
				r.Headers[i].Value = value
				return
			}
		}
		r.Headers = append(r.Headers, event.Header{Key: key, Value: value})
	}
}

func without(key string) func(*event.Record) {
	return func(r *event.Record) {
		r.Headers = slices.DeleteFunc(slices.Clone(r.Headers), func(h event.Header) bool { return h.Key == key })
	}
}

func value(text string) func(*event.Record) {
	return func(r *event.Record) { r.Value = []byte(text) }
}

func bare(text string) func(*event.Record) {
	return func(r *event.Record) { r.Value, r.Headers = []byte(text), nil }
}

func TestDecode(t *testing.T) {
	t.Parallel()

	for name, change := range map[string]func(*event.Record){
		"ATombstone":              func(r *event.Record) { r.Value = nil },
		"ATombstoneWithNoHeaders": func(r *event.Record) { r.Value, r.Headers = nil, nil },
		"ATombstoneWithNoKey":     func(r *event.Record) { r.Value, r.Key, r.Headers = nil, nil, nil },
		"ADeleteOfAChangeCapture": bare(`{"before":{"id":"x"},"after":null,"op":"d","ts_ms":1755933141855}`),
		"AHeartbeat":              bare(`{"ts_ms":1755933141855}`),
		"AHeartbeatAsAStruct":     bare(`Struct{ts_ms=1755933141855}`),
	} {
		t.Run("Skips"+name, func(t *testing.T) {
			t.Parallel()

			record := sample(t, event.OrderPaid).Record()
			change(&record)
			_, err := event.Decode(record)
			require.ErrorIs(t, err, event.ErrNoEvent)
		})
	}

	for _, test := range []struct {
		name   string
		change func(*event.Record)
		says   string
	}{
		{"AnEmptyValue", value(""), "not JSON"},
		{"BlankValue", value(" \n"), "not JSON"},
		{"Null", value("null"), "not a JSON object"},
		{"AnEmptyObject", value("{}"), "empty JSON object"},
		{"AnEmptyObjectWithBlanks", value(" { \n } "), "empty JSON object"},
		{"AnArray", value("[]"), "not a JSON object"},
		{"AnArrayOfObjects", value(`[{"order_id":1}]`), "not a JSON object"},
		{"AString", value(`"OrderPaid"`), "not a JSON object"},
		{"ANumber", value("42"), "not a JSON object"},
		{"WhatIsNotJSON", value("this-is-not-json {{{"), "not JSON"},
		{"RandomBytes", value("\x00\xff\x13\x37"), "not JSON"},
		{"AvroWithItsMagicByte", value("\x00\x00\x00\x00\x01{}"), "not JSON"},
		{"AByteOrderMark", value("\xef\xbb\xbf" + `{"a":1}`), "not JSON"},
		{"JSONThatIsCutShort", value(`{"order_id":"01976f`), "not JSON"},
		{"TwoObjects", value(`{"a":1}{"a":2}`), "not JSON"},
		{"InvalidUTF8", value("{\"a\":\"\xff\"}"), "not UTF-8"},
		{"AZeroCharacter", value(`{"customer_id":"a\u0000b"}`), `\u0000`},
		{"AZeroCharacterInAName", value(`{"metadata":{"\u0000":1}}`), `\u0000`},
		{"AZeroCharacterBehindABackslash", value(`{"a":"\\\u0000"}`), `\u0000`},
		{"TheFirstHalfOfASurrogatePair", value(`{"a":"\ud83d"}`), `\ud83d`},
		{"TheSecondHalfOfASurrogatePair", value(`{"a":"\uDE00"}`), `\uDE00`},
		{"TheHalvesOfASurrogatePairInTheWrongOrder", value(`{"a":"\ude00\ud83d"}`), `\ude00`},
		{"HalfASurrogatePairBeforeAnotherCharacter", value(`{"a":"\ud83dA\ude00"}`), `\ud83d`},

		{"NoKey", func(r *event.Record) { r.Key = nil }, "key"},
		{"AnEmptyKey", func(r *event.Record) { r.Key = []byte{} }, "key"},
		{"AnotherOrdersKey", func(r *event.Record) { r.Key = []byte(tenantID.String()) }, "key"},

		{"NoHeaders", func(r *event.Record) { r.Headers = nil }, "ce_id is missing"},
		{"NoID", without(event.HeaderID), "ce_id is missing"},
		{"ANullID", with(event.HeaderID, nil), "ce_id is missing"},
		{"AnEmptyID", with(event.HeaderID, []byte{}), "ce_id is missing"},
		{"AnIDThatIsNone", with(event.HeaderID, []byte("42")), "ce_id"},
		{"TheNilID", with(event.HeaderID, []byte(uuid.Nil.String())), "ce_id"},
		{"AnIDInBraces", with(event.HeaderID, []byte("{01976f00-2222-7000-8000-000000000002}")), "ce_id"},
		{"AnIDWithNoHyphens", with(event.HeaderID, []byte("01976f00222270008000000000000002")), "ce_id"},
		{"AnIDThatIsAURN", with(event.HeaderID, []byte("urn:uuid:01976f00-2222-7000-8000-000000000002")), "ce_id"},
		{"NoType", without(event.HeaderType), "ce_type is missing"},
		{"NoSubject", without(event.HeaderSubject), "ce_subject is missing"},
		{"NoTenant", without(event.HeaderTenant), "ce_tenant is missing"},
		{"TheNilTenant", with(event.HeaderTenant, []byte(uuid.Nil.String())), "ce_tenant"},
		{"NoSpecVersion", without(event.HeaderSpecVersion), "ce_specversion"},
		{"AnotherSpecVersion", with(event.HeaderSpecVersion, []byte("2.0")), "ce_specversion"},
		{"NoTime", without(event.HeaderTime), "ce_time is missing"},
		{"MicrosecondsForATime", with(event.HeaderTime, []byte("1755933141855875")), "ce_time"},
		{"ADayThatIsNone", with(event.HeaderTime, []byte("2026-02-29T00:00:00Z")), "ce_time"},
		{"ALeapSecond", with(event.HeaderTime, []byte("2016-12-31T23:59:60Z")), "ce_time"},
		{"ATimeWithNoZone", with(event.HeaderTime, []byte("2026-01-01T00:00:00")), "ce_time"},
		{"AYearOfFiveDigitsInUTC", with(event.HeaderTime, []byte("9999-12-31T23:59:59-01:00")), "ce_time"},
		{"TheYearZero", with(event.HeaderTime, []byte("0000-01-01T00:00:00Z")), "ce_time"},
		{"NoAggregateVersion", without(event.HeaderAggregateVersion), "ce_aggregateversion is missing"},
		{"AggregateVersionZero", with(event.HeaderAggregateVersion, []byte("0")), "below 1"},
		{"AnAggregateVersionBelowZero", with(event.HeaderAggregateVersion, []byte("-1")), "below 1"},
		{"AnAggregateVersionThatIsNoNumber", with(event.HeaderAggregateVersion, []byte("two")), "ce_aggregateversion"},
		{"AnAggregateVersionThatIsTooLarge", with(event.HeaderAggregateVersion, []byte("9223372036854775808")), "ce_aggregateversion"},
		{"NoSchemaVersion", without(event.HeaderSchemaVersion), "ce_schemaversion is missing"},
		{"ASchemaVersionThatWrapsToOne", with(event.HeaderSchemaVersion, []byte("4294967297")), "ce_schemaversion"},
	} {
		t.Run("Refuses"+test.name, func(t *testing.T) {
			t.Parallel()

			record := sample(t, event.OrderPaid).Record()
			test.change(&record)
			_, err := event.Decode(record)
			require.ErrorContains(t, err, test.says)
			require.NotErrorIs(t, err, event.ErrNoEvent)
		})
	}

	for name, change := range map[string]func(*event.Record){
		"AnUnknownMember":                      value(`{"order_id":"x","new":[{}]}`),
		"WhiteSpaceAroundTheObject":            value("\n {\"a\":1}\t"),
		"AnEscapedBackslashBeforeTheTextU0000": value(`{"a":"\\u0000"}`),
		"AnEscapedBackslashBeforeTheTextUD83D": value(`{"a":"\\ud83d"}`),
		"AWholeSurrogatePair":                  value(`{"a":"\ud83d\ude00 \uD83D\uDE00"}`),
		"OtherEscapes":                         value(`{"a":"\u0001\u00e9\"\\\/\b\f\n\r\t"}`),
		"AnUnknownType":                        with(event.HeaderType, []byte("OrderArchived")),
		"AnUnknownSchemaVersion":               with(event.HeaderSchemaVersion, []byte("2")),
		"AnUnknownHeader":                      with("ce_dataschema", []byte("x")),
		"ANullTrace":                           with(event.HeaderTraceparent, nil),
		"ATimeInAnotherZone":                   with(event.HeaderTime, []byte("2026-03-04T06:06:07.000089+01:00")),
		"AnIDInCapitals":                       with(event.HeaderID, []byte(strings.ToUpper("01976f00-2222-7000-8000-000000000002"))),
		"ADeleteInsideAnEvent":                 value(`{"op":"d","ts_ms":1}`),
	} {
		t.Run("Accepts"+name, func(t *testing.T) {
			t.Parallel()

			record := sample(t, event.OrderPaid).Record()
			change(&record)
			e, err := event.Decode(record)
			require.NoError(t, err)
			require.Equal(t, record.Value, []byte(e.Payload), "the payload's bytes are kept")
			require.True(t, e.OccurredAt.Equal(at))
			require.Equal(t, time.UTC, e.OccurredAt.Location())
		})
	}

	t.Run("TakesANullHeaderForNone", func(t *testing.T) {
		t.Parallel()

		record := sample(t, event.OrderPaid).Record()
		record.Headers = append([]event.Header{{Key: event.HeaderID}, {Key: event.HeaderTraceparent}}, record.Headers...)
		e, err := event.Decode(record)
		require.NoError(t, err)
		require.Equal(t, sample(t, event.OrderPaid), e, "a null header does not hide the one behind it")
	})

	t.Run("LeavesOutATraceThatIsNone", func(t *testing.T) {
		t.Parallel()

		for _, trace := range []string{"trace", "\xff", "a\x00b", "00-4BF92F-x", strings.Repeat("0", 129)} {
			record := sample(t, event.OrderPaid).Record()
			with(event.HeaderTraceparent, []byte(trace))(&record)
			e, err := event.Decode(record)
			require.NoError(t, err)
			require.Empty(t, e.Traceparent, "%.40q", trace)
		}
	})

	t.Run("TellsWhatItCouldReadOfABadRecord", func(t *testing.T) {
		t.Parallel()

		record := sample(t, event.OrderPaid).Record()
		record.Value = []byte("{{{")
		e, err := event.Decode(record)
		require.Error(t, err)
		want := sample(t, event.OrderPaid)
		want.Payload = record.Value
		require.Equal(t, want, e)
	})

	t.Run("NamesNoMoreOfABadHeaderThanNeeded", func(t *testing.T) {
		t.Parallel()

		record := sample(t, event.OrderPaid).Record()
		with(event.HeaderID, []byte(strings.Repeat("x", 1<<20)))(&record)
		_, err := event.Decode(record)
		require.Error(t, err)
		require.Less(t, len(err.Error()), 200)
	})
}

func TestFingerprint(t *testing.T) {
	t.Parallel()

	paid := sample(t, event.OrderPaid)
	resent := paid
	resent.AggregateVersion, resent.OccurredAt, resent.Traceparent = 7, at.Add(time.Hour), ""
	require.Equal(t, paid.Fingerprint(), resent.Fingerprint(), "of type and value alone")
	require.Len(t, paid.Fingerprint(), 32)

	otherType, otherValue := paid, paid
	otherType.Type = event.OrderRefunded
	otherValue.Payload = append([]byte(" "), paid.Payload...)
	require.NotEqual(t, paid.Fingerprint(), otherType.Fingerprint())
	require.NotEqual(t, paid.Fingerprint(), otherValue.Fingerprint())
}

// FuzzDecode looks for a record that makes Decode panic, that it takes for an
// event without an id, or that is another one once it is sent on.
func FuzzDecode(f *testing.F) {
	add := func(topic string, record event.Record) {
		value := func(key string) string {
			for _, header := range record.Headers {
				if header.Key == key {
					return string(header.Value)
				}
			}
			return ""
		}
		f.Add(topic, record.Key, record.Value, value(event.HeaderSpecVersion), value(event.HeaderID), value(event.HeaderType),
			value(event.HeaderSubject), value(event.HeaderTime), value(event.HeaderTenant),
			value(event.HeaderAggregateVersion), value(event.HeaderSchemaVersion), value(event.HeaderTraceparent))
	}
	good := event.Event{
		ID: uuid.MustParse("01976f00-2222-7000-8000-000000000002"), TenantID: tenantID,
		AggregateType: event.AggregateOrder, AggregateID: orderID, AggregateVersion: 2,
		Type: event.OrderPaid, SchemaVersion: 1, OccurredAt: at, Traceparent: traceparent,
		Payload: []byte(`{"a":"\ud83d\ude00\\u0000"}`),
	}.Record()
	add(event.OrderEvents, good)
	add(event.BillingEvents, good)
	for _, text := range []string{"", "null", "{}", "[]", `{"op":"d"}`, `{"ts_ms":1}`, "Struct{ts_ms=1}", `{"a":"\u0000"}`, `{"a":"\ud800"}`, "{\"a\":\"\xff\"}"} {
		bad := good
		bad.Value = []byte(text)
		add(event.OrderEvents, bad)
		bad.Headers = nil
		add("", bad)
	}

	f.Fuzz(func(t *testing.T, topic string, key, value []byte, spec, id, typ, subject, moment, tenant, version, schema, trace string) {
		record := event.Record{Topic: topic, Key: key, Value: value, Headers: []event.Header{
			{Key: event.HeaderSpecVersion, Value: []byte(spec)}, {Key: event.HeaderID, Value: []byte(id)},
			{Key: event.HeaderType, Value: []byte(typ)}, {Key: event.HeaderSubject, Value: []byte(subject)},
			{Key: event.HeaderTime, Value: []byte(moment)}, {Key: event.HeaderTenant, Value: []byte(tenant)},
			{Key: event.HeaderAggregateVersion, Value: []byte(version)}, {Key: event.HeaderSchemaVersion, Value: []byte(schema)},
			{Key: event.HeaderTraceparent, Value: []byte(trace)},
		}}
		e, err := event.Decode(record)
		if err != nil {
			return
		}
		require.NotEqual(t, uuid.Nil, e.ID)
		require.NotEqual(t, uuid.Nil, e.TenantID)
		require.NotEqual(t, uuid.Nil, e.AggregateID)
		require.NotEmpty(t, e.Type)
		require.Empty(t, event.UnstorableEscape(value))

		if topic != event.OrderEvents && topic != event.BillingEvents {
			return
		}
		again, err := event.Decode(e.Record())
		require.NoError(t, err)
		e.OccurredAt = e.OccurredAt.Truncate(time.Microsecond)
		require.Equal(t, e, again)
	})
}

// Package event is the wire contract: what an event is, the record it becomes on
// Kafka, and how a record is read back. CloudEvents 1.0 in Kafka's binary mode:
// key is the aggregate's id, value the JSON payload itself, everything else in
// headers. Whatever publishes an event (this service's relay, Debezium, a
// replay) makes the same record, and a consumer cannot tell them apart.
package event

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/google/uuid"
)

// Type names a fact, in the past.
type Type string

// The facts. Each has a JSON Schema in schemas/.
const (
	OrderCreated     Type = "OrderCreated"
	OrderPaid        Type = "OrderPaid"
	OrderCancelled   Type = "OrderCancelled"
	OrderRefunded    Type = "OrderRefunded"
	InvoiceIssued    Type = "InvoiceIssued"
	CreditNoteIssued Type = "CreditNoteIssued"
)

// The kinds of aggregate. An aggregate's events are on the topic
// <aggregate type>.events, all of one aggregate in one partition.
const (
	AggregateOrder   = "order"
	AggregateBilling = "billing"
)

// The topics.
const (
	OrderEvents   = AggregateOrder + ".events"
	BillingEvents = AggregateBilling + ".events"
	// LedgerBalances is compacted: the last record of a key is its balance.
	LedgerBalances = "ledger.balances"
	// LedgerBalanceOrders is compacted too: what those who keep the balances
	// remember of each order.
	LedgerBalanceOrders = LedgerBalances + ".orders"
)

// SchemaVersion is the version of the payloads that this build writes and reads.
const SchemaVersion = 1

// MaxPayload is the largest payload in bytes; a record with its headers then
// stays below Kafka's usual limit of 1 MiB.
const MaxPayload = 900_000

// Event is a fact about one aggregate. ID is made once, when the fact happens,
// and is the only thing to deduplicate by. Version counts the aggregate's events
// from 1 without gaps.
type Event struct {
	ID               uuid.UUID // UUIDv7
	TenantID         uuid.UUID
	AggregateType    string
	AggregateID      uuid.UUID
	AggregateVersion int64
	Type             Type
	SchemaVersion    int32
	OccurredAt       time.Time
	Traceparent      string // W3C trace context, or ""
	Payload          json.RawMessage
}

// Header is one header of a record. A nil Value counts as no header.
type Header struct {
	Key   string
	Value []byte
}

// Record is an event on a topic, as it was read or as it will be sent.
type Record struct {
	Topic     string
	Partition int32
	Offset    int64
	Time      time.Time
	Key       []byte
	Value     []byte
	Headers   []Header
}

// timeLayout is RFC 3339 in UTC with six decimals, Debezium's form.
const timeLayout = "2006-01-02T15:04:05.000000Z"

// The names of the headers.
const (
	HeaderSpecVersion      = "ce_specversion"
	HeaderID               = "ce_id"
	HeaderType             = "ce_type"
	HeaderSource           = "ce_source"
	HeaderSubject          = "ce_subject"
	HeaderTime             = "ce_time"
	HeaderTenant           = "ce_tenant"
	HeaderAggregateVersion = "ce_aggregateversion"
	HeaderSchemaVersion    = "ce_schemaversion"
	HeaderTraceparent      = "traceparent"
)

// Topic is where events of an aggregate type go.
func Topic(aggregateType string) string { return aggregateType + ".events" }

// Source is the ce_source of an aggregate type's events.
func Source(aggregateType string) string { return "/onceledger/" + aggregateType }

// Record is the record to send for an event; its partition is the producer's
// choice, by the key.
func (e Event) Record() Record {
	// The values share one buffer: the relay makes a record for every event.
	buffer := make([]byte, 0, 320)
	headers := make([]Header, 0, 10)
	add := func(key string, extended []byte) []byte {
		value := extended[len(buffer):len(extended):len(extended)]
		headers = append(headers, Header{key, value})
		buffer = extended
		return value
	}
	add(HeaderSpecVersion, append(buffer, "1.0"...))
	add(HeaderID, appendUUID(buffer, e.ID))
	add(HeaderType, append(buffer, e.Type...))
	add(HeaderSource, append(buffer, Source(e.AggregateType)...))
	subject := add(HeaderSubject, appendUUID(buffer, e.AggregateID))
	add(HeaderTime, e.OccurredAt.UTC().AppendFormat(buffer, timeLayout))
	add(HeaderTenant, appendUUID(buffer, e.TenantID))
	add(HeaderAggregateVersion, strconv.AppendInt(buffer, e.AggregateVersion, 10))
	add(HeaderSchemaVersion, strconv.AppendInt(buffer, int64(e.SchemaVersion), 10))
	if e.Traceparent != "" {
		add(HeaderTraceparent, append(buffer, e.Traceparent...))
	}
	return Record{
		Topic:   Topic(e.AggregateType),
		Key:     subject,
		Value:   e.Payload,
		Headers: headers,
	}
}

func appendUUID(buffer []byte, id uuid.UUID) []byte {
	buffer = append(hex.AppendEncode(buffer, id[:4]), '-')
	buffer = append(hex.AppendEncode(buffer, id[4:6]), '-')
	buffer = append(hex.AppendEncode(buffer, id[6:8]), '-')
	buffer = append(hex.AppendEncode(buffer, id[8:10]), '-')
	return hex.AppendEncode(buffer, id[10:])
}

// ErrNoEvent says that a record carries no event and is none of ours to judge:
// a tombstone or a heartbeat. It is to be skipped.
var ErrNoEvent = errors.New("record carries no event")

// Decode reads a record. An error other than ErrNoEvent says what is wrong with
// the record; what could be read by then is in the Event all the same, so that
// a dead letter can name it.
//
// The payload is checked to be a JSON object with something in it that Postgres
// can read (see UnstorableEscape), not against its type's schema.
func Decode(record Record) (Event, error) {
	var e Event
	if record.Value == nil {
		return e, fmt.Errorf("%w: no value (tombstone)", ErrNoEvent)
	}

	headers := headerReader{record: record}
	e.ID = headers.uuid(HeaderID)
	e.Type = Type(headers.text(HeaderType))
	e.TenantID = headers.uuid(HeaderTenant)
	e.AggregateID = headers.uuid(HeaderSubject)
	e.AggregateVersion = headers.integer(HeaderAggregateVersion, 64)
	e.SchemaVersion = int32(headers.integer(HeaderSchemaVersion, 32))
	e.OccurredAt = headers.time(HeaderTime)
	e.Traceparent = headers.trace()
	e.Payload = record.Value
	for _, aggregateType := range []string{AggregateOrder, AggregateBilling} {
		if record.Topic == Topic(aggregateType) {
			e.AggregateType = aggregateType
		}
	}
	if headers.optional(HeaderID) == "" && isCaptureNoise(record.Value) {
		return e, fmt.Errorf("%w: heartbeat or delete of a change capture", ErrNoEvent)
	}

	switch {
	case headers.err != nil:
		return e, headers.err
	case headers.text(HeaderSpecVersion) != "1.0":
		return e, fmt.Errorf("%s is %q, not 1.0", HeaderSpecVersion, headers.text(HeaderSpecVersion))
	case string(record.Key) != e.AggregateID.String():
		return e, fmt.Errorf("key %.64q is not the %s", record.Key, HeaderSubject)
	case e.AggregateVersion < 1:
		return e, fmt.Errorf("%s is %d, below 1", HeaderAggregateVersion, e.AggregateVersion)
	}
	return e, checkPayload(record.Value)
}

// isCaptureNoise recognises what a change capture sends beside events when it
// is not told to leave it out: a delete (op "d") and a heartbeat (ts_ms alone).
func isCaptureNoise(value []byte) bool {
	if bytes.HasPrefix(value, []byte("Struct{ts_ms=")) {
		return true
	}
	var fields map[string]json.RawMessage
	if json.Unmarshal(value, &fields) != nil {
		return false
	}
	_, hasTime := fields["ts_ms"]
	return string(fields["op"]) == `"d"` || (hasTime && len(fields) == 1)
}

func checkPayload(value []byte) error {
	trimmed := bytes.TrimSpace(value)
	switch {
	case !json.Valid(value):
		return errors.New("value is not JSON")
	case trimmed[0] != '{':
		return errors.New("value is not a JSON object")
	case bytes.TrimSpace(trimmed[1:])[0] == '}':
		return errors.New("value is an empty JSON object")
	case !utf8.Valid(value):
		return errors.New("value is not UTF-8")
	}
	if escape := UnstorableEscape(value); escape != "" {
		return fmt.Errorf("value has %s in a string, which cannot be stored", escape)
	}
	return nil
}

// UnstorableEscape finds an escape that JSON allows in a string and that
// Postgres can make no text of: the zero character, or half of a surrogate pair.
// The type json takes it in and fails whoever reads a member later. It returns
// the escape as it is written, or "". The text must be valid JSON.
func UnstorableEscape(text []byte) string {
	for i := 0; i < len(text); i++ {
		if text[i] != '\\' {
			continue
		}
		unit, isUnit := utf16Escape(text[i:])
		if !isUnit {
			i++ // whatever is escaped is not the start of an escape
			continue
		}
		if unit == 0 {
			return string(text[i : i+6])
		}
		if utf16.IsSurrogate(unit) {
			low, _ := utf16Escape(text[i+6:])
			if utf16.DecodeRune(unit, low) == utf8.RuneError {
				return string(text[i : i+6])
			}
			i += 6
		}
		i += 5
	}
	return ""
}

// utf16Escape reads an escape such as \u00e9 at the start of text.
func utf16Escape(text []byte) (unit rune, ok bool) {
	if len(text) < 6 || text[0] != '\\' || text[1] != 'u' {
		return 0, false
	}
	number, err := strconv.ParseUint(string(text[2:6]), 16, 16)
	return rune(number), err == nil
}

// headerReader reads headers and keeps the first fault.
type headerReader struct {
	record Record
	err    error
}

func (r *headerReader) optional(key string) string {
	for _, header := range r.record.Headers {
		if header.Key == key && header.Value != nil {
			return string(header.Value)
		}
	}
	return ""
}

func (r *headerReader) text(key string) string {
	value := r.optional(key)
	if value == "" && r.err == nil {
		r.err = fmt.Errorf("header %s is missing", key)
	}
	return value
}

// trace reads a W3C trace context. What is none counts as absent: it is sent on
// with what the event causes, and is never worth refusing an event for.
func (r *headerReader) trace() string {
	const longest = 128 // version 00 has 55
	value := r.optional(HeaderTraceparent)
	if len(value) > longest || strings.Trim(value, "0123456789abcdef-") != "" {
		return ""
	}
	return value
}

func (r *headerReader) uuid(key string) uuid.UUID {
	value := r.text(key)
	id, err := uuid.Parse(value)
	if (err != nil || len(value) != 36 || id == uuid.Nil) && r.err == nil {
		r.err = fmt.Errorf("header %s is %.64q, not a UUID", key, value)
	}
	return id
}

func (r *headerReader) integer(key string, bits int) int64 {
	value := r.text(key)
	number, err := strconv.ParseInt(value, 10, bits)
	if err != nil && r.err == nil {
		r.err = fmt.Errorf("header %s is %.64q, not a number of %d bits", key, value, bits)
	}
	return number
}

// time reads a moment that can be written again: in UTC, with a year of four
// digits.
func (r *headerReader) time(key string) time.Time {
	value := r.text(key)
	moment, err := time.Parse(time.RFC3339Nano, value)
	moment = moment.UTC()
	if (err != nil || moment.Year() < 1 || moment.Year() > 9999) && r.err == nil {
		r.err = fmt.Errorf("header %s is %.64q, not a time of RFC 3339", key, value)
	}
	return moment
}

package inbox_test

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/inbox/inboxtest"
	"github.com/onceledger/onceledger/internal/pgtest"
)

// header sets a header of a record; nil takes it away.
func header(record event.Record, key string, value []byte) event.Record {
	record.Headers = slices.DeleteFunc(slices.Clone(record.Headers), func(h event.Header) bool { return h.Key == key })
	if value != nil {
		record.Headers = append(record.Headers, event.Header{Key: key, Value: value})
	}
	return record
}

// TestUndecodable is field reports R10, R15 and R26: what is no event is a dead
// letter after one try, and its neighbours are applied.
func TestUndecodable(t *testing.T) {
	t.Parallel()

	value := func(value []byte) func(event.Record) event.Record {
		return func(r event.Record) event.Record {
			r.Value = value
			return r
		}
	}
	with := func(key, value string) func(event.Record) event.Record {
		return func(r event.Record) event.Record { return header(r, key, []byte(value)) }
	}
	without := func(key string) func(event.Record) event.Record {
		return func(r event.Record) event.Record { return header(r, key, nil) }
	}
	tests := map[string]func(event.Record) event.Record{
		"AnEmptyValue":            value([]byte{}),
		"RandomBytes":             value([]byte{0xff, 0x00, 0xfe, 0x80}),
		"TextThatIsNoJSON":        value([]byte("this-is-not-json {{{")),
		"Null":                    value([]byte("null")),
		"AnEmptyObject":           value([]byte("{}")),
		"AnArray":                 value([]byte("[]")),
		"AZeroCharacterInAString": value([]byte(`{"customer_id":"a\u0000b"}`)),
		"AZeroCharacterInAName":   value([]byte(`{"a\u0000b":1}`)),
		"BytesThatAreNoUTF8":      value([]byte("{\"customer_id\":\"\xff\"}")),
		"NoKey": func(r event.Record) event.Record {
			r.Key = nil
			return r
		},
		"AnotherAggregatesKey": func(r event.Record) event.Record {
			r.Key = []byte(uuid.NewString())
			return r
		},
		"NoHeaders": func(r event.Record) event.Record {
			r.Headers = nil
			return r
		},
		"NoID":                   without(event.HeaderID),
		"AnIDThatIsNone":         with(event.HeaderID, "42"),
		"NoType":                 without(event.HeaderType),
		"NoTenant":               without(event.HeaderTenant),
		"NoTime":                 without(event.HeaderTime),
		"ATimeInMicroseconds":    with(event.HeaderTime, "1755933141855875"),
		"NoVersion":              without(event.HeaderAggregateVersion),
		"VersionZero":            with(event.HeaderAggregateVersion, "0"),
		"AVersionThatIsNoNumber": with(event.HeaderAggregateVersion, "1e3"),
		"AVersionBeyondABigint":  with(event.HeaderAggregateVersion, "9223372036854775808"),
		"NoSchemaVersion":        without(event.HeaderSchemaVersion),
		"ASchemaVersionBeyond32": with(event.HeaderSchemaVersion, "4294967297"),
		"AnotherSpecVersion":     with(event.HeaderSpecVersion, "0.3"),
		"AHeaderThatIsZeroBytes": with(event.HeaderType, ""),
		"ADeleteWithAnID":        value([]byte(`"d"`)),
		"AnIDInBraces":           with(event.HeaderID, "{"+uuid.NewString()+"}"),
		"AHeaderNameThatIsNoText": func(r event.Record) event.Record {
			return header(value([]byte("{}"))(r), "\xff", []byte("x"))
		},
		"AHeaderNameWithAZeroByte": func(r event.Record) event.Record { return header(value([]byte("{}"))(r), "a\x00b", []byte("x")) },
		"ATypeWithAZeroByte": func(r event.Record) event.Record {
			return header(value([]byte("{}"))(r), event.HeaderType, []byte("Order\x00Paid\xff"))
		},
	}

	w := newWorld(t)
	var applied []uuid.UUID
	for name, spoil := range tests {
		t.Run(name, func(t *testing.T) {
			calls, dead := w.calls(), len(w.DeadLetters(t))
			order := w.order()
			before, bad, after := order.Created(), order.Paid(), w.order().Created()
			records := w.Partition.Append(before, bad, after)
			records[1] = spoil(records[1])
			w.DeliverRecords(t, records...)
			require.Equal(t, calls+1, w.calls(), "one try")

			letters := w.DeadLetters(t)
			require.Len(t, letters, dead+1)
			letter := letters[dead]
			require.Equal(t, inbox.ClassUndecodable, letter.Class, letter.Detail)
			require.NotEmpty(t, letter.Detail)
			require.Equal(t, records[1].Offset, letter.Offset)
			requireKept(t, w, records[1])

			next := order.Refunded(1)
			w.Deliver(t, next)
			applied = append(applied, ids(before, after, next)...)
			require.Equal(t, applied, w.effects(t), "what cannot be read holds nothing back")

			contents := w.Contents(t)
			w.DeliverRecords(t, records...)
			require.Equal(t, contents, w.Contents(t), "again, it changes nothing")
		})
	}
}

// requireKept checks that a record's dead letter has it as it came.
func requireKept(t *testing.T, w *world, record event.Record) {
	t.Helper()
	type kept struct {
		Key, Value []byte
		Headers    []byte
		Attempts   int
	}
	letters := pgtest.Rows[kept](t, w.Owner, `
		SELECT record_key, record_value, record_headers::text, attempts FROM dead_letters
		WHERE partition = $1 AND "offset" = $2`, record.Partition, record.Offset)
	require.Len(t, letters, 1)
	require.Equal(t, record.Key, letters[0].Key)
	require.Equal(t, record.Value, letters[0].Value)
	require.Equal(t, 1, letters[0].Attempts)
	var headers []event.Header
	require.NoError(t, json.Unmarshal(letters[0].Headers, &headers))
	require.Len(t, headers, len(record.Headers))
	for i, h := range record.Headers {
		require.Equal(t, h.Value, headers[i].Value)
	}
}

// TestRecordTime is about dead letters whose record says an impossible time: a
// wrong unit must not keep them from being stored.
func TestRecordTime(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	last := time.Date(9999, 12, 31, 23, 59, 59, 999_999_000, time.UTC)
	for i, test := range []struct{ says, stored time.Time }{
		{time.UnixMilli(1_755_933_141_855), time.Date(2025, 8, 23, 7, 12, 21, 855_000_000, time.UTC)},
		{time.UnixMilli(1_755_933_141), time.Date(1970, 1, 21, 7, 45, 33, 141_000_000, time.UTC)}, // seconds
		{time.UnixMilli(1_755_933_141_855_875), last},                                             // microseconds
		{time.UnixMilli(1_755_933_141_855_875_123), last},                                         // nanoseconds
		{time.UnixMilli(10_000_000_000_000_000), last},                                            // just beyond what Postgres holds
		{time.UnixMilli(math.MaxInt64), last},
		{time.UnixMilli(-1), time.UnixMilli(-1).UTC()}, // Kafka's "none"
		{time.UnixMilli(math.MinInt64), time.Time{}},
		{time.Time{}, time.Time{}},
	} {
		record := w.Partition.Append(w.order().Created())[0]
		record.Value, record.Time = []byte("{}"), test.says
		w.DeliverRecords(t, record)
		require.Equal(t, []time.Time{test.stored}, pgtest.Column[time.Time](t, w.Owner,
			`SELECT record_time AT TIME ZONE 'UTC' FROM dead_letters WHERE "offset" = $1`, i), test.says)
	}
}

// TestSkipped is field report R15: what a change capture sends beside events is
// no event, and no fault.
func TestSkipped(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	order := w.order()
	created := order.Created()
	key := []byte(created.AggregateID.String())
	records := append(w.Partition.Append(created), w.Partition.AppendRecords(
		event.Record{Topic: event.OrderEvents, Key: key},
		event.Record{Topic: event.OrderEvents},
		event.Record{Topic: event.OrderEvents, Key: key, Value: []byte(`{"op":"d","before":{"id":1},"after":null}`)},
		event.Record{Topic: event.OrderEvents, Value: []byte(`{"ts_ms":1755933141855}`)},
		event.Record{Topic: event.OrderEvents, Value: []byte(`Struct{ts_ms=1755933141855}`)},
	)...)
	records = append(records, w.Partition.Append(order.Paid())...)
	tombstone := w.Partition.Append(order.Refunded(1))[0]
	tombstone.Value = nil
	w.DeliverRecords(t, append(records, tombstone)...)

	require.Len(t, w.effects(t), 2)
	require.Empty(t, w.DeadLetters(t))
	require.Equal(t, 6, w.Counted(t, "skipped"))
	require.Equal(t, 2, w.Counted(t, "applied"))

	w.DeliverRecords(t, tombstone)
	require.Equal(t, 7, w.Counted(t, "skipped"), "alone in its batch too")
}

// TestID is about what an event's own id says of when it was made. Nothing else
// has a say: not the record's time, nor when it arrives.
func TestID(t *testing.T) {
	t.Parallel()

	now := time.Now().UTC().Truncate(time.Millisecond)
	oldest := now.Truncate(24*time.Hour).AddDate(0, 0, -1) // the template's first partition
	v7 := factory.ID(now)
	other := func(change func(id *uuid.UUID)) uuid.UUID {
		id := factory.ID(now)
		change(&id)
		return id
	}
	w := newWorld(t, func(config *inbox.Config) { config.Now = func() time.Time { return now } })
	for name, test := range map[string]struct {
		id    uuid.UUID
		class inbox.Class
	}{
		"Random":                     {uuid.New(), inbox.ClassBadID},
		"Version1":                   {uuid.Must(uuid.NewUUID()), inbox.ClassBadID},
		"Version6":                   {uuid.Must(uuid.NewV6()), inbox.ClassBadID},
		"Max":                        {uuid.Max, inbox.ClassBadID},
		"AnotherVariant":             {other(func(id *uuid.UUID) { id[8] |= 0xc0 }), inbox.ClassBadID},
		"FirstMillisecondThatIsKept": {factory.ID(oldest), ""},
		"AMillisecondTooOld":         {factory.ID(oldest.Add(-time.Millisecond)), inbox.ClassTooOld},
		"InSeconds":                  {factory.ID(time.UnixMilli(now.Unix())), inbox.ClassTooOld},
		"From1970":                   {factory.ID(time.UnixMilli(0)), inbox.ClassTooOld},
		"ADayAhead":                  {factory.ID(now.Add(24 * time.Hour)), ""},
		"AMillisecondMoreThanADay":   {factory.ID(now.Add(24*time.Hour + time.Millisecond)), inbox.ClassFutureID},
		"InMicroseconds":             {factory.ID(time.UnixMilli(now.UnixMicro())), inbox.ClassFutureID},
		"TheLastThereCanBe":          {factory.ID(time.UnixMilli(1<<48 - 1)), inbox.ClassFutureID},
		"Now":                        {v7, ""},
	} {
		t.Run(name, func(t *testing.T) {
			applied, dead := len(w.effects(t)), len(w.DeadLetters(t))
			order := w.order()
			e := order.Created()
			e.ID = test.id
			records := w.Partition.Append(e)
			records[0].Time = time.Date(1999, 1, 1, 0, 0, 0, 0, time.UTC)
			w.DeliverRecords(t, records...)
			if test.class == "" {
				require.Equal(t, ids(e), w.effects(t)[applied:])
				return
			}
			require.Len(t, w.effects(t), applied)
			letters := w.DeadLetters(t)[dead:]
			require.Len(t, letters, 1)
			require.Equal(t, test.class, letters[0].Class, letters[0].Detail)
			require.Positive(t, w.Counted(t, string(test.class)))

			next := order.Paid()
			w.Deliver(t, next)
			require.Equal(t, ids(next), w.effects(t)[applied:], "an id that cannot be used holds nothing back")
		})
	}
}

// TestUnknownSchema is about events of a producer that is ahead of this build.
func TestUnknownSchema(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	order, other := w.order(), w.order()
	created, paid := order.Created(), order.Paid()
	created.SchemaVersion = 2
	w.Deliver(t, created, other.Created(), paid)
	w.Deliver(t, order.Refunded(500), other.Paid())
	require.Len(t, w.effects(t), 2)
	letters := w.DeadLetters(t)
	require.Len(t, letters, 3)
	require.Equal(t, inbox.ClassUnknownSchema, letters[0].Class)
	require.Equal(t, "schema version 2 of OrderCreated is not known, only 1 is", letters[0].Detail)
	require.Equal(t, inbox.ClassParked, letters[1].Class, "its order waits for a build that knows it")
	require.Equal(t, inbox.ClassParked, letters[2].Class)
}

// TestData is about events that the database refuses without saying which of a
// batch they are.
func TestData(t *testing.T) {
	t.Parallel()

	t.Run("FindsEachCulpritAndAppliesTheOthersInTheirOrder", func(t *testing.T) {
		t.Parallel()

		for _, culprits := range [][]int{{0, 50, 99}, {17, 18, 19}, {3, 64, 65}} {
			w := newWorld(t)
			events := w.created(100)
			var good []event.Event
			for i := range events {
				if slices.Contains(culprits, i) {
					events[i] = spoilt(events[i])
				} else {
					good = append(good, events[i])
				}
			}
			records := w.Deliver(t, events...)
			require.Equal(t, ids(good...), w.effects(t))
			letters := w.DeadLetters(t)
			require.Len(t, letters, 3)
			for i, letter := range letters {
				require.EqualValues(t, culprits[i], letter.Offset)
				require.Equal(t, inbox.ClassData, letter.Class)
				require.Contains(t, letter.Detail, "effects_storable")
			}
			require.Less(t, w.calls(), 3*2*8, "by halving, not one by one")

			before := w.Contents(t)
			w.DeliverRecords(t, records...)
			require.Equal(t, before, w.Contents(t))
		}
	})

	t.Run("HoldsBackLaterEventsOfItsAggregateAlone", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order, other := w.order(), w.order()
		bad, paid := spoilt(order.Created()), order.Paid()
		good := []event.Event{other.Created(), other.Paid()}
		w.Deliver(t, bad, good[0], paid, good[1])
		require.Equal(t, ids(good...), w.effects(t))
		require.Equal(t, map[uuid.UUID]inbox.Class{bad.ID: inbox.ClassData, paid.ID: inbox.ClassParked}, w.Classes(t))
	})

	t.Run("TakesABatchOfCulpritsAlone", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		events := w.created(8)
		for i := range events {
			events[i] = spoilt(events[i])
		}
		w.Deliver(t, events...)
		require.Empty(t, w.effects(t))
		require.Empty(t, w.Applied(t), "a dead letter is not applied")
		require.Equal(t, 8, w.Counted(t, "data"))
	})
}

func TestRejections(t *testing.T) {
	t.Parallel()

	t.Run("AreTakenAllAtOnce", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.handler.refuse = refuseMarked

		events := w.created(20)
		events[3] = marked(events[3], inbox.ClassRule)
		events[7] = marked(events[7], inbox.ClassGap)
		events[19] = marked(events[19], inbox.ClassUnknownSchema)
		w.Deliver(t, events...)
		require.Equal(t, 2, w.calls())
		require.Equal(t, map[uuid.UUID]inbox.Class{
			events[3].ID: inbox.ClassRule, events[7].ID: inbox.ClassGap, events[19].ID: inbox.ClassUnknownSchema,
		}, w.Classes(t))
		require.Len(t, w.effects(t), 17)
		require.Len(t, w.Applied(t), 17)
	})

	t.Run("GoTogetherWithCulpritsThatTheDatabaseFinds", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.handler.refuse = refuseMarked

		events := w.created(20)
		events[3] = marked(events[3], inbox.ClassRule)
		events[4] = spoilt(events[4])
		events[5] = marked(events[5], inbox.ClassRule)
		w.Deliver(t, events...)
		require.Equal(t, map[uuid.UUID]inbox.Class{
			events[3].ID: inbox.ClassRule, events[4].ID: inbox.ClassData, events[5].ID: inbox.ClassRule,
		}, w.Classes(t))
		require.Equal(t, ids(append(slices.Clone(events[:3]), events[6:]...)...), w.effects(t))
	})

	t.Run("OfWhatWasNotGivenAreAnErrorAndNoDeadLetter", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.handler.refuse = func(event.Event) (inbox.Class, bool) { return inbox.ClassRule, false }
		stranger := inbox.Rejections{{EventID: uuid.New(), Fault: inbox.Fault{Class: inbox.ClassRule, Detail: "not ours"}}}
		in := inboxtest.On(t, w.DB, fails{stranger})

		require.ErrorContains(t, in.Process(t.Context(), in.Partition.Append(w.order().Created())), "was not given")
		require.Empty(t, w.DeadLetters(t))
		require.Empty(t, w.Applied(t))
	})
}

// TestParking is about what follows a dead letter of its aggregate.
func TestParking(t *testing.T) {
	t.Parallel()

	setup := func(t *testing.T) (*world, *factory.Order, event.Event) {
		w := newWorld(t)
		w.handler.refuse = refuseMarked
		order := w.order()
		return w, order, marked(order.Created(), inbox.ClassRule)
	}

	t.Run("KeepsTheirOrderOverBatches", func(t *testing.T) {
		t.Parallel()
		w, order, bad := setup(t)

		other := w.order()
		parked := []event.Event{order.Paid(), order.Refunded(1), order.Refunded(2), order.Refunded(3)}
		free := []event.Event{other.Created(), other.Paid(), other.Refunded(1)}
		w.Deliver(t, free[0], bad, parked[0], free[1])
		w.Deliver(t, parked[1], free[2], parked[2])
		w.Deliver(t, parked[3])

		require.Equal(t, ids(free...), w.effects(t), "other aggregates flow")
		var held []uuid.UUID
		for _, letter := range w.DeadLetters(t)[1:] {
			require.Equal(t, inbox.ClassParked, letter.Class)
			held = append(held, letter.EventID)
		}
		require.Equal(t, ids(parked...), held)
		require.Equal(t, []int64{2, 3, 4, 5}, pgtest.Column[int64](t, w.Owner, `
			SELECT aggregate_version FROM dead_letters WHERE class = 'parked' ORDER BY "offset"`))
		require.ElementsMatch(t, ids(free...), w.Applied(t), "what is parked is not applied")
	})

	t.Run("TakesNoNewRecordForAnOldOneWithItsOffset", func(t *testing.T) { // as in a topic that was made anew
		t.Parallel()
		w, order, bad := setup(t)

		old := w.Deliver(t, bad, order.Paid())
		anew := []event.Record{order.Refunded(1).Record(), order.Refunded(2).Record()}
		for i := range anew {
			anew[i].Partition, anew[i].Offset, anew[i].Time = old[i].Partition, old[i].Offset, old[i].Time
		}
		w.DeliverRecords(t, anew...)
		w.DeliverRecords(t, anew...)
		require.Len(t, w.DeadLetters(t), 4, "none is lost, none is there twice")
	})

	t.Run("ParksNoOtherTenantsAggregateOfThatID", func(t *testing.T) {
		t.Parallel()
		w, order, bad := setup(t)

		bad.TenantID = w.Tenant(t)
		w.Deliver(t, bad, order.Paid())
		require.Len(t, w.DeadLetters(t), 1)
		require.Len(t, w.Applied(t), 1, "the order's own tenant goes on")
	})

	t.Run("ChangesNothingWhenDeliveredAgain", func(t *testing.T) {
		t.Parallel()
		w, order, bad := setup(t)

		first := w.Deliver(t, bad, order.Paid())
		second := w.Deliver(t, order.Refunded(1), w.order().Created())
		before := w.Contents(t)
		w.DeliverRecords(t, second...)
		w.DeliverRecords(t, first[1])
		w.DeliverRecords(t, first[0])
		w.DeliverRecords(t, append(first, second...)...)
		require.Equal(t, before, w.Contents(t))
	})

	t.Run("StillSeesADuplicateOfWhatWasAppliedBefore", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.handler.refuse = refuseMarked

		order := w.order()
		created := order.Created()
		bad := marked(order.Paid(), inbox.ClassRule)
		w.Deliver(t, created)
		w.Deliver(t, bad)
		w.Deliver(t, created)
		require.Equal(t, 1, w.Counted(t, "duplicate"))
		require.Equal(t, map[uuid.UUID]inbox.Class{bad.ID: inbox.ClassRule}, w.Classes(t))
	})

	t.Run("EndsWhenNothingOfTheAggregateIsOpen", func(t *testing.T) {
		t.Parallel()
		w, order, bad := setup(t)

		w.Deliver(t, bad, order.Paid())
		w.Exec(t, pgtest.CloseLetters("discarded", "class = 'rule'"))
		w.Deliver(t, order.Refunded(1))
		require.Empty(t, w.effects(t), "it waits behind the parked one too")
		w.Exec(t, pgtest.CloseLetters("resolved", "true"))
		last := order.Refunded(2)
		w.Deliver(t, last)
		require.Equal(t, ids(last), w.effects(t))
	})

	t.Run("IsForEachConsumerByItself", func(t *testing.T) {
		t.Parallel()
		w, order, bad := setup(t)
		other := w.another(t, func(config *inbox.Config) { config.Consumer = "other" })

		w.Deliver(t, bad)
		paid := order.Paid()
		other.Deliver(t, paid)
		require.Equal(t, ids(paid), w.effects(t))
	})

	t.Run("UsesItsIndex", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		// The index and the query name the same classes, or it is not usable.
		plan := pgtest.Column[string](t, w.Owner, fmt.Sprintf(`
			EXPLAIN SELECT DISTINCT aggregate_id FROM dead_letters
			WHERE consumer = 'billing' AND aggregate_id = ANY('{%s}') AND state = 'open' AND aggregate_id IS NOT NULL
				AND class NOT IN ('undecodable', 'bad-id', 'too-old', 'future-id', 'id-reused')`, uuid.New()))
		require.Contains(t, fmt.Sprint(plan), "dead_letters_parking_idx")
	})
}

// TestLookupsOfManyLetters has as many letters as a bad week leaves: what a batch
// asks of them is looked up one by one, also by the plan that is made once for all
// batches.
func TestLookupsOfManyLetters(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	tx, err := w.Owner.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	for _, statement := range []string{
		"ALTER TABLE dead_letters DISABLE TRIGGER dead_letters_closed_by_decision",
		`INSERT INTO dead_letters (id, consumer, topic, partition, "offset", class, detail, state, event_id, tenant_id, aggregate_id, aggregate_version,
			record_hash, record_headers, record_time)
		SELECT uuidv7(), 'billing', 'orders', 0, n, 'rule', '', (ARRAY['open', 'discarded', 'resolved'])[1 + n % 3], uuidv7(),
			gen_random_uuid(), uuidv7(), 1, '', '[]', now() FROM generate_series(1, 9000) AS n`,
		"ANALYZE dead_letters",
	} {
		_, err := tx.Exec(t.Context(), statement)
		require.NoError(t, err)
	}
	query := func(name string) string {
		source, err := os.ReadFile("../db/inbox.sql.go")
		require.NoError(t, err)
		_, rest, found := strings.Cut(string(source), "-- name: "+name+" ")
		require.True(t, found)
		_, rest, _ = strings.Cut(rest, "\n")
		text, _, found := strings.Cut(rest, "`")
		require.True(t, found)
		return text
	}
	for _, name := range []string{"DeadLetterLockForBatch", "DeadLetterListDiscarded"} {
		_, err := tx.Exec(t.Context(), "PREPARE "+name+" AS "+query(name))
		require.NoError(t, err)
		types := pgtest.Column[string](t, tx, "SELECT unnest(parameter_types)::text FROM pg_prepared_statements WHERE name = lower($1)", name)
		values := make([]string, len(types))
		for i, kind := range types {
			values[i] = "'{}'::" + kind
			if !strings.HasSuffix(kind, "[]") {
				values[i] = "'billing'"
			}
		}
		for _, mode := range []string{"force_generic_plan", "force_custom_plan"} {
			_, err = tx.Exec(t.Context(), "SET LOCAL plan_cache_mode = "+mode)
			require.NoError(t, err)
			plan := strings.Join(pgtest.Column[string](t, tx, "EXPLAIN EXECUTE "+name+" ("+strings.Join(values, ", ")+")"), "\n")
			require.NotContains(t, plan, "Seq Scan on dead_letters", mode)
			require.NotContains(t, plan, "dead_letters_record_key", mode)
			require.Regexp(t, "dead_letters_(parking|discarded_event)_idx", plan, mode)
			require.Regexp(t, "dead_letters_(open_event|discarded_place)_idx", plan, mode)
		}
	}
}

// TestDeadLetterNews checks that a record which is a dead letter already is neither
// counted nor named as one again.
func TestDeadLetterNews(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.handler.refuse = refuseMarked

	bad := marked(w.order().Created(), inbox.ClassRule)
	records := w.Deliver(t, bad)
	w.DeliverRecords(t, records...)
	require.Equal(t, 1, w.Counted(t, "rule"))
	require.Zero(t, w.Counted(t, "parked"))
}

// TestDeadLetterNames checks that a dead letter says what is known of its event.
func TestDeadLetterNames(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.handler.refuse = refuseMarked

	bad := marked(w.order().Created(), inbox.ClassRule)
	record := w.Partition.Append(bad)[0]
	record.Partition, record.Offset, record.Time = 5, 77, time.Date(2026, 1, 2, 3, 4, 5, 6_000, time.UTC)
	w.DeliverRecords(t, record)
	requireKept(t, w, record)

	type letter struct {
		Consumer, Topic  string
		Partition        int32
		Offset           int64
		Class            string
		Detail, State    string
		EventID          uuid.UUID
		EventType        string
		TenantID         uuid.UUID
		AggregateID      uuid.UUID
		AggregateVersion int64
		Time             time.Time
	}
	letters := pgtest.Rows[letter](t, w.Owner, `
		SELECT consumer, topic, partition, "offset", class, detail, state,
			event_id, event_type, tenant_id, aggregate_id, aggregate_version, record_time AT TIME ZONE 'UTC' FROM dead_letters`)
	require.Equal(t, []letter{{
		"billing", event.OrderEvents, 5, 77, "rule", "refused by the test", "open",
		bad.ID, "OrderCreated", w.tenant, bad.AggregateID, 1, record.Time,
	}}, letters)
}

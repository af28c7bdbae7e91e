package deadletters_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/deadletters"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
)

// decision is what a test looks at of a decision.
type decision struct {
	EventID uuid.UUID
	Action  string
	Outcome string
	Class   string
	Reason  string
	By      string
}

func (w *world) decisions(t *testing.T) []decision {
	t.Helper()
	return pgtest.Rows[decision](t, w.Owner, `
		SELECT letter.event_id, action, outcome, coalesce(d.class, ''), coalesce(reason, ''), decided_by
		FROM dead_letter_decisions AS d JOIN dead_letters AS letter ON letter.id = d.dead_letter_id ORDER BY d.id`)
}

func TestRetry(t *testing.T) {
	t.Parallel()

	// setup has an order whose payment is refused, with two refunds behind it.
	setup := func(t *testing.T) (*world, *factory.Order, []event.Event) {
		w := newWorld(t)
		w.refuse(t)
		order := w.order()
		events := []event.Event{order.Created(), bad(order.Paid()), order.Refunded(1), order.Refunded(2)}
		w.Deliver(t, events...)
		require.Len(t, w.DeadLetters(t), 3)
		return w, order, events
	}

	t.Run("AppliesALetterAndWhatWaitsBehindItInOrder", func(t *testing.T) {
		t.Parallel()
		w, order, events := setup(t)

		w.mend(t)
		report := w.retry(t, deadletters.Filter{IDs: []uuid.UUID{w.letter(t, events[1]).ID}})
		require.Equal(t, []inbox.Outcome{"applied", "applied", "applied"}, outcomes(report))
		require.True(t, report.Letters[0].Named)
		require.False(t, report.Letters[1].Named)
		require.Equal(t, []deadletters.Change{{
			TenantID: w.tenant, OrderID: order.State.OrderID,
			Before: deadletters.Books{Version: 1, Open: 1, Parked: 2},
			After:  deadletters.Books{Version: 4, Invoices: 1, CreditNotes: 2, LedgerEntries: 3},
		}}, report.Orders)
		w.requireSettled(t, order, 2)
		require.Equal(t, []string{"resolved", "resolved", "resolved"}, w.states(t))
		require.Equal(t, []decision{
			{events[1].ID, "retried", "applied", "", "", "test"},
			{events[2].ID, "retried", "applied", "", "", "test"},
			{events[3].ID, "retried", "applied", "", "", "test"},
		}, w.decisions(t))
		type mark struct {
			EventID   uuid.UUID
			Partition int32
			Offset    int64
		}
		require.Equal(t, []mark{{events[1].ID, 0, 1}}, pgtest.Rows[mark](t, w.Owner, `
			SELECT event_id, partition, "offset" FROM processed_events WHERE event_id = $1`, events[1].ID), "its own id, from its own place")

		next := order.Refunded(3)
		w.Deliver(t, next)
		w.requireSettled(t, order, 3)
	})

	t.Run("ChangesNothingTheSecondTime", func(t *testing.T) {
		t.Parallel()
		w, order, events := setup(t)

		w.mend(t)
		letter := w.letter(t, events[1]).ID
		w.retry(t, deadletters.Filter{IDs: []uuid.UUID{letter}})
		before := w.Contents(t)
		report := w.retry(t, deadletters.Filter{IDs: []uuid.UUID{letter}})
		require.Equal(t, []inbox.Outcome{deadletters.OutcomeNothing}, outcomes(report))
		require.Equal(t, "resolved", report.Letters[0].State)
		require.Empty(t, w.retry(t, of(order)).Letters, "nothing is open")
		w.discard(t, "too late", events[1])
		require.Equal(t, before, w.Contents(t))
	})

	t.Run("OfOneThatWaitsTriesWhatItWaitsFor", func(t *testing.T) {
		t.Parallel()
		w, order, events := setup(t)

		w.mend(t)
		report := w.retry(t, deadletters.Filter{EventID: events[3].ID})
		require.Equal(t, []inbox.Outcome{"applied", "applied", "applied"}, outcomes(report))
		require.True(t, report.Letters[2].Named)
		w.requireSettled(t, order, 2)
	})

	t.Run("ThatFailsAgainSaysSoAndHoldsTheRest", func(t *testing.T) {
		t.Parallel()
		w, order, events := setup(t)

		type kept struct {
			Class, Detail string
			Attempts      int
			Later         bool
			Headers       string
			Value         []byte
		}
		read := func() []kept {
			return pgtest.Rows[kept](t, w.Owner, `
				SELECT class, detail, attempts, last_failed_at > first_failed_at, record_headers::text, record_value
				FROM dead_letters ORDER BY id`)
		}
		before := read()
		for attempt := range 3 {
			report := w.retry(t, of(order))
			require.Equal(t, []inbox.Outcome{"failed", "parked", "parked"}, outcomes(report))
			require.Equal(t, inbox.ClassData, report.Letters[0].NewClass)
			require.Contains(t, report.Letters[0].NewDetail, "invoices_customer_known")
			require.Equal(t, report.Orders[0].Before, report.Orders[0].After)

			after := read()
			require.Equal(t, 2+attempt, after[0].Attempts)
			require.True(t, after[0].Later)
			require.Equal(t, before[0].Headers, after[0].Headers, "they do not grow")
			require.Equal(t, before[0].Value, after[0].Value)
			require.Equal(t, before[1:], after[1:], "what was not tried is as it was")
		}
		require.Equal(t, []decision{
			{events[1].ID, "retried", "failed", "data", "", "test"},
			{events[1].ID, "retried", "failed", "data", "", "test"},
			{events[1].ID, "retried", "failed", "data", "", "test"},
		}, w.decisions(t))
		w.requireNothingBehindNothing(t)
	})

	t.Run("FailsInAnotherWay", func(t *testing.T) {
		t.Parallel()
		w, order, events := setup(t)

		w.mend(t)
		w.Exec(t, "ALTER TABLE credit_notes ADD CONSTRAINT credit_notes_none CHECK (false) NOT VALID")
		report := w.retry(t, of(order))
		require.Equal(t, []inbox.Outcome{"applied", "failed", "parked"}, outcomes(report))
		require.Equal(t, inbox.ClassData, w.letter(t, events[2]).Class, "it is the one at fault now")
		require.Contains(t, w.letter(t, events[2]).Detail, "credit_notes_none")
		require.EqualValues(t, 2, w.letter(t, events[2]).Attempts)
		w.requireNothingBehindNothing(t)

		w.Exec(t, "ALTER TABLE credit_notes DROP CONSTRAINT credit_notes_none")
		w.retry(t, of(order))
		w.requireSettled(t, order, 2)
	})

	t.Run("GoesByVersionAndNotByArrival", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		// The payment got lost; it was published again when the refund had failed for
		// want of it, and is parked behind the refund.
		order := w.order()
		created, paid, refunded := order.Created(), order.Paid(), order.Refunded(1)
		w.Deliver(t, created, refunded)
		w.Deliver(t, paid)
		require.Equal(t, map[uuid.UUID]inbox.Class{refunded.ID: inbox.ClassGap, paid.ID: inbox.ClassParked}, w.Classes(t))
		report := w.retry(t, of(order))
		require.Equal(t, []inbox.Outcome{"applied", "applied"}, outcomes(report))
		require.Equal(t, paid.ID, *report.Letters[0].EventID)
		w.requireSettled(t, order, 1)
	})

	t.Run("OfAnEventThatIsThereTwice", func(t *testing.T) {
		t.Parallel()
		w, order, events := setup(t)

		w.Deliver(t, events[1], events[2]) // the relay sent them again
		require.Len(t, w.DeadLetters(t), 5)
		w.mend(t)
		report := w.retry(t, of(order))
		require.Equal(t, []inbox.Outcome{"applied", "duplicate", "applied", "duplicate", "applied"}, outcomes(report))
		w.requireSettled(t, order, 2)
	})

	t.Run("OfAnEventThatWasAppliedMeanwhile", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.refuse(t)

		// An id that was refused is free: another event with it was applied.
		order, other := w.order(), w.order()
		created := order.Created()
		paid := bad(order.Paid())
		w.Deliver(t, created, paid)
		theirs := other.Created()
		theirs.ID = paid.ID
		w.Deliver(t, theirs)
		w.mend(t)
		later := order.Refunded(1)
		w.Deliver(t, later)
		report := w.retry(t, of(order))
		require.Equal(t, []inbox.Outcome{"failed", "failed"}, outcomes(report))
		require.Equal(t, inbox.ClassIDReused, report.Letters[0].NewClass)
		require.Equal(t, inbox.ClassGap, report.Letters[1].NewClass, "no longer held, and without its payment")
		w.requireNothingBehindNothing(t)
	})

	t.Run("OfWhatHoldsNothingBack", func(t *testing.T) {
		t.Parallel()
		w, order, events := setup(t)

		records := w.Partition.Append(order.Refunded(5), order.Refunded(6))
		records[0].Value = []byte("not JSON")
		records[1].Value, records[1].Headers = []byte("not JSON"), nil
		w.DeliverRecords(t, records...)
		letters, _, err := w.letters.List(t.Context(), deadletters.Filter{Classes: []inbox.Class{inbox.ClassUndecodable}}, uuid.Nil, 10)
		require.NoError(t, err)
		require.Len(t, letters, 2)
		require.NotNil(t, letters[0].OrderID)
		require.Nil(t, letters[1].OrderID, "nobody knows whose it is")
		report := w.retry(t, deadletters.Filter{Classes: []inbox.Class{inbox.ClassUndecodable}})
		require.Equal(t, []inbox.Outcome{"failed", "failed"}, outcomes(report))
		require.Len(t, report.Orders, 1)
		require.EqualValues(t, 1, w.letter(t, events[1]).Attempts, "nobody else was tried")
	})

	t.Run("OfAnIDFromTheFutureWhoseTimeHasCome", func(t *testing.T) {
		t.Parallel()
		w, order, events := setup(t)

		// Of the same order as what holds: it has to wait in its place.
		early := order.Refunded(5)
		early.ID = factory.ID(time.Now().Add(30 * time.Hour))
		w.Deliver(t, early)
		require.Equal(t, inbox.ClassFutureID, w.letter(t, early).Class)
		w.Exec(t, "UPDATE dead_letters SET record_headers = replace(record_headers::text, $1, $2)::jsonb, event_id = $3 WHERE event_id = $4",
			header(early.ID), header(events[0].ID), events[0].ID, early.ID)
		report := w.retry(t, deadletters.Filter{Classes: []inbox.Class{inbox.ClassFutureID}})
		require.Equal(t, []inbox.Outcome{"failed"}, outcomes(report))
		require.Equal(t, inbox.ClassIDReused, report.Letters[0].NewClass)

		fresh := factory.ID(time.Now())
		w.Exec(t, "UPDATE dead_letters SET class = 'future-id', record_headers = replace(record_headers::text, $1, $2)::jsonb, event_id = $3 WHERE event_id = $4",
			header(events[0].ID), header(fresh), fresh, events[0].ID)
		report = w.retry(t, deadletters.Filter{Classes: []inbox.Class{inbox.ClassFutureID}})
		require.Equal(t, []inbox.Outcome{"parked"}, outcomes(report))
		w.mend(t)
		require.Equal(t, []inbox.Outcome{"applied", "applied", "applied", "applied"}, outcomes(w.retry(t, of(order))))
		w.requireSettled(t, order, 3)
	})

	t.Run("OfManyOrdersTakesEachByItself", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.refuse(t)

		var good, still []*factory.Order
		for i := range 6 {
			order := w.order()
			payment := bad(order.Paid())
			if i%2 == 0 { // this one stays bad
				payment = factory.Altered(payment, func(state *event.Order) { state.NetAmount++ })
				still = append(still, order)
			} else {
				good = append(good, order)
			}
			w.Deliver(t, payment, order.Refunded(1))
		}
		w.mend(t)
		report := w.retry(t, deadletters.Filter{Classes: []inbox.Class{inbox.ClassData, inbox.ClassRule}})
		require.Len(t, report.Letters, 12)
		require.Len(t, report.Orders, 6)
		for _, change := range report.Orders {
			if change.OrderID == good[0].State.OrderID {
				require.Equal(t, deadletters.Books{Version: 3, Invoices: 1, CreditNotes: 1, LedgerEntries: 2}, change.After)
			}
			if change.OrderID == still[0].State.OrderID {
				require.Equal(t, change.Before, change.After)
			}
		}
		w.requireNothingBehindNothing(t)
	})

	t.Run("IsBounded", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.refuse(t)

		for range 5 {
			w.Deliver(t, bad(w.order().Paid()))
		}
		w.mend(t)
		filter := deadletters.Filter{Classes: []inbox.Class{inbox.ClassData}}
		report := w.retry(t, filter, deadletters.Act{By: "test", Limit: 2})
		require.Len(t, report.Letters, 2)
		require.True(t, report.More)
		report = w.retry(t, filter)
		require.Len(t, report.Letters, 3)
		require.False(t, report.More)
	})

	t.Run("IsRefusedWithoutASelection", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		for name, filter := range map[string]deadletters.Filter{
			"Nothing": {}, "AnUnknownClass": {Classes: []inbox.Class{"bad"}}, "AnUnknownState": {States: []string{"shut"}},
			"ATimeBackwards": {Since: time.Now(), Until: time.Now().Add(-time.Hour)}, "AZeroByte": {Consumer: "a\x00"},
		} {
			_, err := w.letters.Retry(t.Context(), filter, deadletters.Act{By: "test"})
			require.ErrorIs(t, err, deadletters.ErrSelection, name)
		}
		_, err := w.letters.Retry(t.Context(), deadletters.Filter{IDs: []uuid.UUID{uuid.New()}}, deadletters.Act{By: "test"})
		require.ErrorIs(t, err, deadletters.ErrNotFound)
		for _, by := range []string{"", " ", strings.Repeat("x", 201), "a\x00"} {
			_, err := w.letters.Retry(t.Context(), deadletters.Filter{Consumer: "billing"}, deadletters.Act{By: by})
			require.ErrorContains(t, err, "needs a name")
		}
	})
}

// header is an id as a letter's headers have it.
func header(id uuid.UUID) string { return base64Of(id.String()) }

func TestDiscard(t *testing.T) {
	t.Parallel()

	setup := func(t *testing.T) (*world, *factory.Order, []event.Event) {
		w := newWorld(t)
		order := w.order()
		wrong := factory.Altered(order.Paid(), func(state *event.Order) { state.NetAmount++ })
		events := []event.Event{wrong, order.Refunded(1), order.Refunded(2)}
		w.Deliver(t, events...)
		return w, order, events
	}

	t.Run("NeedsAReason", func(t *testing.T) {
		t.Parallel()
		w, _, events := setup(t)

		before := w.Contents(t)
		filter := deadletters.Filter{IDs: []uuid.UUID{w.letter(t, events[0]).ID}}
		for _, reason := range []string{"", "  ", "\t\n", "\u200b", strings.Repeat("x", 2001), "a\x00b", "\xff"} {
			_, err := w.letters.Discard(t.Context(), filter, deadletters.Act{By: "test", Reason: reason})
			require.ErrorIs(t, err, deadletters.ErrReason, "%q", reason)
		}
		require.Equal(t, before, w.Contents(t))
		_, err := w.Owner.Exec(t.Context(), `
			INSERT INTO dead_letter_decisions (id, dead_letter_id, action, outcome, reason, decided_by)
			VALUES (gen_random_uuid(), $1, 'discarded', 'discarded', ' ', 'x')`, filter.IDs[0])
		require.Equal(t, "23514", postgres.Code(err), "nor does the database take one without")
	})

	t.Run("ReleasesThoseBehindIt", func(t *testing.T) {
		t.Parallel()
		w, order, events := setup(t)

		report := w.discard(t, " sums wrong, refunded by hand ", events[0])
		require.Equal(t, []inbox.Outcome{"discarded", "failed", "parked"}, outcomes(report), "its refunds have no payment")
		require.Equal(t, inbox.ClassGap, report.Letters[1].NewClass)
		require.Equal(t, []decision{
			{events[0].ID, "discarded", "discarded", "", "sums wrong, refunded by hand", "test"},
			{events[1].ID, "retried", "failed", "gap", "", "test"},
		}, w.decisions(t))
		w.requireNothingBehindNothing(t)

		// What is right in itself is applied.
		right := w.order()
		wrong := factory.Altered(right.Created(), func(state *event.Order) { state.NetAmount++ })
		w.Deliver(t, wrong, right.Paid(), right.Refunded(1))
		report = w.discard(t, "sums wrong", wrong)
		require.Equal(t, []inbox.Outcome{"discarded", "applied", "applied"}, outcomes(report))
		require.Equal(t, deadletters.Books{Version: 3, Invoices: 1, CreditNotes: 1, LedgerEntries: 2}, report.Orders[0].After)
		require.NotEmpty(t, w.retry(t, of(order)).Letters)
	})

	t.Run("OfOneThatWaitsLeavesTheOthersWaiting", func(t *testing.T) {
		t.Parallel()
		w, _, events := setup(t)

		report := w.discard(t, "not this one", events[1])
		require.Equal(t, []inbox.Outcome{"discarded"}, outcomes(report))
		require.Equal(t, map[uuid.UUID]inbox.Class{events[0].ID: inbox.ClassRule, events[1].ID: inbox.ClassParked, events[2].ID: inbox.ClassParked}, w.Classes(t))
		require.EqualValues(t, 1, w.letter(t, events[0]).Attempts, "nobody tried it")
		w.requireNothingBehindNothing(t)
	})

	t.Run("OfAllOfAnOrder", func(t *testing.T) {
		t.Parallel()
		w, order, events := setup(t)

		report, err := w.letters.Discard(t.Context(), of(order), deadletters.Act{By: "test", Reason: "of a test customer"})
		require.NoError(t, err)
		require.Equal(t, []inbox.Outcome{"discarded", "discarded", "discarded"}, outcomes(report))
		require.Len(t, w.decisions(t), len(events))
		require.Empty(t, w.Applied(t))
	})

	t.Run("IsFinal", func(t *testing.T) {
		t.Parallel()
		w, _, events := setup(t)

		w.discard(t, "wrong", events[0])
		letter := w.letter(t, events[0]).ID
		before := w.Contents(t)
		report := w.retry(t, deadletters.Filter{IDs: []uuid.UUID{letter}})
		require.Equal(t, []inbox.Outcome{deadletters.OutcomeNothing}, outcomes(report))
		require.Equal(t, "discarded", report.Letters[0].State)
		require.Equal(t, []inbox.Outcome{deadletters.OutcomeNothing}, outcomes(w.discard(t, "twice", events[0])))
		require.Equal(t, before, w.Contents(t))

		for _, pool := range []string{"worker", ""} {
			for _, statement := range []string{
				"UPDATE dead_letters SET state = 'open' WHERE state = 'discarded'",
				"UPDATE dead_letters SET detail = 'never' WHERE state = 'discarded'",
				"UPDATE dead_letters SET state = 'resolved' WHERE state = 'open'", // nobody has decided so
				"UPDATE dead_letters SET state = 'discarded' WHERE state = 'open'",
				`INSERT INTO dead_letter_decisions (id, dead_letter_id, action, outcome, decided_by)
					SELECT uuidv7(), id, 'retried', 'applied', 'x' FROM dead_letters WHERE state = 'open'`, // and it is not
				"DELETE FROM dead_letters",
				"TRUNCATE dead_letters CASCADE",
				"UPDATE dead_letter_decisions SET reason = 'another'",
				"DELETE FROM dead_letter_decisions",
				"TRUNCATE dead_letter_decisions",
			} {
				_, err := w.DB.Pool(t, pool).Exec(t.Context(), statement)
				require.Equal(t, "42501", postgres.Code(err), "%s as %q: %v", statement, pool, err)
			}
		}
		for _, statement := range []string{"UPDATE dead_letters SET record_value = '{}'", "UPDATE dead_letters SET event_id = gen_random_uuid()",
			"UPDATE dead_letters SET record_headers = '[]'", `UPDATE dead_letters SET "offset" = 7`, "DELETE FROM dead_letters"} {
			_, err := w.DB.Pool(t, "worker").Exec(t.Context(), statement)
			require.Equal(t, "42501", postgres.Code(err), "%s: %v", statement, err)
		}
	})
}

// TestComesAgain is a record that is delivered once more when its dead letter is
// closed: offsets that were not committed, a replay, a relay that sends twice.
func TestComesAgain(t *testing.T) {
	t.Parallel()

	t.Run("ResolvedIsADuplicate", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.refuse(t)

		order := w.order()
		events := []event.Event{bad(order.Paid()), order.Refunded(1)}
		records := w.Deliver(t, events...)
		w.mend(t)
		w.retry(t, of(order))
		before := w.Contents(t)
		w.DeliverRecords(t, records...)
		w.Deliver(t, events...)
		require.Equal(t, before, w.Contents(t))
		require.Equal(t, 4, w.Counted(t, "duplicate"))
	})

	t.Run("DiscardedStaysDiscarded", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.refuse(t)

		order := w.order()
		created := bad(order.Created())
		w.Exec(t, "ALTER TABLE order_billing ADD CONSTRAINT order_billing_none CHECK (false) NOT VALID")
		records := w.Deliver(t, created)
		require.Equal(t, inbox.ClassData, w.Classes(t)[created.ID])
		w.discard(t, "a test", created)
		w.Exec(t, "ALTER TABLE order_billing DROP CONSTRAINT order_billing_none") // it could be applied now
		before := w.Contents(t)
		w.DeliverRecords(t, records...)
		w.Deliver(t, created, created)
		require.Equal(t, before, w.Contents(t), "neither applied nor open again")
		require.Equal(t, 3, w.Counted(t, "discarded"))

		// In the middle of a batch, others are not touched by it.
		paid, other := order.Paid(), w.order().Created()
		w.Deliver(t, other, created, paid)
		require.ElementsMatch(t, []uuid.UUID{paid.ID, other.ID}, w.Applied(t))
	})

	t.Run("DiscardedWithAnotherContentIsAnotherEvent", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order := w.order()
		paid := order.Paid()
		wrong := factory.Altered(paid, func(state *event.Order) { state.NetAmount++ })
		w.Deliver(t, wrong)
		w.discard(t, "sums wrong; the producer sends it again", wrong)
		w.Deliver(t, paid) // the same id, put right
		require.Equal(t, []uuid.UUID{paid.ID}, w.Applied(t))
		w.requireSettled(t, order, 0)
	})

	t.Run("DiscardedWithAnotherSchemaVersionIsAnotherEvent", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order := w.order()
		paid := order.Paid()
		wrong := paid
		wrong.SchemaVersion = 7
		w.Deliver(t, wrong)
		require.Equal(t, inbox.ClassUnknownSchema, w.Classes(t)[paid.ID])
		w.discard(t, "no such schema; the producer sends it again", wrong)
		w.Deliver(t, wrong)
		require.Equal(t, 1, w.Counted(t, "discarded"))
		w.Deliver(t, paid) // nothing but a header is another
		require.Equal(t, []uuid.UUID{paid.ID}, w.Applied(t))
		w.requireSettled(t, order, 0)
	})

	t.Run("UndecodableStaysDiscarded", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		records := w.Partition.Append(w.order().Created(), w.order().Created())
		records[0].Value = []byte("not JSON")
		w.DeliverRecords(t, records...)
		letters, _, err := w.letters.List(t.Context(), deadletters.Filter{States: []string{"open"}}, uuid.Nil, 10)
		require.NoError(t, err)
		_, err = w.letters.Discard(t.Context(), deadletters.Filter{IDs: []uuid.UUID{letters[0].ID}}, deadletters.Act{By: "test", Reason: "noise"})
		require.NoError(t, err)
		before := w.Contents(t)
		w.DeliverRecords(t, records...)
		require.Equal(t, before, w.Contents(t))
		require.Equal(t, 1, w.Counted(t, "discarded"))

		// At its place in a topic that was made anew there is another record.
		again := w.Partition.Append(w.order().Created())
		again[0].Offset = records[0].Offset
		w.DeliverRecords(t, again...)
		require.Len(t, w.Applied(t), 2)
	})

	t.Run("DiscardedTwin", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		// The same event is there twice; one decision is for both.
		order := w.order()
		wrong := factory.Altered(order.Created(), func(state *event.Order) { state.NetAmount++ })
		w.Deliver(t, wrong)
		w.Deliver(t, wrong, order.Paid())
		letters, _, err := w.letters.List(t.Context(), deadletters.Filter{EventID: wrong.ID}, uuid.Nil, 10)
		require.NoError(t, err)
		require.Len(t, letters, 2)
		report, err := w.letters.Discard(t.Context(), deadletters.Filter{IDs: []uuid.UUID{letters[0].ID}}, deadletters.Act{By: "test", Reason: "wrong"})
		require.NoError(t, err)
		require.Equal(t, []inbox.Outcome{"discarded", "discarded", "applied"}, outcomes(report))
		require.Equal(t, []string{"discarded", "discarded", "resolved"}, w.states(t))
	})
}

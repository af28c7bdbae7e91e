package deadletters_test

import (
	"encoding/base64"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/deadletters"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/pgtest"
)

func base64Of(text string) string { return base64.StdEncoding.EncodeToString([]byte(text)) }

// TestPreview: each thing that can become of a letter is said before, nothing is
// changed by saying it, and then it comes to pass.
func TestPreview(t *testing.T) {
	t.Parallel()

	// foretell previews, checks that no table changed, does it, and checks that it came as said.
	foretell := func(t *testing.T, w *world, filter deadletters.Filter) deadletters.Report {
		t.Helper()
		before := w.Contents(t)
		said := w.retry(t, filter, preview)
		require.True(t, said.Preview)
		require.Equal(t, before, w.Contents(t), "a preview changes nothing")
		done := w.retry(t, filter)
		require.Equal(t, outcomes(said), outcomes(done))
		require.Equal(t, said.Orders, done.Orders)
		for i, letter := range said.Letters {
			require.Equal(t, letter.NewClass, done.Letters[i].NewClass)
			require.Equal(t, letter.Stale, done.Letters[i].Stale)
		}
		return done
	}

	t.Run("WouldApply", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.refuse(t)

		order := w.order()
		w.Deliver(t, bad(order.Paid()), order.Refunded(1))
		w.mend(t)
		require.Equal(t, []inbox.Outcome{"applied", "applied"}, outcomes(foretell(t, w, of(order))))
		other := w.order()
		w.Deliver(t, other.Paid())
		require.Equal(t, []int64{1, 2}, pgtest.Column[int64](t, w.Owner, "SELECT number FROM invoices ORDER BY 1"), "no number was used up")
	})

	t.Run("WouldBeADuplicate", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.refuse(t)

		order := w.order()
		paid := bad(order.Paid())
		w.Deliver(t, paid)
		w.Deliver(t, paid)
		w.mend(t)
		require.Equal(t, []inbox.Outcome{"applied", "duplicate"}, outcomes(foretell(t, w, of(order))))
	})

	t.Run("WouldBeStale", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		// Two credit notes were made, of versions 2 and 4; that of version 3 is told later, when the
		// view is at 4.
		order := w.order()
		paid, first, late, last := order.Paid(), order.Refunded(1), order.Refunded(2), order.Refunded(3)
		w.Deliver(t, paid, first)
		w.Deliver(t, last)
		w.Exec(t, "ALTER TABLE credit_notes ADD CONSTRAINT credit_notes_none CHECK (false) NOT VALID")
		w.Deliver(t, late)
		require.Equal(t, inbox.ClassData, w.Classes(t)[late.ID])
		w.Exec(t, "ALTER TABLE credit_notes DROP CONSTRAINT credit_notes_none")
		done := foretell(t, w, of(order))
		require.Equal(t, []inbox.Outcome{"applied"}, outcomes(done))
		require.True(t, done.Letters[0].Stale)
		require.Equal(t, int64(5), done.Letters[0].ViewVersion)
		require.Equal(t, deadletters.Books{Version: 5, Invoices: 1, CreditNotes: 3, LedgerEntries: 4}, done.Orders[0].After,
			"dedupe decides, and not the version guard")
	})

	t.Run("WouldStayParkedAndFailAgain", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order := w.order()
		wrong := factory.Altered(order.Paid(), func(state *event.Order) { state.NetAmount++ })
		w.Deliver(t, wrong, order.Refunded(1))
		done := foretell(t, w, of(order))
		require.Equal(t, []inbox.Outcome{"failed", "parked"}, outcomes(done))
		require.Equal(t, inbox.ClassRule, done.Letters[0].NewClass)
		require.NotEmpty(t, done.Letters[0].NewDetail)
	})

	t.Run("WouldFailAtTheCommit", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.refuse(t)

		// A constraint that is checked at the commit names its culprit all the same.
		order, other := w.order(), w.order()
		w.Deliver(t, bad(order.Paid()), order.Refunded(1))
		w.Deliver(t, bad(other.Paid()))
		w.mend(t)
		w.Exec(t, `
			CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
			BEGIN
				RAISE EXCEPTION 'not this one' USING ERRCODE = 'check_violation', CONSTRAINT = 'at_the_commit';
			END $$;
			CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON credit_notes DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse()`)
		done := foretell(t, w, of(order))
		require.Equal(t, []inbox.Outcome{"applied", "failed"}, outcomes(done))
		require.Equal(t, inbox.ClassData, done.Letters[1].NewClass)
		require.Contains(t, done.Letters[1].NewDetail, "not this one")
	})

	t.Run("OfADiscard", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		order := w.order()
		wrong := factory.Altered(order.Created(), func(state *event.Order) { state.NetAmount++ })
		w.Deliver(t, wrong, order.Paid(), order.Refunded(1))
		filter := deadletters.Filter{IDs: []uuid.UUID{w.letter(t, wrong).ID}}
		before := w.Contents(t)
		said, err := w.letters.Discard(t.Context(), filter, preview)
		require.NoError(t, err)
		require.Equal(t, []inbox.Outcome{"discarded", "applied", "applied"}, outcomes(said))
		require.Equal(t, before, w.Contents(t))
		done := w.discard(t, "wrong", wrong)
		require.Equal(t, outcomes(said), outcomes(done))
		require.Equal(t, said.Orders, done.Orders)
	})

	t.Run("OfManyCutInHalvesByTheDatabase", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		w.refuse(t)

		// The database does not say whose fault it is: the letters are halved until
		// it stands alone, and those behind it are held though they came in another half.
		order := w.order()
		events := []event.Event{bad(order.Paid())}
		for range 8 {
			events = append(events, order.Refunded(1))
		}
		w.Deliver(t, events...)
		w.mend(t)
		w.Exec(t, "ALTER TABLE credit_notes ADD CONSTRAINT credit_notes_few CHECK (ordinal < 4) NOT VALID")
		done := foretell(t, w, of(order))
		require.Equal(t, []inbox.Outcome{"applied", "applied", "applied", "applied", "failed", "parked", "parked", "parked", "parked"}, outcomes(done))
		w.requireNothingBehindNothing(t)
		w.Exec(t, "ALTER TABLE credit_notes DROP CONSTRAINT credit_notes_few")
		foretell(t, w, of(order))
		w.requireSettled(t, order, 8)
	})
}

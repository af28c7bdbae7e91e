package httpapi_test

import (
	"bytes"
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
)

func TestReceipt(t *testing.T) {
	t.Parallel()

	// at reads a value inside JSON by names and indexes.
	at := func(value any, path ...any) any {
		for _, step := range path {
			switch step := step.(type) {
			case string:
				value = value.(map[string]any)[step]
			case int:
				value = value.([]any)[step]
			}
		}
		return value
	}

	t.Run("GoesAsFarAsTheOrderHasGot", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		path := w.order()
		receipt := w.get(path + "/receipt").json()
		require.Equal(t, false, receipt["complete"])
		require.Equal(t, []any{"OrderCreated, version 1: to be published and applied by billing"}, receipt["waits_for"])
		require.Len(t, receipt["events"], 1)
		require.Equal(t, "order.events", at(receipt, "events", 0, "topic"))
		require.Equal(t, []any{}, at(receipt, "events", 0, "applied"))
		require.Nil(t, receipt["invoice"])
		for _, list := range []string{"credit_notes", "ledger_entries", "dead_letters"} {
			require.Equal(t, []any{}, receipt[list], "%s: an empty list, not null", list)
		}

		records := w.records()
		records[0].Partition = 3
		w.offset = 41
		w.deliver(records...)
		receipt = w.get(path + "/receipt").json()
		require.Equal(t, true, receipt["complete"], "an order that nobody paid has nothing else to come")
		require.Equal(t, []any{}, receipt["waits_for"])
		applied := at(receipt, "events", 0, "applied", 0)
		require.Equal(t, "billing", at(applied, "consumer"))
		require.Equal(t, "order.events", at(applied, "topic"))
		require.EqualValues(t, 3, at(applied, "partition"))
		require.EqualValues(t, 41, at(applied, "offset"))

		require.Equal(t, http.StatusOK, w.post(path+"/pay", `{"payment_reference":"pi_1"}`).Code)
		receipt = w.get(path + "/receipt").json()
		require.Equal(t, false, receipt["complete"])
		require.Equal(t, []any{"OrderPaid, version 2: to be published and applied by billing"}, receipt["waits_for"])

		w.bill()
		receipt = w.get(path + "/receipt").json()
		require.Equal(t, true, receipt["complete"])
		require.EqualValues(t, 41, at(receipt, "events", 0, "applied", 0, "offset"), "where it was applied, not where it came again")
		require.EqualValues(t, 2975, at(receipt, "invoice", "total_amount"))
		require.Len(t, receipt["ledger_entries"], 1)
		require.Equal(t, at(receipt, "events", 1, "event_id"), at(receipt, "ledger_entries", 0, "event_id"))
		require.Equal(t, at(receipt, "events", 1, "event_id"), at(receipt, "invoice", "id"))
		require.Len(t, at(receipt, "ledger_entries", 0, "lines"), 2)
		require.Equal(t, "billing.events", at(receipt, "events", 2, "topic"))
		require.Equal(t, "InvoiceIssued", at(receipt, "events", 2, "type"))
	})

	t.Run("ShowsWhatIsDeadAndWhatWaitsBehindIt", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		path := w.paidOrder()
		require.Equal(t, http.StatusCreated, w.post(path+"/refunds", `{"amount":500,"reason":"damaged"}`).Code)
		require.Equal(t, http.StatusCreated, w.post(path+"/refunds", `{"amount":1,"reason":"damaged"}`).Code)
		records := w.records()
		require.Len(t, records, 4)
		w.deliver(records[0], records[2]) // OrderPaid got lost
		w.deliver(records[3])

		receipt := w.get(path + "/receipt").json()
		require.Equal(t, false, receipt["complete"])
		require.Nil(t, receipt["invoice"])
		letters := receipt["dead_letters"].([]any)
		require.Len(t, letters, 2)
		require.Equal(t, "gap", at(letters, 0, "class"))
		require.Equal(t, "parked", at(letters, 1, "class"))
		require.Equal(t, "open", at(letters, 0, "state"))
		require.Equal(t, at(receipt, "events", 2, "event_id"), at(letters, 0, "event_id"))
		waits := receipt["waits_for"].([]any)
		require.Len(t, waits, 3)
		require.Contains(t, waits[0], "OrderPaid, version 2: missing since ", "the refund waits for it")
		require.Contains(t, waits[1], "OrderRefunded, version 3: dead letter "+at(letters, 0, "id").(string)+" (gap: ")
		require.Contains(t, waits[2], "(parked: ")
	})

	t.Run("ShowsWhatBillingMisses", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		path := w.paidOrder()
		records := w.records()
		w.deliver(records[1]) // OrderCreated got lost
		receipt := w.get(path + "/receipt").json()
		require.NotNil(t, receipt["invoice"])
		require.Equal(t, false, receipt["complete"])
		require.Len(t, receipt["missing_versions"], 1)
		require.EqualValues(t, 1, at(receipt, "missing_versions", 0, "version"))
		since := at(receipt, "missing_versions", 0, "missing_since").(string)
		require.Len(t, receipt["waits_for"], 1)
		require.Contains(t, at(receipt, "waits_for", 0), "OrderCreated, version 1: missing since "+since[:19])

		w.exec("DELETE FROM outbox_events WHERE event_type = 'OrderCreated'")
		receipt = w.get(path + "/receipt").json()
		require.Len(t, receipt["waits_for"], 1)
		require.Contains(t, at(receipt, "waits_for", 0), "version 1: missing since ", "though the outbox has it no more")

		w.deliver(records[0])
		receipt = w.get(path + "/receipt").json()
		require.Equal(t, true, receipt["complete"])
		require.NotContains(t, receipt, "missing_versions")
	})

	t.Run("ShowsWhatWasDiscarded", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		path := w.paidOrder()
		records := w.records()
		w.deliver(records[0])
		records[1].Value = bytes.Replace(records[1].Value, []byte(`"net_amount":`), []byte(`"net_amount":1`), 1)
		w.deliver(records[1])
		receipt := w.get(path + "/receipt").json()
		require.Equal(t, "open", at(receipt, "dead_letters", 0, "state"))
		require.Len(t, receipt["waits_for"], 1)
		require.NotContains(t, receipt, "discarded")

		w.exec(`
			WITH decision AS (
			  INSERT INTO dead_letter_decisions (id, dead_letter_id, action, outcome, reason, decided_by)
			  SELECT gen_random_uuid(), id, 'discarded', 'discarded', 'sums wrong', 'grace' FROM dead_letters)
			UPDATE dead_letters SET state = 'discarded'`)
		receipt = w.get(path + "/receipt").json()
		require.Equal(t, []any{}, receipt["waits_for"], "it is not to come")
		require.Equal(t, false, receipt["complete"], "and the chain lacks it")
		id := at(receipt, "dead_letters", 0, "id").(string)
		require.Len(t, receipt["discarded"], 1)
		require.Contains(t, at(receipt, "discarded", 0), "OrderPaid, version 2: discarded, and not applied: dead letter "+id)
		require.NotContains(t, at(receipt, "discarded", 0), "grace")

		w.exec("UPDATE outbox_events SET id = uuidv7() WHERE event_type = 'OrderPaid'") // then what was discarded was somebody else's
		receipt = w.get(path + "/receipt").json()
		require.NotContains(t, receipt, "discarded")
		require.Len(t, receipt["waits_for"], 1, "the order's own is still to come")
	})

	t.Run("ShowsOneOrderAlone", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		first, second := w.paidOrder(), w.paidOrder()
		w.bill()
		for _, path := range []string{first, second} {
			receipt := w.get(path + "/receipt").json()
			require.Len(t, receipt["events"], 3)
			require.Len(t, receipt["ledger_entries"], 1)
		}
		require.NotEqual(t, at(w.get(first+"/receipt").json(), "invoice", "number"), at(w.get(second+"/receipt").json(), "invoice", "number"))
	})

	t.Run("LeadsToItsInvoice", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)

		path := w.paidOrder()
		require.Equal(t, []any{}, w.get("/v1/invoices?order_id=" + path[len("/v1/orders/"):]).json()["invoices"])
		w.bill()
		invoice := w.get(path + "/receipt").json()["invoice"].(map[string]any)
		require.Equal(t, invoice, w.get("/v1/invoices/"+invoice["id"].(string)).json())
		require.Equal(t, []any{invoice}, w.get("/v1/invoices?order_id=" + path[len("/v1/orders/"):]).json()["invoices"])
	})
}

// TestTrace follows a request's trace into its event.
func TestTrace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	const parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	traced := func(t *testing.T, header ...string) string {
		w := w.on(t)
		header = append(header, "Idempotency-Key", t.Name())
		created := w.send(http.MethodPost, "/v1/orders", oneBook, header...)
		require.Equal(t, http.StatusCreated, created.Code, created.Body)
		id := created.json()["id"].(string)
		for _, record := range w.records() {
			if string(record.Key) == id {
				e, err := event.Decode(record)
				require.NoError(t, err)
				return e.Traceparent
			}
		}
		require.Fail(t, "no event")
		return ""
	}

	t.Run("IsTakenFromTheRequest", func(t *testing.T) {
		t.Parallel()

		require.Equal(t, parent, traced(t, "traceparent", parent))
		require.Equal(t, parent, traced(t, "Traceparent", parent), "a replay")
	})

	t.Run("IsOfTheRequestThatWasDone", func(t *testing.T) {
		t.Parallel()

		path := w.on(t).order()
		for _, step := range []struct{ path, body, parent string }{
			{path + "/pay", `{"payment_reference":"pi_traced"}`, "00-00000000000000000000000000000001-0000000000000001-00"},
			{path + "/refunds", `{"amount":1,"reason":"damaged"}`, "00-00000000000000000000000000000002-0000000000000002-01"},
		} {
			require.Less(t, w.on(t).send(http.MethodPost, step.path, step.body, "Idempotency-Key", step.parent, "traceparent", step.parent).Code, 300)
		}
		var parents []string
		for _, record := range w.on(t).records() {
			if e, err := event.Decode(record); err == nil && "/v1/orders/"+e.AggregateID.String() == path {
				parents = append(parents, e.Traceparent)
			}
		}
		require.Equal(t, []string{
			"", "00-00000000000000000000000000000001-0000000000000001-00", "00-00000000000000000000000000000002-0000000000000002-01",
		}, parents)
	})

	for name, header := range map[string]string{
		"None": "", "AnotherVersion": "ff" + parent[2:], "Capitals": "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
		"TooLong": parent + "-x", "TooShort": parent[:54], "ZerosForATrace": "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
		"ZerosForAParent": "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01", "Text": "trace", "AZeroByte": parent[:54] + "\x00", "NoUTF8": "\xff",
	} {
		t.Run("IsLeftOutFor"+name, func(t *testing.T) {
			t.Parallel()

			require.Empty(t, traced(t, "traceparent", header))
		})
	}
}

package e2e_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/deadletters"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/kafkatest"
	"github.com/onceledger/onceledger/test/stack"
)

// TestDeadLetters is an operator's walk on a system at work. A record that nobody
// can apply becomes a dead letter, its order waits behind it, other orders go on;
// the commands show it, release it by discarding it, and release another, whose
// cause was mended, by trying it again. Then the books are right.
func TestDeadLetters(t *testing.T) {
	t.Parallel()

	s := stack.New(t)
	api := s.API(t)
	worker := s.Worker(t, "worker", stack.AllRoles)
	stack.StartAll(t, api, worker)
	c := customer{s.NewClient(api), t}
	dlq := func(args ...string) string {
		t.Helper()
		said := run(t, []string{"DATABASE_URL=" + s.Database.URL("worker")}, "onceledger", append([]string{"dlq"}, args...)...)
		require.Zero(t, said.code, said.stderr)
		return said.stdout
	}
	letters := func(filter ...string) (found []deadletters.Letter) {
		t.Helper()
		var document struct {
			Letters []deadletters.Letter `json:"dead_letters"`
		}
		require.NoError(t, json.Unmarshal([]byte(dlq(append([]string{"list", "--json"}, filter...)...)), &document))
		return document.Letters
	}
	place := func(body string) (id, path string) {
		id, _ = c.post(http.StatusCreated, "/v1/orders", body)["id"].(string)
		return id, "/v1/orders/" + id
	}
	pay := func(path string) {
		c.post(http.StatusOK, path+"/pay", `{"payment_reference":"`+uuid.NewString()+`"}`)
		c.post(http.StatusCreated, path+"/refunds", `{"amount":500,"reason":"damaged"}`)
	}

	// Somebody else's record about an order of ours: its sums are wrong.
	forgedID, forgedPath := place(twoBooks)
	c.receipt(forgedPath)
	var tenant uuid.UUID
	require.NoError(t, s.Owner.QueryRow(t.Context(), "SELECT id FROM tenants").Scan(&tenant))
	forged := &factory.Order{TenantID: tenant}
	forged.Created()
	forged.State.OrderID = uuid.MustParse(forgedID)
	record := factory.Altered(forged.Paid(), func(state *event.Order) { state.NetAmount++ }).Record()
	produced := kafkatest.Record{Key: record.Key, Value: record.Value}
	for _, header := range record.Headers {
		produced.Headers = append(produced.Headers, kgo.RecordHeader{Key: header.Key, Value: header.Value})
	}
	s.Broker.Produce(t, event.OrderEvents, produced)
	require.Eventually(t, func() bool { return len(letters()) == 1 }, stack.Patience, stack.Patience/1000)

	// A fault of the database, which is mended later.
	_, err := s.Owner.Exec(t.Context(), "ALTER TABLE invoices ADD CONSTRAINT invoices_email_known CHECK (customer_email <> 'strange@example.com') NOT VALID")
	require.NoError(t, err)
	strangeID, strangePath := place(strings.Replace(twoBooks, "a@example.com", "strange@example.com", 1))

	pay(forgedPath)
	pay(strangePath)
	require.Eventually(t, func() bool { return len(letters()) == 5 }, stack.Patience, stack.Patience/1000)
	for range 5 { // others flow
		_, path := place(twoBooks)
		pay(path)
		require.NotNil(t, c.receipt(path)["invoice"])
	}
	require.Len(t, letters("--class", "parked"), 3)
	waits := fmt.Sprint(c.get(forgedPath + "/receipt")["waits_for"])
	require.Contains(t, waits, "OrderPaid, version 2: dead letter")
	require.Contains(t, waits, "(parked: ")

	require.NoError(t, worker.WaitFor("say what is open", func() (bool, error) {
		status, body, err := worker.Get("/readyz")
		require.NotContains(t, body, `"ready":false`)
		return err == nil && status == http.StatusOK && strings.Contains(body, "2 open (1 data, 1 rule), 3 parked behind them"), err
	}))
	open, err := worker.Metric("onceledger_dead_letters_open", `class="rule"`)
	require.NoError(t, err)
	require.InDelta(t, 1, open, 0)

	// By the command line: look, see what would become of it, discard.
	letter := letters("--class", "rule")[0]
	require.Contains(t, dlq("show", letter.ID.String()), "parked behind it: 2")
	require.Contains(t, dlq("retry", letter.ID.String()), "would fail again as rule")
	out := dlq("discard", letter.ID.String(), "--reason", "forged")
	require.Equal(t, 2, strings.Count(out, "would apply"))
	require.Len(t, letters(), 5, "a preview changes nothing")
	dlq("discard", letter.ID.String(), "--reason", "forged", "--yes")
	require.NotNil(t, c.receipt(forgedPath)["invoice"])

	// It comes again, and stays discarded.
	s.Broker.Produce(t, event.OrderEvents, produced)
	require.NoError(t, worker.WaitFor("see it again", func() (bool, error) {
		discarded, err := worker.Metric("onceledger_inbox_records_total", `outcome="discarded"`)
		return discarded == 1, err
	}))

	// By HTTP, with a key made for it.
	key := run(t, []string{"DATABASE_URL=" + s.Database.URL("")}, "onceledger", "keys", "create", "--operator", "grace")
	require.Zero(t, key.code, key.stderr)
	post := func(path, key string) (status int, report deadletters.Report) {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, worker.URL()+"/v1/operator/dead-letters/"+path,
			strings.NewReader(`{"order_id":"`+strangeID+`"}`))
		require.NoError(t, err)
		request.Header.Set("Authorization", "Bearer "+key)
		response, err := http.DefaultClient.Do(request)
		require.NoError(t, err)
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(text, &report), "%s", text)
		return response.StatusCode, report
	}
	status, _ := post("retry", s.Key)
	require.Equal(t, http.StatusUnauthorized, status, "a tenant's key is none")
	operator := strings.TrimSpace(key.stdout)
	status, report := post("retry?preview=true", operator)
	require.Equal(t, http.StatusOK, status)
	require.Equal(t, "failed", string(report.Letters[0].Outcome))
	_, err = s.Owner.Exec(t.Context(), "ALTER TABLE invoices DROP CONSTRAINT invoices_email_known")
	require.NoError(t, err)
	status, report = post("retry", operator)
	require.Equal(t, http.StatusOK, status)
	require.Len(t, report.Letters, 2)
	require.Equal(t, int64(1), report.Orders[0].After.Invoices)
	require.NotNil(t, c.receipt(strangePath)["invoice"])
	_, report = post("retry", operator)
	require.Empty(t, report.Letters, "a second time there is nothing to do")

	require.Empty(t, letters())
	said := run(t, []string{"DATABASE_URL=" + s.Database.URL("verify"), "KAFKA_BROKERS=" + s.Broker.Brokers()}, "onceledger", "verify")
	require.Zero(t, said.code, "%s%s", said.stdout, said.stderr)
}

// TestMissingVersion: an event that does not come is noticed by the consumer, said
// in the order's receipt and in the worker's log, and no longer so once it has come.
func TestMissingVersion(t *testing.T) {
	t.Parallel()

	s := stack.New(t)
	api := s.API(t)
	relay, billing := s.Worker(t, "relay", "relay"), s.Worker(t, "billing", "billing", "GAP_WAIT=1s")
	stack.StartAll(t, api, relay, billing)
	c := customer{s.NewClient(api), t}
	require.NoError(t, relay.Stop())

	id, _ := c.post(http.StatusCreated, "/v1/orders", twoBooks)["id"].(string)
	path := "/v1/orders/" + id
	c.post(http.StatusOK, path+"/pay", `{"payment_reference":"pi_1"}`)
	// The payment alone gets to the topic, before the relay comes back.
	var e event.Event
	require.NoError(t, s.Owner.QueryRow(t.Context(), `
		SELECT id, tenant_id, aggregate_type, aggregate_id, aggregate_version, event_type, schema_version, payload, occurred_at
		FROM outbox_events WHERE event_type = 'OrderPaid'`).Scan(&e.ID, &e.TenantID, &e.AggregateType, &e.AggregateID, &e.AggregateVersion,
		&e.Type, &e.SchemaVersion, &e.Payload, &e.OccurredAt))
	record := e.Record()
	produced := kafkatest.Record{Key: record.Key, Value: record.Value}
	for _, header := range record.Headers {
		produced.Headers = append(produced.Headers, kgo.RecordHeader{Key: header.Key, Value: header.Value})
	}
	s.Broker.Produce(t, event.OrderEvents, produced)

	var receipt map[string]any
	require.NoError(t, stack.Wait(t.Context(), func() (bool, error) {
		receipt = c.get(path + "/receipt")
		return receipt["invoice"] != nil, nil
	}))
	require.Contains(t, fmt.Sprint(receipt["waits_for"]), "OrderCreated, version 1: missing since ")
	require.Len(t, receipt["missing_versions"], 1)
	require.NoError(t, billing.WaitFor("alarm", func() (bool, error) {
		overdue, err := billing.Metric("onceledger_missing_versions_overdue")
		return overdue == 1, err
	}))
	require.NoError(t, billing.WaitFor("say so in its log", func() (bool, error) {
		return strings.Contains(billing.Log(), "a version of an order is missing"), nil
	}))

	require.NoError(t, relay.StartReady())
	require.NotContains(t, c.receipt(path), "missing_versions")
	require.NoError(t, billing.WaitFor("end its alarm", func() (bool, error) {
		missing, err := billing.Metric("onceledger_missing_versions")
		return missing == 0, err
	}))
}

// TestDeadLettersCannotBeStored is the end of field report R26: the worker stops at
// a record that it can neither apply nor keep, says so, and passes over nothing.
func TestDeadLettersCannotBeStored(t *testing.T) {
	t.Parallel()

	s := stack.New(t, 1)
	api := s.API(t)
	worker := s.Worker(t, "worker", stack.AllRoles)
	stack.StartAll(t, api, worker)
	s.Run(t, api, 2, 2, 1)
	_, err := s.Owner.Exec(t.Context(), "REVOKE INSERT ON dead_letters FROM onceledger_worker")
	require.NoError(t, err)
	s.Broker.Produce(t, event.OrderEvents, kafkatest.Record{Value: []byte("this-is-not-json {{{")})
	require.NoError(t, worker.WaitFor("be not ready", func() (bool, error) {
		status, body, err := worker.Get("/readyz")
		return status == http.StatusServiceUnavailable && strings.Contains(body, "dead letter"), err
	}))
	count := func(table string) (rows int) {
		require.NoError(t, s.Owner.QueryRow(t.Context(), "SELECT count(*) FROM "+table).Scan(&rows))
		return rows
	}
	orders, applied := count("orders"), count("processed_events")
	load := s.StartLoad(t, api, 2, 2)
	require.Eventually(t, func() bool { return count("orders") >= orders+2 }, stack.Patience, stack.Patience/1000)
	require.Equal(t, applied, count("processed_events"), "it passes over nothing")
	_, err = s.Owner.Exec(t.Context(), "GRANT INSERT ON dead_letters TO onceledger_worker")
	require.NoError(t, err)
	require.NoError(t, worker.WaitReady())
	require.NoError(t, load.Finish(8))
	require.Equal(t, 1, count("dead_letters"))
	said := run(t, []string{"DATABASE_URL=" + s.Database.URL("verify"), "KAFKA_BROKERS=" + s.Broker.Brokers()}, "onceledger", "verify")
	require.Zero(t, said.code, "%s%s", said.stdout, said.stderr)
}

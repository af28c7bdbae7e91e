package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/deadletters"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/inbox/inboxtest"
	"github.com/onceledger/onceledger/internal/pgtest"
)

// TestDLQ is an operator's walk through the commands. The environment is the
// process's, so these do not run in parallel.
func TestDLQ(t *testing.T) {
	c := inboxtest.New(t, billing.Handler{Now: time.Now})
	tenant := c.Tenant(t)
	t.Setenv("DATABASE_URL", c.DB.URL("worker"))
	dlq := func(t *testing.T, args ...string) string {
		t.Helper()
		stdout, stderr, err := call(t, append([]string{"dlq"}, args...)...)
		require.NoError(t, err, stderr)
		return stdout
	}
	require.Equal(t, "no dead letters\n", dlq(t, "list"))
	require.Equal(t, "no version is missing\n", dlq(t, "gaps"))

	order := &factory.Order{TenantID: tenant}
	events := []event.Event{order.Created(), order.Paid(), order.Refunded(500), order.Refunded(100)}
	c.Exec(t, "ALTER TABLE invoices ADD CONSTRAINT invoices_none CHECK (false) NOT VALID")
	c.Deliver(t, events...)
	bad := &factory.Order{TenantID: tenant}
	wrong := factory.Altered(bad.Created(), func(state *event.Order) { state.NetAmount++ })
	c.Deliver(t, wrong, bad.Paid())
	garbage := c.Partition.Append((&factory.Order{TenantID: tenant}).Created())
	garbage[0].Value, garbage[0].Headers = []byte("\x1b[31m{{{"), nil
	c.DeliverRecords(t, garbage...)

	ids := pgtest.Column[uuid.UUID](t, c.Owner, "SELECT id FROM dead_letters ORDER BY id")
	require.Len(t, ids, 6)

	t.Run("SaysWhichOrNothing", func(t *testing.T) {
		for _, empty := range [][]string{{"--order", ""}, {"--id", ""}, {"--tenant", ""}, {"--since", ""}, {"--order", uuid.Nil.String()}, {""}} {
			_, _, err := call(t, append([]string{"dlq", "discard", "--class", "rule", "--reason", "r", "--yes"}, empty...)...)
			require.Error(t, err, empty)
		}
		require.Equal(t, 6, strings.Count(dlq(t, "list"), "open"))
	})
	t.Run("List", func(t *testing.T) {
		list := dlq(t, "list")
		require.Equal(t, 7, strings.Count(list, "\n"))
		require.Contains(t, list, ids[0].String())
		require.Contains(t, list, "invoices_none")
		require.Equal(t, 3, strings.Count(dlq(t, "list", "--order", order.State.OrderID.String()), "open"))
		require.Equal(t, 1, strings.Count(dlq(t, "list", "--class", "rule", "--since", "1h"), "open"))
		require.Equal(t, "no dead letters\n", dlq(t, "list", "--until", "1h"))
		require.Equal(t, "no dead letters\n", dlq(t, "list", "--state", "resolved"))
		stdout, stderr, err := call(t, "dlq", "list", "--limit", "4")
		require.NoError(t, err)
		require.Equal(t, 5, strings.Count(stdout, "\n"))
		require.Contains(t, stderr, "--after "+ids[3].String())
		require.Equal(t, 3, strings.Count(dlq(t, "list", "--after", ids[3].String()), "\n"))
		var document struct {
			Letters []deadletters.Letter `json:"dead_letters"`
		}
		require.NoError(t, json.Unmarshal([]byte(dlq(t, "list", "--json")), &document))
		require.Len(t, document.Letters, 6)
	})

	t.Run("Show", func(t *testing.T) {
		shown := dlq(t, "show", ids[0].String())
		require.Contains(t, shown, "ce_type: OrderPaid")
		require.Contains(t, shown, `"order_id": "`+order.State.OrderID.String())
		require.Contains(t, shown, "parked behind it: 2")
		shown = dlq(t, "show", ids[5].String())
		require.Contains(t, shown, "hex 1b5b33316d7b7b7b")
		require.NotContains(t, shown, "\x1b")
		require.NotContains(t, dlq(t, "list"), "\x1b")
		var details deadletters.Details
		require.NoError(t, json.Unmarshal([]byte(dlq(t, "show", "--json", ids[0].String())), &details))
		require.Equal(t, 2, details.BehindAll)
	})

	t.Run("RetryPreviewsFirst", func(t *testing.T) {
		before := c.Contents(t)
		out := dlq(t, "retry", ids[0].String())
		require.Contains(t, out, "would fail again as data")
		require.Equal(t, 2, strings.Count(out, "would stay parked"))
		require.Contains(t, out, "Nothing was changed")
		c.Exec(t, "ALTER TABLE invoices DROP CONSTRAINT invoices_none")
		out = dlq(t, "retry", "--order", order.State.OrderID.String())
		require.Equal(t, 3, strings.Count(out, "would apply"))
		require.Contains(t, out, "0 -> 1")
		require.Equal(t, before, c.Contents(t))
	})

	t.Run("RetryDoesIt", func(t *testing.T) {
		out := dlq(t, "retry", ids[2].String(), "--yes", "--as", "grace")
		require.Equal(t, 3, strings.Count(out, "applied"))
		require.Regexp(t, order.State.OrderID.String()+` +1 -> 4 +0 -> 1 +0 -> 2 +0 -> 3 +1 -> 0 +2 -> 0`, out)
		require.NotContains(t, out, "Nothing was changed")
		require.Equal(t, []string{"grace", "grace", "grace"}, pgtest.Column[string](t, c.Owner, "SELECT decided_by FROM dead_letter_decisions"))
		before := c.Contents(t)
		require.Contains(t, dlq(t, "retry", ids[2].String(), "--yes"), "nothing to do: it is resolved")
		require.Contains(t, dlq(t, "retry", "--order", order.State.OrderID.String(), "--yes"), "nothing to do")
		require.Equal(t, before, c.Contents(t))
		require.Contains(t, dlq(t, "show", ids[0].String()), "retried by grace: applied")
	})

	t.Run("Discard", func(t *testing.T) {
		before := c.Contents(t)
		_, _, err := call(t, "dlq", "discard", ids[3].String(), "--yes")
		require.ErrorContains(t, err, "needs a reason")
		out := dlq(t, "discard", ids[3].String(), "--reason", "sums wrong")
		require.Contains(t, out, "would be discarded")
		require.Contains(t, out, "would apply")
		require.Equal(t, before, c.Contents(t))
		out = dlq(t, "discard", ids[3].String(), ids[5].String(), "--reason", "sums wrong", "--yes")
		require.Contains(t, out, "applied")
		shown := dlq(t, "show", ids[3].String())
		require.Contains(t, shown, "discarded by cli:")
		require.Contains(t, shown, "sums wrong")
		require.Equal(t, "no dead letters\n", dlq(t, "list"))
		require.Equal(t, 7, strings.Count(dlq(t, "list", "--all"), "\n"))
	})

	t.Run("Gaps", func(t *testing.T) {
		lacking := &factory.Order{TenantID: tenant}
		c.Deliver(t, lacking.Paid(), lacking.Refunded(1))
		id := lacking.State.OrderID.String()
		require.Contains(t, dlq(t, "gaps"), id)
		for _, args := range [][]string{{"--give-up", "--reason", "x"}, {"--give-up", "--order", id}, {"--order", "x"}, {"--version", "-1"}, {"--give-up", "--order", id, "--reason", " "}} {
			_, _, err := call(t, append([]string{"dlq", "gaps"}, args...)...)
			require.Error(t, err, args)
		}
		require.Contains(t, dlq(t, "gaps", "--order", id, "--give-up", "--reason", "gone before the outbox was kept"), "given up")
		require.Equal(t, "no version is missing\n", dlq(t, "gaps"))
		require.Len(t, pgtest.Column[string](t, c.Owner, "SELECT decided_by FROM version_gap_decisions WHERE reason LIKE 'gone%'"), 1, "it is on record")
		require.Equal(t, "no version is missing\n", dlq(t, "gaps", "--order", id, "--give-up", "--reason", "again"))
	})

	t.Run("WrongInput", func(t *testing.T) {
		before := c.Contents(t)
		for _, args := range [][]string{
			{"retry"}, {"retry", "--yes"}, {"discard", "--reason", "x"}, {"retry", "42"}, {"retry", uuid.NewString()}, {"retry", "--class", "bad"},
			{"retry", "--since", "yesterday"}, {"list", "--state", "shut"}, {"list", "--limit", "0"}, {"list", "--after", "x"}, {"show"}, {"show", "x"},
			{"show", uuid.NewString()}, {"retry", "--order", "x", "--yes"}, {"list", "everything"}, {"retry", "--class", "rule", "--limit", "-1"},
		} {
			stdout, _, err := call(t, append([]string{"dlq"}, args...)...)
			require.Error(t, err, args)
			require.Empty(t, stdout, args)
			require.NotContains(t, err.Error(), "SQLSTATE", args)
		}
		require.Equal(t, before, c.Contents(t))

		t.Setenv("DATABASE_URL", c.DB.URL("verify"))
		_, _, err := call(t, "dlq", "retry", ids[0].String())
		require.ErrorContains(t, err, "onceledger_worker")
		t.Setenv("DATABASE_URL", "")
		t.Setenv("ONCELEDGER_HOME", t.TempDir())
		_, _, err = call(t, "dlq", "list")
		require.ErrorContains(t, err, "DATABASE_URL is not set")
	})
}

// TestOperatorsKeys are made, listed and ended beside the tenants'.
func TestOperatorsKeys(t *testing.T) {
	database := pgtest.New(t)
	t.Setenv("DATABASE_URL", database.URL(""))
	stdout, stderr, err := call(t, "keys", "create", "--operator", "grace")
	require.NoError(t, err)
	require.Regexp(t, `^olo_[A-Za-z0-9_-]{64}\n$`, stdout)
	require.Contains(t, stderr, "only time")
	_, _, err = call(t, "keys", "create", "--tenant", "acme")
	require.NoError(t, err)
	for _, args := range [][]string{nil, {"--operator", "a", "--tenant", "b"}, {"--operator", " "}, {"--operator", "a", "--name", "b"}} {
		_, _, err = call(t, append([]string{"keys", "create"}, args...)...)
		require.Error(t, err, args)
	}
	list, _, err := call(t, "keys", "list")
	require.NoError(t, err)
	require.Regexp(t, `\(operator\) +grace .* -\n`, list)
	require.Contains(t, list, "acme")
	id := pgtest.Column[uuid.UUID](t, database.Pool(t, ""), "SELECT id FROM operator_keys")[0].String()
	stdout, _, err = call(t, "keys", "revoke", id)
	require.NoError(t, err)
	require.Contains(t, stdout, "revoked")
	_, _, err = call(t, "keys", "revoke", id)
	require.ErrorContains(t, err, "revoked before")
}

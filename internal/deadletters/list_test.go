package deadletters_test

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/deadletters"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/inbox/inboxtest"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/postgres"
)

func TestList(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	wrong := func(e event.Event) event.Event {
		return factory.Altered(e, func(state *event.Order) { state.NetAmount++ })
	}
	order, other := w.order(), &factory.Order{TenantID: w.Tenant(t)}
	events := []event.Event{wrong(order.Created()), order.Paid(), wrong(other.Created())}
	w.Deliver(t, events...)
	records := w.Partition.Append(w.order().Created())
	records[0].Value = []byte("not JSON")
	w.DeliverRecords(t, records...)
	w.discard(t, "wrong", events[2])
	w.Exec(t, "UPDATE dead_letters SET first_failed_at = '2026-01-02T00:00:00Z' WHERE class = 'parked'")

	list := func(filter deadletters.Filter) (classes []string) {
		letters, more, err := w.letters.List(t.Context(), filter, uuid.Nil, 100)
		require.NoError(t, err)
		require.False(t, more)
		for _, letter := range letters {
			classes = append(classes, string(letter.Class)+" "+letter.State)
		}
		return classes
	}
	require.Equal(t, []string{"rule open", "parked open", "rule discarded", "undecodable open"}, list(deadletters.Filter{}))
	for name, test := range map[string]struct {
		filter deadletters.Filter
		want   []string
	}{
		"ByID":       {deadletters.Filter{IDs: []uuid.UUID{w.letter(t, events[1]).ID, uuid.New()}}, []string{"parked open"}},
		"ByOrder":    {of(order), []string{"rule open", "parked open"}},
		"ByEvent":    {deadletters.Filter{EventID: events[2].ID}, []string{"rule discarded"}},
		"ByTenant":   {deadletters.Filter{TenantID: other.TenantID}, []string{"rule discarded"}},
		"ByClass":    {deadletters.Filter{Classes: []inbox.Class{"rule"}}, []string{"rule open", "rule discarded"}},
		"ByClasses":  {deadletters.Filter{Classes: []inbox.Class{"parked", "undecodable"}}, []string{"parked open", "undecodable open"}},
		"ByState":    {deadletters.Filter{States: []string{"discarded"}}, []string{"rule discarded"}},
		"ByConsumer": {deadletters.Filter{Consumer: "another"}, nil},
		"Since":      {deadletters.Filter{Since: time.Now().Add(-time.Hour)}, []string{"rule open", "rule discarded", "undecodable open"}},
		"Until":      {deadletters.Filter{Until: time.Now().Add(-time.Hour)}, []string{"parked open"}},
		"Between": {deadletters.Filter{Since: time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC), Until: time.Date(2026, 1, 2, 0, 0, 1, 0, time.UTC)},
			[]string{"parked open"}},
		"ByAllOfThese": {deadletters.Filter{TenantID: w.tenant, Classes: []inbox.Class{"rule"}, States: []string{"open"}}, []string{"rule open"}},
	} {
		require.Equal(t, test.want, list(test.filter), name)
	}

	var paged []deadletters.Letter
	after := uuid.Nil
	for more := true; more; {
		var page []deadletters.Letter
		var err error
		page, more, err = w.letters.List(t.Context(), deadletters.Filter{}, after, 3)
		require.NoError(t, err)
		paged = append(paged, page...)
		after = page[len(page)-1].ID
	}
	whole, _, err := w.letters.List(t.Context(), deadletters.Filter{}, uuid.Nil, 100)
	require.NoError(t, err)
	require.Equal(t, whole, paged)
	for _, limit := range []int{0, -1, 1001} {
		_, _, err := w.letters.List(t.Context(), deadletters.Filter{}, uuid.Nil, limit)
		require.ErrorIs(t, err, deadletters.ErrSelection)
	}
}

func TestShow(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	order := w.order()
	wrong := factory.Altered(order.Created(), func(state *event.Order) { state.NetAmount++ })
	records := w.Deliver(t, wrong, order.Paid(), order.Refunded(1))
	w.retry(t, of(order))
	details, err := w.letters.Show(t.Context(), w.letter(t, wrong).ID)
	require.NoError(t, err)
	require.Equal(t, inbox.ClassRule, details.Class)
	require.EqualValues(t, 2, details.Attempts)
	require.JSONEq(t, string(records[0].Value), string(details.Record.Value.JSON))
	require.Equal(t, wrong.AggregateID.String(), *details.Record.Key.Text)
	require.Len(t, details.Record.Headers, len(records[0].Headers))
	require.Equal(t, 2, details.BehindAll)
	require.Equal(t, []inbox.Class{"parked", "parked"}, []inbox.Class{details.Behind[0].Class, details.Behind[1].Class})
	require.Len(t, details.Decisions, 1)
	require.Equal(t, inbox.OutcomeFailed, details.Decisions[0].Outcome)
	middle, err := w.letters.Show(t.Context(), details.Behind[0].ID)
	require.NoError(t, err)
	require.Equal(t, 1, middle.BehindAll)
	_, err = w.letters.Show(t.Context(), uuid.New())
	require.ErrorIs(t, err, deadletters.ErrNotFound)

	for name, test := range map[string]struct {
		value []byte
		check func(t *testing.T, value deadletters.Bytes)
	}{
		"Text": {[]byte("not JSON\n{"), func(t *testing.T, value deadletters.Bytes) {
			t.Helper()
			require.Equal(t, "not JSON\n{", *value.Text)
		}},
		"Bytes": {[]byte{0xff, 0, 1}, func(t *testing.T, value deadletters.Bytes) {
			t.Helper()
			require.Equal(t, "ff0001", *value.Hex)
		}},
		"AnEscapeSequence": {[]byte("\x1b[2J"), func(t *testing.T, value deadletters.Bytes) {
			t.Helper()
			require.Equal(t, "1b5b324a", *value.Hex, "it must not reach a terminal")
		}},
		"MuchText": {[]byte(strings.Repeat("é", 50_000)), func(t *testing.T, value deadletters.Bytes) {
			t.Helper()
			require.True(t, value.Truncated)
			require.Equal(t, 100_000, value.Size)
			require.Equal(t, strings.Repeat("é", 32768), *value.Text)
		}},
		"MuchJSON": {[]byte(`["` + strings.Repeat("x", 70_000) + `"]`), func(t *testing.T, value deadletters.Bytes) {
			t.Helper()
			require.True(t, value.Truncated)
			require.Nil(t, value.JSON)
			require.Len(t, *value.Text, 64<<10)
		}},
		"Nothing": {[]byte{}, func(t *testing.T, value deadletters.Bytes) {
			t.Helper()
			require.Empty(t, *value.Text)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			record := w.Partition.Append(w.order().Created())[0]
			record.Value = test.value
			w.DeliverRecords(t, record)
			letters, _, err := w.letters.List(t.Context(), deadletters.Filter{}, uuid.Nil, 100)
			require.NoError(t, err)
			details, err := w.letters.Show(t.Context(), letters[len(letters)-1].ID)
			require.NoError(t, err)
			require.Equal(t, len(test.value), details.Record.Value.Size)
			test.check(t, details.Record.Value)
			_, err = json.Marshal(details)
			require.NoError(t, err)
		})
	}
}

// TestWatch: what is open and what is missing is counted, said in a line, and a
// version that is missing for too long is named in the log, once.
func TestWatch(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	var log bytes.Buffer
	registry := prometheus.NewRegistry()
	watch := deadletters.NewWatch(deadletters.WatchConfig{
		Pool: w.DB.Pool(t, "worker"), Consumer: inboxtest.Name, GapWait: time.Minute,
		Log: slog.New(slog.NewTextHandler(&log, nil)), Metrics: registry, Now: time.Now,
	})
	require.Equal(t, "not counted yet", watch.Note(t.Context()))
	require.NoError(t, watch.Look(t.Context()))
	require.Equal(t, "none open", watch.Note(t.Context()))

	order, incomplete := w.order(), w.order()
	wrong := factory.Altered(order.Created(), func(state *event.Order) { state.NetAmount++ })
	w.Deliver(t, wrong, order.Paid(), order.Refunded(1), incomplete.Paid())
	w.Exec(t, "UPDATE dead_letters SET first_failed_at = now() - interval '90 seconds'")
	require.NoError(t, watch.Look(t.Context()))
	require.Equal(t, "1 open (1 rule), 2 parked behind them, the oldest for 1m30s; 1 versions of orders are missing, for up to 0s", watch.Note(t.Context()))
	require.Empty(t, log.String())
	metric := func(name string) (sum float64, series int) {
		families, err := registry.Gather()
		require.NoError(t, err)
		for _, family := range families {
			if family.GetName() == name {
				for _, metric := range family.GetMetric() {
					sum += metric.GetGauge().GetValue()
					series++
				}
			}
		}
		return sum, series
	}
	requireMetric := func(name string, want float64) {
		t.Helper()
		got, series := metric(name)
		require.NotZero(t, series)
		require.InDelta(t, want, got, 0, name)
	}
	requireMetric("onceledger_missing_versions", 1)
	requireMetric("onceledger_missing_versions_overdue", 0)
	requireMetric("onceledger_dead_letters_open", 3)
	_, series := metric("onceledger_dead_letters_open")
	require.Equal(t, len(inbox.Classes()), series, "a series for each class, so that an alert can tell 0 from nothing")

	w.Exec(t, "UPDATE version_gaps SET noticed_at = now() - interval '2 minutes'")
	for range 2 {
		require.NoError(t, watch.Look(t.Context()))
	}
	requireMetric("onceledger_missing_versions_overdue", 1)
	require.Equal(t, 1, strings.Count(log.String(), "a version of an order is missing"))
	require.Contains(t, log.String(), incomplete.State.OrderID.String())
	require.Contains(t, log.String(), "version=1")

	w.discard(t, "wrong", wrong)
	w.Exec(t, "DELETE FROM version_gaps")
	require.NoError(t, watch.Look(t.Context()))
	require.Equal(t, "none open", watch.Note(t.Context()))
	requireMetric("onceledger_missing_versions", 0)
	requireMetric("onceledger_dead_letters_open", 0)
}

// TestGiveUpIsOnRecord checks that who gave up a version, and why, is kept as it is
// when the version comes all the same.
func TestGiveUpIsOnRecord(t *testing.T) {
	t.Parallel()
	w := newWorld(t)

	order := w.order()
	created, paid := order.Created(), order.Paid()
	w.Deliver(t, paid)
	given, err := w.letters.GiveUp(t.Context(), order.State.OrderID, 1, "somebody", "gone for good")
	require.NoError(t, err)
	require.Len(t, given, 1)
	gaps, _, err := w.letters.Gaps(t.Context())
	require.NoError(t, err)
	require.Empty(t, gaps)
	given, err = w.letters.GiveUp(t.Context(), order.State.OrderID, 0, "another", "again")
	require.NoError(t, err)
	require.Empty(t, given)

	w.Deliver(t, created)
	require.Len(t, w.Applied(t), 2)
	require.Empty(t, pgtest.Column[int64](t, w.Owner, "SELECT version FROM version_gaps"))
	require.Equal(t, []string{"somebody: gone for good"}, pgtest.Column[string](t, w.Owner,
		"SELECT decided_by || ': ' || reason FROM version_gap_decisions"))
	for _, pool := range []string{"worker", ""} {
		for _, statement := range []string{"UPDATE version_gap_decisions SET reason = 'x'", "DELETE FROM version_gap_decisions", "TRUNCATE version_gap_decisions"} {
			_, err := w.DB.Pool(t, pool).Exec(t.Context(), statement)
			require.Equal(t, "42501", postgres.Code(err), "%s as %q: %v", statement, pool, err)
		}
	}
}

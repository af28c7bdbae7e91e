package operators_test

import (
	"encoding/base64"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/deadletters"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/inbox/inboxtest"
	"github.com/onceledger/onceledger/internal/operators"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/tenants"
)

// world is a worker's consumer, and its operators' API with a key.
type world struct {
	*inboxtest.Consumer
	handler http.Handler
	key     string
	tenant  uuid.UUID
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{Consumer: inboxtest.New(t, billing.Handler{Now: time.Now})}
	pool := w.DB.Pool(t, "worker")
	in := inbox.New(inbox.Config{
		Consumer: billing.Consumer, Pool: pool, Handler: billing.Handler{Now: time.Now},
		Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry(), Now: time.Now,
	})
	w.handler = operators.Handler(pool, deadletters.New(pool, map[string]*inbox.Inbox{billing.Consumer: in}), slog.New(slog.DiscardHandler))
	key, err := operators.CreateKey(t.Context(), w.Owner, "grace")
	require.NoError(t, err)
	w.key, w.tenant = key, w.Tenant(t)
	return w
}

type answer struct{ *httptest.ResponseRecorder }

func (w *world) send(t *testing.T, method, path, body, key string) answer {
	t.Helper()
	request := httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(body))
	if key != "" {
		request.Header.Set("Authorization", "Bearer "+key)
	}
	recorder := httptest.NewRecorder()
	w.handler.ServeHTTP(recorder, request)
	return answer{recorder}
}

func (w *world) get(t *testing.T, path string) answer {
	t.Helper()
	return w.send(t, http.MethodGet, operators.Path+path, "", w.key)
}

func (w *world) post(t *testing.T, path, body string) answer {
	t.Helper()
	return w.send(t, http.MethodPost, operators.Path+path, body, w.key)
}

func (a answer) into(t *testing.T, value any) {
	t.Helper()
	require.Equal(t, http.StatusOK, a.Code, a.Body.String())
	require.NoError(t, json.Unmarshal(a.Body.Bytes(), value))
}

func (a answer) requireProblem(t *testing.T, status int, code string) {
	t.Helper()
	require.Equal(t, status, a.Code, a.Body.String())
	require.Equal(t, "application/problem+json", a.Header().Get("Content-Type"))
	var problem struct{ Type, Title, RequestID string }
	require.NoError(t, json.Unmarshal(a.Body.Bytes(), &problem))
	require.Equal(t, "https://github.com/onceledger/onceledger/blob/main/docs/problems/"+code+".md", problem.Type)
	require.NotEmpty(t, problem.Title)
	require.NotEmpty(t, a.Header().Get("X-Request-Id"))
}

type page struct {
	Letters    []deadletters.Letter `json:"dead_letters"`
	NextCursor *string              `json:"next_cursor"`
}

func (w *world) order() *factory.Order { return &factory.Order{TenantID: w.tenant} }

func wrong(e event.Event) event.Event {
	return factory.Altered(e, func(state *event.Order) { state.NetAmount++ })
}

// TestWalk is an operator's way over HTTP: find, look, see what would become of it,
// do it, find that there is nothing to do any more.
func TestWalk(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	order := w.order()
	w.Exec(t, "ALTER TABLE invoices ADD CONSTRAINT invoices_none CHECK (false) NOT VALID")
	w.Deliver(t, order.Created(), order.Paid(), order.Refunded(1))
	bad := w.order()
	w.Deliver(t, wrong(bad.Created()), bad.Cancelled())

	var list page
	w.get(t, "dead-letters?state=open&class=data&class=rule&limit=1").into(t, &list)
	require.Len(t, list.Letters, 1)
	require.NotNil(t, list.NextCursor)
	letter := list.Letters[0]
	require.Equal(t, inbox.ClassData, letter.Class)
	list = page{}
	w.get(t, "dead-letters?state=open&class=data&class=rule&limit=1&cursor="+url.QueryEscape(w.nextCursor(t, letter))).into(t, &list)
	require.Equal(t, inbox.ClassRule, list.Letters[0].Class)
	require.Nil(t, list.NextCursor)
	badLetter := list.Letters[0]

	var details deadletters.Details
	w.get(t, "dead-letters/"+letter.ID.String()).into(t, &details)
	require.Equal(t, 1, details.BehindAll)
	require.NotEmpty(t, details.Record.Value.JSON)

	w.Exec(t, "ALTER TABLE invoices DROP CONSTRAINT invoices_none")
	before := w.Contents(t)
	var report deadletters.Report
	w.post(t, "dead-letters/"+letter.ID.String()+"/retry?preview=true", "").into(t, &report)
	require.True(t, report.Preview)
	require.Equal(t, inbox.OutcomeApplied, report.Letters[0].Outcome)
	require.Equal(t, before, w.Contents(t))

	report = deadletters.Report{}
	w.post(t, "dead-letters/"+letter.ID.String()+"/retry", "").into(t, &report)
	require.Len(t, report.Letters, 2)
	require.Equal(t, int64(1), report.Orders[0].After.Invoices)
	require.Equal(t, []string{"grace", "grace"}, pgtest.Column[string](t, w.Owner, "SELECT decided_by FROM dead_letter_decisions"))

	before = w.Contents(t)
	report = deadletters.Report{}
	w.post(t, "dead-letters/"+letter.ID.String()+"/retry", "").into(t, &report)
	require.Equal(t, deadletters.OutcomeNothing, report.Letters[0].Outcome)
	require.Equal(t, "resolved", report.Letters[0].State)
	require.Equal(t, before, w.Contents(t))

	path := "dead-letters/" + badLetter.ID.String() + "/discard"
	w.post(t, path, `{}`).requireProblem(t, http.StatusBadRequest, "discard-reason-missing")
	w.post(t, path, `{"reason":"  "}`).requireProblem(t, http.StatusBadRequest, "discard-reason-missing")
	require.Equal(t, before, w.Contents(t))
	report = deadletters.Report{}
	w.post(t, path, `{"reason":"sums wrong"}`).into(t, &report)
	require.Equal(t, []inbox.Outcome{"discarded", "applied"}, []inbox.Outcome{report.Letters[0].Outcome, report.Letters[1].Outcome})
	details = deadletters.Details{}
	w.get(t, "dead-letters/"+badLetter.ID.String()).into(t, &details)
	require.Equal(t, "sums wrong", *details.Decisions[0].Reason)
	require.Equal(t, "grace", details.Decisions[0].DecidedBy)

	list = page{}
	w.get(t, "dead-letters?state=open").into(t, &list)
	require.NotNil(t, list.Letters, "an empty list, not null")
	require.Empty(t, list.Letters)
}

func (w *world) nextCursor(t *testing.T, letter deadletters.Letter) string {
	t.Helper()
	var list page
	w.get(t, "dead-letters?state=open&class=data&class=rule&limit=1").into(t, &list)
	require.Equal(t, letter.ID, list.Letters[0].ID)
	return *list.NextCursor
}

func TestBySelection(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for range 3 {
		w.Deliver(t, wrong(w.order().Created()))
	}
	var report deadletters.Report
	w.post(t, "dead-letters/retry?preview=true", `{"classes":["rule"],"limit":2}`).into(t, &report)
	require.Len(t, report.Letters, 2)
	require.True(t, report.More)
	report = deadletters.Report{}
	w.post(t, "dead-letters/discard", `{"classes":["rule"],"reason":"all wrong"}`).into(t, &report)
	require.Len(t, report.Letters, 3)
	report = deadletters.Report{}
	w.post(t, "dead-letters/retry", `{"classes":["rule"]}`).into(t, &report)
	require.Empty(t, report.Letters)
	require.NotNil(t, report.Letters)
}

// TestKeys: nobody gets in without an operator's own key.
func TestKeys(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.Deliver(t, wrong(w.order().Created()))
	tenants, err := tenants.CreateKey(t.Context(), w.Owner, "acme", "of a tenant")
	require.NoError(t, err)
	second, err := operators.CreateKey(t.Context(), w.Owner, "ada")
	require.NoError(t, err)
	require.NotEqual(t, w.key, second)
	require.Equal(t, http.StatusOK, w.send(t, http.MethodGet, operators.Path+"dead-letters", "", second).Code)

	raw, err := base64.RawURLEncoding.DecodeString(strings.TrimPrefix(w.key, "olo_"))
	require.NoError(t, err)
	other := func(change func([]byte) []byte) string {
		return "olo_" + base64.RawURLEncoding.EncodeToString(change(append([]byte{}, raw...)))
	}
	bad := map[string]string{
		"None": "", "ATenants": tenants, "Text": "olo_", "NoBase64": "olo_%%%", "Short": w.key[:20], "Long": w.key + "AAAA",
		"AnotherSecret": other(func(key []byte) []byte { key[47] ^= 1; return key }),
		"AnothersID":    other(func(key []byte) []byte { key[3] ^= 1; return key }),
		"TheHash":       other(func(key []byte) []byte { copy(key[16:], make([]byte, 32)); return key }),
		"WithSpace":     w.key + " ", "Lower": strings.ToLower(w.key),
	}
	_, err = w.Owner.Exec(t.Context(), "UPDATE operator_keys SET revoked_at = now() WHERE name = 'ada'")
	require.NoError(t, err)
	bad["Revoked"] = second
	for name, key := range bad {
		t.Run(name, func(t *testing.T) {
			before := w.Contents(t)
			for _, request := range [][2]string{
				{http.MethodGet, "dead-letters"}, {http.MethodGet, "dead-letters/" + uuid.NewString()},
				{http.MethodPost, "dead-letters/retry"}, {http.MethodPost, "dead-letters/discard"},
				{http.MethodPost, "dead-letters/" + uuid.NewString() + "/retry"}, {http.MethodPost, "dead-letters/" + uuid.NewString() + "/discard"},
			} {
				a := w.send(t, request[0], operators.Path+request[1], `{"classes":["rule"],"reason":"x"}`, key)
				a.requireProblem(t, http.StatusUnauthorized, "operator-unauthorized")
				require.Equal(t, "Bearer", a.Header().Get("WWW-Authenticate"))
			}
			require.Equal(t, before, w.Contents(t))
		})
	}

	stored := pgtest.Column[string](t, w.Owner, "SELECT operator_keys::text FROM operator_keys")
	for _, row := range stored {
		require.NotContains(t, row, w.key)
	}
	for _, name := range []string{"", "  ", strings.Repeat("é", 101)} {
		_, err := operators.CreateKey(t.Context(), w.Owner, name)
		require.ErrorIs(t, err, operators.ErrName)
	}
	for _, role := range []string{"api", "relay", "janitor", "verify"} {
		_, err := w.DB.Pool(t, role).Exec(t.Context(), "SELECT FROM operator_keys")
		require.Error(t, err, role)
	}
	_, err = w.DB.Pool(t, "worker").Exec(t.Context(), "INSERT INTO operator_keys (id, name, key_hash) VALUES (gen_random_uuid(), 'x', sha256('x'))")
	require.Error(t, err, "a worker makes no operators")
}

// TestProblems: what is asked for wrongly is said, and nothing is done.
func TestProblems(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.Deliver(t, wrong(w.order().Created()))
	id := uuid.NewString()
	before := w.Contents(t)

	const selection = "dead-letter-selection-invalid"
	for name, test := range map[string]struct {
		method, path, body string
		status             int
		code               string
	}{
		"NoSuchLetter":      {http.MethodGet, "dead-letters/" + id, "", 404, "dead-letter-not-found"},
		"NoID":              {http.MethodGet, "dead-letters/42", "", 404, "dead-letter-not-found"},
		"RetryNoSuch":       {http.MethodPost, "dead-letters/" + id + "/retry", "", 404, "dead-letter-not-found"},
		"UnknownParameter":  {http.MethodGet, "dead-letters?klass=rule", "", 400, selection},
		"UnknownClass":      {http.MethodGet, "dead-letters?class=bad", "", 400, selection},
		"UnknownState":      {http.MethodGet, "dead-letters?state=shut", "", 400, selection},
		"NoUUID":            {http.MethodGet, "dead-letters?order_id=1", "", 400, selection},
		"NoTime":            {http.MethodGet, "dead-letters?since=yesterday", "", 400, selection},
		"Twice":             {http.MethodGet, "dead-letters?since=2026-01-01T00:00:00Z&since=2026-01-01T00:00:00Z", "", 400, selection},
		"NoLimit":           {http.MethodGet, "dead-letters?limit=many", "", 400, selection},
		"TooMany":           {http.MethodGet, "dead-letters?limit=1001", "", 400, selection},
		"NoCursor":          {http.MethodGet, "dead-letters?cursor=!", "", 400, selection},
		"ZeroByte":          {http.MethodGet, "dead-letters?consumer=%00", "", 400, selection},
		"NotUTF8":           {http.MethodGet, "dead-letters?consumer=%ff", "", 400, selection},
		"EmptyConsumer":     {http.MethodGet, "dead-letters?consumer=", "", 400, selection},
		"NilUUID":           {http.MethodGet, "dead-letters?order_id=" + uuid.Nil.String(), "", 400, selection},
		"EmptyOrder":        {http.MethodPost, "dead-letters/discard", `{"order_id":"","classes":["rule"],"reason":"r"}`, 400, selection},
		"NilOrder":          {http.MethodPost, "dead-letters/discard", `{"order_id":"` + uuid.Nil.String() + `","classes":["rule"],"reason":"r"}`, 400, selection},
		"NullOrder":         {http.MethodPost, "dead-letters/discard", `{"order_id":null,"classes":["rule"],"reason":"r"}`, 400, selection},
		"NoIDs":             {http.MethodPost, "dead-letters/discard", `{"ids":[],"classes":["rule"],"reason":"r"}`, 400, selection},
		"NothingNamed":      {http.MethodPost, "dead-letters/retry", "", 400, selection},
		"EmptyObject":       {http.MethodPost, "dead-letters/retry", "{}", 400, selection},
		"UnknownMember":     {http.MethodPost, "dead-letters/retry", `{"class":"rule"}`, 400, selection},
		"NoJSON":            {http.MethodPost, "dead-letters/retry", `{`, 400, selection},
		"TwoDocuments":      {http.MethodPost, "dead-letters/retry", `{"classes":["rule"]} {}`, 400, selection},
		"AList":             {http.MethodPost, "dead-letters/retry", `[]`, 400, selection},
		"NegativeLimit":     {http.MethodPost, "dead-letters/retry", `{"classes":["rule"],"limit":-1}`, 400, selection},
		"PathAndBody":       {http.MethodPost, "dead-letters/" + id + "/retry", `{"classes":["rule"]}`, 400, selection},
		"PreviewMaybe":      {http.MethodPost, "dead-letters/retry?preview=maybe", `{"classes":["rule"]}`, 400, selection},
		"PreviewMisspelt":   {http.MethodPost, "dead-letters/retry?previev=true", `{"classes":["rule"]}`, 400, selection},
		"PreviewTwice":      {http.MethodPost, "dead-letters/retry?preview=true&preview=false", `{"classes":["rule"]}`, 400, selection},
		"DiscardNoReason":   {http.MethodPost, "dead-letters/discard", `{"classes":["rule"]}`, 400, "discard-reason-missing"},
		"DiscardZeroByte":   {http.MethodPost, "dead-letters/discard", `{"classes":["rule"],"reason":"a\u0000"}`, 400, "discard-reason-missing"},
		"DiscardTooLong":    {http.MethodPost, "dead-letters/discard", `{"classes":["rule"],"reason":"` + strings.Repeat("x", 2001) + `"}`, 400, "discard-reason-missing"},
		"DiscardNothing":    {http.MethodPost, "dead-letters/discard", `{"reason":"because"}`, 400, selection},
		"DiscardOfNoLetter": {http.MethodPost, "dead-letters/" + id + "/discard", `{"reason":"because"}`, 404, "dead-letter-not-found"},
	} {
		t.Run(name, func(t *testing.T) {
			w.send(t, test.method, operators.Path+test.path, test.body, w.key).requireProblem(t, test.status, test.code)
		})
	}
	for _, request := range [][2]string{{http.MethodGet, "elsewhere"}, {http.MethodDelete, "dead-letters"}, {http.MethodPut, "dead-letters/" + id}, {http.MethodGet, "dead-letters/" + id + "/retry"}} {
		a := w.send(t, request[0], operators.Path+request[1], "", w.key)
		require.Contains(t, []int{http.StatusNotFound, http.StatusMethodNotAllowed}, a.Code)
		require.Equal(t, "application/problem+json", a.Header().Get("Content-Type"))
	}
	large := w.post(t, "dead-letters/retry", `{"reason":"`+strings.Repeat("x", 200<<10)+`"}`)
	require.Equal(t, http.StatusRequestEntityTooLarge, large.Code)
	require.Equal(t, before, w.Contents(t))

	t.Run("OfADatabaseThatIsBusy", func(t *testing.T) {
		tx, err := w.Owner.Begin(t.Context())
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), "LOCK operator_keys")
		require.NoError(t, err)
		_, err = w.Owner.Exec(t.Context(), "ALTER DATABASE "+w.DB.Name+" SET lock_timeout = '50ms'")
		require.NoError(t, err)
		fresh := w.DB.Pool(t, "worker")
		handler := operators.Handler(fresh, deadletters.New(fresh, nil), slog.New(slog.DiscardHandler))
		recorder := httptest.NewRecorder()
		request := httptest.NewRequestWithContext(t.Context(), http.MethodGet, operators.Path+"dead-letters", nil)
		request.Header.Set("Authorization", "Bearer "+w.key)
		handler.ServeHTTP(recorder, request)
		answer{recorder}.requireProblem(t, http.StatusServiceUnavailable, "try-again")
		require.NoError(t, tx.Rollback(t.Context()))
	})
}

package operators_test

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/http"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/deadletters"
	"github.com/onceledger/onceledger/internal/inbox"
	"github.com/onceledger/onceledger/internal/operators"
	"github.com/onceledger/onceledger/internal/pgtest"
)

// TestSaysWhatWasDone: an act that fails at one order says what it did to those
// before it, to the caller and in the log.
func TestSaysWhatWasDone(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for range 3 {
		w.Deliver(t, wrong(w.order().Created()))
	}
	ids := pgtest.Column[uuid.UUID](t, w.Owner, "SELECT id FROM dead_letters ORDER BY id")
	pool := w.DB.Pool(t, "worker", func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["lock_timeout"] = "100ms" })
	in := inbox.New(inbox.Config{
		Consumer: billing.Consumer, Pool: pool, Handler: billing.Handler{Now: time.Now},
		Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry(), Now: time.Now,
	})
	var log bytes.Buffer
	w.handler = operators.Handler(pool, deadletters.New(pool, map[string]*inbox.Inbox{billing.Consumer: in}), slog.New(slog.NewTextHandler(&log, nil)))

	tx, err := w.Owner.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT FROM dead_letters WHERE id = $1 FOR UPDATE", ids[2])
	require.NoError(t, err)
	body := `{"classes":["rule"],"reason":"all wrong"}`
	a := w.post(t, "dead-letters/discard", body)
	require.NoError(t, tx.Rollback(t.Context()))

	a.requireProblem(t, http.StatusConflict, "dead-letter-busy")
	require.NotContains(t, a.Body.String(), "SQLSTATE")
	require.Contains(t, a.Body.String(), ids[2].String())
	var problem struct {
		Done deadletters.Report `json:"done"`
	}
	require.NoError(t, json.Unmarshal(a.Body.Bytes(), &problem))
	require.Len(t, problem.Done.Letters, 2)
	for i, letter := range problem.Done.Letters {
		require.Equal(t, ids[i], letter.ID)
		require.Equal(t, inbox.OutcomeDiscarded, letter.Outcome)
	}
	require.Equal(t, []string{"discarded", "discarded", "open"}, pgtest.Column[string](t, w.Owner, "SELECT state FROM dead_letters ORDER BY id"))
	require.Regexp(t, `msg="dead letters seen to" action=discard by=grace letters=2 whole=false`, log.String())

	var report deadletters.Report
	w.post(t, "dead-letters/discard", body).into(t, &report)
	require.Len(t, report.Letters, 1)
	require.Contains(t, log.String(), "letters=1 whole=true")
}

package deadletters

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/inbox"
)

// watchEvery is how often the letters are counted: as often as metrics are read at
// the most.
const watchEvery = 5 * time.Second

// watchShare bounds what counting costs: it waits this many times as long as it
// took, and less than a minute.
const watchShare = 10

// namedGaps is how many missing versions the log names one by one.
const namedGaps = 20

// WatchConfig is what a Watch is made of.
type WatchConfig struct {
	Pool     *pgxpool.Pool
	Consumer string
	GapWait  time.Duration // how long a version may be missing before somebody is to know
	Log      *slog.Logger
	Metrics  prometheus.Registerer
	Now      func() time.Time
}

// Watch shows the open letters and the missing versions of a consumer: as metrics,
// as a note of /readyz, and missing versions in the log once they have been
// missing for long. Neither makes a process not ready: a dead letter is no outage,
// and what is not held back goes on.
type Watch struct {
	config WatchConfig
	note   atomic.Pointer[string]
	said   map[db.MissingVersionListRow]bool // in the log; Run's

	open, oldest      *prometheus.GaugeVec
	missing, overdue  prometheus.Gauge
	oldestGap, seenAt prometheus.Gauge
}

// NewWatch registers the metrics.
func NewWatch(config WatchConfig) *Watch {
	auto := promauto.With(config.Metrics)
	labels := prometheus.Labels{"consumer": config.Consumer}
	byClass := func(name, help string) *prometheus.GaugeVec {
		return auto.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: labels}, []string{"class"})
	}
	gauge := func(name, help string) prometheus.Gauge {
		return auto.NewGauge(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: labels})
	}
	w := &Watch{
		config:    config,
		said:      make(map[db.MissingVersionListRow]bool),
		open:      byClass("onceledger_dead_letters_open", "Dead letters that wait for a person, by class; those of the class parked wait behind another."),
		oldest:    byClass("onceledger_dead_letters_oldest_seconds", "Age of the oldest open dead letter of a class; 0 if there is none."),
		missing:   gauge("onceledger_missing_versions", "Versions of orders that have not come although later ones have."),
		overdue:   gauge("onceledger_missing_versions_overdue", "Those of them that have been missing for longer than GAP_WAIT."),
		oldestGap: gauge("onceledger_missing_versions_oldest_seconds", "How long the version has been missing that has been for longest; 0 if none is."),
		seenAt:    gauge("onceledger_dead_letters_seen_timestamp_seconds", "When these were last counted: older than a minute, they mean nothing."),
	}
	w.note.Store(new("not counted yet"))
	return w
}

// Note is what /readyz shows.
func (w *Watch) Note(context.Context) string { return *w.note.Load() }

// Run counts until ctx is done.
func (w *Watch) Run(ctx context.Context) error {
	for {
		began := time.Now()
		if err := w.Look(ctx); err != nil && ctx.Err() == nil {
			w.config.Log.WarnContext(ctx, "dead letters not counted", "error", err)
			text := "not counted: " + err.Error()
			w.note.Store(&text)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(max(watchEvery, watchShare*time.Since(began))):
		}
	}
}

// Look counts once.
func (w *Watch) Look(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, watchEvery)
	defer cancel()
	letters, err := db.New().DeadLetterCount(ctx, w.config.Pool, w.config.Consumer)
	if err != nil {
		return fmt.Errorf("count dead letters: %w", err)
	}
	gaps, err := db.New().MissingVersionCount(ctx, w.config.Pool, w.config.GapWait.Seconds())
	if err != nil {
		return fmt.Errorf("count missing versions: %w", err)
	}

	counted := make(map[inbox.Class]db.DeadLetterCountRow, len(letters))
	for _, row := range letters {
		counted[inbox.Class(row.Class)] = row
	}
	for _, class := range inbox.Classes() {
		w.open.WithLabelValues(string(class)).Set(float64(counted[class].Letters))
		w.oldest.WithLabelValues(string(class)).Set(counted[class].OldestSeconds)
	}
	w.missing.Set(float64(gaps.Missing))
	w.overdue.Set(float64(gaps.Overdue))
	w.oldestGap.Set(gaps.OldestSeconds)
	w.seenAt.Set(float64(w.config.Now().Unix()))
	text := describe(letters, gaps)
	w.note.Store(&text)
	return w.alarm(ctx, gaps.Overdue)
}

// describe is one line: 2 open (1 data, 1 rule), 3 parked behind them, the oldest
// for 4m0s; 1 version is missing.
func describe(letters []db.DeadLetterCountRow, gaps db.MissingVersionCountRow) string {
	var open, parked int64
	var oldest float64
	var classes []string
	for _, row := range letters {
		oldest = max(oldest, row.OldestSeconds)
		if inbox.Class(row.Class) == inbox.ClassParked {
			parked = row.Letters
			continue
		}
		open += row.Letters
		classes = append(classes, fmt.Sprintf("%d %s", row.Letters, row.Class))
	}
	text := "none open"
	if open+parked > 0 {
		text = fmt.Sprintf("%d open (%s), %d parked behind them, the oldest for %s", open, strings.Join(classes, ", "), parked, seconds(oldest))
	}
	if gaps.Missing > 0 {
		text += fmt.Sprintf("; %d versions of orders are missing, for up to %s", gaps.Missing, seconds(gaps.OldestSeconds))
	}
	return text
}

func seconds(s float64) time.Duration { return time.Duration(s) * time.Second }

// alarm says in the log which versions are missing for too long: each once.
func (w *Watch) alarm(ctx context.Context, overdue int64) error {
	if overdue == 0 {
		clear(w.said)
		return nil
	}
	rows, err := db.New().MissingVersionList(ctx, w.config.Pool, db.MissingVersionListParams{
		AfterTenant: uuid.Nil, AfterOrder: uuid.Nil, WaitSeconds: w.config.GapWait.Seconds(), PageSize: namedGaps,
	})
	if err != nil {
		return fmt.Errorf("list missing versions: %w", err)
	}
	still := make(map[db.MissingVersionListRow]bool, len(rows))
	for _, row := range rows {
		still[row] = true
		if !w.said[row] {
			w.config.Log.WarnContext(ctx, "a version of an order is missing", "tenant_id", row.TenantID, "order_id", row.OrderID,
				"version", row.Version, "noticed_at", row.NoticedAt.UTC(), "overdue", overdue)
		}
	}
	w.said = still
	return nil
}

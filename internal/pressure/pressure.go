// Package pressure watches how near the relay's replication slots are to the
// limit of the log that Postgres keeps for them, and for how long events wait.
//
// A relay that does not get on makes Postgres keep its log, up to
// max_slot_wal_keep_size; then the slot is lost, and what it had not brought has
// to be found in the outbox. That limit keeps the disk from filling. This package
// keeps the limit from being reached: the API asks Shed before it writes, and
// stops to take orders while there is still room for what is under way. It costs
// one query a second, and nothing per request.
package pressure

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/onceledger/onceledger/internal/db"
)

const (
	watchEvery = time.Second

	// keepFor is how long the last reading counts when there is no newer one.
	// After that nothing is known, and nothing is shed: a database that cannot be
	// asked refuses the requests by itself.
	keepFor = 30 * time.Second
)

// Config is what a Watcher is made of.
type Config struct {
	DB   db.DBTX
	Slot string // the relay's; Debezium's of that name is watched with it

	ReservePercent int           // of max_slot_wal_keep_size, below which requests are shed; 0 is never
	MaxAge         time.Duration // of the oldest event that is not known to be delivered

	Log      *slog.Logger
	Registry prometheus.Registerer
	Now      func() time.Time
}

// Watcher reads the state once a second while Run runs, and tells from the last
// reading whether to shed.
type Watcher struct {
	config  Config
	last    atomic.Pointer[reading]
	metrics *prometheus.GaugeVec
}

type reading struct {
	at     time.Time
	reason string // "" is none
}

// The reasons to shed, as in the metric.
const (
	reasonWAL = "wal"
	reasonAge = "age"
)

// NewWatcher makes a watcher that sheds nothing until Run has read something.
func NewWatcher(config Config) *Watcher {
	w := &Watcher{config: config, metrics: promauto.With(config.Registry).NewGaugeVec(prometheus.GaugeOpts{
		Name: "onceledger_http_shedding",
		Help: "1 while requests that write are refused, by why: wal (the log kept for the relay is near its limit), age (events wait too long).",
	}, []string{"reason"})}
	w.show("")
	return w
}

// Shed reports whether a request that writes is to be refused now.
func (w *Watcher) Shed() bool {
	last := w.last.Load()
	return last != nil && last.reason != "" && w.config.Now().Sub(last.at) < keepFor
}

// Run watches until ctx is done.
func (w *Watcher) Run(ctx context.Context) error {
	ticker := time.NewTicker(watchEvery)
	defer ticker.Stop()
	for {
		w.look(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// look reads the state. Where it cannot be read the last one stands.
func (w *Watcher) look(ctx context.Context) {
	ask, cancel := context.WithTimeout(ctx, watchEvery)
	defer cancel()
	row, err := db.New().PressureGet(ask, w.config.DB, w.config.Slot)
	if err != nil {
		w.config.Log.DebugContext(ctx, "pressure not read", "error", err)
		if !w.Shed() {
			w.show("")
		}
		return
	}
	reason, why := w.judge(row)
	before := w.last.Swap(&reading{at: w.config.Now(), reason: reason})
	w.show(reason)
	switch {
	case reason != "" && (before == nil || before.reason != reason):
		w.config.Log.WarnContext(ctx, "shedding load: requests that write are refused", "reason", reason, "why", why)
	case reason == "" && before != nil && before.reason != "":
		w.config.Log.InfoContext(ctx, "no longer shedding load")
	}
}

// judge says whether to shed, and why.
func (w *Watcher) judge(row db.PressureGetRow) (reason, why string) {
	limited := row.KeepBytes > 0 && row.SafeBytes != math.MaxInt64
	if reserve := row.KeepBytes / 100 * int64(w.config.ReservePercent); limited && reserve > 0 && row.SafeBytes < reserve {
		return reasonWAL, fmt.Sprintf("%d MB of log are left for the relay's slot before it is lost, and %d MB are the reserve (max_slot_wal_keep_size is %d MB)",
			max(0, row.SafeBytes)>>20, reserve>>20, row.KeepBytes>>20)
	}
	if age := time.Duration(row.OldestSeconds * float64(time.Second)); age > w.config.MaxAge {
		return reasonAge, fmt.Sprintf("the oldest event has waited for %s, and %s is the limit", age.Round(time.Second), w.config.MaxAge)
	}
	return "", ""
}

func (w *Watcher) show(now string) {
	for _, reason := range []string{reasonWAL, reasonAge} {
		value := 0.0
		if reason == now {
			value = 1
		}
		w.metrics.WithLabelValues(reason).Set(value)
	}
}

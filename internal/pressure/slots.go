package pressure

import (
	"context"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/onceledger/onceledger/internal/db"
)

// slotsEvery is how often the metrics are read: as often as they are scraped at
// the most.
const slotsEvery = 5 * time.Second

// Slots shows the relay's slots as metrics, for whatever relay reads them and
// whether or not one does: the connector of Debezium says RUNNING over a slot
// that is lost.
type Slots struct {
	conn db.DBTX
	slot string
	log  *slog.Logger

	retained, safe, active *prometheus.GaugeVec
	status, invalidated    *prometheus.GaugeVec
	limit, oldest, seen    prometheus.Gauge
	now                    func() time.Time
}

// NewSlots registers the metrics.
func NewSlots(conn db.DBTX, slot string, log *slog.Logger, registry prometheus.Registerer, now func() time.Time) *Slots {
	auto := promauto.With(registry)
	gauges := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return auto.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, append([]string{"slot"}, labels...))
	}
	gauge := func(name, help string) prometheus.Gauge {
		return auto.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	return &Slots{
		conn: conn, slot: slot, log: log, now: now,
		retained:    gauges("onceledger_slot_retained_bytes", "Log that Postgres keeps for a slot."),
		safe:        gauges("onceledger_slot_safe_wal_bytes", "Log that can still be written before a slot is lost; -1 if there is no limit, or it is lost."),
		active:      gauges("onceledger_slot_active", "1 if somebody reads from a slot."),
		status:      gauges("onceledger_slot_wal_status", "1 for a slot's wal_status: reserved, extended, unreserved, lost.", "status"),
		invalidated: gauges("onceledger_slot_invalidated", "1 for why a slot was invalidated; no series if it was not.", "reason"),
		limit:       gauge("onceledger_slot_wal_limit_bytes", "max_slot_wal_keep_size; below 0 if there is no limit."),
		oldest:      gauge("onceledger_outbox_oldest_undelivered_seconds", "Age of the oldest event that is not known to be delivered; 0 if all are."),
		seen:        gauge("onceledger_slot_seen_timestamp_seconds", "When the slots were last read: older than a minute, the other metrics of them mean nothing."),
	}
}

// Run reads until ctx is done.
func (s *Slots) Run(ctx context.Context) error {
	ticker := time.NewTicker(slotsEvery)
	defer ticker.Stop()
	for {
		if err := s.Read(ctx); err != nil && ctx.Err() == nil {
			s.log.WarnContext(ctx, "replication slots not read", "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// Read reads once.
func (s *Slots) Read(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, slotsEvery)
	defer cancel()
	slots, err := db.New().SlotList(ctx, s.conn, s.slot)
	if err != nil {
		return err
	}
	total, err := db.New().PressureGet(ctx, s.conn, s.slot)
	if err != nil {
		return err
	}
	for _, vector := range []*prometheus.GaugeVec{s.retained, s.safe, s.active, s.status, s.invalidated} {
		vector.Reset() // a slot that is dropped has no series
	}
	for _, slot := range slots {
		s.retained.WithLabelValues(slot.SlotName).Set(float64(slot.RetainedBytes))
		s.safe.WithLabelValues(slot.SlotName).Set(float64(slot.SafeBytes))
		s.active.WithLabelValues(slot.SlotName).Set(map[bool]float64{true: 1}[slot.Active])
		for _, status := range []string{"reserved", "extended", "unreserved", "lost"} {
			s.status.WithLabelValues(slot.SlotName, status).Set(map[bool]float64{true: 1}[slot.WalStatus == status])
		}
		if slot.InvalidationReason != "" {
			s.invalidated.WithLabelValues(slot.SlotName, slot.InvalidationReason).Set(1)
		}
	}
	s.limit.Set(float64(total.KeepBytes))
	s.oldest.Set(total.OldestSeconds)
	s.seen.Set(float64(s.now().Unix()))
	return nil
}

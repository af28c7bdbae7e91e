package httpapi

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/janitor"
	"github.com/onceledger/onceledger/internal/telemetry"
)

// furthestClock is how far this host's clock may be from the database's: ids are
// made from it, and the consumer refuses ids from the future.
const furthestClock = 5 * time.Minute

// Checks are what the API has to find in order to be ready: the database, its
// clock, the partitions of today and tomorrow, and the way to Kafka. The API
// itself never talks to Kafka; what it knows of it is what the relay wrote down.
func Checks(pool *pgxpool.Pool, now func() time.Time, publication, slot string) []telemetry.Check {
	ask := func(ctx context.Context) (db.ReadinessGetRow, error) {
		return db.New().ReadinessGet(ctx, pool, publication, slot)
	}
	return []telemetry.Check{
		{Name: "database", Ask: func(ctx context.Context) error {
			row, err := ask(ctx)
			if err != nil {
				return fmt.Errorf("ask database: %w", err)
			}
			if off := now().Sub(row.DatabaseTime).Abs(); off > furthestClock {
				return fmt.Errorf("this host's clock is %s off the database's", off.Round(time.Second))
			}
			return nil
		}},
		{Name: "partitions", Ask: func(ctx context.Context) error {
			return janitor.CheckPartitions(ctx, pool, now())
		}},
		{Name: "relay", Ask: func(ctx context.Context) error {
			row, err := ask(ctx)
			if err != nil {
				return fmt.Errorf("ask database: %w", err)
			}
			if row.RelayFault != "" {
				return errors.New(row.RelayFault)
			}
			return nil
		}},
	}
}

type metrics struct {
	requests *prometheus.HistogramVec
	replayed prometheus.Counter
	shed     prometheus.Counter
}

func newMetrics(registerer prometheus.Registerer) *metrics {
	m := &metrics{
		requests: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "onceledger_http_request_seconds",
			Help:    "Time from a request's first byte to its answer.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
		}, []string{"method", "route", "status"}),
		replayed: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "onceledger_http_replayed_total",
			Help: "Requests that were answered with the stored answer of an earlier one.",
		}),
		shed: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "onceledger_http_shed_total",
			Help: "Requests that were refused because events do not get to Kafka.",
		}),
	}
	registerer.MustRegister(m.requests, m.replayed, m.shed)
	return m
}

func (m *metrics) observe(method, route string, status int, took time.Duration) {
	m.requests.WithLabelValues(method, route, strconv.Itoa(status)).Observe(took.Seconds())
}

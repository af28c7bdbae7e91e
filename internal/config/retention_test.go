package config_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/config"
)

// A command that checks the retention contract must not have other numbers than
// the worker that keeps it.
func TestRetentionIsTheWorkers(t *testing.T) {
	t.Parallel()

	for _, environ := range []map[string]string{
		{},
		{"OUTBOX_RETENTION": "24h", "DEDUPE_WINDOW": "2160h", "REPLAY_WINDOW": "0"},
	} {
		getenv := func(name string) string {
			if value, ok := environ[name]; ok {
				return value
			}
			switch name {
			case "WORKER_ROLES":
				return "balances"
			case "KAFKA_BROKERS":
				return "127.0.0.1:9092"
			}
			return ""
		}
		worker, err := config.LoadWorker(getenv)
		require.NoError(t, err)
		retention, err := config.LoadRetention(getenv)
		require.NoError(t, err)
		require.Equal(t, [3]time.Duration{worker.OutboxRetention, worker.DedupeWindow, worker.ReplayWindow},
			[3]time.Duration{retention.Outbox, retention.Dedupe, retention.Replay})
	}
	_, err := config.LoadRetention(func(name string) string { return map[string]string{"DEDUPE_WINDOW": "1h", "REPLAY_WINDOW": "x"}[name] })
	require.ErrorContains(t, err, "DEDUPE_WINDOW")
	require.ErrorContains(t, err, "REPLAY_WINDOW")
}

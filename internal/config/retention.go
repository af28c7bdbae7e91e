package config

import (
	"errors"
	"time"
)

// Retention is how long things are kept, for a command that has to know what the
// workers are told.
type Retention struct {
	Outbox time.Duration // OUTBOX_RETENTION, default 72h
	Dedupe time.Duration // DEDUPE_WINDOW, default 720h
	Replay time.Duration // REPLAY_WINDOW, default 168h; 0 is no replay
}

// LoadRetention reads what a worker would, with the same defaults.
func LoadRetention(getenv func(string) string) (Retention, error) {
	env := reader{getenv: getenv}
	retention := Retention{
		Outbox: env.longer("OUTBOX_RETENTION", time.Hour, 72*time.Hour),
		Dedupe: env.longer("DEDUPE_WINDOW", 24*time.Hour, 720*time.Hour),
		Replay: env.longer("REPLAY_WINDOW", 0, 168*time.Hour),
	}
	return retention, errors.Join(env.faults...)
}

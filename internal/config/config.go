// Package config reads the environment. Only cmd/ imports it: everything below
// gets what it needs as arguments.
package config

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"
)

// API is the environment of cmd/api.
type API struct {
	DatabaseURL     string        // DATABASE_URL, login onceledger_api
	Addr            string        // ONCELEDGER_ADDR, default 127.0.0.1:8080
	MaxConns        int32         // API_MAX_CONNS, default 10
	Slot            string        // RELAY_SLOT, default onceledger_outbox
	ShedReserve     int           // SHED_WAL_RESERVE, percent of max_slot_wal_keep_size, default 20%; 0 is never
	ShedAge         time.Duration // SHED_OUTBOX_AGE, default 1h
	ShutdownTimeout time.Duration // SHUTDOWN_TIMEOUT, default 10s
	LogLevel        slog.Level    // LOG_LEVEL, default info
	Crash           string        // ONCELEDGER_CRASH, default none
}

// The roles of a worker.
const (
	RoleRelay    = "relay"
	RoleBilling  = "billing"
	RoleBalances = "balances"
	RoleJanitor  = "janitor"
)

var roles = []string{RoleRelay, RoleBilling, RoleBalances, RoleJanitor}

// Worker is the environment of cmd/worker. Each role needs its own addresses
// only.
type Worker struct {
	Roles              []string      // WORKER_ROLES, default all
	ID                 string        // WORKER_ID, required where several workers run; default none
	DatabaseURL        string        // DATABASE_URL, login onceledger_worker
	RelayDatabaseURL   string        // RELAY_DATABASE_URL, login onceledger_relay
	JanitorDatabaseURL string        // JANITOR_DATABASE_URL, login onceledger_janitor
	Brokers            string        // KAFKA_BROKERS, host:port,…
	Addr               string        // WORKER_ADDR, default 127.0.0.1:8081
	Slot               string        // RELAY_SLOT, default onceledger_outbox
	PollEvery          time.Duration // RELAY_POLL_INTERVAL, default 100ms
	Batch              int           // BILLING_BATCH, events in hand at most, default 2000
	Writers            int           // BILLING_WRITERS, transactions side by side, default 2
	Skip               []Record      // BALANCES_SKIP, partition:offset,… of billing.events; default none
	GapWait            time.Duration // GAP_WAIT, how long a version of an order may be missing, default 1m
	OutboxRetention    time.Duration // OUTBOX_RETENTION, default 72h
	DedupeWindow       time.Duration // DEDUPE_WINDOW, default 720h
	ReplayWindow       time.Duration // REPLAY_WINDOW, default 168h; 0 is no replay
	KeyRetention       time.Duration // IDEMPOTENCY_RETENTION, default 168h
	ShutdownTimeout    time.Duration // SHUTDOWN_TIMEOUT, default 10s
	LogLevel           slog.Level    // LOG_LEVEL, default info
	Crash              string        // ONCELEDGER_CRASH, default none
}

// Record is where a record lies in its topic.
type Record struct {
	Partition int32
	Offset    int64
}

// Has reports whether the worker has a role.
func (w Worker) Has(role string) bool { return slices.Contains(w.Roles, role) }

// LoadAPI reads the environment of cmd/api and names all that is wrong with it.
func LoadAPI(getenv func(string) string) (API, error) {
	env := reader{getenv: getenv}
	config := API{
		DatabaseURL:     env.required("DATABASE_URL", "the API"),
		Addr:            env.text("ONCELEDGER_ADDR", "127.0.0.1:8080"),
		MaxConns:        int32(env.count("API_MAX_CONNS", 10)),
		Slot:            env.text("RELAY_SLOT", "onceledger_outbox"),
		ShedReserve:     env.percent("SHED_WAL_RESERVE", 20),
		ShedAge:         env.duration("SHED_OUTBOX_AGE", time.Hour),
		ShutdownTimeout: env.duration("SHUTDOWN_TIMEOUT", 10*time.Second),
		LogLevel:        env.level(),
		Crash:           getenv("ONCELEDGER_CRASH"),
	}
	return config, errors.Join(env.faults...)
}

// LoadWorker reads the environment of cmd/worker and names all that is wrong
// with it.
func LoadWorker(getenv func(string) string) (Worker, error) {
	env := reader{getenv: getenv}
	config := Worker{
		Roles:           env.roles(),
		ID:              getenv("WORKER_ID"),
		Addr:            env.text("WORKER_ADDR", "127.0.0.1:8081"),
		Slot:            env.text("RELAY_SLOT", "onceledger_outbox"),
		PollEvery:       env.duration("RELAY_POLL_INTERVAL", 100*time.Millisecond),
		Batch:           env.count("BILLING_BATCH", 2000),
		Writers:         env.count("BILLING_WRITERS", 2),
		Skip:            env.records("BALANCES_SKIP"),
		GapWait:         env.duration("GAP_WAIT", time.Minute),
		OutboxRetention: env.longer("OUTBOX_RETENTION", time.Hour, 72*time.Hour),
		DedupeWindow:    env.longer("DEDUPE_WINDOW", 24*time.Hour, 720*time.Hour),
		ReplayWindow:    env.longer("REPLAY_WINDOW", 0, 168*time.Hour),
		KeyRetention:    env.longer("IDEMPOTENCY_RETENTION", 24*time.Hour, 168*time.Hour),
		ShutdownTimeout: env.duration("SHUTDOWN_TIMEOUT", 10*time.Second),
		LogLevel:        env.level(),
		Crash:           getenv("ONCELEDGER_CRASH"),
	}
	if config.Has(RoleBilling) {
		config.DatabaseURL = env.required("DATABASE_URL", "the role billing")
	}
	if config.Has(RoleRelay) {
		config.RelayDatabaseURL = env.required("RELAY_DATABASE_URL", "the role relay")
	}
	if config.Has(RoleJanitor) {
		config.JanitorDatabaseURL = env.required("JANITOR_DATABASE_URL", "the role janitor")
	}
	config.Brokers = env.required("KAFKA_BROKERS", "the worker")
	return config, errors.Join(env.faults...)
}

// reader reads variables and collects what is wrong with them. It never prints a
// value of an address, which may hold a password.
type reader struct {
	getenv func(string) string
	faults []error
}

func (r *reader) fault(format string, args ...any) {
	r.faults = append(r.faults, fmt.Errorf(format, args...))
}

func (r *reader) text(name, standard string) string {
	if value := r.getenv(name); value != "" {
		return value
	}
	return standard
}

func (r *reader) required(name, who string) string {
	value := r.getenv(name)
	if value == "" {
		r.fault("%s is not set: it is needed by %s (docs/configuration.md)", name, who)
	}
	return value
}

func (r *reader) count(name string, standard int) int {
	value := r.getenv(name)
	if value == "" {
		return standard
	}
	number, err := strconv.Atoi(value)
	if err != nil || number < 1 || number > 100_000 {
		r.fault("%s is %q: want a whole number from 1 to 100000", name, value)
	}
	return number
}

func (r *reader) duration(name string, standard time.Duration) time.Duration {
	value := r.getenv(name)
	if value == "" {
		return standard
	}
	duration, err := time.ParseDuration(value)
	if err != nil || duration <= 0 {
		r.fault("%s is %q: want a duration above zero, such as 10s", name, value)
	}
	return duration
}

// longer is a duration from lowest on; that may be 0.
func (r *reader) longer(name string, lowest, standard time.Duration) time.Duration {
	value := r.getenv(name)
	if value == "" {
		return standard
	}
	duration, err := time.ParseDuration(value)
	if err != nil || duration < lowest {
		r.fault("%s is %q: want a duration from %s on, such as %s", name, value, lowest, standard)
	}
	return duration
}

func (r *reader) percent(name string, standard int) int {
	value := r.getenv(name)
	if value == "" {
		return standard
	}
	digits, found := strings.CutSuffix(value, "%")
	number, err := strconv.Atoi(digits)
	if !found || err != nil || number < 0 || number > 90 {
		r.fault("%s is %q: want a whole number of percent from 0%% to 90%%", name, value)
	}
	return number
}

// records reads partition:offset,….
func (r *reader) records(name string) []Record {
	var records []Record
	for text := range strings.SplitSeq(r.getenv(name), ",") {
		if text = strings.TrimSpace(text); text == "" {
			continue
		}
		before, after, _ := strings.Cut(text, ":")
		partition, partitionErr := strconv.ParseInt(before, 10, 32)
		offset, offsetErr := strconv.ParseInt(after, 10, 64)
		if partitionErr != nil || offsetErr != nil || partition < 0 || offset < 0 {
			r.fault("%s names %q: want partition:offset, separated by commas, such as 3:1234", name, text)
		}
		records = append(records, Record{int32(partition), offset})
	}
	return records
}

func (r *reader) level() slog.Level {
	var level slog.Level
	if value := r.getenv("LOG_LEVEL"); value != "" {
		if err := level.UnmarshalText([]byte(value)); err != nil {
			r.fault("LOG_LEVEL is %q: want debug, info, warn or error", value)
		}
	}
	return level
}

func (r *reader) roles() []string {
	value := r.getenv("WORKER_ROLES")
	if value == "" {
		return roles
	}
	var chosen []string
	for name := range strings.SplitSeq(value, ",") {
		name = strings.TrimSpace(name)
		if !slices.Contains(roles, name) {
			r.fault("WORKER_ROLES names %q: want some of %s", name, strings.Join(roles, ","))
		}
		chosen = append(chosen, name)
	}
	return chosen
}

package config_test

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/config"
)

func env(values map[string]string) func(string) string {
	return func(name string) string { return values[name] }
}

const secret = "postgres://api:s3cret@db:5432/x"

func TestLoadAPI(t *testing.T) {
	t.Parallel()

	t.Run("NeedsTheDatabaseAlone", func(t *testing.T) {
		t.Parallel()

		got, err := config.LoadAPI(env(map[string]string{"DATABASE_URL": secret}))
		require.NoError(t, err)
		require.Equal(t, config.API{
			DatabaseURL: secret, Addr: "127.0.0.1:8080", MaxConns: 10, Slot: "onceledger_outbox",
			ShedReserve: 20, ShedAge: time.Hour, ShutdownTimeout: 10 * time.Second, LogLevel: slog.LevelInfo,
		}, got)
	})

	t.Run("TakesWhatIsSet", func(t *testing.T) {
		t.Parallel()

		got, err := config.LoadAPI(env(map[string]string{
			"DATABASE_URL": secret, "ONCELEDGER_ADDR": ":0", "API_MAX_CONNS": "3", "RELAY_SLOT": "other",
			"SHED_WAL_RESERVE": "5%", "SHED_OUTBOX_AGE": "90s", "SHUTDOWN_TIMEOUT": "250ms", "LOG_LEVEL": "debug", "ONCELEDGER_CRASH": "api.before-commit",
		}))
		require.NoError(t, err)
		require.Equal(t, config.API{
			DatabaseURL: secret, Addr: ":0", MaxConns: 3, Slot: "other", ShedReserve: 5, ShedAge: 90 * time.Second,
			ShutdownTimeout: 250 * time.Millisecond, LogLevel: slog.LevelDebug, Crash: "api.before-commit",
		}, got)
	})

	t.Run("NamesAllFaultsAtOnce", func(t *testing.T) {
		t.Parallel()

		_, err := config.LoadAPI(env(map[string]string{"API_MAX_CONNS": "many", "SHUTDOWN_TIMEOUT": "10", "LOG_LEVEL": "loud"}))
		requireFaults(t, err, "DATABASE_URL", "API_MAX_CONNS", "SHUTDOWN_TIMEOUT", "LOG_LEVEL")
	})

	for name, value := range map[string]string{
		"Zero": "0", "BelowZero": "-1", "TooMany": "100001", "MoreThanFitsInt32": "4294967299", "Decimals": "1.5", "Blank": " ", "Text": "ten",
	} {
		t.Run("RefusesConnections"+name, func(t *testing.T) {
			t.Parallel()

			_, err := config.LoadAPI(env(map[string]string{"DATABASE_URL": secret, "API_MAX_CONNS": value}))
			requireFaults(t, err, "API_MAX_CONNS")
		})
	}

	for name, value := range map[string]string{"WithoutASign": "20", "BelowZero": "-1%", "TooMuch": "91%", "Decimals": "2.5%", "Text": "some%"} {
		t.Run("RefusesAReserve"+name, func(t *testing.T) {
			t.Parallel()

			_, err := config.LoadAPI(env(map[string]string{"DATABASE_URL": secret, "SHED_WAL_RESERVE": value}))
			requireFaults(t, err, "SHED_WAL_RESERVE")
		})
	}

	for name, value := range map[string]string{"Zero": "0s", "BelowZero": "-1s", "WithoutAUnit": "5", "Text": "soon"} {
		t.Run("RefusesATimeout"+name, func(t *testing.T) {
			t.Parallel()

			_, err := config.LoadAPI(env(map[string]string{"DATABASE_URL": secret, "SHUTDOWN_TIMEOUT": value}))
			requireFaults(t, err, "SHUTDOWN_TIMEOUT")
		})
	}
}

func TestLoadWorker(t *testing.T) {
	t.Parallel()

	all := map[string]string{
		"DATABASE_URL": secret, "RELAY_DATABASE_URL": secret, "JANITOR_DATABASE_URL": secret, "KAFKA_BROKERS": "a:9092,b:9092",
	}

	t.Run("HasEveryRoleUnlessTold", func(t *testing.T) {
		t.Parallel()

		got, err := config.LoadWorker(env(all))
		require.NoError(t, err)
		require.Equal(t, config.Worker{
			Roles:       []string{config.RoleRelay, config.RoleBilling, config.RoleBalances, config.RoleJanitor},
			DatabaseURL: secret, RelayDatabaseURL: secret, JanitorDatabaseURL: secret, Brokers: "a:9092,b:9092",
			Addr: "127.0.0.1:8081", Slot: "onceledger_outbox", PollEvery: 100 * time.Millisecond, Batch: 2000, Writers: 2,
			GapWait: time.Minute, OutboxRetention: 72 * time.Hour, DedupeWindow: 720 * time.Hour, ReplayWindow: 168 * time.Hour, KeyRetention: 168 * time.Hour,
			ShutdownTimeout: 10 * time.Second, LogLevel: slog.LevelInfo,
		}, got)
	})

	for _, test := range []struct {
		roles string
		needs []string
	}{
		{"", []string{"DATABASE_URL", "RELAY_DATABASE_URL", "JANITOR_DATABASE_URL", "KAFKA_BROKERS"}},
		{"relay", []string{"RELAY_DATABASE_URL", "KAFKA_BROKERS"}},
		{"billing", []string{"DATABASE_URL", "KAFKA_BROKERS"}},
		{"balances", []string{"KAFKA_BROKERS"}},
		{"janitor", []string{"JANITOR_DATABASE_URL", "KAFKA_BROKERS"}},
		{"relay, janitor", []string{"RELAY_DATABASE_URL", "JANITOR_DATABASE_URL", "KAFKA_BROKERS"}},
	} {
		t.Run("NeedsTheAddressesOfItsRolesAlone/"+test.roles, func(t *testing.T) {
			t.Parallel()

			_, err := config.LoadWorker(env(map[string]string{"WORKER_ROLES": test.roles}))
			requireFaults(t, err, test.needs...)

			enough := map[string]string{"WORKER_ROLES": test.roles}
			for _, name := range test.needs {
				enough[name] = all[name]
			}
			_, err = config.LoadWorker(env(enough))
			require.NoError(t, err)
		})
	}

	t.Run("TakesRetentionsWithinTheirBounds", func(t *testing.T) {
		t.Parallel()

		values := map[string]string{"OUTBOX_RETENTION": "1h", "DEDUPE_WINDOW": "24h", "REPLAY_WINDOW": "0", "IDEMPOTENCY_RETENTION": "24h"}
		for name, value := range all {
			values[name] = value
		}
		got, err := config.LoadWorker(env(values))
		require.NoError(t, err)
		require.Equal(t, []time.Duration{time.Hour, 24 * time.Hour, 0, 24 * time.Hour},
			[]time.Duration{got.OutboxRetention, got.DedupeWindow, got.ReplayWindow, got.KeyRetention})

		for name, value := range map[string]string{
			"OUTBOX_RETENTION": "59m", "DEDUPE_WINDOW": "23h", "REPLAY_WINDOW": "-1s", "IDEMPOTENCY_RETENTION": "3 days",
		} {
			values[name] = value
		}
		_, err = config.LoadWorker(env(values))
		requireFaults(t, err, "OUTBOX_RETENTION", "DEDUPE_WINDOW", "REPLAY_WINDOW", "IDEMPOTENCY_RETENTION")
	})

	t.Run("TakesRecordsToSkip", func(t *testing.T) {
		t.Parallel()

		values := map[string]string{"WORKER_ROLES": "balances", "KAFKA_BROKERS": "a:9092", "BALANCES_SKIP": "3:1234, 0:0"}
		got, err := config.LoadWorker(env(values))
		require.NoError(t, err)
		require.Equal(t, []config.Record{{Partition: 3, Offset: 1234}, {}}, got.Skip)

		for _, wrong := range []string{"3", "3:", ":4", "-1:4", "3:-4", "3:x", "3;4"} {
			values["BALANCES_SKIP"] = wrong
			_, err := config.LoadWorker(env(values))
			requireFaults(t, err, "BALANCES_SKIP")
		}
	})

	t.Run("RefusesARoleThatIsNone", func(t *testing.T) {
		t.Parallel()

		for _, roles := range []string{"cook", "relay,", "relay;billing", "Relay", ","} {
			values := map[string]string{"WORKER_ROLES": roles}
			for name, value := range all {
				values[name] = value
			}
			_, err := config.LoadWorker(env(values))
			require.ErrorContains(t, err, "WORKER_ROLES", roles)
		}
	})

	t.Run("NamesAllFaultsAtOnce", func(t *testing.T) {
		t.Parallel()

		_, err := config.LoadWorker(env(map[string]string{
			"WORKER_ROLES": "cook,billing", "BILLING_BATCH": "0", "SHUTDOWN_TIMEOUT": "x", "LOG_LEVEL": "x",
		}))
		requireFaults(t, err, "WORKER_ROLES", "BILLING_BATCH", "SHUTDOWN_TIMEOUT", "LOG_LEVEL", "DATABASE_URL", "KAFKA_BROKERS")
	})

	t.Run("TellsNoSecret", func(t *testing.T) {
		t.Parallel()

		values := map[string]string{"WORKER_ROLES": "cook", "BILLING_BATCH": "0", "SHUTDOWN_TIMEOUT": "x", "LOG_LEVEL": "x"}
		for name, value := range all {
			values[name] = value
		}
		_, err := config.LoadWorker(env(values))
		require.Error(t, err)
		require.NotContains(t, err.Error(), "s3cret")
	})
}

// requireFaults wants one line for each of the variables, and no other.
func requireFaults(t *testing.T, err error, names ...string) {
	t.Helper()
	require.Error(t, err)
	var got []string
	for line := range strings.SplitSeq(err.Error(), "\n") {
		name, _, _ := strings.Cut(line, " ")
		got = append(got, name)
	}
	require.ElementsMatch(t, names, got, err.Error())
}

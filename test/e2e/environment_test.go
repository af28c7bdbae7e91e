package e2e_test

import (
	"net"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/pgtest"
)

// TestWrongEnvironment starts each program with something missing or wrong. It
// must end, not with 0, and name the variable; and it must not print a password.
func TestWrongEnvironment(t *testing.T) {
	t.Parallel()

	const (
		nobody   = "postgres://someone:secret-word@127.0.0.1:1/x" // port 1: nobody listens
		garbage  = "postgres://someone:secret-word/%zz@127.0.0.1/x"
		broker   = "KAFKA_BROKERS=127.0.0.1:1"
		anywhere = "WORKER_ADDR=127.0.0.1:0"
	)
	database := pgtest.New(t)
	wrongPassword := strings.Replace(database.URL("relay"), "onceledger-test", "secret-word", 1)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	taken := listener.Addr().String()

	tests := []struct {
		name    string
		command string
		env     []string
		names   []string
	}{
		{"APIWithNothing", "api", nil, []string{"DATABASE_URL"}},
		{"APIWithoutServer", "api", []string{"DATABASE_URL=" + nobody}, []string{"DATABASE_URL"}},
		{"APIWithMalformedAddress", "api", []string{"DATABASE_URL=" + garbage}, []string{"DATABASE_URL"}},
		{"APIWithWrongPassword", "api", []string{"DATABASE_URL=" + wrongPassword}, []string{"DATABASE_URL"}},
		{"APIOnTakenPort", "api", []string{"DATABASE_URL=" + database.URL("api"), "ONCELEDGER_ADDR=" + taken}, []string{"ONCELEDGER_ADDR"}},
		{"APIOnNoPort", "api", []string{"DATABASE_URL=" + database.URL("api"), "ONCELEDGER_ADDR=nonsense"}, []string{"ONCELEDGER_ADDR"}},
		{"APIWithUnknownCrashPoint", "api", []string{"DATABASE_URL=" + nobody, "ONCELEDGER_CRASH=nowhere"}, []string{"ONCELEDGER_CRASH"}},
		{
			"APIWithManyFaults", "api", []string{"API_MAX_CONNS=0", "SHUTDOWN_TIMEOUT=10", "LOG_LEVEL=loud"},
			[]string{"DATABASE_URL", "API_MAX_CONNS", "SHUTDOWN_TIMEOUT", "LOG_LEVEL"},
		},

		{"WorkerWithNothing", "worker", nil, []string{"DATABASE_URL", "RELAY_DATABASE_URL", "JANITOR_DATABASE_URL", "KAFKA_BROKERS"}},
		{
			"WorkerWithManyFaults", "worker", []string{"WORKER_ROLES=billing,dishes", "BILLING_BATCH=0"},
			[]string{"WORKER_ROLES", "BILLING_BATCH", "DATABASE_URL", "KAFKA_BROKERS"},
		},
		{"BillingWithoutServer", "worker", []string{"WORKER_ROLES=billing", "DATABASE_URL=" + nobody, broker}, []string{"DATABASE_URL"}},
		{"JanitorWithoutServer", "worker", []string{"WORKER_ROLES=janitor", "JANITOR_DATABASE_URL=" + nobody, broker}, []string{"JANITOR_DATABASE_URL"}},
		{"WorkerOnTakenPort", "worker", []string{"WORKER_ROLES=janitor", "JANITOR_DATABASE_URL=" + database.URL("janitor"), broker, "WORKER_ADDR=" + taken}, []string{"WORKER_ADDR"}},
		{"RelayWithMalformedAddress", "worker", []string{"WORKER_ROLES=relay", "RELAY_DATABASE_URL=" + garbage, broker, anywhere}, []string{"RELAY_DATABASE_URL"}},
		{"RelayWithWrongPassword", "worker", []string{"WORKER_ROLES=relay", "RELAY_DATABASE_URL=" + wrongPassword, broker, anywhere}, []string{"RELAY_DATABASE_URL"}},
		{"RelayWithAnotherLogin", "worker", []string{"WORKER_ROLES=relay", "RELAY_DATABASE_URL=" + database.URL("api"), broker, anywhere}, []string{"RELAY_DATABASE_URL"}},
		{"RelayWithImpossibleSlot", "worker", []string{"WORKER_ROLES=relay", "RELAY_DATABASE_URL=" + nobody, broker, anywhere, "RELAY_SLOT=it's"}, []string{"RELAY_SLOT"}},

		{"MigrateWithNothing", "onceledger migrate up", nil, []string{"DATABASE_URL"}},
		{"MigrateWithoutServer", "onceledger migrate up", []string{"DATABASE_URL=" + nobody}, []string{"DATABASE_URL"}},
		{"KeysWithNothing", "onceledger keys create --tenant acme", nil, []string{"DATABASE_URL"}},
		{"KeysWithMalformedAddress", "onceledger keys list", []string{"DATABASE_URL=" + garbage}, []string{"DATABASE_URL"}},
		{"VerifyWithNothing", "onceledger verify", nil, []string{"DATABASE_URL"}},
		{"VerifyWithoutServer", "onceledger verify", []string{"DATABASE_URL=" + nobody}, []string{"DATABASE_URL"}},
		{"UpOnTakenPort", "onceledger up", []string{"ONCELEDGER_ADDR=" + taken}, []string{"ONCELEDGER_ADDR"}},
		{"UpWithoutPostgresPrograms", "onceledger up", []string{"ONCELEDGER_ADDR=127.0.0.1:0", "ONCELEDGER_POSTGRES_BIN=/nowhere"}, []string{"ONCELEDGER_POSTGRES_BIN"}},
		{"UpWithoutServer", "onceledger up", []string{"ONCELEDGER_ADDR=127.0.0.1:0", "DATABASE_URL=" + nobody}, []string{"DATABASE_URL"}},
		{"UpWithoutFolder", "onceledger up", []string{"ONCELEDGER_ADDR=127.0.0.1:0", "ONCELEDGER_HOME=/proc/nowhere"}, []string{"ONCELEDGER_HOME"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			words := strings.Fields(test.command)
			said := run(t, test.env, words[0], words[1:]...)
			require.NotZero(t, said.code)
			require.Empty(t, said.stdout)
			for _, name := range test.names {
				require.Contains(t, said.stderr, name)
			}
			require.NotContains(t, said.stderr, "secret-word")
			require.NotContains(t, said.stderr, "goroutine ")
		})
	}
}

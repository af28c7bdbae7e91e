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
		nowhere  = "127.0.0.1:1"
		anywhere = "127.0.0.1:0"
	)
	database := pgtest.New(t)
	wrongPassword := strings.Replace(database.URL("relay"), "onceledger-test", "secret-word", 1)
	listener, err := net.Listen("tcp", anywhere)
	require.NoError(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	taken := listener.Addr().String()

	tests := []struct {
		program string // with its arguments
		env     []string
		names   []string
	}{
		{"api", nil, []string{"DATABASE_URL"}},
		{"api", []string{"DATABASE_URL=" + nobody}, []string{"DATABASE_URL"}},
		{"api", []string{"DATABASE_URL=" + garbage}, []string{"DATABASE_URL"}},
		{"api", []string{"DATABASE_URL=" + wrongPassword}, []string{"DATABASE_URL"}},
		{"api", []string{"DATABASE_URL=" + database.URL("api"), "ONCELEDGER_ADDR=" + taken}, []string{"ONCELEDGER_ADDR"}},
		{"api", []string{"DATABASE_URL=" + database.URL("api"), "ONCELEDGER_ADDR=nonsense"}, []string{"ONCELEDGER_ADDR"}},
		{"api", []string{"DATABASE_URL=" + nobody, "ONCELEDGER_CRASH=nowhere"}, []string{"ONCELEDGER_CRASH"}},
		{"api", []string{"API_MAX_CONNS=0", "SHUTDOWN_TIMEOUT=10", "LOG_LEVEL=loud"}, []string{"DATABASE_URL", "API_MAX_CONNS", "SHUTDOWN_TIMEOUT", "LOG_LEVEL"}},

		{"worker", nil, []string{"DATABASE_URL", "RELAY_DATABASE_URL", "JANITOR_DATABASE_URL", "KAFKA_BROKERS"}},
		{"worker", []string{"WORKER_ROLES=billing,dishes", "BILLING_BATCH=0"}, []string{"WORKER_ROLES", "BILLING_BATCH", "DATABASE_URL", "KAFKA_BROKERS"}},
		{"worker", []string{"WORKER_ROLES=billing", "DATABASE_URL=" + nobody, "KAFKA_BROKERS=" + nowhere}, []string{"DATABASE_URL"}},
		{"worker", []string{"WORKER_ROLES=janitor", "JANITOR_DATABASE_URL=" + nobody}, []string{"JANITOR_DATABASE_URL"}},
		{"worker", []string{"WORKER_ROLES=janitor", "JANITOR_DATABASE_URL=" + database.URL("janitor"), "WORKER_ADDR=" + taken}, []string{"WORKER_ADDR"}},
		{"worker", []string{"WORKER_ROLES=relay", "RELAY_DATABASE_URL=" + garbage, "KAFKA_BROKERS=" + nowhere}, []string{"RELAY_DATABASE_URL"}},
		{"worker", []string{"WORKER_ROLES=relay", "RELAY_DATABASE_URL=" + wrongPassword, "KAFKA_BROKERS=" + nowhere, "WORKER_ADDR=" + anywhere}, []string{"RELAY_DATABASE_URL"}},
		{"worker", []string{"WORKER_ROLES=relay", "RELAY_DATABASE_URL=" + database.URL("api"), "KAFKA_BROKERS=" + nowhere, "WORKER_ADDR=" + anywhere}, []string{"RELAY_DATABASE_URL"}},
		{"worker", []string{"WORKER_ROLES=relay", "RELAY_DATABASE_URL=" + nobody, "KAFKA_BROKERS=" + nowhere, "RELAY_SLOT=it's"}, []string{"RELAY_SLOT"}},

		{"onceledger migrate up", nil, []string{"DATABASE_URL"}},
		{"onceledger migrate up", []string{"DATABASE_URL=" + nobody}, []string{"DATABASE_URL"}},
		{"onceledger keys create --tenant acme", nil, []string{"DATABASE_URL"}},
		{"onceledger keys list", []string{"DATABASE_URL=" + garbage}, []string{"DATABASE_URL"}},
		{"onceledger verify", nil, []string{"DATABASE_URL"}},
		{"onceledger verify", []string{"DATABASE_URL=" + nobody}, []string{"DATABASE_URL"}},
		{"onceledger up", []string{"ONCELEDGER_ADDR=" + taken}, []string{"ONCELEDGER_ADDR"}},
		{"onceledger up", []string{"ONCELEDGER_ADDR=" + anywhere, "ONCELEDGER_POSTGRES_BIN=/nowhere"}, []string{"ONCELEDGER_POSTGRES_BIN"}},
		{"onceledger up", []string{"ONCELEDGER_ADDR=" + anywhere, "DATABASE_URL=" + nobody}, []string{"DATABASE_URL"}},
		{"onceledger up", []string{"ONCELEDGER_ADDR=" + anywhere, "ONCELEDGER_HOME=/proc/nowhere"}, []string{"ONCELEDGER_HOME"}},
	}
	for _, test := range tests {
		t.Run(strings.NewReplacer(" ", "_", "/", "_").Replace(test.program+" without "+strings.Join(test.names, ",")), func(t *testing.T) {
			t.Parallel()

			words := strings.Fields(test.program)
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

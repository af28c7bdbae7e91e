// Package stack runs the service for a test as it runs for its users: the
// programs of cmd/ as processes of their own, which the test may kill, on a
// Postgres and a broker that are the test's alone. Clients send requests over
// HTTP and remember every answer (Load), and RequireBooks holds what they
// remember, what is in the database and what is on the topics against each
// other.
//
// The broker runs inside the test program and is never killed: it stands in for
// Kafka, which is trusted to keep what it has acknowledged.
package stack

import (
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/kafkatest"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/sandbox"
	"github.com/onceledger/onceledger/internal/tenants"
)

// Partitions is how many each topic has, unless New is told otherwise.
const Partitions = 6

// Stack is a Postgres, a broker and a tenant with a key, for one test.
type Stack struct {
	Server   *pgtest.Instance
	Database *pgtest.Database
	Broker   *kafkatest.Broker
	Owner    *pgxpool.Pool // the database, logged in as its owner
	Key      string        // the tenant's

	loads []*Load
}

// New starts a Postgres and a broker, and makes the topics. It starts no
// program.
func New(t testing.TB, partitions ...int32) *Stack {
	t.Helper()
	Program(t, "api") // what does not build fails first
	server := pgtest.Server(t)
	database := server.New(t)
	s := &Stack{
		Server:   server,
		Database: database,
		Broker:   kafkatest.New(t),
		Owner:    database.Pool(t, ""),
	}
	t.Cleanup(func() {
		if t.Failed() {
			text, _ := os.ReadFile(server.LogFile())
			t.Logf("the end of the log of Postgres:\n%s", sandbox.Tail(string(text), 20))
		}
	})
	count := append(partitions, Partitions)[0]
	for _, topic := range kafka.ServiceTopics(int(count), 1) {
		require.NoError(t, s.Broker.CreateTopic(topic.Name, count, topic.Config))
	}
	key, err := tenants.CreateKey(t.Context(), s.Owner, "acme", "test")
	require.NoError(t, err)
	s.Key = key
	return s
}

// API makes an API. More variables may follow.
func (s *Stack) API(t testing.TB, env ...string) *Process {
	t.Helper()
	return NewProcess(t, "api", "api", append(s.APIEnv(), env...)...)
}

// APIEnv is what an API needs in its environment.
func (s *Stack) APIEnv() []string {
	return []string{"DATABASE_URL=" + s.Database.URL("api"), "ONCELEDGER_ADDR=127.0.0.1:0"}
}

// Worker makes a worker with some roles, such as "relay,billing", known to its
// consumer group as name. More variables may follow.
func (s *Stack) Worker(t testing.TB, name, roles string, env ...string) *Process {
	t.Helper()
	return NewProcess(t, name, "worker", append(s.WorkerEnv(name, roles), env...)...)
}

// WorkerEnv is what a worker needs in its environment, and nothing that is for
// other roles than its own.
func (s *Stack) WorkerEnv(name, roles string) []string {
	needs := map[string][]string{
		"billing":  {"DATABASE_URL=" + s.Database.URL("worker"), "KAFKA_BROKERS=" + s.Broker.Brokers()},
		"relay":    {"RELAY_DATABASE_URL=" + s.Database.URL("relay"), "KAFKA_BROKERS=" + s.Broker.Brokers()},
		"balances": {"KAFKA_BROKERS=" + s.Broker.Brokers()},
		"janitor":  {"JANITOR_DATABASE_URL=" + s.Database.URL("janitor"), "KAFKA_BROKERS=" + s.Broker.Brokers()},
	}
	env := []string{"WORKER_ROLES=" + roles, "WORKER_ID=" + name, "WORKER_ADDR=127.0.0.1:0"}
	for role := range strings.SplitSeq(roles, ",") {
		env = append(env, needs[role]...)
	}
	return env
}

// AllRoles are those of a worker that does everything.
const AllRoles = "relay,billing,balances,janitor"

// StartAll starts processes and waits until all are ready.
func StartAll(t testing.TB, processes ...*Process) {
	t.Helper()
	for _, process := range processes {
		require.NoError(t, process.Start())
	}
	for _, process := range processes {
		require.NoError(t, process.WaitReady())
	}
}

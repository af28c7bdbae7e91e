package faults_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/faults"
	"github.com/onceledger/onceledger/internal/kafkatest"
	"github.com/onceledger/onceledger/internal/pgtest"
)

// TestLinkToPostgres has a network be slow, thin, and cut, with Postgres behind
// it, and heal after each.
func TestLinkToPostgres(t *testing.T) {
	t.Parallel()

	database := pgtest.New(t)
	link, err := faults.StartLink(hostOf(t, database.URL("")))
	require.NoError(t, err)
	t.Cleanup(link.Close)
	connect := func() *pgconn.PgConn {
		config, err := pgconn.ParseConfig(database.URL(""))
		require.NoError(t, err)
		config.Host, config.Port = splitAddr(t, link.Addr())
		conn, err := pgconn.ConnectConfig(t.Context(), config)
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
		return conn
	}
	ask := func(conn *pgconn.PgConn, sql string) error { return conn.Exec(t.Context(), sql).Close() }

	conn := connect()
	require.NoError(t, link.Latency(80*time.Millisecond, 0))
	began := time.Now()
	require.NoError(t, ask(conn, "SELECT 1"))
	require.GreaterOrEqual(t, time.Since(began), 80*time.Millisecond)
	require.NoError(t, link.Heal(t.Context()))

	require.NoError(t, link.Bandwidth(500))
	began = time.Now()
	require.NoError(t, ask(conn, "SELECT repeat('x', 200000)"))
	require.GreaterOrEqual(t, time.Since(began), 200*time.Millisecond)
	require.NoError(t, link.Heal(t.Context()))

	require.NoError(t, link.CutAfter(1000))
	require.Error(t, ask(conn, "SELECT repeat('x', 200000)"))
	require.NoError(t, link.Heal(t.Context()))

	conn = connect()
	require.NoError(t, link.Reset())
	require.Error(t, ask(conn, "SELECT 1"))
	require.NoError(t, link.Heal(t.Context()))
	require.NoError(t, ask(connect(), "SELECT 1"))
}

// TestLinkToKafka puts the bad network in front of a broker, which tells its
// clients to go through it.
func TestLinkToKafka(t *testing.T) {
	t.Parallel()

	broker := kafkatest.New(t)
	topic := broker.Topic(t, 1)
	proxy, err := faults.StartKafkaProxy(t.Context(), broker.Brokers())
	require.NoError(t, err)
	t.Cleanup(proxy.Close)
	gate := proxy.Gates()[0]
	link, err := faults.StartLink(gate.Addr())
	require.NoError(t, err)
	t.Cleanup(link.Close)
	proxy.Name(gate, link.Addr())
	require.Equal(t, link.Addr(), proxy.Brokers())

	client, err := kgo.NewClient(kgo.SeedBrokers(link.Addr()), kgo.DefaultProduceTopic(topic))
	require.NoError(t, err)
	t.Cleanup(client.Close)
	require.NoError(t, client.ProduceSync(t.Context(), kgo.StringRecord("straight")).FirstErr())
	require.NoError(t, link.Latency(80*time.Millisecond, 0))
	began := time.Now()
	require.NoError(t, client.ProduceSync(t.Context(), kgo.StringRecord("late")).FirstErr())
	require.GreaterOrEqual(t, time.Since(began), 80*time.Millisecond, "the broker's answers come through the link")
	require.NoError(t, link.Heal(t.Context()))
	require.Len(t, broker.Records(t, topic), 2)
}

package inbox_test

import (
	"bytes"
	"net"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/pgtest"
)

// commitBreaker stands between a pool and the server. Armed, it passes the next
// COMMIT on, waits for the server's answer and breaks the connection instead of
// passing the answer back.
type commitBreaker struct {
	database *pgtest.Database
	listener net.Listener
	armed    atomic.Bool
}

func newCommitBreaker(t *testing.T, database *pgtest.Database) *commitBreaker {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { listener.Close() })
	config, err := pgxpool.ParseConfig(database.URL("worker"))
	require.NoError(t, err)
	server := net.JoinHostPort(config.ConnConfig.Host, strconv.Itoa(int(config.ConnConfig.Port)))

	b := &commitBreaker{database: database, listener: listener}
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			upstream, err := net.Dial("tcp", server)
			if err != nil {
				client.Close()
				continue
			}
			go b.carry(client, upstream)
		}
	}()
	return b
}

// pool connects as the worker, through the breaker.
func (b *commitBreaker) pool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	return b.database.Pool(t, "worker", func(config *pgxpool.Config) {
		config.ConnConfig.Port = uint16(b.listener.Addr().(*net.TCPAddr).Port)
	})
}

func (b *commitBreaker) arm() { b.armed.Store(true) }

func (b *commitBreaker) carry(client, upstream net.Conn) {
	defer client.Close()
	defer upstream.Close()
	var broken atomic.Bool
	go func() {
		defer client.Close()
		answer := make([]byte, 32<<10)
		for {
			n, err := upstream.Read(answer)
			if err != nil || broken.Load() {
				return
			}
			if _, err := client.Write(answer[:n]); err != nil {
				return
			}
		}
	}()
	request := make([]byte, 32<<10)
	for {
		n, err := client.Read(request)
		if err != nil {
			return
		}
		if bytes.Contains(request[:n], []byte("commit\x00")) && b.armed.CompareAndSwap(true, false) {
			broken.Store(true)
		}
		if _, err := upstream.Write(request[:n]); err != nil {
			return
		}
	}
}

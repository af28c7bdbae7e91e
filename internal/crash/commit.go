package crash

import (
	"bytes"
	"net"
)

// AfterCommit is a point where no line of code runs: a COMMIT has left for
// Postgres, and nothing has been heard of it. It returns what watches a
// connection for that, or nil where this process is not to die there.
func AfterCommit(point string) func(net.Conn) net.Conn {
	if t := armed.Load(); t == nil || t.name != point {
		return nil
	}
	return func(conn net.Conn) net.Conn { return &commitWatcher{Conn: conn, point: point} }
}

// commitWatcher sees what pgx sends in clear, without TLS: a transaction begins
// with a simple query of its own, and ends with one.
type commitWatcher struct {
	net.Conn
	point   string
	reading bool // the transaction writes nothing, so nothing hangs on its commit
}

var commitMessage = []byte("Q\x00\x00\x00\x0bcommit\x00")

func (w *commitWatcher) Write(message []byte) (int, error) {
	if bytes.HasPrefix(message, []byte("Q")) && bytes.Contains(message, []byte("begin")) {
		w.reading = bytes.Contains(message, []byte("read only"))
	}
	n, err := w.Conn.Write(message)
	if err == nil && !w.reading && bytes.Equal(message, commitMessage) {
		Point(w.point)
	}
	return n, err
}

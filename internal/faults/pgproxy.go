package faults

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"strings"
	"sync"
)

// PgProxy is a gate in front of Postgres that reads the protocol, message by
// message, so that it knows a COMMIT for what it is: in a simple query, and in
// an extended one, where it is parsed at one time and executed at another.
//
// It strikes at commits of transactions that were not begun as read only.
type PgProxy struct {
	*Gate

	mutex         sync.Mutex
	before, after int // commits to strike at
	cutBefore     int
	cutAfter      int
}

// StartPgProxy starts a proxy in front of a server at host:port. Clients have to
// do without TLS, which it declines for the server.
func StartPgProxy(ctx context.Context, upstream string) (*PgProxy, error) {
	p := &PgProxy{}
	gate, err := openGate(ctx, upstream, p.carry)
	if err != nil {
		return nil, err
	}
	p.Gate = gate
	return p, nil
}

// CutAfterCommit passes the next so many COMMITs on, waits until the server has
// answered that it is done, and breaks the connection in place of the answer:
// committed, and the client does not hear of it.
func (p *PgProxy) CutAfterCommit(times int) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.after = times
}

// CutBeforeCommit breaks the connection in place of passing on the next so many
// COMMITs: rolled back, and to the client it looks the same.
func (p *PgProxy) CutBeforeCommit(times int) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.before = times
}

// Cut says how many commits were cut off before they arrived, and after.
func (p *PgProxy) Cut() (before, after int) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return p.cutBefore, p.cutAfter
}

// strike takes one of a number of strikes that are left.
func (p *PgProxy) strike(left, done *int) bool {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if *left == 0 {
		return false
	}
	*left--
	*done++
	return true
}

func (p *PgProxy) armed() bool {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return p.after > 0
}

// pgConn is what is known of one connection.
type pgConn struct {
	statements, portals map[string]string // what is prepared under a name
	reading             bool              // the transaction was begun as read only

	mutex      sync.Mutex
	committing bool // a COMMIT that writes is under way
}

// sendsCommit takes notice of a message and says if it makes the server commit.
func (c *pgConn) sendsCommit(kind byte, body []byte) bool {
	switch kind {
	case 'Q':
		return c.runs(cString(&body))
	case 'P':
		name := cString(&body)
		c.statements[name] = cString(&body)
	case 'B':
		portal := cString(&body)
		c.portals[portal] = c.statements[cString(&body)]
	case 'E':
		return c.runs(c.portals[cString(&body)])
	}
	return false
}

func (c *pgConn) runs(sql string) bool {
	word, rest, _ := strings.Cut(strings.ToLower(strings.TrimLeft(sql, " \t\r\n")), ";")
	first, _, _ := strings.Cut(strings.TrimSpace(word), " ")
	switch first {
	case "begin", "start":
		c.reading = strings.Contains(word, "read only")
		// BEGIN; ...; COMMIT in one query commits too.
		return !c.reading && (strings.HasSuffix(strings.TrimRight(rest, " ;\r\n"), "commit"))
	case "commit", "end":
		return !c.reading
	}
	return false
}

func cString(body *[]byte) string {
	text, rest, _ := bytes.Cut(*body, []byte{0})
	*body = rest
	return string(text)
}

// Codes of the first message of a connection, which has no kind.
const (
	sslRequest = 80877103
	gssRequest = 80877104
	// maxMessage is more than any message here has; more is another protocol.
	maxMessage = 1 << 30
)

func (p *PgProxy) carry(l *link) {
	client := bufio.NewReaderSize(l.client, 32<<10)
	if err := p.greet(l, client); err != nil {
		return
	}
	conn := &pgConn{statements: make(map[string]string), portals: make(map[string]string)}
	l.both(
		func() error { return p.requests(l, client, conn) },
		func() error { return p.answers(l, bufio.NewReaderSize(l.server, 32<<10), conn) },
	)
}

// greet passes on the first message and declines encryption.
func (p *PgProxy) greet(l *link, client *bufio.Reader) error {
	for {
		size := make([]byte, 4)
		if _, err := io.ReadFull(client, size); err != nil {
			return err
		}
		length := binary.BigEndian.Uint32(size)
		if length < 8 || length > maxMessage {
			return fmt.Errorf("a first message of %d bytes", length)
		}
		message := append(size, make([]byte, length-4)...)
		if _, err := io.ReadFull(client, message[4:]); err != nil {
			return err
		}
		switch binary.BigEndian.Uint32(message[4:]) {
		case sslRequest, gssRequest:
			if err := l.write(l.client, []byte("N")); err != nil {
				return err
			}
		default:
			return l.write(l.server, message)
		}
	}
}

func (p *PgProxy) requests(l *link, client *bufio.Reader, conn *pgConn) error {
	for {
		message, err := readMessage(client)
		if err != nil {
			return err
		}
		if conn.sendsCommit(message[0], message[5:]) {
			if p.strike(&p.before, &p.cutBefore) {
				l.cut()
				return errEnded
			}
			conn.mutex.Lock()
			conn.committing = p.armed()
			conn.mutex.Unlock()
		}
		if err := l.write(l.server, message); err != nil {
			return err
		}
	}
}

func (p *PgProxy) answers(l *link, server *bufio.Reader, conn *pgConn) error {
	for {
		message, err := readMessage(server)
		if err != nil {
			return err
		}
		conn.mutex.Lock()
		// A transaction that had failed answers ROLLBACK to its COMMIT.
		committed := conn.committing && message[0] == 'C' && string(message[5:]) == "COMMIT\x00"
		if message[0] == 'Z' || committed {
			conn.committing = false
		}
		conn.mutex.Unlock()
		if committed && p.strike(&p.after, &p.cutAfter) {
			l.cut()
			return errEnded
		}
		if err := l.write(l.client, message); err != nil {
			return err
		}
		// What follows at once goes with it; a stream of changes is many small
		// messages.
		for server.Buffered() > 0 && !p.armed() {
			rest, _ := server.Peek(server.Buffered())
			whole := wholeMessages(rest)
			if whole == 0 {
				break
			}
			if err := l.write(l.client, rest[:whole]); err != nil {
				return err
			}
			_, _ = server.Discard(whole)
		}
	}
}

// wholeMessages is how many bytes of a text are whole messages.
func wholeMessages(text []byte) int {
	whole := 0
	for len(text)-whole >= 5 {
		next := whole + 1 + int(binary.BigEndian.Uint32(text[whole+1:]))
		if next > len(text) {
			break
		}
		whole = next
	}
	return whole
}

// readMessage reads a message: its kind, its length, and the rest.
func readMessage(from *bufio.Reader) ([]byte, error) {
	head := make([]byte, 5, 64)
	if _, err := io.ReadFull(from, head); err != nil {
		return nil, err
	}
	length := binary.BigEndian.Uint32(head[1:])
	if length < 4 || length > maxMessage {
		return nil, fmt.Errorf("a message of %d bytes", length)
	}
	message := append(head, make([]byte, length-4)...)
	_, err := io.ReadFull(from, message[5:])
	return message, err
}

package faults

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Gate stands in front of a server: clients connect to its address, and each
// connection is carried to the server. What passes through is up to the kind of
// gate; any of them can shut, fall silent, slow down and break what is open.
type Gate struct {
	listener net.Listener
	upstream string
	carry    func(link *link)
	done     chan struct{}
	wait     sync.WaitGroup

	delay          atomic.Int64
	opened, passed atomic.Int64

	mutex  sync.Mutex
	shut   bool
	silent chan struct{} // closed when it speaks again; nil while it does
	links  map[*link]struct{}
	broken int
}

// link is one connection of a client, carried to the server.
type link struct {
	gate           *Gate
	client, server net.Conn
	once           sync.Once
	ended          chan struct{}
}

// OpenGate opens a gate that lets everything through, in front of host:port.
func OpenGate(ctx context.Context, upstream string) (*Gate, error) {
	return openGate(ctx, upstream, func(l *link) {
		l.both(func() error { return l.pass(l.client, l.server) }, func() error { return l.pass(l.server, l.client) })
	})
}

func openGate(ctx context.Context, upstream string, carry func(*link)) (*Gate, error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("open a gate to %s: %w", upstream, err)
	}
	g := &Gate{
		listener: listener, upstream: upstream, carry: carry,
		done: make(chan struct{}), links: make(map[*link]struct{}),
	}
	g.wait.Go(g.accept)
	return g, nil
}

// Addr is where clients connect.
func (g *Gate) Addr() string { return g.listener.Addr().String() }

// Through is an address of the server, such as a database URL, with the gate's
// in the place of the server's.
func (g *Gate) Through(address string) (string, error) {
	parsed, err := url.Parse(address)
	if err != nil {
		return "", errors.New("an address with a gate before it has to be a URL")
	}
	parsed.Host = g.Addr()
	return parsed.String(), nil
}

// Shut breaks every connection and lets no new one through, until Open.
func (g *Gate) Shut() {
	g.mutex.Lock()
	g.shut = true
	g.mutex.Unlock()
	g.Break()
}

// Silence keeps connections and lets nothing through in either direction, until
// Open: then what was sent arrives.
func (g *Gate) Silence() {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	if g.silent == nil {
		g.silent = make(chan struct{})
	}
}

// Slow delays everything that the server says by a time; 0 ends that.
func (g *Gate) Slow(by time.Duration) { g.delay.Store(int64(by)) }

// Open ends Shut, Silence and Slow.
func (g *Gate) Open() {
	g.Slow(0)
	g.mutex.Lock()
	defer g.mutex.Unlock()
	g.shut = false
	if g.silent != nil {
		close(g.silent)
		g.silent = nil
	}
}

// Break breaks every connection that is open, by a reset and not by an end, and
// says how many there were.
func (g *Gate) Break() int {
	g.mutex.Lock()
	open := slices.Collect(maps.Keys(g.links))
	g.broken += len(open)
	g.mutex.Unlock()
	for _, l := range open {
		l.reset()
	}
	return len(open)
}

// Broken is how many connections the gate has broken.
func (g *Gate) Broken() int {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	return g.broken
}

// Opened is how many connections have been carried to the server.
func (g *Gate) Opened() int { return int(g.opened.Load()) }

// Passed is how often something that the server said was let through.
func (g *Gate) Passed() int { return int(g.passed.Load()) }

// Close ends the gate and every connection through it.
func (g *Gate) Close() {
	select {
	case <-g.done:
		return
	default:
	}
	close(g.done)
	_ = g.listener.Close()
	g.Open()
	g.mutex.Lock()
	for l := range g.links {
		go l.close()
	}
	g.mutex.Unlock()
	g.wait.Wait()
}

func (g *Gate) accept() {
	for {
		client, err := g.listener.Accept()
		if err != nil {
			select {
			case <-g.done:
				return
			case <-time.After(10 * time.Millisecond): // out of file descriptors, for a moment
				continue
			}
		}
		g.wait.Go(func() { g.connect(client) })
	}
}

func (g *Gate) connect(client net.Conn) {
	if g.isShut() {
		reset(client)
		return
	}
	server, err := (&net.Dialer{Timeout: 10 * time.Second}).Dial("tcp", g.upstream)
	if err != nil {
		reset(client)
		return
	}
	l := &link{gate: g, client: client, server: server, ended: make(chan struct{})}
	g.mutex.Lock()
	refused := g.shut
	if !refused {
		g.links[l] = struct{}{}
	}
	g.mutex.Unlock()
	if refused {
		l.reset()
		return
	}
	g.opened.Add(1)
	defer l.close()
	select {
	case <-g.done:
	default:
		g.carry(l)
	}
}

func (g *Gate) isShut() bool {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	return g.shut
}

// both carries both directions until either ends.
func (l *link) both(up, down func() error) {
	var wait sync.WaitGroup
	wait.Go(func() { _ = up(); l.close() })
	_ = down()
	l.close()
	wait.Wait()
}

// pass copies what one side says to the other.
func (l *link) pass(from, to net.Conn) error {
	buffer := make([]byte, 32<<10)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			return err
		}
		if err := l.write(to, buffer[:n]); err != nil {
			return err
		}
	}
}

var errEnded = errors.New("the connection has ended")

// write says something to one side, once the gate lets it.
func (l *link) write(to net.Conn, text []byte) error {
	if by := time.Duration(l.gate.delay.Load()); by > 0 && to == l.client {
		select {
		case <-time.After(by):
		case <-l.ended:
			return errEnded
		}
	}
	l.gate.mutex.Lock()
	silent := l.gate.silent
	l.gate.mutex.Unlock()
	if silent != nil {
		select {
		case <-silent:
		case <-l.ended:
			return errEnded
		}
	}
	if to == l.client {
		l.gate.passed.Add(1)
	}
	_, err := to.Write(text)
	return err
}

// cut breaks the connection, and counts it.
func (l *link) cut() {
	l.gate.mutex.Lock()
	l.gate.broken++
	l.gate.mutex.Unlock()
	l.reset()
}

func (l *link) reset() {
	linger(l.client)
	l.close()
}

func (l *link) close() {
	l.once.Do(func() {
		close(l.ended)
		_ = l.client.Close()
		_ = l.server.Close()
		l.gate.mutex.Lock()
		delete(l.gate.links, l)
		l.gate.mutex.Unlock()
	})
}

// reset ends a connection so that the other side sees a reset.
func reset(conn net.Conn) {
	linger(conn)
	_ = conn.Close()
}

func linger(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
}

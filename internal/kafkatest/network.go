package kafkatest

import (
	"net"
	"sync"
)

// state is what clients see of the broker.
type state int

const (
	answering state = iota
	silent
	unreachable
)

// network stands between the broker and its clients.
type network struct {
	addr string

	mutex sync.Mutex
	state state
	gate  chan struct{} // closed unless silent
	conns map[*gatedConn]struct{}
}

func newNetwork() *network {
	gate := make(chan struct{})
	close(gate)
	return &network{gate: gate, conns: make(map[*gatedConn]struct{})}
}

func (n *network) listen(network, address string) (net.Listener, error) {
	listener, err := net.Listen(network, address)
	if err != nil {
		return nil, err
	}
	n.addr = listener.Addr().String()
	return &gatedListener{Listener: listener, network: n}, nil
}

func (n *network) set(next state) {
	n.mutex.Lock()
	if (n.state == silent) != (next == silent) {
		if next == silent {
			n.gate = make(chan struct{})
		} else {
			close(n.gate)
		}
	}
	n.state = next
	var broken []*gatedConn
	if next == unreachable {
		for conn := range n.conns {
			broken = append(broken, conn)
		}
	}
	n.mutex.Unlock()

	for _, conn := range broken {
		_ = conn.Close()
	}
}

// admit makes a connection known, unless none is to get through.
func (n *network) admit(conn net.Conn) *gatedConn {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	if n.state == unreachable {
		return nil
	}
	gated := &gatedConn{Conn: conn, network: n, closed: make(chan struct{})}
	n.conns[gated] = struct{}{}
	return gated
}

func (n *network) currentGate() <-chan struct{} {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	return n.gate
}

type gatedListener struct {
	net.Listener
	network *network
}

func (l *gatedListener) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if gated := l.network.admit(conn); gated != nil {
			return gated, nil
		}
		_ = conn.Close()
	}
}

// gatedConn passes nothing on while the network is silent.
type gatedConn struct {
	net.Conn
	network *network
	once    sync.Once
	closed  chan struct{}
}

func (c *gatedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if waited := c.wait(); waited != nil {
		return 0, waited
	}
	return n, err
}

func (c *gatedConn) Write(p []byte) (int, error) {
	if err := c.wait(); err != nil {
		return 0, err
	}
	return c.Conn.Write(p)
}

func (c *gatedConn) wait() error {
	select {
	case <-c.network.currentGate():
		return nil
	case <-c.closed:
		return net.ErrClosed
	}
}

func (c *gatedConn) Close() error {
	c.once.Do(func() {
		close(c.closed)
		c.network.mutex.Lock()
		delete(c.network.conns, c)
		c.network.mutex.Unlock()
	})
	return c.Conn.Close()
}

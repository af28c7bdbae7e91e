//go:build apache

package balances_test

import (
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

// proxy passes bytes on to a broker whose port stands in a file. It can cut
// connections when the answer to a Produce request is due: the broker has
// handled it by then.
type proxy struct {
	addr   string
	toCut  atomic.Int64
	cutAll atomic.Int64
}

const produceKey = 0

func startProxy(t *testing.T, portFile string) *proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &proxy{addr: listener.Addr().String()}
	var conns sync.WaitGroup
	conns.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			port, err := os.ReadFile(portFile)
			if err != nil {
				_ = client.Close()
				continue
			}
			broker, err := net.Dial("tcp", "127.0.0.1:"+strings.TrimSpace(string(port)))
			if err != nil {
				_ = client.Close()
				continue
			}
			conns.Go(func() { p.serve(client, broker) })
		}
	})
	t.Cleanup(func() { _ = listener.Close() })
	return p
}

// cutAnswers cuts the next so many answers to writes.
func (p *proxy) cutAnswers(count int64) { p.toCut.Store(count) }

func (p *proxy) cuts() int64 { return p.cutAll.Load() }

func (p *proxy) serve(client, broker net.Conn) {
	var writes sync.Map // correlation ids of Produce requests
	closeBoth := func() { _ = client.Close(); _ = broker.Close() }
	defer closeBoth()
	go func() {
		defer closeBoth()
		for {
			frame, err := readFrame(client)
			if err != nil {
				return
			}
			if len(frame) >= 12 && binary.BigEndian.Uint16(frame[4:]) == produceKey {
				writes.Store(binary.BigEndian.Uint32(frame[8:]), true)
			}
			if _, err := broker.Write(frame); err != nil {
				return
			}
		}
	}()
	for {
		frame, err := readFrame(broker)
		if err != nil {
			return
		}
		_, isWrite := writes.LoadAndDelete(binary.BigEndian.Uint32(frame[4:]))
		if isWrite && p.toCut.Add(-1) >= 0 {
			p.cutAll.Add(1)
			return
		}
		if _, err := client.Write(frame); err != nil {
			return
		}
	}
}

// readFrame reads one request or answer with its length.
func readFrame(conn net.Conn) ([]byte, error) {
	var size [4]byte
	if _, err := io.ReadFull(conn, size[:]); err != nil {
		return nil, err
	}
	frame := make([]byte, 4+binary.BigEndian.Uint32(size[:]))
	copy(frame, size[:])
	_, err := io.ReadFull(conn, frame[4:])
	return frame, err
}

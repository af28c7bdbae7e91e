package devstack

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
)

// Ports are chosen below those that Linux gives to outgoing connections (from
// 32768): otherwise any such connection may sit on a remembered port.
const (
	lowestPort  = 15000
	highestPort = 32000
)

// FreePort returns a TCP port nobody listens on at 127.0.0.1. Another process
// may take it before the caller does, so the caller must be ready to try again.
func FreePort(ctx context.Context) (int, error) {
	var last error
	for range 100 {
		port := lowestPort + rand.IntN(highestPort-lowestPort)
		listener, err := new(net.ListenConfig).Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err == nil {
			return port, listener.Close()
		}
		last = err
	}
	return 0, fmt.Errorf("find a free port: %w", last)
}

// rememberedPort is the port a former start wrote to path; 0 when there is none.
func rememberedPort(path string) int {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	port, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || port < 1 || port > 65535 {
		return 0
	}
	return port
}

func rememberPort(path string, port int) error {
	if err := os.WriteFile(path, []byte(strconv.Itoa(port)+"\n"), 0o600); err != nil {
		return fmt.Errorf("remember port: %w", err)
	}
	return nil
}

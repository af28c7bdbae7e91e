package devstack

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
)

// FreePort returns a TCP port nobody listens on at 127.0.0.1. Another process
// may take it before the caller does, so the caller must be ready to try again.
func FreePort(ctx context.Context) (int, error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("find a free port: %w", err)
	}
	defer listener.Close()
	return listener.Addr().(*net.TCPAddr).Port, nil
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

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode"

	"github.com/onceledger/onceledger/internal/devstack"
)

// portHeldTimeout is how long a port may be held by an API whose supervisor
// was killed just now.
const portHeldTimeout = 3 * time.Second

// checkAddr makes sure that a program will be able to listen on addr, which a
// variable gave.
func checkAddr(ctx context.Context, variable, addr string) error {
	if _, _, err := net.SplitHostPort(addr); err != nil {
		return fmt.Errorf("%s is %q, want host:port: %w", variable, addr, err)
	}
	deadline := time.Now().Add(portHeldTimeout)
	for {
		listener, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
		if err == nil {
			return listener.Close()
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			return fmt.Errorf("%s is %s: %w", variable, addr, err)
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("another program listens on %s: set %s to another address (127.0.0.1:0 picks a free port)", addr, variable)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// withPort puts a free port in the place of port 0.
func withPort(ctx context.Context, addr string) (string, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil || port != "0" {
		return addr, err
	}
	free, err := devstack.FreePort(ctx)
	if err != nil {
		return "", err
	}
	return net.JoinHostPort(host, strconv.Itoa(free)), nil
}

// workerAddr is where the worker is to listen: the address that was given, or one
// that stays the same from start to start as long as nobody else takes it.
func (s *supervisor) workerAddr(ctx context.Context) (string, error) {
	if s.config.WorkerAddr != "" {
		return withPort(ctx, s.config.WorkerAddr)
	}
	return rememberedAddr(ctx, filepath.Join(s.config.Home, "worker-port"))
}

// rememberedAddr is 127.0.0.1 with the port written in file, or with a free one
// if that is taken.
func rememberedAddr(ctx context.Context, file string) (string, error) {
	if text, err := os.ReadFile(file); err == nil {
		addr := net.JoinHostPort("127.0.0.1", strings.TrimSpace(string(text)))
		if listener, err := new(net.ListenConfig).Listen(ctx, "tcp", addr); err == nil {
			return addr, listener.Close()
		}
	}
	port, err := devstack.FreePort(ctx)
	if err != nil {
		return "", err
	}
	text := strconv.Itoa(port)
	if err := os.WriteFile(file, []byte(text+"\n"), 0o600); err != nil {
		return "", fmt.Errorf("remember a port: %w", err)
	}
	return net.JoinHostPort("127.0.0.1", text), nil
}

// baseURL is where to reach, from this machine, what listens on addr.
func baseURL(addr string) string {
	host, port, _ := net.SplitHostPort(addr)
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return "http://" + net.JoinHostPort(host, port)
}

// waitReady asks a part until it says that it is ready, and tells what it waits
// for when that takes long.
func (s *supervisor) waitReady(ctx context.Context, name, url string) error {
	said := time.Now()
	var reason error
	for {
		err := askReady(ctx, url+"/readyz")
		if err == nil {
			return nil
		}
		if reason == nil || ctx.Err() == nil {
			reason = err
		}
		if time.Since(said) > 5*time.Second && ctx.Err() == nil {
			said = time.Now()
			s.say("still waiting for %s: %v", name, reason)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w; it says %w (its log is %s)", name, ctx.Err(), reason, s.logFile(name))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func askReady(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode == http.StatusOK {
		return nil
	}
	reason, _ := io.ReadAll(io.LimitReader(response.Body, 2000))
	return fmt.Errorf("%s: %s", response.Status, strings.TrimSpace(string(reason)))
}

// summary is what a newcomer pastes into a second terminal.
func summary(url, worker, keyFile, home string) string {
	return fmt.Sprintf(`
onceledger is ready at %[1]s
  API key  %[2]s
  worker   %[5]s
  logs     %[3]s
  Ctrl-C stops everything; what was stored stays in %[4]s.

Make an order, pay it, and see what became of it (paste into another terminal):

  ORDER=$(curl -s %[1]s/v1/orders -H "Authorization: Bearer $(cat %[2]s)" -H "Idempotency-Key: $(date +%%s%%N)" -H 'Content-Type: application/json' -d '{"customer_id":"c-42","customer_email":"a@example.com","currency":"EUR","lines":[{"sku":"book","description":"A book","quantity":2,"unit_amount":1250,"tax_rate":"0.19"}]}' | grep -o '"id":"[^"]*"' | head -n 1 | cut -d '"' -f 4); echo "$ORDER"
  curl -s %[1]s/v1/orders/$ORDER/pay -H "Authorization: Bearer $(cat %[2]s)" -H "Idempotency-Key: $(date +%%s%%N)" -H 'Content-Type: application/json' -d "{\"payment_reference\":\"pi-$ORDER\"}"; echo
  curl -s %[1]s/v1/orders/$ORDER/receipt -H "Authorization: Bearer $(cat %[2]s)"; echo
`, url, shellQuoted(keyFile), filepath.Join(home, "logs"), home, worker)
}

// shellQuoted leaves an ordinary path as it is.
func shellQuoted(path string) string {
	if !strings.ContainsFunc(path, func(r rune) bool {
		return !strings.ContainsRune("/._-+@", r) && !unicode.IsLetter(r) && !unicode.IsDigit(r)
	}) {
		return path
	}
	return "'" + strings.ReplaceAll(path, "'", `'\''`) + "'"
}

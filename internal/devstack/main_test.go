package devstack

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// helperVariable turns this test program into one that runs a server, to be
// killed by a test. Its value is "postgres", "postgres as" an identity, or
// "broker".
const helperVariable = "DEVSTACK_HELPER"

func TestMain(m *testing.M) {
	role := os.Getenv(helperVariable)
	if role == "" {
		os.Exit(m.Run())
	}
	if err := runHelper(role, os.Getenv("HELPER_DIR")); err != nil {
		fmt.Println("fault", err)
		os.Exit(1)
	}
}

func runHelper(role, dir string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if role == "broker" {
		return RunBroker(ctx, BrokerConfig{Dir: dir, Topics: []Topic{{Name: "events", Partitions: 2}}, Ready: func(addr string) {
			fmt.Println("ready", addr)
		}})
	}
	config := PostgresConfig{Dir: dir, BinDir: os.Getenv("HELPER_BIN_DIR")}
	var server *Postgres
	var err error
	switch role {
	case "postgres as " + setuidNobody.name:
		server, err = startPostgresAs(ctx, setuidNobody, config)
	case "postgres as " + userNamespace.name:
		server, err = startPostgresAs(ctx, userNamespace, config)
	default:
		server, err = StartPostgres(ctx, config)
	}
	if err != nil {
		return err
	}
	fmt.Println("ready", server.AdminURL("postgres"))
	<-ctx.Done()
	return server.Stop(context.Background())
}

// helper is this program run again as a server's parent.
type helper struct {
	cmd   *exec.Cmd
	ready string // what it said after "ready"
}

// startHelper returns when the server in the helper is ready.
func startHelper(t *testing.T, role, dir string) *helper {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), helperVariable+"="+role, "HELPER_DIR="+dir)
	if role != "broker" {
		cmd.Env = append(cmd.Env, "HELPER_BIN_DIR="+findBinDir(t))
	}
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })

	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	ready, ok := strings.CutPrefix(strings.TrimSpace(line), "ready ")
	require.True(t, ok, line)
	go func() { _, _ = io.Copy(io.Discard, stdout) }()
	return &helper{cmd: cmd, ready: ready}
}

func (h *helper) end(t *testing.T, signal syscall.Signal) {
	t.Helper()
	require.NoError(t, h.cmd.Process.Signal(signal))
	_ = h.cmd.Wait()
}

// logLines collects what is logged.
type logLines struct{ lines []string }

func (l *logLines) logf(format string, args ...any) {
	l.lines = append(l.lines, fmt.Sprintf(format, args...))
}

func (l *logLines) String() string { return strings.Join(l.lines, "\n") }

func findBinDir(t *testing.T) string {
	t.Helper()
	dir, err := FindPostgres(t.Context(), BinariesConfig{
		BinDir:      os.Getenv("ONCELEDGER_POSTGRES_BIN"),
		FallbackDir: filepath.Join(os.TempDir(), fmt.Sprintf("onceledger-%d", os.Getuid())),
		Logf:        t.Logf,
	})
	require.NoError(t, err)
	return dir
}

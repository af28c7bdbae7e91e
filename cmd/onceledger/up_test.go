package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestMain makes this test program, called by another name, the programs of a
// bin folder: onceledger itself, and stand-ins for api and worker.
func TestMain(m *testing.M) {
	switch filepath.Base(os.Args[0]) {
	case "onceledger":
		main()
	case "api":
		standIn(os.Getenv("ONCELEDGER_ADDR"))
	case "worker":
		standIn(os.Getenv("WORKER_ADDR"))
	default:
		os.Exit(m.Run())
	}
}

// standIn is ready until SIGTERM, or beyond it when it is to be stubborn.
func standIn(addr string) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	listener, err := net.Listen("tcp", addr)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	go func() { _ = http.Serve(listener, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})) }()
	<-ctx.Done()
	if os.Getenv("TEST_STUBBORN") != "" {
		select {}
	}
}

func TestUp(t *testing.T) {
	t.Parallel()

	t.Run("LeavesNothingBehindWhenKilledAndRecovers", func(t *testing.T) {
		t.Parallel()

		bin := makeBin(t)
		up := startUp(t, bin)
		key, err := os.ReadFile(filepath.Join(bin, "home", "api-key"))
		require.NoError(t, err)
		require.Len(t, processes(t, bin), 5, "onceledger, postgres, broker, worker, api")
		require.NoError(t, up.cmd.Process.Kill())
		_ = up.cmd.Wait()

		// At once, while its children are still ending.
		again := startUp(t, bin)
		same, err := os.ReadFile(filepath.Join(bin, "home", "api-key"))
		require.NoError(t, err)
		require.Equal(t, string(key), string(same))
		require.NoError(t, again.cmd.Process.Kill())
		_ = again.cmd.Wait()
		require.Eventually(t, func() bool { return len(processes(t, bin)) == 0 }, 30*time.Second, 10*time.Millisecond)
	})

	t.Run("StopsEverythingOnCtrlC", func(t *testing.T) {
		t.Parallel()

		bin := makeBin(t)
		up := startUp(t, bin)
		up.ctrlC(t)
		require.NoError(t, up.cmd.Wait())
		require.Empty(t, processes(t, bin))
		var order []string
		for line := range strings.Lines(up.stderr.String()) {
			if part, ok := strings.CutPrefix(line, "stopping "); ok {
				order = append(order, strings.TrimSpace(part))
			}
		}
		require.Equal(t, []string{"api", "worker", "broker", "postgres"}, order)
		require.NotContains(t, up.stderr.String(), "starting it again", "Ctrl-C reached a child before its turn")
		rest, err := io.ReadAll(up.stdout)
		require.NoError(t, err)
		require.Empty(t, rest, "more than one line on standard output")
	})

	t.Run("StopsAtOnceOnTheSecondCtrlC", func(t *testing.T) {
		t.Parallel()

		bin := makeBin(t)
		up := startUp(t, bin, "TEST_STUBBORN=1")
		up.ctrlC(t)
		require.Eventually(t, func() bool { // it waits for the API
			return strings.Contains(up.stderr.String(), "stopping api")
		}, 10*time.Second, time.Millisecond)
		up.ctrlC(t)
		began := time.Now()
		require.Error(t, up.cmd.Wait())
		require.Less(t, time.Since(began), 10*time.Second, "it waited for the stubborn API after all")
		require.Eventually(t, func() bool { return len(processes(t, bin)) == 0 }, 30*time.Second, 10*time.Millisecond)
	})

	t.Run("ExitsWithOneWhenItCannotStart", func(t *testing.T) {
		t.Parallel()

		bin := makeBin(t)
		cmd := upCommand(bin, "ONCELEDGER_POSTGRES_BIN=/nonexistent")
		out, err := cmd.CombinedOutput()
		require.Error(t, err)
		require.Equal(t, 1, cmd.ProcessState.ExitCode())
		require.Contains(t, string(out), "ONCELEDGER_POSTGRES_BIN")
	})
}

// up is a running `onceledger up`.
type up struct {
	cmd    *exec.Cmd
	stdout io.Reader // what comes after the ready line
	stderr *syncBuffer
}

func makeBin(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	program, err := os.ReadFile(os.Args[0])
	require.NoError(t, err)
	for _, name := range []string{"onceledger", "api", "worker"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), program, 0o755))
	}
	return dir
}

func upCommand(bin string, environ ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(bin, "onceledger"), "up")
	cmd.Env = append(os.Environ(), "ONCELEDGER_ADDR=127.0.0.1:0", "ONCELEDGER_HOME="+filepath.Join(bin, "home"))
	cmd.Env = append(cmd.Env, environ...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // like a terminal's foreground job
	return cmd
}

func startUp(t *testing.T, bin string, environ ...string) *up {
	t.Helper()
	cmd := upCommand(bin, environ...)
	run := &up{cmd: cmd, stderr: &syncBuffer{}}
	cmd.Stderr = run.stderr
	read, write, err := os.Pipe()
	require.NoError(t, err)
	t.Cleanup(func() { _ = read.Close() })
	cmd.Stdout = write
	require.NoError(t, cmd.Start())
	require.NoError(t, write.Close())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })

	stdout := bufio.NewReader(read)
	line, err := stdout.ReadString('\n')
	require.NoError(t, err, run.stderr)
	require.Regexp(t, `^ready http://127\.0\.0\.1:\d+\n$`, line)
	run.stdout = stdout
	return run
}

// ctrlC is what a terminal does: a signal to the whole foreground group.
func (u *up) ctrlC(t *testing.T) {
	t.Helper()
	require.NoError(t, syscall.Kill(-u.cmd.Process.Pid, syscall.SIGINT))
}

// processes lists the command lines of living processes that name bin.
func processes(t *testing.T, bin string) []string {
	t.Helper()
	paths, err := filepath.Glob("/proc/[0-9]*/cmdline")
	require.NoError(t, err)
	var found []string
	for _, path := range paths {
		line, err := os.ReadFile(path)
		if err == nil && bytes.Contains(line, []byte(bin)) {
			found = append(found, strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return found
}

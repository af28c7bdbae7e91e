package crash_test

import (
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/crash"
)

func TestArmRefuses(t *testing.T) {
	t.Parallel()

	for _, value := range []string{"no-such-point", crash.APIBeforeCommit + ":0", crash.APIBeforeCommit + ":x", crash.APIBeforeCommit + ":"} {
		require.Error(t, crash.Arm(value), value)
	}
}

// TestPoint runs itself as another process, which counts aloud and is killed on
// the way.
func TestPoint(t *testing.T) {
	t.Parallel()

	const variable = "CRASH_TEST"
	if value, inner := os.LookupEnv(variable); inner {
		require.NoError(t, crash.Arm(value))
		for range 3 {
			crash.Point(crash.APIBeforeCommit)
			crash.Point(crash.WorkerBeforeCommit)
			_, _ = os.Stdout.WriteString("x")
		}
		os.Exit(0)
	}

	for value, want := range map[string]struct {
		output string
		killed bool
	}{
		"":                           {"xxx", false},
		crash.APIBeforeCommit:        {"", true},
		crash.APIBeforeCommit + ":3": {"xx", true},
		crash.APIBeforeCommit + ":4": {"xxx", false},
	} {
		cmd := exec.Command(os.Args[0], "-test.run=^TestPoint$")
		cmd.Env = append(os.Environ(), variable+"="+value)
		output, err := cmd.Output()
		require.Equal(t, want.output, string(output), value)
		require.Equal(t, want.killed, err != nil, value)
		status := cmd.ProcessState.Sys().(syscall.WaitStatus)
		require.Equal(t, want.killed, status.Signaled() && status.Signal() == syscall.SIGKILL, value)
	}
}

// loud says aloud what is written to it.
type loud struct{ net.Conn }

func (loud) Write(text []byte) (int, error) { return os.Stdout.Write(text) }

// TestAfterCommit runs itself as another process, which is killed once it has
// sent the second COMMIT of a transaction that may write, and no sooner.
func TestAfterCommit(t *testing.T) {
	t.Parallel()

	const variable = "CRASH_TEST_COMMIT"
	if value, inner := os.LookupEnv(variable); inner {
		require.NoError(t, crash.Arm(value))
		wrap := crash.AfterCommit(crash.APICommitSentNotHeard)
		if wrap == nil {
			os.Exit(0)
		}
		conn := wrap(loud{})
		send := func(sql string) {
			_, _ = conn.Write(append([]byte{'Q', 0, 0, 0, byte(5 + len(sql))}, sql+"\x00"...))
		}
		for _, begin := range []string{"begin", "begin read only", "begin; set local a = 'b'"} {
			send(begin)
			send("select 'commit'")
			send("commit")
		}
		send("begin")
		os.Exit(0)
	}

	run := func(value string) (output string, err error) {
		cmd := exec.Command(os.Args[0], "-test.run=^TestAfterCommit$")
		cmd.Env = append(os.Environ(), variable+"="+value)
		text, err := cmd.Output()
		return string(text), err
	}
	output, err := run(crash.APICommitSentNotHeard + ":2")
	require.Error(t, err)
	require.True(t, strings.HasSuffix(output, "Q\x00\x00\x00\x0bcommit\x00"), "%q", output)
	require.Contains(t, output, "set local")
	for _, value := range []string{crash.APIBeforeCommit, ""} {
		output, err = run(value)
		require.NoError(t, err)
		require.Empty(t, output, "nothing is watched")
	}
}

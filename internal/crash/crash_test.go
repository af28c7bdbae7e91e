package crash_test

import (
	"os"
	"os/exec"
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

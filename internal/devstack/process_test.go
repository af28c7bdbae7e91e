package devstack

import (
	"context"
	"os/exec"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestProcess(t *testing.T) {
	t.Parallel()

	start := func(t *testing.T, script string) *Process {
		t.Helper()
		process, err := StartProcess(exec.Command("/bin/sh", "-c", script), syscall.SIGTERM)
		require.NoError(t, err)
		t.Cleanup(process.Kill)
		return process
	}

	t.Run("SaysHowTheChildEnded", func(t *testing.T) {
		t.Parallel()

		process := start(t, "exit 3")
		<-process.Done()
		require.EqualError(t, process.Err(), "exit status 3")
		require.NoError(t, process.Stop(t.Context(), syscall.SIGTERM), "stopping what has ended")
	})

	t.Run("IsOutOfReachOfCtrlC", func(t *testing.T) {
		t.Parallel()

		process := start(t, "exec sleep 600")
		group, err := syscall.Getpgid(process.Pid())
		require.NoError(t, err)
		require.Equal(t, process.Pid(), group)
		require.NoError(t, process.Stop(t.Context(), syscall.SIGTERM))
		require.EqualError(t, process.Err(), "signal: terminated")
	})

	t.Run("KillsWhoDoesNotStopInTime", func(t *testing.T) {
		t.Parallel()

		cmd := exec.Command("/bin/sh", "-c", "trap '' TERM; echo deaf; while :; do sleep 600; done")
		stdout, err := cmd.StdoutPipe()
		require.NoError(t, err)
		process, err := StartProcess(cmd, syscall.SIGTERM)
		require.NoError(t, err)
		_, err = stdout.Read(make([]byte, 5))
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, process.Stop(ctx, syscall.SIGTERM), context.Canceled)
		require.EqualError(t, process.Err(), "signal: killed")
	})

	t.Run("FailsForAMissingProgram", func(t *testing.T) {
		t.Parallel()

		_, err := StartProcess(exec.Command("/nonexistent"), syscall.SIGTERM)
		require.ErrorContains(t, err, "start /nonexistent")
	})
}

package devstack

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestLock(t *testing.T) {
	t.Parallel()

	t.Run("RefusesTheSecondAndNamesTheFirst", func(t *testing.T) {
		t.Parallel()

		path := filepath.Join(t.TempDir(), "lock")
		lock, err := Lock(path)
		require.NoError(t, err)
		_, err = Lock(path)
		require.ErrorIs(t, err, ErrLocked)
		require.ErrorContains(t, err, fmt.Sprintf("pid %d", os.Getpid()))

		require.NoError(t, lock.Unlock())
		lock, err = Lock(path)
		require.NoError(t, err)
		require.NoError(t, lock.Unlock())
	})

	t.Run("IsFreeAtOnceThoughAChildHoldsTheFile", func(t *testing.T) {
		t.Parallel()

		path := filepath.Join(t.TempDir(), "lock")
		lock, err := Lock(path)
		require.NoError(t, err)
		child := exec.Command("sleep", "600")
		child.ExtraFiles = []*os.File{lock.file}
		require.NoError(t, child.Start())
		t.Cleanup(func() { _ = child.Process.Kill(); _ = child.Wait() })

		require.NoError(t, lock.Unlock())
		lock, err = Lock(path)
		require.NoError(t, err)
		require.NoError(t, lock.Unlock())
	})

	t.Run("WaitsForTheHolder", func(t *testing.T) {
		t.Parallel()

		path := filepath.Join(t.TempDir(), "lock")
		first, err := Lock(path)
		require.NoError(t, err)
		got := make(chan error)
		go func() {
			lock, err := WaitLock(t.Context(), path)
			if err == nil {
				err = lock.Unlock()
			}
			got <- err
		}()
		select {
		case err := <-got:
			t.Fatal("did not wait", err)
		default:
		}
		require.NoError(t, first.Unlock())
		require.NoError(t, <-got)
	})

	t.Run("WaitsNoLongerThanAsked", func(t *testing.T) {
		t.Parallel()

		path := filepath.Join(t.TempDir(), "lock")
		_, err := Lock(path)
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err = WaitLock(ctx, path)
		require.ErrorIs(t, err, context.Canceled)
	})
}

func TestRememberedPort(t *testing.T) {
	t.Parallel()

	path := filepath.Join(t.TempDir(), "port")
	require.Zero(t, rememberedPort(path), "nothing remembered")
	require.NoError(t, rememberPort(path, 5432))
	require.Equal(t, 5432, rememberedPort(path))
	for _, nonsense := range []string{"", "x", "0", "-1", "70000"} {
		require.NoError(t, os.WriteFile(path, []byte(nonsense), 0o600))
		require.Zero(t, rememberedPort(path), nonsense)
	}
}

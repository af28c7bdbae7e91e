// Package e2e_test uses the service as its users and operators do: through
// HTTP, environment variables, signals and exit codes.
package e2e_test

import (
	"bytes"
	"context"
	"errors"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/test/stack"
)

func TestMain(m *testing.M) { stack.Main(m) }

// result is what a program that ran to its end said and ended with.
type result struct {
	stdout, stderr string
	code           int
}

// run runs a program to its end, with nothing in its environment but env.
func run(t *testing.T, env []string, program string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), stack.Patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, stack.Program(t, program), args...)
	cmd.Env = env
	if env == nil {
		cmd.Env = []string{} // nil would be the test's own
	}
	cmd.Dir = t.TempDir()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	require.NoError(t, ctx.Err(), "%s does not end; it said:\n%s", program, stderr.String())
	if _, exited := errors.AsType[*exec.ExitError](err); !exited {
		require.NoError(t, err)
	}
	return result{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

package stack

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/onceledger/onceledger/internal/sandbox"
)

// Process is a program that is started, ended and started again.
type Process = sandbox.Process

// Patience is for what must happen; nothing waits so long when all is well.
const Patience time.Duration = sandbox.Patience

// Wait asks until the answer is yes. What was wrong last is in the error, if the
// time is up before that.
func Wait(ctx context.Context, is func() (bool, error)) error { return sandbox.Wait(ctx, is) }

// NewProcess makes a process of a program of cmd/. Its environment is env and
// nothing of the test's own. Its log is shown if the test fails, and it is
// killed when the test ends.
func NewProcess(t testing.TB, name, program string, env ...string) *Process {
	t.Helper()
	p := sandbox.NewProcess(t.Context(), name, Program(t, program), "", env...)
	t.Cleanup(func() {
		_ = p.Kill()
		for _, trouble := range []string{"panic: ", "fatal error: ", "WARNING: DATA RACE"} {
			if strings.Contains(p.Log(), "\n"+trouble) || strings.HasPrefix(p.Log(), trouble) {
				t.Errorf("%s had a %q", name, trouble)
			}
		}
		if t.Failed() {
			t.Logf("the end of the log of %s:\n%s", name, sandbox.Tail(sandbox.WithoutRequests(p.Log()), 40))
		}
	})
	return p
}

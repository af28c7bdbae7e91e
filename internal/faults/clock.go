package faults

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// BuildWithClock builds a program of this module whose clock is off by a time:
// whoever asks for the time in it, in our code or in a library, is told another
// one. What it measures (timeouts, waiting) is as ever.
//
// A Go program reads the clock without asking the kernel, so nothing outside of
// it can be put in between. But time.Now is Go: it is compiled anew, from a copy
// with one line more, by way of go build's -overlay. That takes the Go that built
// the program, and some twenty seconds the first time.
func BuildWithClock(ctx context.Context, off time.Duration, source, program, into string) error {
	into, err := filepath.Abs(into)
	if err != nil {
		return err
	}
	goroot, err := run(ctx, source, "go", "env", "GOROOT")
	if err != nil {
		return fmt.Errorf("a clock that is off needs Go, to build the program with it: %w", err)
	}
	original := filepath.Join(goroot, "src", "time", "time.go")
	text, err := os.ReadFile(original)
	if err != nil {
		return fmt.Errorf("read the source of package time: %w", err)
	}
	const line = "func Now() Time {\n\tsec, nsec, mono := runtimeNow()\n"
	if bytes.Count(text, []byte(line)) != 1 {
		return fmt.Errorf("%s does not look as expected: time.Now cannot be changed", original)
	}
	text = bytes.Replace(text, []byte(line), fmt.Appendf([]byte(line), "\tsec += %d\n", int64(off/time.Second)), 1)

	changed, overlay := into+".time.go", into+".json"
	defer os.Remove(changed) //nolint:errcheck // a few kilobytes beside the program
	defer os.Remove(overlay) //nolint:errcheck // the same
	list, err := json.Marshal(map[string]any{"Replace": map[string]string{original: changed}})
	if err == nil {
		err = os.WriteFile(changed, text, 0o600) //nolint:gosec // beside the program that was asked for
	}
	if err == nil {
		err = os.WriteFile(overlay, list, 0o600)
	}
	if err != nil {
		return fmt.Errorf("write another package time: %w", err)
	}
	if _, err := run(ctx, source, "go", "build", "-buildvcs=false", "-overlay", overlay, "-o", into, program); err != nil {
		return fmt.Errorf("build %s with a clock that is off: %w", program, err)
	}
	return nil
}

// CanBuild says whether a program of a module can be built here: there is Go, and
// the current folder is in that module.
func CanBuild(module string) bool {
	if _, err := exec.LookPath("go"); err != nil {
		return false
	}
	dir, err := os.Getwd()
	for ; err == nil; dir = filepath.Dir(dir) {
		text, readErr := os.ReadFile(filepath.Join(dir, "go.mod"))
		if readErr == nil {
			first, _, _ := strings.Cut(string(text), "\n")
			return strings.TrimSpace(first) == "module "+module
		}
		if dir == filepath.Dir(dir) {
			break
		}
	}
	return false
}

func run(ctx context.Context, dir, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...) //nolint:gosec // go, and nothing else
	cmd.Dir = dir
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", cmd, err, strings.TrimSpace(said.String()))
	}
	return strings.TrimSpace(string(out)), nil
}

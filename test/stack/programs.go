package stack

import (
	"bytes"
	"context"
	"crypto/sha256"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/devstack"
)

// module is where the programs are: its folder cmd.
const module = "github.com/onceledger/onceledger"

// names are the programs that a test may start.
var names = []string{"api", "worker", "onceledger"}

// inUse begins the names of folders that belong to one test program.
const inUse = "in-use-programs-"

// folder is this test program's own folder of programs, made at first use. A
// program that is built anew meanwhile does not change under a test.
var folder struct {
	once sync.Once
	path string
	err  error
}

// Main is the TestMain of a package that starts programs. Its tests wait more
// than they work, so a few more run at once than there are cores.
func Main(m *testing.M) {
	flag.Parse()
	chosen := false
	flag.Visit(func(f *flag.Flag) { chosen = chosen || f.Name == "test.parallel" })
	if !chosen {
		_ = flag.Set("test.parallel", "4")
	}
	code := m.Run()
	if folder.path != "" {
		_ = os.RemoveAll(folder.path)
	}
	os.Exit(code)
}

// Program is the path of a program. The first call builds all of them: minutes
// with empty caches, otherwise moments.
//
// With ONCELEDGER_TEST_RACE set they are built with the race detector; a race
// then ends its process with exit code 66.
func Program(t testing.TB, name string) string {
	t.Helper()
	folder.once.Do(func() { folder.path, folder.err = build() })
	require.NoError(t, folder.err, "build the programs")
	return filepath.Join(folder.path, name)
}

// build builds into a folder that all test programs of a checkout share, where
// what is up to date is not linked again, and makes links to the results.
func build() (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	root, err := command(ctx, "go", "list", "-m", "-f", "{{.Dir}}", module)
	if err != nil {
		return "", err
	}
	cache, err := devstack.CacheDir(filepath.Join(os.TempDir(), fmt.Sprintf("onceledger-%d", os.Getuid())))
	if err != nil {
		return "", err
	}
	args := []string{"build", "-buildvcs=false"}
	if os.Getenv("ONCELEDGER_TEST_RACE") != "" {
		args = append(args, "-race")
	}
	sum := sha256.Sum256(fmt.Append(nil, root, args))
	shared := filepath.Join(cache, fmt.Sprintf("programs-%x", sum[:6]))
	lock, err := devstack.WaitLock(ctx, shared+".lock")
	if err != nil {
		return "", err
	}
	defer lock.Unlock()
	removeOlder(filepath.Join(cache, inUse+"*"), 12*time.Hour)              // of test programs that were killed
	removeOlder(filepath.Join(cache, "programs-*[0-9a-f]"), 7*24*time.Hour) // of checkouts that are gone

	args = append(args, "-o", shared+string(filepath.Separator))
	for _, name := range names {
		args = append(args, module+"/cmd/"+name)
	}
	if _, err := command(ctx, "go", args...); err != nil {
		return "", err
	}
	own, err := os.MkdirTemp(cache, inUse)
	for _, name := range names {
		if err == nil {
			err = os.Link(filepath.Join(shared, name), filepath.Join(own, name))
		}
	}
	return own, err
}

// removeOlder removes folders that nobody has built into for so long.
func removeOlder(pattern string, age time.Duration) {
	dirs, _ := filepath.Glob(pattern)
	for _, dir := range dirs {
		if info, err := os.Stat(dir); err == nil && info.IsDir() && time.Since(info.ModTime()) > age {
			_ = os.RemoveAll(dir)
		}
	}
}

// command runs a program and returns what it printed.
func command(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w\n%s", cmd, err, said.Bytes())
	}
	return string(bytes.TrimSpace(out)), nil
}

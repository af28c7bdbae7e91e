// Command prepare fetches what the tests need before they start, so that a
// download shows its progress instead of looking like a test that hangs.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/onceledger/onceledger/internal/devstack"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	dir, err := devstack.FindPostgres(ctx, devstack.BinariesConfig{
		BinDir:      os.Getenv("ONCELEDGER_POSTGRES_BIN"),
		FallbackDir: filepath.Join(os.TempDir(), fmt.Sprintf("onceledger-%d", os.Getuid())), // where pgtest looks
		Logf:        func(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) },
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, "prepare the tests:", err)
		os.Exit(1)
	}
	fmt.Fprintln(os.Stderr, "the tests use the Postgres in", dir)
}

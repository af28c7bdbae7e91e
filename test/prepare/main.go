// Command prepare fetches what the tests need before they start, so that a
// download shows its progress instead of looking like a test that hangs.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/onceledger/onceledger/internal/devstack"
)

func main() {
	java := flag.Bool("java", false, "fetch Apache Kafka, Kafka Connect and Debezium as well, for the tests that need Java")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	err := preparePostgres(ctx)
	if err == nil && *java {
		err = prepareJava(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "prepare the tests:", err)
		os.Exit(1)
	}
}

func say(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

// fallbackDir is where pgtest looks when there is no cache folder.
func fallbackDir() string {
	return filepath.Join(os.TempDir(), fmt.Sprintf("onceledger-%d", os.Getuid()))
}

func preparePostgres(ctx context.Context) error {
	dir, err := devstack.FindPostgres(ctx, devstack.BinariesConfig{
		BinDir:      os.Getenv("ONCELEDGER_POSTGRES_BIN"),
		FallbackDir: fallbackDir(),
		Logf:        say,
	})
	if err != nil {
		return err
	}
	say("the tests use the Postgres in %s", dir)
	return nil
}

func prepareJava(ctx context.Context) error {
	config := devstack.JavaConfig{Home: os.Getenv("JAVA_HOME"), FallbackDir: fallbackDir(), Logf: say}
	java, err := devstack.FindJava(ctx, config)
	if err != nil {
		return err
	}
	for _, jars := range []devstack.Jars{devstack.KafkaJars, devstack.ConnectJars, devstack.DebeziumJars} {
		dir, err := devstack.FetchJars(ctx, config, jars)
		if err != nil {
			return err
		}
		say("the tests run %s with the jars in %s", java, dir)
	}
	return nil
}

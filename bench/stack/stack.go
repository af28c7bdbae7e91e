// Package stack starts what a benchmark measures on: a Postgres that really
// syncs to disk, and a broker in a process of its own, the embedded one or Apache
// Kafka. Both live in a temporary folder and end with the benchmark.
package stack

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/devstack"
	"github.com/onceledger/onceledger/internal/migrate"
)

// Password is what every service role logs in with here.
const Password = "bench"

// Stack is what Start started.
type Stack struct {
	Dir      string
	Postgres *devstack.Postgres
	Brokers  string
	Broker   int // process id
}

// Start starts a stack with the embedded broker and returns what stops it and
// removes its folder.
func Start(ctx context.Context) (*Stack, func(), error) {
	return start(ctx, (*Stack).startBroker)
}

func start(ctx context.Context, broker func(*Stack, context.Context, *[]func()) error) (*Stack, func(), error) {
	dir, err := os.MkdirTemp("", "onceledger-bench-")
	if err != nil {
		return nil, nil, err
	}
	s := &Stack{Dir: dir}
	var stops []func()
	stop := func() {
		for _, f := range slices.Backward(stops) {
			f()
		}
		_ = os.RemoveAll(dir)
	}
	if err := errors.Join(broker(s, ctx, &stops), ctx.Err()); err != nil {
		stop()
		return nil, nil, err
	}
	if err := s.startPostgres(ctx, &stops); err != nil {
		stop()
		return nil, nil, err
	}
	return s, stop, nil
}

func say(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }

func (s *Stack) startPostgres(ctx context.Context, stops *[]func()) error {
	binaries, err := devstack.FindPostgres(ctx, devstack.BinariesConfig{
		BinDir: os.Getenv("ONCELEDGER_POSTGRES_BIN"), FallbackDir: s.Dir, Logf: say,
	})
	if err != nil {
		return err
	}
	s.Postgres, err = devstack.StartPostgres(ctx, devstack.PostgresConfig{
		Dir: filepath.Join(s.Dir, "postgres"), BinDir: binaries, Logf: say,
		Settings: map[string]string{
			"shared_buffers": "512MB", "max_wal_size": "4GB", "checkpoint_timeout": "15min", "autovacuum_naptime": "10s", "track_commit_timestamp": "on",
		},
	})
	if err != nil {
		return err
	}
	*stops = append(*stops, func() { _ = s.Postgres.Stop(context.WithoutCancel(ctx)) })
	return nil
}

// startBroker runs this program again as the broker (see BeBroker).
func (s *Stack) startBroker(_ context.Context, stops *[]func()) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), brokerVariable+"="+filepath.Join(s.Dir, "kafka"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	process, err := devstack.StartProcess(cmd, syscall.SIGTERM)
	if err != nil {
		return err
	}
	*stops = append(*stops, func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		_ = process.Stop(ctx, syscall.SIGTERM)
	})
	s.Broker = process.Pid()
	line, err := bufio.NewReader(out).ReadString('\n')
	s.Brokers = strings.TrimSpace(line)
	return err
}

const brokerVariable = "ONCELEDGER_BENCH_BROKER"

// BeBroker makes this process the broker if it was started to be it. Call it
// first in main.
func BeBroker(ctx context.Context) {
	dir := os.Getenv(brokerVariable)
	if dir == "" {
		return
	}
	err := devstack.RunBroker(ctx, devstack.BrokerConfig{
		Dir:   dir,
		Ready: func(addr string) { fmt.Println(addr) },
		Logf:  func(string, ...any) {},
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, "broker:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Database makes an empty migrated database in which every role can log in.
func (s *Stack) Database(ctx context.Context, name string) error {
	admin, err := pgx.Connect(ctx, s.Postgres.AdminURL("postgres"))
	if err != nil {
		return err
	}
	defer admin.Close(ctx)
	if _, err := admin.Exec(ctx, "CREATE DATABASE "+pgx.Identifier{name}.Sanitize()); err != nil {
		return err
	}
	if err := migrate.Up(ctx, s.Postgres.AdminURL(name)); err != nil {
		return err
	}
	for _, role := range []string{"api", "relay", "worker", "janitor", "verify"} {
		if _, err := admin.Exec(ctx, "ALTER ROLE onceledger_"+role+" PASSWORD '"+Password+"'"); err != nil {
			return err
		}
	}
	return nil
}

// Drop drops a database.
func (s *Stack) Drop(ctx context.Context, name string) error {
	admin, err := pgx.Connect(ctx, s.Postgres.AdminURL("postgres"))
	if err != nil {
		return err
	}
	defer admin.Close(ctx)
	_, err = admin.Exec(ctx, "DROP DATABASE "+pgx.Identifier{name}.Sanitize()+" WITH (FORCE)")
	return errors.Join(err, checkpoint(ctx, admin))
}

// checkpoint keeps one leg's writes out of the next one's time.
func checkpoint(ctx context.Context, conn *pgx.Conn) error {
	_, err := conn.Exec(ctx, "CHECKPOINT")
	return err
}

// URL is a role's address of a database.
func (s *Stack) URL(database, role string) string {
	return s.Postgres.URL(database, "onceledger_"+role, url.QueryEscape(Password))
}

// CPU is how many CPU-seconds a process has used so far.
func CPU(pid int) float64 {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	user, _ := strconv.ParseFloat(fields[11], 64)
	system, _ := strconv.ParseFloat(fields[12], 64)
	return (user + system) / 100
}

// ForgetRSS lets RSS begin again from what the process holds now.
func ForgetRSS(pid int) error {
	return os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0)
}

// RSS is the most memory that a process has held so far, in bytes.
func RSS(pid int) int64 {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kilobytes, _ := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			return kilobytes << 10
		}
	}
	return 0
}

// Spread is the least, the middle and the greatest of some numbers.
type Spread struct {
	Min    float64 `json:"min"`
	Median float64 `json:"median"`
	Max    float64 `json:"max"`
}

// SpreadOf sorts numbers and takes their spread.
func SpreadOf(numbers []float64) Spread {
	if len(numbers) == 0 {
		return Spread{}
	}
	sorted := slices.SortedFunc(slices.Values(numbers), cmp.Compare[float64])
	return Spread{sorted[0], sorted[len(sorted)/2], sorted[len(sorted)-1]}
}

// Save writes a result beside the others.
func Save(name string, result any) error {
	encoded, err := json.MarshalIndent(result, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join("bench", "results", name), append(encoded, '\n'), 0o644)
}

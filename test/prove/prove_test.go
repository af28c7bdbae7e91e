// Package prove_test runs `onceledger prove` as its users do.
package prove_test

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/kafkatest"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/prove"
	"github.com/onceledger/onceledger/internal/tenants"
	"github.com/onceledger/onceledger/test/stack"
)

func TestMain(m *testing.M) { stack.Main(m) }

// command makes a prove that is not started yet, in a folder of its own.
func command(t *testing.T, home string, args ...string) *stack.Process {
	t.Helper()
	p := stack.NewProcess(t, "prove", "onceledger", append(os.Environ(), "ONCELEDGER_HOME="+home)...)
	p.Args = append([]string{"prove"}, args...)
	return p
}

// home is a folder in which nothing is left running.
func home(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "onceledger-prove-")
	require.NoError(t, err)
	t.Cleanup(func() {
		requireNothingRuns(t, dir)
		_ = os.RemoveAll(dir)
	})
	return dir
}

// requireNothingRuns waits until no process has the folder in its command line.
func requireNothingRuns(t *testing.T, dir string) {
	t.Helper()
	require.NoError(t, stack.Wait(context.Background(), func() (bool, error) {
		var left []string
		lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
		for _, path := range lines {
			text, _ := os.ReadFile(path)
			if strings.Contains(string(text), dir) {
				left = append(left, strings.ReplaceAll(string(text), "\x00", " "))
			}
		}
		return len(left) == 0, fmt.Errorf("still runs: %q", left)
	}))
}

// childrenOf are the programs that a process has started, by their ids.
func childrenOf(t *testing.T, p *stack.Process) map[string]string {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", p.Pid()))
	require.NoError(t, err)
	children := make(map[string]string)
	for _, file := range tasks {
		text, _ := os.ReadFile(file)
		for pid := range strings.FieldsSeq(string(text)) {
			if program, err := os.Readlink("/proc/" + pid + "/exe"); err == nil {
				children[pid] = program
			}
		}
	}
	return children
}

// exitCode waits for the end of a process.
func exitCode(t *testing.T, p *stack.Process) int {
	t.Helper()
	require.NoError(t, stack.Wait(context.Background(), func() (bool, error) { return !p.Alive(), errors.New("it runs") }))
	err := p.Err()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return exit.ExitCode()
	}
	require.NoError(t, err)
	return 0
}

func readReport(t *testing.T, dir string) prove.Report {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "report.json"))
	require.NoError(t, err)
	var report prove.Report
	require.NoError(t, json.Unmarshal(text, &report))
	return report
}

func waitSaid(t *testing.T, p *stack.Process, what string) {
	t.Helper()
	require.NoError(t, p.WaitFor("say "+what, func() (bool, error) { return strings.Contains(p.Log(), what), nil }))
}

// Goal: a short proof, broken off in both ways that there are, ends with an account
// in which nothing is missing.
// Method: a run is killed with -9 in the middle, goes on, is stopped with Ctrl-C,
// and goes on to its end; the report is about all of it.
func TestResume(t *testing.T) {
	t.Parallel()

	dir := home(t)
	folder := filepath.Join(dir, "prove", "5")
	first := command(t, dir, "--faults", "5", "--seed", "5", "--cells", "kill-api,kill-relay,kill-billing")
	require.NoError(t, first.Start())
	waitSaid(t, first, "1/5 ")
	children := childrenOf(t, first)
	require.GreaterOrEqual(t, len(children), 5, "Postgres, broker, API and two workers")
	require.NoError(t, first.Kill())
	for pid, program := range children {
		require.NoError(t, stack.Wait(context.Background(), func() (bool, error) {
			now, err := os.Readlink("/proc/" + pid + "/exe")
			return err != nil || now != program, fmt.Errorf("%s still runs (%s)", program, pid)
		}))
	}
	requireNothingRuns(t, folder)

	anew := command(t, dir, "--faults", "5", "--seed", "5")
	require.NoError(t, anew.Start())
	require.Equal(t, 2, exitCode(t, anew))
	require.Contains(t, anew.Log(), "was broken off: go on with it with --resume")

	other := command(t, dir, "--resume", "--seed", "5", "--faults", "9")
	require.NoError(t, other.Start())
	require.Equal(t, 2, exitCode(t, other))
	require.Contains(t, other.Log(), "--faults is 9, and the run in "+folder+" has 5")

	second := command(t, dir, "--resume")
	require.NoError(t, second.Start())
	waitSaid(t, second, "going on after fault 1 of 5")
	waitSaid(t, second, "2/5 ")
	require.NoError(t, second.Signal(syscall.SIGINT))
	require.Equal(t, 130, exitCode(t, second))
	require.Contains(t, second.Log(), "PARTIAL: ")
	require.Contains(t, second.Log(), "As far as it went, everything is accounted for.")
	partial := readReport(t, folder)
	require.True(t, partial.Partial)
	require.Empty(t, partial.Violations)

	third := command(t, dir, "--resume")
	require.NoError(t, third.Start())
	require.Equal(t, 0, exitCode(t, third), third.Log())
	report := readReport(t, folder)
	require.True(t, report.OK)
	require.Equal(t, []int{5, 5, 2}, []int{report.Done, report.Faults, report.Resumed})
	require.Empty(t, report.Violations)
	require.Empty(t, report.Unbitten)
	require.Equal(t, report.Account.Orders.Acknowledged, report.Account.Orders.Applied)
	require.Greater(t, report.Account.Orders.Acknowledged, partial.Account.Orders.Acknowledged)
	require.GreaterOrEqual(t, report.Bites[prove.BiteCrash], int64(5))
	chosen, err := prove.Choose(prove.Cells(), []string{"kill-api", "kill-relay", "kill-billing"})
	require.NoError(t, err)
	require.Equal(t, prove.ScheduleDigest(prove.Schedule(chosen, 5, 5)), report.Schedule)

	journal, err := os.ReadFile(filepath.Join(folder, "journal.jsonl"))
	require.NoError(t, err)
	require.Equal(t, fmt.Sprintf("%x", sha256.Sum256(journal)), report.JournalDigest)
	require.NoDirExists(t, filepath.Join(folder, "postgres"), "data of a run that has nothing more to show")

	fourth := command(t, dir, "--resume")
	require.NoError(t, fourth.Start())
	require.Equal(t, 2, exitCode(t, fourth))
	require.Contains(t, fourth.Log(), "there is nothing to go on with")
}

func TestBadInput(t *testing.T) {
	t.Parallel()

	dir := home(t)
	full := filepath.Join(dir, "full")
	require.NoError(t, os.MkdirAll(filepath.Join(full, "postgres"), 0o700))
	tests := map[string]struct {
		args []string
		says string
	}{
		"FolderOfSomebody": {[]string{"--dir", full, "--cells", "kill-api"}, full + " is not empty, and no run of prove"},
		"UnknownCell":      {[]string{"--cells", "kill-apii"}, "there is no cell \"kill-apii\" (did you mean kill-api"},
		"SeedIsAWord":      {[]string{"--seed", "lucky"}, "--seed is \"lucky\": want a whole number from 1 to 18446744073709551615"},
		"SeedIsZero":       {[]string{"--seed", "0"}, "--seed is \"0\""},
		"SeedIsTooLarge":   {[]string{"--seed", "18446744073709551616"}, "--seed is \"18446744073709551616\""},
		"SeedIsNegative":   {[]string{"--seed", "-1"}, "--seed is \"-1\""},
		"NoFaults":         {[]string{"--faults", "0"}, "--faults is 0: want 1 or more"},
		"UnknownFlag":      {[]string{"--fault", "3"}, "unknown flag: --fault"},
		"Argument":         {[]string{"everything"}, "unknown command \"everything\""},
		"NothingToGoOn":    {[]string{"--resume"}, "there is nothing to go on with"},
		"NoPrograms":       {[]string{"--programs", dir, "--cells", "kill-api"}, "there is no program " + dir + "/api"},
		"NothingListens":   {[]string{"--database", "postgres://nobody@127.0.0.1:1/x", "--kafka-brokers", "127.0.0.1:1"}, "is the stack running?"},
		"PasswordIsUnsaid": {[]string{"--database", "postgres://nobody:geheim@127.0.0.1:1/x", "--kafka-brokers", "127.0.0.1:1"}, "does not answer"},
		"NoAddress":        {[]string{"--database", "nowhere", "--kafka-brokers", "127.0.0.1:1"}, "--database"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := command(t, dir, test.args...)
			require.NoError(t, p.Start())
			require.Equal(t, 2, exitCode(t, p), p.Log())
			require.Contains(t, p.Log(), "Nothing was proved: ")
			require.Contains(t, p.Log(), test.says)
			require.NotContains(t, p.Log(), "geheim")
			require.DirExists(t, filepath.Join(full, "postgres"))
		})
	}
}

// Goal: on services that run already nothing is touched that is not prove's.
// Method: a database with a tenant in it is refused as it is; one without is used,
// and so is the first one when that is asked for.
func TestGivenServices(t *testing.T) {
	t.Parallel()

	server := pgtest.Server(t)
	database := server.New(t)
	broker := kafkatest.New(t)
	owner := database.Pool(t, "")
	given := []string{"--database", database.URL(""), "--kafka-brokers", broker.Brokers(), "--faults", "2", "--seed", "3", "--cells", "kill-api,kill-relay,postgres-kill"}
	for _, name := range []string{"acme", "prove-it-ltd"} {
		_, err := tenants.CreateKey(t.Context(), owner, name, "real")
		require.NoError(t, err)
	}

	dir := home(t)
	refused := command(t, dir, given...)
	require.NoError(t, refused.Start())
	require.Equal(t, 2, exitCode(t, refused))
	require.Contains(t, refused.Log(), "the database holds the data of 2 tenants that are not prove's (acme, prove-it-ltd): nothing was done")
	var tenants int
	require.NoError(t, owner.QueryRow(t.Context(), "SELECT count(*) FROM tenants").Scan(&tenants))
	require.Equal(t, 2, tenants)

	told := command(t, dir, append(given, "--on-real-data")...)
	require.NoError(t, told.Start())
	require.Equal(t, 0, exitCode(t, told), told.Log())
	require.Contains(t, told.Log(), "left out: postgres-kill (needs postgres)")

	// What a run has left there is no later run's.
	again := command(t, home(t), append(given, "--on-real-data")...)
	require.NoError(t, again.Start())
	require.Equal(t, 2, exitCode(t, again))
	require.Contains(t, again.Log(), "the database has orders of an earlier run with seed 3: take another --seed")
}

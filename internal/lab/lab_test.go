package lab_test

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/lab"
	"github.com/onceledger/onceledger/test/stack"
)

var updatePages = flag.Bool("update", false, "write what the experiments print into docs/lab")

const (
	pages    = "../../docs/lab"
	patience = 5 * time.Minute
)

func TestMain(m *testing.M) { stack.Main(m) }

// Goal: a page of docs/lab shows what a reader will see.
// Method: run the experiment, a process as a reader runs it, and compare.
func TestPages(t *testing.T) {
	t.Parallel()

	for _, experiment := range lab.Experiments {
		if !experiment.NeedsJava {
			t.Run(experiment.Name, func(t *testing.T) {
				t.Parallel()
				comparePage(t, experiment.Name)
			})
		}
	}
}

// comparePage holds an experiment's output against the block of its page that begins with the command.
func comparePage(t *testing.T, name string, flags ...string) {
	t.Helper()
	path := filepath.Join(pages, name+".md")
	page, err := os.ReadFile(path)
	require.NoError(t, err, "each experiment has a page")
	block := regexp.MustCompile("(?s)```console\n\\$ onceledger lab " + regexp.QuoteMeta(name) + "\n(.*?)```")
	shown := block.FindSubmatch(page)
	require.NotNil(t, shown, "%s shows no run", path)

	printed, said, err := run(t, append([]string{"lab", name}, flags...)...)
	require.NoError(t, err, said)
	if *updatePages {
		written := block.ReplaceAllLiteral(page, []byte("```console\n$ onceledger lab "+name+"\n"+printed+"```"))
		require.NoError(t, os.WriteFile(path, written, 0o600))
		return
	}
	require.Equal(t, normal(string(shown[1])), normal(printed), "%s is not what a run prints: go test ./internal/lab -update writes it anew", path)
}

// What varies from run to run.
var (
	clock    = regexp.MustCompile(`\b\d\d:\d\d:\d\d\.\d{3}\b`)
	duration = regexp.MustCompile(`\bafter \d+(\.\d+)?s\b`)
)

// normal takes out of an output what no two runs have in common: the time of day, and how long something took.
func normal(text string) string {
	text = clock.ReplaceAllString(text, "hh:mm:ss.mmm")
	return duration.ReplaceAllString(text, "after some seconds")
}

// command is onceledger with a folder for temporary files of its own.
func command(t *testing.T, args ...string) (cmd *exec.Cmd, temp string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	temp = t.TempDir()
	cmd = exec.CommandContext(ctx, stack.Program(t, "onceledger"), args...)
	cmd.Env = append(os.Environ(), "TMPDIR="+temp)
	return cmd, temp
}

func run(t *testing.T, args ...string) (printed, said string, err error) {
	t.Helper()
	cmd, temp := command(t, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err = cmd.Run()
	requireNothingLeft(t, temp)
	return stdout.String(), stderr.String(), err
}

// requireNothingLeft looks for files in an experiment's temporary folder, and for processes that were given it.
func requireNothingLeft(t *testing.T, temp string) {
	t.Helper()
	left, err := os.ReadDir(temp)
	require.NoError(t, err)
	require.Empty(t, left, "files are left")
	environs, err := filepath.Glob("/proc/[0-9]*/environ")
	require.NoError(t, err)
	for _, path := range environs {
		environ, _ := os.ReadFile(path) // it may have ended, or be somebody else's
		require.NotContains(t, string(environ), "TMPDIR="+temp+"\x00", "a process is left: %s", path)
	}
}

// Goal: the list is what there is, in the order in which to read it, in the command and in the docs.
func TestList(t *testing.T) {
	t.Parallel()

	printed, said, err := run(t, "lab", "list")
	require.NoError(t, err, said)
	lines := strings.Split(strings.TrimSpace(printed), "\n")
	require.Len(t, lines, len(lab.Experiments))
	readme, err := os.ReadFile(filepath.Join(pages, "README.md"))
	require.NoError(t, err)
	at := -1
	for i, experiment := range lab.Experiments {
		require.Regexp(t, "^"+experiment.Name+" +"+regexp.QuoteMeta(experiment.Summary)+"$", lines[i])
		line := fmt.Sprintf("| [%[1]s](%[1]s.md) | %s |", experiment.Name, experiment.Summary)
		next := bytes.Index(readme, []byte(line))
		require.Greater(t, next, at, "docs/lab/README.md lacks, or has in another order: %s", line)
		at = next
	}
}

// Goal: docs/claims.md answers each claim, and what it quotes from an experiment is what that prints.
func TestClaims(t *testing.T) {
	t.Parallel()

	text, err := os.ReadFile("../../docs/claims.md")
	require.NoError(t, err)
	spaces := regexp.MustCompile(`\s+`)
	named, quoted := regexp.MustCompile("`onceledger lab ([a-z-]+)`"), regexp.MustCompile("`([^`]+)`")
	answered := make(map[string]bool)
	quotations := 0
	for line := range strings.Lines(string(text)) {
		// The cells of a row of a table; a bar in a cell has a backslash before it.
		cells := strings.Split(strings.ReplaceAll(line, `\|`, "\x00"), " | ")
		if len(cells) != 5 || !regexp.MustCompile(`^\| [A-I]\d$`).MatchString(cells[0]) {
			continue
		}
		id := strings.TrimPrefix(cells[0], "| ")
		require.False(t, answered[id], "%s is answered twice", id)
		answered[id] = true
		require.Regexp(t, "`Test|not shown yet|a benchmark", cells[4], "%s is shown by nothing", id)

		var shown string
		for _, name := range named.FindAllStringSubmatch(cells[2], -1) {
			page, err := os.ReadFile(filepath.Join(pages, name[1]+".md"))
			require.NoError(t, err, id)
			shown += spaces.ReplaceAllString(string(page), " ")
		}
		for _, quotation := range quoted.FindAllStringSubmatch(cells[3], -1) {
			if shown != "" {
				require.Contains(t, shown, strings.ReplaceAll(quotation[1], "\x00", "|"), "%s quotes what is not printed", id)
				quotations++
			}
		}
	}
	for part, count := range map[string]int{"A": 6, "B": 5, "C": 7, "D": 4, "E": 7, "F": 3, "G": 2, "H": 6, "I": 8} {
		for n := range count {
			require.True(t, answered[fmt.Sprint(part, n+1)], "claim %s%d has no answer", part, n+1)
		}
	}
	require.Greater(t, quotations, 40)
}

// Goal: the crash may be anywhere, and the count follows: one lost, one twice, or none of both.
func TestEventsAndCrashAfter(t *testing.T) {
	t.Parallel()

	for name, invoices := range map[string]int{"at-most-once": 6, "naive": 8, "dedupe": 7} {
		for _, crashAfter := range []string{"1", "7"} {
			t.Run(name+" "+crashAfter, func(t *testing.T) {
				t.Parallel()
				printed, said, err := run(t, "lab", name, "--events", "7", "--crash-after", crashAfter)
				require.NoError(t, err, said)
				require.Contains(t, printed, fmt.Sprintf("\n7 orders paid, %d invoices\n", invoices))
				require.Contains(t, printed, "lines with an error in its log: 0\n")
				require.Regexp(t, fmt.Sprintf(` order-%s +\| +%d \|`, crashAfter, invoices-6), printed)
			})
		}
	}
}

func TestRefusals(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name string
		args []string
		want []string
	}{
		{"NoName", nil, []string{"which experiment?", "onceledger lab list"}},
		{"TwoNames", []string{"naive", "dedupe"}, []string{`"dedupe" is too much`}},
		{"NearName", []string{"dedup"}, []string{`no experiment "dedup"`, "is dedupe meant?"}},
		{"PartOfAName", []string{"guard"}, []string{"is version-guard meant?"}},
		{"NoNearName", []string{"xyzzy"}, []string{`no experiment "xyzzy" (onceledger lab list`}},
		{"NoEvents", []string{"naive", "--events", "0"}, []string{"--events is 0: want 1 or more"}},
		{"TooManyEvents", []string{"naive", "--events", "101"}, []string{"--events is 101: want 1 to 100"}},
		{"CrashAfterTheLast", []string{"naive", "--crash-after", "6"}, []string{"--crash-after is 6: want 1 to 5"}},
		{"CrashBeforeTheFirst", []string{"naive", "--crash-after", "-1"}, []string{"--crash-after is -1: want 1 or more"}},
		{"NothingToCount", []string{"parallel", "--events", "3"}, []string{"parallel takes neither --events nor --crash-after"}},
		{"UnknownBroker", []string{"naive", "--kafka", "rabbit"}, []string{`--kafka is "rabbit": want embedded or apache`}},
		{"NeedsKafka", []string{"kafka-transaction", "--kafka", "embedded"}, []string{"cannot be seen on the embedded broker", "Java 17"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			printed, said, err := run(t, append([]string{"lab"}, test.args...)...)
			require.Error(t, err)
			require.Empty(t, printed)
			for _, part := range test.want {
				require.Contains(t, said, part)
			}
			require.Equal(t, 1, strings.Count(said, "\n"), "one line: %s", said)
		})
	}
}

// Goal: a service that cannot be started is said to be so, and leaves nothing.
func TestServicesThatCannotStart(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name, variable string
		args           []string
		want           string
	}{
		{"Postgres", "ONCELEDGER_POSTGRES_BIN=/nowhere", []string{"naive"}, "ONCELEDGER_POSTGRES_BIN"},
		{"Java", "JAVA_HOME=/nowhere", []string{"kafka-transaction"}, "JAVA_HOME"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			cmd, temp := command(t, append([]string{"lab"}, test.args...)...)
			cmd.Env = append(cmd.Env, test.variable)
			said, err := cmd.CombinedOutput()
			require.Error(t, err)
			require.Contains(t, string(said), "onceledger: "+test.args[0]+": ")
			require.Contains(t, string(said), test.want)
			requireNothingLeft(t, temp)
		})
	}
}

// Goal: Ctrl-C in the middle ends every child, one that is stopped too, and removes the folder.
func TestInterrupted(t *testing.T) {
	t.Parallel()

	cmd, temp := command(t, "lab", "parallel")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	var printed strings.Builder
	buffer := make([]byte, 4096)
	for !strings.Contains(printed.String(), "stops here (SIGSTOP)") {
		n, err := stdout.Read(buffer)
		printed.Write(buffer[:n])
		require.NoError(t, err, "it ended: %s", printed.String())
	}
	require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
	require.Error(t, cmd.Wait())
	require.Contains(t, stderr.String(), "parallel was stopped in the middle; what it started is ended")
	requireNothingLeft(t, temp)
}

// Goal: --keep keeps the folder, with the data in it, and says where.
func TestKeep(t *testing.T) {
	t.Parallel()

	cmd, temp := command(t, "lab", "at-most-once", "--events", "1", "--crash-after", "1", "--keep")
	said, err := cmd.CombinedOutput()
	require.NoError(t, err, string(said))
	kept, err := filepath.Glob(filepath.Join(temp, "onceledger-lab-*"))
	require.NoError(t, err)
	require.Len(t, kept, 1)
	require.Contains(t, string(said), "kept: "+kept[0])
	require.DirExists(t, filepath.Join(kept[0], "postgres", "data"))
	require.Contains(t, string(said), "1 order paid, 0 invoices")
}

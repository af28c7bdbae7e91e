package main

import (
	"bufio"
	"context"
	"encoding/json"
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

// twin is one patch: a few lines of the product, and what is known of them.
type twin struct {
	Name string
	// Breaks is what is wrong with it, in a sentence, and SeenIn where people have
	// made that mistake.
	Breaks, SeenIn string
	// CaughtBy are the invariants of which prove must find one broken; Cells are
	// the faults that bring it to light, at most Faults of them, and Arguments what
	// else prove is to be told.
	CaughtBy  []string
	Cells     []string
	Faults    int
	Arguments []string
	// Simulation is the test that must fail: "./package TestName".
	Simulation string

	patch string   // path
	files []string // that it changes, seen from the root
}

func (t twin) faults(usual int) int {
	if t.Faults > 0 {
		return t.Faults
	}
	return usual
}

// packages are those that it changes.
func (t twin) packages() []string {
	var packages []string
	for _, file := range t.files {
		packages = append(packages, "./"+filepath.Dir(file))
	}
	slices.Sort(packages)
	return slices.Compact(packages)
}

// readTwins reads the patches of a folder: all of them, or those that are named.
func readTwins(dir string, names []string) ([]twin, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.patch"))
	if err != nil {
		return nil, err
	}
	var twins []twin
	var faults []error
	wanted := slices.Clone(names)
	for _, path := range paths {
		name := strings.TrimSuffix(filepath.Base(path), ".patch")
		if len(names) > 0 {
			at := slices.Index(wanted, name)
			if at < 0 {
				continue
			}
			wanted = slices.Delete(wanted, at, at+1)
		}
		t, err := readTwin(path)
		if err != nil {
			faults = append(faults, fmt.Errorf("%s: %w", filepath.Base(path), err))
		}
		twins = append(twins, t)
	}
	for _, name := range wanted {
		faults = append(faults, fmt.Errorf("there is no twin %q in %s", name, dir))
	}
	if len(twins) == 0 && len(faults) == 0 {
		faults = append(faults, fmt.Errorf("there is no patch in %s", dir))
	}
	return twins, errors.Join(faults...)
}

var invariants = regexp.MustCompile(`^I([1-9]|10)( or I([1-9]|10))*$`)

// readTwin reads a patch's header: lines "Name: value" above the diff.
func readTwin(path string) (twin, error) {
	t := twin{Name: strings.TrimSuffix(filepath.Base(path), ".patch"), patch: path}
	file, err := os.Open(path)
	if err != nil {
		return t, err
	}
	defer file.Close()
	texts := map[string]*string{"Breaks": &t.Breaks, "Seen in": &t.SeenIn, "Simulation": &t.Simulation}
	lines := bufio.NewScanner(file)
	header := true
	for lines.Scan() {
		line := lines.Text()
		if changed, is := strings.CutPrefix(line, "+++ b/"); is {
			t.files = append(t.files, changed)
		}
		if header = header && line != ""; !header {
			continue
		}
		name, value, _ := strings.Cut(line, ": ")
		switch name {
		case "Caught by":
			if !invariants.MatchString(value) {
				return t, fmt.Errorf("caught by %q: want one of I1 to I10, or some with \" or \" between them", value)
			}
			t.CaughtBy = strings.Split(value, " or ")
		case "Cells":
			t.Cells = strings.Split(value, ",")
		case "Arguments":
			t.Arguments = strings.Fields(value)
		case "Faults":
			if t.Faults, err = strconv.Atoi(value); err != nil {
				return t, fmt.Errorf("faults: %w", err)
			}
		default:
			text := texts[name]
			if text == nil {
				return t, fmt.Errorf("line %q is not one of a header", line)
			}
			*text = value
		}
	}
	if t.Breaks == "" || t.SeenIn == "" || len(t.CaughtBy) == 0 || len(t.Cells) == 0 || len(t.files) == 0 {
		return t, errors.New("its header must say Breaks, Seen in, Caught by and Cells, and below an empty line there must be a diff")
	}
	return t, lines.Err()
}

// overlay applies a patch to copies of the files, exactly or not at all, and
// returns the file that tells the go command to take those instead.
func (s settings) overlay(ctx context.Context, t twin) (string, error) {
	dir := filepath.Join(s.scratch, t.Name, "source")
	replace := make(map[string]string)
	for _, file := range t.files {
		text, err := os.ReadFile(filepath.Join(s.root, file))
		if err != nil {
			return "", err
		}
		copied := filepath.Join(dir, file)
		if err := os.MkdirAll(filepath.Dir(copied), 0o755); err != nil {
			return "", err
		}
		if err := os.WriteFile(copied, text, 0o644); err != nil {
			return "", err
		}
		replace[filepath.Join(s.root, file)] = copied
	}
	apply := exec.CommandContext(ctx, "git", "apply", "--whitespace=nowarn", t.patch)
	apply.Dir = dir
	// It is to see the copies alone, and no repository around them.
	apply.Env = append(os.Environ(), "GIT_CEILING_DIRECTORIES="+filepath.Dir(dir))
	if out, err := apply.CombinedOutput(); err != nil {
		return "", fmt.Errorf("the patch does not apply any more: %w\n%s", err, out)
	}
	encoded, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	overlay := filepath.Join(s.scratch, t.Name, "overlay.json")
	return overlay, os.WriteFile(overlay, encoded, 0o644)
}

func (s settings) compile(ctx context.Context, overlay string, packages []string) error {
	return s.goCommand(ctx, append([]string{"build", "-buildvcs=false", "-overlay", overlay}, packages...)...)
}

// build makes the programs of a twin, or of the product without an overlay.
func (s settings) build(ctx context.Context, name, overlay string) (dir string, err error) {
	dir = filepath.Join(s.scratch, name, "bin")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	arguments := []string{"build", "-buildvcs=false", "-o", dir + "/"}
	if overlay != "" {
		arguments = append(arguments, "-overlay", overlay)
	}
	return dir, s.goCommand(ctx, append(arguments, "./cmd/api", "./cmd/worker")...)
}

func (s settings) goCommand(ctx context.Context, arguments ...string) error {
	command := exec.CommandContext(ctx, "go", arguments...)
	command.Dir = s.root
	if out, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("go %s: %w\n%s", arguments[0], err, out)
	}
	return nil
}

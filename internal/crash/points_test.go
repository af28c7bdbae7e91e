package crash_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/crash"
)

// TestPoints holds the points against the product and the documentation: each is
// reached by a line of code and told of in docs/exactly-once.md, and each line
// of code names one that is declared. What the faults reach is their own test.
func TestPoints(t *testing.T) {
	t.Parallel()

	declared := constants(t)
	require.ElementsMatch(t, crash.Points(), values(declared), "the list holds every constant")
	for _, point := range crash.Points() {
		process, between, ok := strings.Cut(point, ".")
		require.True(t, ok, point)
		require.Contains(t, []string{"api", "relay", "worker", "balances", "janitor"}, process, point)
		require.True(t, strings.Contains(between, "-not-") || strings.HasPrefix(between, "before-"),
			"%s says what lies on either side of it", point)
		require.NoError(t, crash.Arm(point+":1000000"))
	}
	require.NoError(t, crash.Arm(""))

	reached := make(map[string][]string)
	for _, dir := range []string{"../../cmd", "../../internal"} {
		err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			if proves := strings.HasPrefix(path, "../../internal/prove/") || strings.HasPrefix(path, "../../internal/faults/"); proves {
				return nil
			}
			for _, name := range used(t, path) {
				reached[name] = append(reached[name], path)
			}
			return nil
		})
		require.NoError(t, err)
	}
	documentation, err := os.ReadFile("../../docs/exactly-once.md")
	require.NoError(t, err)
	for name, point := range declared {
		require.NotEmpty(t, reached[name], "no line of the product reaches %s", name)
		require.Contains(t, string(documentation), "`"+point+"`", "docs/exactly-once.md")
		delete(reached, name)
	}
	require.Empty(t, reached, "these are used and not declared")
}

// constants are the points as crash.go declares them, by their names in Go.
func constants(t *testing.T) map[string]string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "crash.go", nil, 0)
	require.NoError(t, err)
	found := make(map[string]string)
	ast.Inspect(file, func(node ast.Node) bool {
		if spec, ok := node.(*ast.ValueSpec); ok {
			for i, value := range spec.Values {
				if literal, ok := value.(*ast.BasicLit); ok && literal.Kind == token.STRING {
					text, err := strconv.Unquote(literal.Value)
					require.NoError(t, err)
					found[spec.Names[i].Name] = text
				}
			}
		}
		return true
	})
	return found
}

func values(declared map[string]string) []string {
	var all []string
	for _, point := range declared {
		all = append(all, point)
	}
	slices.Sort(all)
	return all
}

// used are the points that a file of the product names, as crash.NAME.
func used(t *testing.T, path string) []string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
	require.NoError(t, err)
	var names []string
	ast.Inspect(file, func(node ast.Node) bool {
		selector, ok := node.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if from, ok := selector.X.(*ast.Ident); ok && from.Name == "crash" &&
			!slices.Contains([]string{"Point", "Arm", "AfterCommit", "Points"}, selector.Sel.Name) {
			names = append(names, selector.Sel.Name)
		}
		return true
	})
	return names
}

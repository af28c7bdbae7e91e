// Package static_test checks the files that no compiler reads: that the compose
// file and the documentation agree with the code and with each other.
package static_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// root is the repository, seen from this folder.
const root = "../.."

// walkFiles calls fn for each file of the repository below dir whose name ends
// with suffix, with its path from root.
func walkFiles(t *testing.T, dir, suffix string, fn func(path string)) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join(root, dir), func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := entry.Name()
		if entry.IsDir() && path != root && (name == "bin" || name == "node_modules" || strings.HasPrefix(name, ".") && name != "..") {
			return fs.SkipDir
		}
		if !entry.IsDir() && strings.HasSuffix(name, suffix) {
			relative, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			fn(relative)
		}
		return nil
	})
	require.NoError(t, err)
}

func parse(t *testing.T, path string) *ast.File {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(root, path), nil, parser.SkipObjectResolution)
	require.NoError(t, err)
	return file
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, path))
	require.NoError(t, err)
	return string(text)
}

var variableForm = regexp.MustCompile(`^[A-Z][A-Z0-9]*(_[A-Z0-9]+)+$`)

// variables lists the environment variables that the code in dir quotes.
func variables(t *testing.T, dir string) []string {
	t.Helper()
	var names []string
	walkFiles(t, dir, ".go", func(path string) {
		if strings.HasSuffix(path, "_test.go") {
			return
		}
		ast.Inspect(parse(t, path), func(node ast.Node) bool {
			if text, ok := quoted(node); ok && variableForm.MatchString(text) {
				names = append(names, text)
			}
			return true
		})
	})
	require.NotEmpty(t, names)
	return names
}

// quoted is the text of a string literal.
func quoted(node ast.Node) (string, bool) {
	literal, ok := node.(*ast.BasicLit)
	if !ok || literal.Kind != token.STRING {
		return "", false
	}
	text, err := strconv.Unquote(literal.Value)
	return text, err == nil
}

package static_test

import (
	"go/ast"
	"net/url"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestProblemPages: each failure that the code declares has its page in
// docs/problems, with the status it is answered with, and no page is left over.
func TestProblemPages(t *testing.T) {
	t.Parallel()

	statuses := map[string]string{
		"Invalid":      "400 Bad Request",
		"RuleViolated": "422 Unprocessable Content",
		"Unauthorized": "401 Unauthorized",
		"NotFound":     "404 Not Found",
		"Conflict":     "409 Conflict",
		"Unavailable":  "503 Service Unavailable",
	}
	declared := declaredFailures(t)
	require.Contains(t, declared, "order-not-found")
	for code, kind := range declared {
		page := read(t, "docs/problems/"+code+".md")
		status := statuses[kind]
		if code == "internal" {
			status = "500 Internal Server Error"
		}
		require.NotEmpty(t, status, "kind %s", kind)
		require.Contains(t, page, "`"+code+"`, "+status+"\n", "docs/problems/%s.md", code)
		require.Contains(t, page, "## What happened", "docs/problems/%s.md", code)
		require.Contains(t, page, "## What to do", "docs/problems/%s.md", code)
	}
	walkFiles(t, "docs/problems", ".md", func(path string) {
		code := strings.TrimSuffix(filepath.Base(path), ".md")
		require.Contains(t, declared, code, "%s is the page of no failure", path)
	})
}

// declaredFailures finds each failure.New in the code: its code and its kind.
func declaredFailures(t *testing.T) map[string]string {
	t.Helper()
	declared := make(map[string]string)
	walkFiles(t, ".", ".go", func(path string) {
		if strings.HasSuffix(path, "_test.go") {
			return
		}
		ast.Inspect(parse(t, path), func(node ast.Node) bool {
			call, ok := node.(*ast.CallExpr)
			if !ok || !isSelector(call.Fun, "failure", "New") || len(call.Args) < 2 {
				return true
			}
			code, ok := quoted(call.Args[1])
			require.True(t, ok, "%s: the code of a failure is a constant", path)
			require.NotContains(t, declared, code, "%s: two failures have one code", path)
			kind, ok := call.Args[0].(*ast.SelectorExpr)
			require.True(t, ok, "%s: the kind of %s is a constant of package failure", path, code)
			declared[code] = kind.Sel.Name
			return true
		})
	})
	return declared
}

func isSelector(expression ast.Expr, pkg, name string) bool {
	selector, ok := expression.(*ast.SelectorExpr)
	if !ok || selector.Sel.Name != name {
		return false
	}
	identifier, ok := selector.X.(*ast.Ident)
	return ok && identifier.Name == pkg
}

// TestConfigurationPage: each variable that a program reads is explained, and
// each one explained is read.
func TestConfigurationPage(t *testing.T) {
	t.Parallel()

	page := read(t, "docs/configuration.md")
	compose := read(t, "docker-compose.yml")
	example := read(t, ".env.example")
	asked := append(variables(t, "internal/config"), variables(t, "cmd")...)
	for _, name := range asked {
		require.True(t, explains(page, name), "docs/configuration.md does not explain %s", name)
	}
	for _, row := range regexp.MustCompile("(?m)^\\| `([A-Z0-9_]+)` \\|").FindAllStringSubmatch(page, -1) {
		if strings.Contains(compose, "${"+row[1]+":-") {
			require.Contains(t, example, row[1]+"=", ".env.example does not show it")
			continue
		}
		require.Contains(t, asked, row[1], "docs/configuration.md explains what no program reads")
	}
	for _, line := range regexp.MustCompile(`(?m)^#? ?([A-Z0-9_]+)=`).FindAllStringSubmatch(example, -1) {
		require.True(t, explains(page, line[1]), ".env.example sets %s, which docs/configuration.md does not explain", line[1])
	}
}

func explains(page, name string) bool { return strings.Contains(page, "| `"+name+"` |") }

// TestNamedTestsExist: the documentation says which test shows what, so those
// tests are there under these names.
func TestNamedTestsExist(t *testing.T) {
	t.Parallel()

	functions, subtests := make(map[string]string), make(map[string]bool)
	walkFiles(t, ".", "_test.go", func(path string) {
		for _, declaration := range parse(t, path).Decls {
			function, ok := declaration.(*ast.FuncDecl)
			if !ok || function.Recv != nil || !strings.HasPrefix(function.Name.Name, "Test") {
				continue
			}
			functions[function.Name.Name] = path
			ast.Inspect(function, func(node ast.Node) bool {
				if text, ok := quoted(node); ok {
					subtests[function.Name.Name+"/"+text] = true
				}
				return true
			})
		}
	})

	named := regexp.MustCompile("`(Test[A-Za-z0-9]+)(?:/([A-Za-z0-9]+))?`")
	found := 0
	walkFiles(t, ".", ".md", func(path string) {
		for _, match := range named.FindAllStringSubmatch(read(t, path), -1) {
			found++
			require.NotEmpty(t, functions[match[1]], "%s names a test that does not exist: %s", path, match[1])
			if match[2] != "" {
				require.True(t, subtests[match[1]+"/"+match[2]], "%s names a subtest that does not exist: %s", path, match[0])
			}
		}
	})
	require.Greater(t, found, 20)
}

// TestLinks: what a page of the repository links to in the repository is there.
func TestLinks(t *testing.T) {
	t.Parallel()

	link := regexp.MustCompile(`\]\(([^)\s]+)\)`)
	code := regexp.MustCompile("(?s)```.*?```")
	found := 0
	walkFiles(t, ".", ".md", func(path string) {
		text := code.ReplaceAllString(read(t, path), "")
		for _, match := range link.FindAllStringSubmatch(text, -1) {
			target, err := url.Parse(match[1])
			require.NoError(t, err, path)
			if target.Scheme != "" || target.Path == "" {
				continue
			}
			found++
			matches, err := filepath.Glob(filepath.Join(root, filepath.Dir(path), target.Path))
			require.NoError(t, err)
			require.NotEmpty(t, matches, "%s links to %s", path, match[1])
		}
	})
	require.Greater(t, found, 20)
}

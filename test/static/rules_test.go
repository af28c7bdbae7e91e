package static_test

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

// ruleFile is a file of Prometheus' rules, as far as it may hold alerts.
type ruleFile struct {
	Groups []struct {
		Name  string
		Rules []struct {
			Alert       string
			Expr        string
			For         string
			Labels      map[string]string
			Annotations map[string]string
		}
	}
}

var (
	metricForm  = regexp.MustCompile(`\bonceledger_[a-z0-9_]+`)
	headingForm = regexp.MustCompile(`(?m)^#+ (.+)$`)
)

// TestAlerts: each rule is one that Prometheus reads, of metrics that the code
// has, and leads to a section of the runbook.
func TestAlerts(t *testing.T) {
	t.Parallel()

	metrics := make(map[string]bool)
	for _, dir := range []string{"internal", "cmd"} {
		walkFiles(t, dir, ".go", func(path string) {
			if !strings.HasSuffix(path, "_test.go") {
				for _, literal := range regexp.MustCompile(`"(onceledger_[a-z0-9_]+)"`).FindAllStringSubmatch(read(t, path), -1) {
					metrics[literal[1]] = true
				}
			}
		})
	}
	sections := make(map[string]bool)
	for _, heading := range headingForm.FindAllStringSubmatch(read(t, "docs/runbook.md"), -1) {
		sections[anchor(heading[1])] = true
	}

	names := make(map[string]bool)
	walkFiles(t, "deploy/prometheus/rules", ".yml", func(path string) {
		var file ruleFile
		decoder := yaml.NewDecoder(strings.NewReader(read(t, path)))
		decoder.KnownFields(true)
		require.NoError(t, decoder.Decode(&file), path)
		require.NotEmpty(t, file.Groups, path)
		for _, group := range file.Groups {
			require.NotEmpty(t, group.Name, path)
			require.NotEmpty(t, group.Rules, "%s: %s", path, group.Name)
			for _, rule := range group.Rules {
				require.Regexp(t, `^Onceledger[A-Za-z]+$`, rule.Alert, path)
				require.False(t, names[rule.Alert], "two alerts are named %s", rule.Alert)
				names[rule.Alert] = true

				used := metricForm.FindAllString(rule.Expr, -1)
				require.NotEmpty(t, used, rule.Alert)
				for _, metric := range used {
					require.True(t, metrics[strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(metric, "_bucket"), "_sum"), "_count")] || metrics[metric],
						"%s asks for %s, which no program has", rule.Alert, metric)
				}
				requireBalanced(t, rule.Alert, rule.Expr)
				if rule.For != "" {
					_, err := time.ParseDuration(rule.For)
					require.NoError(t, err, rule.Alert)
				}
				require.Contains(t, []string{"warning", "critical"}, rule.Labels["severity"], rule.Alert)
				require.NotEmpty(t, rule.Annotations["summary"], rule.Alert)
				page, section, _ := strings.Cut(rule.Annotations["runbook"], "#")
				require.Equal(t, "docs/runbook.md", page, rule.Alert)
				require.True(t, sections[section], "%s leads to %s, which is no section of %s", rule.Alert, section, page)
			}
		}
	})
	require.NotEmpty(t, names)
}

// anchor is what a heading is linked by.
func anchor(heading string) string {
	heading = regexp.MustCompile("[^a-z0-9 _-]").ReplaceAllString(strings.ToLower(heading), "")
	return strings.ReplaceAll(heading, " ", "-")
}

func requireBalanced(t *testing.T, name, expression string) {
	t.Helper()
	closes := map[rune]rune{')': '(', '}': '{', ']': '['}
	var open []rune
	for _, char := range expression {
		switch char {
		case '(', '{', '[':
			open = append(open, char)
		case ')', '}', ']':
			require.NotEmpty(t, open, name)
			require.Equal(t, closes[char], open[len(open)-1], name)
			open = open[:len(open)-1]
		}
	}
	require.Empty(t, open, name)
}

package e2e_test

import (
	"encoding/json"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/test/stack"
)

// TestRolesInProcessesOfTheirOwn runs each role where it may be run: the relay
// alone, billing twice, balances twice, the janitor alone, each with its own login
// only.
func TestRolesInProcessesOfTheirOwn(t *testing.T) {
	t.Parallel()

	s := stack.New(t)
	api := s.API(t)
	relay, janitor := s.Worker(t, "relay", "relay"), s.Worker(t, "janitor", "janitor")
	a, b := s.Worker(t, "a", "billing"), s.Worker(t, "b", "billing")
	c, d := s.Worker(t, "c", "balances"), s.Worker(t, "d", "balances")
	stack.StartAll(t, api, relay, a, b, c, d, janitor)

	for process, checks := range map[*stack.Process][]string{
		api: {"database", "partitions", "relay"}, relay: {"relay"}, a: {"billing"}, b: {"billing"}, c: {"balances"}, d: {"balances"}, janitor: {"janitor"},
	} {
		_, text, err := process.Get("/readyz")
		require.NoError(t, err)
		var ready struct {
			Ready  bool              `json:"ready"`
			Checks map[string]string `json:"checks"`
		}
		require.NoError(t, json.Unmarshal([]byte(text), &ready))
		require.True(t, ready.Ready)
		for _, check := range []string{"database", "partitions", "relay", "billing", "balances", "janitor"} {
			if slices.Contains(checks, check) {
				require.Equal(t, "ok", ready.Checks[check], text)
			} else {
				require.NotContains(t, ready.Checks, check, "another's")
			}
		}
	}

	load := s.StartLoad(t, api, 4, 1)
	for _, worker := range []*stack.Process{a, b} {
		require.NoError(t, worker.WaitFor("have its share of the work", func() (bool, error) {
			applied, err := worker.Metric("onceledger_inbox_records_total", `outcome="applied"`)
			return applied > 10, err
		}))
	}
	for _, worker := range []*stack.Process{c, d} {
		require.NoError(t, worker.WaitFor("have its share of the balances", func() (bool, error) {
			applied, err := worker.Metric("onceledger_balances_records_total", `outcome="applied"`)
			return applied > 10, err
		}))
	}
	require.NoError(t, load.Finish(20))
	s.RequireBooks(t, api)
	s.RequireTopicBalances(t)
}

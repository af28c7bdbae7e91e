package e2e_test

import (
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/test/stack"
)

// drillSlotLoss runs the operator's command on a stack.
func drillSlotLoss(t *testing.T, s *stack.Stack, api *stack.Process, args ...string) (out string, code int) {
	t.Helper()
	return drillSlotLossAt(t, s, strings.TrimPrefix(api.URL(), "http://"), s.Key, args...)
}

func drillSlotLossAt(t *testing.T, s *stack.Stack, addr, key string, args ...string) (out string, code int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), stack.Program(t, "onceledger"), append([]string{"drill", "slot-loss"}, args...)...)
	cmd.Env = []string{
		"RELAY_DATABASE_URL=" + s.Database.URL("relay"), "DATABASE_URL=" + s.Database.URL("verify"),
		"KAFKA_BROKERS=" + s.Broker.Brokers(), "ONCELEDGER_ADDR=" + addr,
		"ONCELEDGER_API_KEY=" + key,
	}
	text, _ := cmd.CombinedOutput() // how it ended is the code
	t.Logf("%s", text)
	return string(text), cmd.ProcessState.ExitCode()
}

// count is a number of the drill's account.
func count(t *testing.T, out, name string) int {
	t.Helper()
	found := regexp.MustCompile(`(?m)^` + name + ` +(\d+)`).FindStringSubmatch(out)
	require.NotNil(t, found, "no %q", name)
	n, err := strconv.Atoi(found[1])
	require.NoError(t, err)
	return n
}

// Goal: an operator drops the slot of a system at work, and is shown that nothing
// is lost by it.
func TestDrillSlotLoss(t *testing.T) {
	t.Parallel()

	s := stack.New(t)
	api := s.API(t)
	stack.StartAll(t, api, s.Worker(t, "worker-a", stack.AllRoles), s.Worker(t, "worker-b", "relay,billing"))
	s.Run(t, api, 4, 8, 1)

	out, code := drillSlotLoss(t, s, api, "--orders", "200", "--away", "500ms")
	require.Zero(t, code)
	require.GreaterOrEqual(t, count(t, out, "written meanwhile"), 3*200)
	hole := count(t, out, "in the hole")
	require.Positive(t, hole)
	require.GreaterOrEqual(t, count(t, out, "re-sent"), hole)
	require.Equal(t, count(t, out, "seen by the consumer"), count(t, out, "applied")+count(t, out, "duplicates suppressed"))
	require.Equal(t, 3*200, count(t, out, "applied"))
	require.Zero(t, count(t, out, "lost"))

	// Others make the orders.
	load := s.StartLoad(t, api, 4, 2)
	out, code = drillSlotLoss(t, s, api, "--orders", "0", "--away", "100ms")
	require.Zero(t, code)
	require.Positive(t, count(t, out, "in the hole"))
	require.NoError(t, load.Finish(8))
}

// Goal: the drill does not call well what is not.
func TestDrillSlotLossWithoutAConsumer(t *testing.T) {
	t.Parallel()

	s := stack.New(t)
	api := s.API(t)
	relay := s.Worker(t, "relay", "relay")
	stack.StartAll(t, api, relay)
	out, code := drillSlotLoss(t, s, api, "--orders", "10", "--away", "10ms", "--wait", "5s")
	require.Equal(t, 1, code)
	require.Equal(t, 30, count(t, out, "lost"))
	require.Zero(t, count(t, out, "applied"))

	// What is wrong with the API is said, and before anything is broken.
	out, code = drillSlotLossAt(t, s, strings.TrimPrefix(api.URL(), "http://"), "no-key", "--wait", "10m")
	require.Equal(t, 1, code)
	require.Contains(t, out, "nothing was done")
	require.Contains(t, out, "ONCELEDGER_API_KEY")
	require.Contains(t, out, "401")
	out, code = drillSlotLossAt(t, s, "127.0.0.1:1", s.Key, "--wait", "10m")
	require.Equal(t, 1, code)
	require.Contains(t, out, "nothing was done")
	require.Contains(t, out, "connection refused")

	// With nothing at work, nothing is broken.
	require.NoError(t, relay.Stop())
	out, code = drillSlotLoss(t, s, api, "--orders", "10", "--wait", "5s")
	require.Equal(t, 1, code)
	require.Contains(t, out, "nothing was done: replication slot onceledger_outbox is not in use: no relay is running")
}

package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/pgtest"
)

// call runs the program's command line in this process.
func call(t *testing.T, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	var out, errOut bytes.Buffer
	cmd := newRootCommand()
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	cmd.SetErr(&errOut)
	err = cmd.ExecuteContext(t.Context())
	return out.String(), errOut.String(), err
}

// A script that names a command wrongly must not go on as if that had run.
func TestUnknownCommand(t *testing.T) {
	t.Parallel()

	for _, parent := range [][]string{nil, {"migrate"}, {"keys"}, {"relay"}, {"wal"}, {"drill"}, {"outbox"}} {
		stdout, _, err := call(t, append(parent, "foo")...)
		require.ErrorContains(t, err, `foo": see onceledger`, parent)
		require.Equal(t, 1, exitCode(err))
		require.Empty(t, stdout)

		stdout, _, err = call(t, parent...)
		require.NoError(t, err)
		require.Contains(t, stdout, "Available Commands")
	}
	_, _, err := call(t, "relay", "stat")
	require.EqualError(t, err, `there is no command "onceledger relay stat": is status meant? See onceledger relay --help`)
}

// What is asked for wrongly is refused by its name, before anything is done. The
// environment is the process's, so these do not run in parallel.
func TestWrongInput(t *testing.T) {
	database := pgtest.New(t)
	cases := map[string]struct {
		environ map[string]string
		args    []string
		want    string
	}{
		"NegativeOrders":  {args: []string{"drill", "slot-loss", "--orders", "-1"}, want: "--orders is -1"},
		"NegativeAway":    {args: []string{"drill", "slot-loss", "--away", "-1s"}, want: "--away is -1s"},
		"WaitWithinAway":  {args: []string{"drill", "slot-loss", "--away", "1m", "--wait", "1m"}, want: "--wait is 1m0s"},
		"UnknownRelay":    {args: []string{"relay", "switch", "--to", "carrier-pigeon"}, want: "--to: there is no relay"},
		"NoConnect":       {args: []string{"relay", "switch", "--to", "debezium"}, want: "CONNECT_URL is not set"},
		"SlotForStatus":   {environ: map[string]string{"RELAY_SLOT": "Bad-Name"}, args: []string{"relay", "status"}, want: `RELAY_SLOT is "Bad-Name"`},
		"SlotForSwitch":   {environ: map[string]string{"RELAY_SLOT": "Bad-Name"}, args: []string{"relay", "switch", "--to", "poll"}, want: `RELAY_SLOT is "Bad-Name"`},
		"SlotForDrill":    {environ: map[string]string{"RELAY_SLOT": "Bad-Name"}, args: []string{"drill", "slot-loss"}, want: `RELAY_SLOT is "Bad-Name"`},
		"SlotForUp":       {environ: map[string]string{"RELAY_SLOT": "Bad-Name"}, args: []string{"up"}, want: `RELAY_SLOT is "Bad-Name"`},
		"AddressForDrill": {environ: map[string]string{"ONCELEDGER_ADDR": "http://127.0.0.1"}, args: []string{"drill", "slot-loss"}, want: "ONCELEDGER_ADDR"},
	}
	for name, test := range cases {
		t.Run(name, func(t *testing.T) {
			for name, value := range map[string]string{
				"RELAY_DATABASE_URL": database.URL("relay"), "DATABASE_URL": database.URL("verify"), "KAFKA_BROKERS": "127.0.0.1:1",
				"ONCELEDGER_API_KEY": "none", "ONCELEDGER_HOME": t.TempDir(), "CONNECT_URL": "", "RELAY_SLOT": "", "ONCELEDGER_ADDR": "",
			} {
				t.Setenv(name, value)
			}
			for name, value := range test.environ {
				t.Setenv(name, value)
			}
			stdout, _, err := call(t, test.args...)
			require.ErrorContains(t, err, test.want)
			require.Empty(t, stdout)
		})
	}

	t.Run("DebeziumIsLeft", func(t *testing.T) {
		t.Setenv("RELAY_DATABASE_URL", database.URL("relay"))
		t.Setenv("CONNECT_URL", "")
		_, err := database.Pool(t, "").Exec(t.Context(), `
			INSERT INTO relay_assignment (slot_name, relay, target) VALUES ('leaves_debezium', 'debezium', 'debezium')`)
		require.NoError(t, err)
		t.Setenv("RELAY_SLOT", "leaves_debezium")
		_, _, err = call(t, "relay", "switch", "--to", "poll")
		require.ErrorContains(t, err, "CONNECT_URL is not set")
		require.ErrorContains(t, err, "--abandon-debezium")
	})
}

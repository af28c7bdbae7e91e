package switchover_test

import (
	"context"
	"fmt"
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/relay"
	"github.com/onceledger/onceledger/internal/switchover"
)

// The switches themselves are tested under load, by test/conformance.

// A login that has lost REPLICATION can get away from the log, and not back to
// it.
func TestWithoutReplication(t *testing.T) {
	t.Parallel()

	database := pgtest.New(t)
	owner := database.Pool(t, "")
	slot, role := "slot_"+database.Name, "plain_"+database.Name
	_, err := owner.Exec(t.Context(), fmt.Sprintf("CREATE ROLE %q LOGIN PASSWORD 'plain' IN ROLE onceledger_relay", role))
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := owner.Exec(context.WithoutCancel(t.Context()), fmt.Sprintf("DROP ROLE %q", role))
		require.NoError(t, err)
	})
	address, err := url.Parse(database.URL("relay"))
	require.NoError(t, err)
	address.User = url.UserPassword(role, "plain")
	var said []string
	config := switchover.Config{
		URL: address.String(), Slot: slot, Publication: relay.DefaultPublication, Wait: time.Minute,
		Say: func(format string, args ...any) { said = append(said, fmt.Sprintf(format, args...)) },
	}
	_, err = owner.Exec(t.Context(), "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", slot)
	require.NoError(t, err)

	report, err := switchover.Switch(t.Context(), config, relay.KindPoll)
	require.NoError(t, err)
	require.Equal(t, relay.KindWAL, report.From)
	kind, err := relay.Assigned(t.Context(), owner, slot)
	require.NoError(t, err)
	require.Equal(t, relay.KindPoll, kind)
	require.Contains(t, said[len(said)-1], "SELECT pg_drop_replication_slot('"+slot+"')")

	_, err = switchover.Switch(t.Context(), config, relay.KindWAL)
	require.ErrorContains(t, err, "nothing was changed")
	require.ErrorContains(t, err, "give it REPLICATION")

	// With the right login the slot that was left goes.
	config.URL = database.URL("relay")
	_, err = switchover.Switch(t.Context(), config, relay.KindPoll)
	require.NoError(t, err)
	require.Empty(t, pgtest.Column[string](t, owner, "SELECT slot_name::text FROM pg_replication_slots WHERE slot_name = $1", slot))
}

// Two at once to the same relay: both come to the same end.
func TestTwoAtOnce(t *testing.T) {
	t.Parallel()

	database := pgtest.New(t)
	config := switchover.Config{
		URL: database.URL("relay"), Slot: "slot_" + database.Name, Publication: relay.DefaultPublication,
		Wait: time.Minute, Say: func(string, ...any) {},
	}
	for _, to := range []relay.Kind{relay.KindPoll, relay.KindWAL, relay.KindPoll} {
		done := make(chan error)
		for range 2 {
			go func() {
				_, err := switchover.Switch(t.Context(), config, to)
				done <- err
			}()
		}
		require.NoError(t, <-done)
		require.NoError(t, <-done)
		kind, err := relay.Assigned(t.Context(), database.Pool(t, ""), config.Slot)
		require.NoError(t, err)
		require.Equal(t, to, kind)
	}
}

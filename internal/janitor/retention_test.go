package janitor_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/janitor"
)

func TestRetention(t *testing.T) {
	t.Parallel()

	const day = 24 * time.Hour
	topics := func(kept time.Duration) map[string]time.Duration {
		return map[string]time.Duration{"billing.events": day, "order.events": kept}
	}
	standard := janitor.Retention{Dedupe: 30 * day, Outbox: 3 * day, Replay: 7 * day, Topics: topics(14 * day)}
	for name, test := range map[string]struct {
		change func(*janitor.Retention)
		says   []string // nothing: it holds
	}{
		"HoldsAsItIs":          {func(*janitor.Retention) {}, nil},
		"HoldsByAHair":         {func(r *janitor.Retention) { r.Dedupe = 24*day + 1 }, nil},
		"HoldsWithoutReplay":   {func(r *janitor.Retention) { r.Replay, r.Dedupe = 0, 18*day }, nil},
		"FailsAtTheSum":        {func(r *janitor.Retention) { r.Dedupe = 24 * day }, []string{"DEDUPE_WINDOW 576h", "OUTBOX_RETENTION 72h", "order.events 336h", "REPLAY_WINDOW 168h", "= 576h", "above 576h"}},
		"FailsByTheOutbox":     {func(r *janitor.Retention) { r.Outbox = 10 * day }, []string{"OUTBOX_RETENTION 240h", "= 744h"}},
		"FailsByTheTopic":      {func(r *janitor.Retention) { r.Topics = topics(21 * day) }, []string{"topic order.events 504h", "= 744h"}},
		"FailsByTheReplay":     {func(r *janitor.Retention) { r.Replay = 13*day + 90*time.Minute }, []string{"REPLAY_WINDOW 313.5h"}},
		"FailsByATopicForEver": {func(r *janitor.Retention) { r.Topics = topics(janitor.Unlimited) }, []string{"order.events keeps records for ever", "retention.ms=-1", "kafka-configs.sh --alter --topic order.events"}},
		"FailsWithoutATopic":   {func(r *janitor.Retention) { r.Topics = nil }, []string{"no topic's retention is known"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			r := standard
			test.change(&r)
			err := r.Check()
			if test.says == nil {
				require.NoError(t, err)
				return
			}
			require.ErrorIs(t, err, janitor.ErrRetention)
			for _, words := range test.says {
				require.ErrorContains(t, err, words)
			}
			require.NotContains(t, err.Error(), "billing.events", "which is short enough")
		})
	}

	t.Run("NamesEachTopicThatIsTooLong", func(t *testing.T) {
		t.Parallel()

		r := standard
		r.Topics = map[string]time.Duration{"billing.events": 21 * day, "order.events": janitor.Unlimited}
		require.ErrorContains(t, r.Check(), "billing.events")
		require.ErrorContains(t, r.Check(), "order.events")
	})
}

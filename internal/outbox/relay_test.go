package outbox_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/outbox"
)

func TestRelay(t *testing.T) {
	t.Parallel()

	t.Run("PublishesWhatIsCommitted", func(t *testing.T) {
		t.Parallel()

		bench := setup(t)
		orders := newOrders(t, 3)
		bench.start(t)
		bench.waitFor(t, outbox.StateStreaming)
		ids := bench.commit(t, orders.events(t, 10)...)
		require.ElementsMatch(t, ids, bench.receive(t, 10))
		require.Len(t, bench.records, 10)
	})
}

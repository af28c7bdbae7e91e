package factory_test

import (
	"encoding/json"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/factory"
)

func TestOrder(t *testing.T) {
	t.Parallel()

	t.Run("IsTwoBooksUnlessToldOtherwise", func(t *testing.T) {
		t.Parallel()

		order := factory.Order{TenantID: uuid.New()}
		var paid event.Order
		require.NoError(t, json.Unmarshal(order.Paid().Payload, &paid))
		require.Equal(t, []int64{2500, 475, 2975}, []int64{paid.NetAmount, paid.TaxAmount, paid.TotalAmount})
		require.EqualValues(t, 2, paid.Version)
		require.Equal(t, "EUR", string(paid.Currency))
	})

	t.Run("RefundsToTheLastUnit", func(t *testing.T) {
		t.Parallel()

		seed := rand.Uint64()
		t.Logf("seed %d", seed)
		rng := rand.New(rand.NewPCG(seed, 0))
		for range 200 {
			order := factory.Random(rng, uuid.New())
			order.Paid()
			given := make(map[string][2]int64)
			for order.Left() > 0 {
				order.Refunded(1 + rng.Int64N(order.Left()))
				for _, part := range order.State.Refund.Taxes {
					require.GreaterOrEqual(t, part.NetAmount, int64(0))
					require.GreaterOrEqual(t, part.TaxAmount, int64(0))
					sum := given[part.Rate.String()]
					given[part.Rate.String()] = [2]int64{sum[0] + part.NetAmount, sum[1] + part.TaxAmount}
				}
			}
			for _, tax := range order.State.Taxes {
				require.Equal(t, [2]int64{tax.NetAmount, tax.TaxAmount}, given[tax.Rate.String()])
			}
		}
	})

	t.Run("MakesRecordsThatDecode", func(t *testing.T) {
		t.Parallel()

		order := factory.Order{TenantID: uuid.New()}
		partition := factory.Partition{Number: 3, Next: 7}
		events := []event.Event{order.Created(), order.Paid(), order.Refunded(500)}
		for i, record := range partition.Append(events...) {
			require.Equal(t, event.OrderEvents, record.Topic)
			require.Equal(t, int32(3), record.Partition)
			require.EqualValues(t, 7+i, record.Offset)
			decoded, err := event.Decode(record)
			require.NoError(t, err)
			require.Equal(t, events[i], decoded)
		}
	})
}

func TestID(t *testing.T) {
	t.Parallel()

	at := time.Date(2026, time.January, 31, 23, 59, 59, 999_000_000, time.UTC)
	last := factory.ID(at)
	for range 20_000 {
		id := factory.ID(at)
		require.Greater(t, id.String(), last.String())
		last = id
	}
	require.EqualValues(t, 7, last.Version())
	require.Equal(t, uuid.RFC4122, last.Variant())
	seconds, nanoseconds := last.Time().UnixTime()
	require.Equal(t, at, time.Unix(seconds, nanoseconds).UTC())
}

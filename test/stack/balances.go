package stack

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/balances"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/verify"
)

// RequireTopicBalances waits until the role balances has caught up and requires
// that verify finds the balances on the topic equal to the ledger's.
func (s *Stack) RequireTopicBalances(t testing.TB) {
	t.Helper()
	brokers := s.Broker.Brokers()
	report, err := verify.Run(t.Context(), verify.Config{
		DB:   s.Owner,
		Wait: Patience,
		Topic: &verify.Topic{
			Behind: func(ctx context.Context) (int64, error) {
				return kafka.Behind(ctx, brokers, balances.Group, event.BillingEvents)
			},
			Read: func(ctx context.Context) (balances.Totals, error) {
				return balances.Collect(func(use func(event.Record) error) error {
					return kafka.ReadTopic(ctx, brokers, event.LedgerBalances, use)
				})
			},
		},
	})
	require.NoError(t, err)
	require.Equal(t, verify.TopicEqual, report.Topic.State, "%v %v", report.Findings, report.Notes)
	require.Positive(t, report.Topic.Accounts)
}

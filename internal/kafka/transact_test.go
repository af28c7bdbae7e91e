package kafka

import (
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/onceledger/onceledger/internal/kafkatest"
)

// TestMembershipOfNobodyIsRefused: before it has joined, and when it is expelled,
// a member has nothing to fence its offsets with. internal/balances shows on
// Apache Kafka that the broker would let them pass.
func TestMembershipOfNobodyIsRefused(t *testing.T) {
	t.Parallel()

	broker := kafkatest.New(t)
	consumer, err := NewConsumer(ConsumerConfig{
		Brokers: broker.Brokers(), Group: "balances", Topics: []string{broker.Topic(t, 1)}, Log: slog.New(slog.DiscardHandler),
	})
	require.NoError(t, err)
	m, err := consumer.join()
	require.NoError(t, err)
	_, err = m.membership()
	require.ErrorIs(t, err, errNoMember)

	require.Eventually(t, func() bool {
		m.poll(tick)
		return len(m.tracker.partitions()) == 1
	}, time.Minute, time.Millisecond)
	_, err = m.membership()
	require.NoError(t, err)

	// The group expels it. It knows before it is told, which is at the next poll.
	broker.ControlKey(int16(kmsg.Heartbeat), func(request kmsg.Request) (kmsg.Response, error, bool) {
		answer := request.ResponseKind().(*kmsg.HeartbeatResponse)
		answer.ErrorCode = kerr.UnknownMemberID.Code
		return answer, nil, true
	})
	require.Eventually(t, func() bool {
		_, err := m.membership()
		return errors.Is(err, errNoMember)
	}, time.Minute, time.Millisecond)
	require.NoError(t, m.client.Close())
}

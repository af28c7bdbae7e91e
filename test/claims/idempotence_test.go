package claims_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Goal: a client does not let an idempotent producer be set up without what idempotence rests on.
func TestIdempotenceWantsAllAcknowledgements(t *testing.T) {
	t.Parallel()

	for name, option := range map[string]kgo.Opt{
		"acks=1":               kgo.RequiredAcks(kgo.LeaderAck()),
		"acks=0":               kgo.RequiredAcks(kgo.NoAck()),
		"6 requests in flight": kgo.MaxProduceRequestsInflightPerBroker(6),
	} {
		_, err := kgo.NewClient(option)
		require.ErrorContains(t, err, "idempoten", name)
		client, err := kgo.NewClient(option, kgo.DisableIdempotentWrite())
		require.NoError(t, err, name)
		client.Close()
	}
}

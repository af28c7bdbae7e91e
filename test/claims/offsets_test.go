// Package claims_test shows what docs/claims.md answers with a test, where neither an experiment of the lab nor a test
// of the product does: what holds of Kafka and Postgres, whoever uses them.
package claims_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/kafkatest"
)

const patience = time.Minute

// Goal: a duplicate has to move the offset. Where it does not, the group lags for as long as nothing comes behind it
// and is given the duplicate at each start; the next record's commit covers it, since a commit says "everything
// before". Where the duplicate counts as a failure that is tried again, nothing behind it is ever read.
func TestDuplicateWithoutItsOffset(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name      string
		duplicate func(ctx context.Context, client *kgo.Client, record *kgo.Record) error
		lag       int64 // with the duplicate at the end of the topic
		freed     bool  // by the record behind it
	}{
		{"ThatCommits", func(ctx context.Context, client *kgo.Client, record *kgo.Record) error {
			return client.CommitRecords(ctx, record)
		}, 0, true},
		{"ThatOnlySkips", func(context.Context, *kgo.Client, *kgo.Record) error { return nil }, 1, true},
		{"ThatFails", func(_ context.Context, client *kgo.Client, record *kgo.Record) error {
			client.SetOffsets(map[string]map[int32]kgo.EpochOffset{record.Topic: {record.Partition: {Epoch: -1, Offset: record.Offset}}})
			return nil
		}, 1, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()

			topic := kafkatest.Topic(t, 1)
			once := kafkatest.Record{Value: []byte("event-1")}
			kafkatest.Produce(t, topic, once, once)
			applied := make(map[string]int)
			// Each consumer of the group reads on until it has been given so many records.
			read := func(count int) (offsets []int64) {
				t.Helper()
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				client, err := kgo.NewClient(kgo.SeedBrokers(kafkatest.Brokers(t)), kgo.ConsumeTopics(topic), kgo.ConsumerGroup(topic),
					kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.DisableAutoCommit())
				require.NoError(t, err)
				defer client.Close()
				for len(offsets) < count {
					fetches := client.PollRecords(ctx, 1)
					require.NoError(t, fetches.Err())
					for _, record := range fetches.Records() {
						offsets = append(offsets, record.Offset)
						if applied[string(record.Value)]++; applied[string(record.Value)] > 1 {
							require.NoError(t, test.duplicate(ctx, client, record))
						} else {
							require.NoError(t, client.CommitRecords(ctx, record))
						}
					}
				}
				return offsets
			}

			require.Equal(t, []int64{0, 1}, read(2))
			require.Equal(t, test.lag, lag(t, topic))
			if test.lag > 0 {
				require.Equal(t, []int64{1}, read(1), "started again, it is given the duplicate again")
				require.Equal(t, test.lag, lag(t, topic))
			}

			kafkatest.Produce(t, topic, kafkatest.Record{Value: []byte("event-2")})
			if test.freed {
				offsets := read(int(test.lag) + 1)
				require.EqualValues(t, 2, offsets[len(offsets)-1])
				require.Zero(t, lag(t, topic), "the commit of what is behind covers it")
			} else {
				require.Equal(t, []int64{1, 1, 1, 1, 1}, read(5), "it never comes past the duplicate")
				require.EqualValues(t, 2, lag(t, topic))
			}
		})
	}
}

func lag(t *testing.T, topic string) int64 {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(kafkatest.Brokers(t)))
	require.NoError(t, err)
	defer client.Close()
	admin := kadm.NewClient(client)
	committed, err := admin.FetchOffsets(t.Context(), topic)
	require.NoError(t, err)
	ends, err := admin.ListEndOffsets(t.Context(), topic)
	require.NoError(t, err)
	at, known := committed.Lookup(topic, 0)
	require.True(t, known, "group %s has committed nothing", topic)
	end, _ := ends.Lookup(topic, 0)
	return end.Offset - at.At
}

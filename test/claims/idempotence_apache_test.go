//go:build apache

package claims_test

import (
	"context"
	"encoding/binary"
	"hash/crc32"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/onceledger/onceledger/internal/devstack"
	"github.com/onceledger/onceledger/internal/faults"
)

func apache(t *testing.T) string {
	t.Helper()
	cluster, err := devstack.StartKafka(t.Context(), devstack.KafkaConfig{Dir: t.TempDir(), JavaHome: os.Getenv("JAVA_HOME"), Logf: t.Logf})
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
		defer cancel()
		require.NoError(t, cluster.Stop(ctx))
	})
	return cluster.Bootstrap()
}

func client(t *testing.T, brokers string, options ...kgo.Opt) *kgo.Client {
	t.Helper()
	c, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(brokers)}, options...)...)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

func makeTopic(t *testing.T, brokers, topic string) *kadm.Client {
	t.Helper()
	admin := kadm.NewClient(client(t, brokers))
	_, err := admin.CreateTopic(t.Context(), 1, 1, nil, topic)
	require.NoError(t, err)
	return admin
}

func end(t *testing.T, admin *kadm.Client, topic string) int64 {
	t.Helper()
	ends, err := admin.ListEndOffsets(t.Context(), topic)
	require.NoError(t, err)
	found, _ := ends.Lookup(topic, 0)
	return found.Offset
}

// Goal: a connection that is cut between the broker's write and its acknowledgement has the client send again. Without
// idempotence the record is there twice; with it once; and what the application sends again, or a producer that was
// started again, is another record either way.
func TestCutBetweenProduceAndAcknowledgement(t *testing.T) {
	t.Parallel()

	brokers := apache(t)
	const records, cuts = 20, 5
	for _, test := range []struct {
		name    string
		options []kgo.Opt
		twice   bool
	}{
		{"Idempotent", nil, false},
		{"NotIdempotent", []kgo.Opt{kgo.DisableIdempotentWrite()}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			admin := makeTopic(t, brokers, test.name)
			proxy, err := faults.StartKafkaProxy(t.Context(), brokers)
			require.NoError(t, err)
			t.Cleanup(proxy.Close)
			producer := client(t, proxy.Brokers(), append(test.options, kgo.DefaultProduceTopic(test.name))...)
			require.NoError(t, producer.Ping(t.Context()))
			proxy.CutAnswers(kmsg.Produce, cuts)
			for range records {
				require.NoError(t, producer.ProduceSync(t.Context(), &kgo.Record{Value: []byte("paid")}).FirstErr())
			}
			require.Equal(t, cuts, proxy.Cut(), "answers that were cut")
			written := end(t, admin, test.name)
			t.Logf("%d records acknowledged, %d answers cut, %d records on the topic", records, cuts, written)
			if test.twice {
				require.EqualValues(t, records+cuts, written)
				return
			}
			require.EqualValues(t, records, written)

			// The same, sent again by the application and by another producer.
			require.NoError(t, producer.ProduceSync(t.Context(), &kgo.Record{Value: []byte("paid")}).FirstErr())
			again := client(t, brokers, kgo.DefaultProduceTopic(test.name))
			require.NoError(t, again.ProduceSync(t.Context(), &kgo.Record{Value: []byte("paid")}).FirstErr())
			require.EqualValues(t, records+2, end(t, admin, test.name))
		})
	}
}

// Goal: what a broker makes of a producer's id, epoch and sequence: the batch that it has is acknowledged and not
// written again, a gap is an error, and an epoch that is not the latest is fenced.
// Method: the requests are made by hand.
func TestSequencesOfAProducer(t *testing.T) {
	t.Parallel()

	const topic = "sequences"
	brokers := apache(t)
	admin := makeTopic(t, brokers, topic)
	raw := client(t, brokers)
	first := initProducer(t, raw)

	require.NoError(t, produce(t, raw, topic, first, 0))
	require.NoError(t, produce(t, raw, topic, first, 0), "the same batch again is acknowledged")
	require.EqualValues(t, 1, end(t, admin, topic), "and not written again")
	require.NoError(t, produce(t, raw, topic, first, 1))
	require.ErrorIs(t, produce(t, raw, topic, first, 5), kerr.OutOfOrderSequenceNumber, "a gap")
	require.EqualValues(t, 2, end(t, admin, topic))

	second := initProducer(t, raw) // the same transactional id again
	require.Equal(t, first.ProducerID, second.ProducerID)
	require.Greater(t, second.ProducerEpoch, first.ProducerEpoch)
	require.NoError(t, produce(t, raw, topic, second, 0))
	require.ErrorIs(t, produce(t, raw, topic, first, 2), kerr.InvalidProducerEpoch, "the old epoch is fenced")
	require.EqualValues(t, 3, end(t, admin, topic))
}

const transactionalID = "claims"

func initProducer(t *testing.T, raw *kgo.Client) *kmsg.InitProducerIDResponse {
	t.Helper()
	request := kmsg.NewPtrInitProducerIDRequest()
	id := transactionalID
	request.TransactionalID = &id
	request.TransactionTimeoutMillis = 60_000
	request.ProducerID, request.ProducerEpoch = -1, -1
	var response *kmsg.InitProducerIDResponse
	require.Eventually(t, func() bool { // the coordinator may have to be made first
		var err error
		response, err = request.RequestWith(t.Context(), raw)
		return err == nil && response.ErrorCode == 0
	}, patience, 50*time.Millisecond)
	return response
}

// produce sends one record as a producer with this id and epoch, as its batch of this sequence.
func produce(t *testing.T, raw *kgo.Client, topic string, producer *kmsg.InitProducerIDResponse, sequence int32) error {
	t.Helper()
	record := kmsg.Record{Value: []byte("paid")}
	record.Length = int32(len(record.AppendTo(nil)) - 1) // the length itself is one byte while it is 0
	batch := kmsg.NewRecordBatch()
	batch.Magic = 2
	batch.PartitionLeaderEpoch = -1
	batch.FirstTimestamp = time.Now().UnixMilli()
	batch.MaxTimestamp = batch.FirstTimestamp
	batch.ProducerID, batch.ProducerEpoch, batch.FirstSequence = producer.ProducerID, producer.ProducerEpoch, sequence
	batch.NumRecords = 1
	batch.Records = record.AppendTo(nil)
	written := batch.AppendTo(nil)
	batch.Length = int32(len(written) - 12)
	written = batch.AppendTo(nil)
	binary.BigEndian.PutUint32(written[17:], crc32.Checksum(written[21:], crc32.MakeTable(crc32.Castagnoli)))

	partition := kmsg.NewProduceRequestTopicPartition()
	partition.Records = written
	toTopic := kmsg.NewProduceRequestTopic()
	toTopic.Topic = topic
	described, err := kadm.NewClient(raw).ListTopics(t.Context(), topic)
	require.NoError(t, err)
	toTopic.TopicID = described[topic].ID
	toTopic.Partitions = append(toTopic.Partitions, partition)
	request := kmsg.NewPtrProduceRequest()
	request.Acks, request.TimeoutMillis = -1, 10_000
	request.Topics = append(request.Topics, toTopic)
	response, err := request.RequestWith(t.Context(), raw)
	require.NoError(t, err)
	return kerr.ErrorForCode(response.Topics[0].Partitions[0].ErrorCode)
}

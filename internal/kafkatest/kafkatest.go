// Package kafkatest gives tests a Kafka-protocol broker in this process.
//
// Brokers and Topic use one broker for the whole test program; a topic with a
// unique name is what keeps parallel tests apart (give consumer groups unique
// names too). New makes a broker for one test, which can then go away, hang
// and come back.
//
// The broker keeps its records in memory and is a stand-in for Apache Kafka:
// good for what clients do with answers and outages, not for what a broker
// guarantees when it is killed.
package kafkatest

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Record is a record with everything that came with it. To produce one, fill
// in Key, Value and Headers, and Partition if it matters (see Produce).
type Record = kgo.Record

// shared is the broker of this test program. It ends with the program.
var shared = sync.OnceValues(open)

// Broker is a broker of one node. The embedded cluster offers more: faults to
// answer with (Fault), consumer groups to wait for (WaitGroupInfo), and others.
type Broker struct {
	*kfake.Cluster

	network *network
}

// New starts a broker for this test alone.
func New(t testing.TB) *Broker {
	t.Helper()
	broker, err := open()
	require.NoError(t, err)
	t.Cleanup(func() {
		broker.network.set(answering)
		broker.Close()
	})
	return broker
}

func open() (*Broker, error) {
	network := newNetwork()
	cluster, err := kfake.NewCluster(
		kfake.NumBrokers(1),
		kfake.ListenFn(network.listen),
		kfake.GroupMinSessionTimeout(100*time.Millisecond), // Kafka's 6 s make slow tests
	)
	if err != nil {
		return nil, fmt.Errorf("start a broker: %w", err)
	}
	return &Broker{Cluster: cluster, network: network}, nil
}

func sharedBroker(t testing.TB) *Broker {
	t.Helper()
	broker, err := shared()
	require.NoError(t, err)
	return broker
}

// Brokers is the program's broker as clients' bootstrap servers.
func Brokers(t testing.TB) string {
	t.Helper()
	return sharedBroker(t).Brokers()
}

// Topic makes a topic with a unique name on the program's broker.
func Topic(t testing.TB, partitions int32) string {
	t.Helper()
	return sharedBroker(t).Topic(t, partitions)
}

// Produce writes records to a topic of the program's broker; see
// Broker.Produce.
func Produce(t testing.TB, topic string, records ...Record) {
	t.Helper()
	sharedBroker(t).Produce(t, topic, records...)
}

// Records reads a topic of the program's broker; see Broker.Records.
func Records(t testing.TB, topic string) []Record {
	t.Helper()
	return sharedBroker(t).Records(t, topic)
}

// Brokers is the broker as clients' bootstrap servers. The address stays the
// same through Pause and Stall.
func (b *Broker) Brokers() string { return b.network.addr }

// Pause makes the broker unreachable: connections break, and new ones break at
// once. What it had accepted stays.
func (b *Broker) Pause() { b.network.set(unreachable) }

// Stall makes the broker silent: connections stay, nothing is answered. What
// clients send is handled after Resume.
func (b *Broker) Stall() { b.network.set(silent) }

// Resume ends a Pause or Stall.
func (b *Broker) Resume() { b.network.set(answering) }

var topicCount atomic.Int64

// Topic makes a topic with a unique name.
func (b *Broker) Topic(t testing.TB, partitions int32) string {
	t.Helper()
	name := fmt.Sprintf("topic-%d", topicCount.Add(1))
	require.NoError(t, b.CreateTopic(name, partitions, nil))
	return name
}

// Produce writes records and returns when the broker has them. A record with a
// key goes to the partition that every murmur2 producer picks for the key,
// those of the Java clients included. One without goes to its Partition.
func (b *Broker) Produce(t testing.TB, topic string, records ...Record) {
	t.Helper()
	client := b.client(t, kgo.RecordPartitioner(byKeyOrByHand{
		byKey:  kgo.StickyKeyPartitioner(nil).ForTopic(topic),
		byHand: kgo.ManualPartitioner().ForTopic(topic),
	}))
	defer client.Close()
	for _, record := range records {
		record.Topic = topic
		require.NoError(t, client.ProduceSync(t.Context(), &record).FirstErr())
	}
}

// Records reads all that a topic holds, by partition and offset. Records of
// transactions that are open or aborted are left out.
func (b *Broker) Records(t testing.TB, topic string) []Record {
	t.Helper()
	toRead := make(map[int32]int64)
	starts := make(map[int32]kgo.Offset)
	for _, partition := range b.PartitionInfos(topic) {
		if partition.LastStableOffset > partition.LogStartOffset {
			toRead[partition.Partition] = partition.LastStableOffset
			starts[partition.Partition] = kgo.NewOffset().At(partition.LogStartOffset)
		}
	}
	client := b.client(t,
		kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: starts}),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.KeepControlRecords(), // a transaction's end has an offset too, and may be the last
	)
	defer client.Close()

	var records []Record
	for len(toRead) > 0 {
		fetches := client.PollFetches(t.Context())
		require.NoError(t, errors.Join(t.Context().Err(), fetches.Err()))
		fetches.EachRecord(func(record *kgo.Record) {
			end, ok := toRead[record.Partition]
			if !ok || record.Offset >= end {
				return // written since Records was called
			}
			if record.Offset == end-1 {
				delete(toRead, record.Partition)
			}
			if !record.Attrs.IsControl() {
				records = append(records, *record)
			}
		})
	}
	slices.SortFunc(records, func(a, b Record) int {
		return cmp.Or(cmp.Compare(a.Partition, b.Partition), cmp.Compare(a.Offset, b.Offset))
	})
	return records
}

// Header is the value of a record's header, and whether it has one.
func Header(record Record, key string) (string, bool) {
	for _, header := range record.Headers {
		if header.Key == key {
			return string(header.Value), true
		}
	}
	return "", false
}

func (b *Broker) client(t testing.TB, options ...kgo.Opt) *kgo.Client {
	t.Helper()
	client, err := kgo.NewClient(append(options, kgo.SeedBrokers(b.Brokers()))...)
	require.NoError(t, err)
	return client
}

// byKeyOrByHand picks a partition from the key, or takes the record's own.
type byKeyOrByHand struct {
	byKey, byHand kgo.TopicPartitioner
}

func (p byKeyOrByHand) ForTopic(string) kgo.TopicPartitioner { return p }

func (p byKeyOrByHand) RequiresConsistency(*kgo.Record) bool { return true }

func (p byKeyOrByHand) Partition(record *kgo.Record, partitions int) int {
	if record.Key == nil {
		return p.byHand.Partition(record, partitions)
	}
	return p.byKey.Partition(record, partitions)
}

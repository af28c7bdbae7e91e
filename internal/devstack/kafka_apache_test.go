//go:build apache

package devstack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

func TestKafka(t *testing.T) {
	t.Parallel()

	t.Run("OneBrokerKeepsRecordsAndPortsOverRestarts", func(t *testing.T) {
		t.Parallel()

		config := KafkaConfig{Dir: t.TempDir(), JavaHome: os.Getenv("JAVA_HOME"), Logf: t.Logf}
		kafka := startKafka(t, config)
		bootstrap := kafka.Bootstrap()
		createTopic(t, bootstrap, "events", 3, -1)
		client := newClient(t, bootstrap)
		writeRecords(t, client, "events", 0, 100)

		_, err := StartKafka(t.Context(), config)
		require.ErrorIs(t, err, ErrLocked)

		// A crash, under the clients' feet.
		pid := kafka.Pid(1)
		kafka.Kill(1)
		<-kafka.Done(1)
		require.ErrorContains(t, kafka.Err(1), "killed")
		require.NoError(t, kafka.Start(t.Context(), 1))
		require.NotEqual(t, pid, kafka.Pid(1))
		writeRecords(t, client, "events", 100, 200)

		// And a stop in order, by another process as far as the folder is concerned.
		stopKafka(t, kafka)
		require.ErrorIs(t, syscall.Kill(kafka.Pid(1), 0), syscall.ESRCH)
		kafka = startKafka(t, config)
		require.Equal(t, bootstrap, kafka.Bootstrap())
		require.Len(t, readRecords(t, bootstrap, "events", 200), 200)

		// What nobody made is not made by using it.
		refused := newClient(t, bootstrap, kgo.UnknownTopicRetries(0))
		err = refused.ProduceSync(t.Context(), &kgo.Record{Topic: "unheard.of"}).FirstErr()
		require.ErrorIs(t, err, kerr.UnknownTopicOrPartition)

		stopKafka(t, kafka)
		config.Brokers = 3
		_, err = StartKafka(t.Context(), config)
		require.ErrorContains(t, err, "holds a cluster of 1, and 3 are wanted")
	})

	t.Run("ThreeBrokersLoseNothingAcknowledgedWhenOneIsKilled", func(t *testing.T) {
		t.Parallel()

		kafka := startKafka(t, KafkaConfig{Dir: t.TempDir(), Brokers: 3, JavaHome: os.Getenv("JAVA_HOME"), Logf: t.Logf})
		createTopic(t, kafka.Bootstrap(), "events", 3, -1)
		writer := startWriter(t, kafka.Bootstrap(), "events")

		writer.waitFor(t, 500)
		kafka.Kill(1)
		writer.waitFor(t, 500) // two go on without the third
		require.NoError(t, kafka.Start(t.Context(), 1))
		waitInSync(t, kafka.Bootstrap(), "events", 3)

		// Stopped in its tracks, one looks dead to the others, and comes back.
		require.NoError(t, kafka.Pause(2))
		writer.waitFor(t, 500)
		require.NoError(t, kafka.Resume(2))
		waitInSync(t, kafka.Bootstrap(), "events", 3)

		acknowledged := writer.stop(t)
		times := readRecords(t, kafka.Bootstrap(), "events", len(acknowledged))
		for _, key := range acknowledged {
			require.Equal(t, 1, times[key], "record %s", key)
		}
		t.Logf("%d records were acknowledged", len(acknowledged))
	})
}

func TestConnect(t *testing.T) {
	t.Parallel()

	kafka := startKafka(t, KafkaConfig{Dir: t.TempDir(), JavaHome: os.Getenv("JAVA_HOME"), Logf: t.Logf})
	config := ConnectConfig{Dir: t.TempDir(), Bootstrap: kafka.Bootstrap(), JavaHome: os.Getenv("JAVA_HOME"), Logf: t.Logf}
	connect, err := StartConnect(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(connect.Kill)

	plugins := askConnect(t, connect.URL()+"/connector-plugins?connectorsOnly=false")
	for _, class := range []string{"io.debezium.connector.postgresql.PostgresConnector", "io.debezium.transforms.outbox.EventRouter"} {
		require.Contains(t, plugins, class)
	}
	log, err := os.ReadFile(connect.LogFile())
	require.NoError(t, err)
	require.NotContains(t, string(log), "ERROR")

	_, err = StartConnect(t.Context(), config)
	require.ErrorIs(t, err, ErrLocked)

	url := connect.URL()
	connect.Kill()
	<-connect.Done()
	require.NoError(t, connect.Start(t.Context()))
	require.Equal(t, url, connect.URL())
	require.JSONEq(t, "[]", askConnect(t, url+"/connectors"))

	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	require.NoError(t, connect.Stop(ctx))
	require.ErrorIs(t, syscall.Kill(connect.Pid(), 0), syscall.ESRCH)
}

func startKafka(t *testing.T, config KafkaConfig) *Kafka {
	t.Helper()
	began := time.Now()
	kafka, err := StartKafka(t.Context(), config)
	require.NoError(t, err)
	t.Logf("%d brokers are ready after %s", kafka.Brokers(), time.Since(began).Round(time.Millisecond))
	t.Cleanup(kafka.killAll)
	return kafka
}

func stopKafka(t *testing.T, kafka *Kafka) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	require.NoError(t, kafka.Stop(ctx))
}

func newClient(t *testing.T, bootstrap string, options ...kgo.Opt) *kgo.Client {
	t.Helper()
	client, err := kgo.NewClient(append(options, kgo.SeedBrokers(strings.Split(bootstrap, ",")...))...)
	require.NoError(t, err)
	t.Cleanup(client.Close)
	return client
}

func createTopic(t *testing.T, bootstrap, name string, partitions int32, replication int16) {
	t.Helper()
	topic := kmsg.NewCreateTopicsRequestTopic()
	topic.Topic, topic.NumPartitions, topic.ReplicationFactor = name, partitions, replication
	request := kmsg.NewPtrCreateTopicsRequest()
	request.Topics = append(request.Topics, topic)
	response, err := request.RequestWith(t.Context(), newClient(t, bootstrap))
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.Topics[0].ErrorCode))
}

// writeRecords writes records with the keys from up to below to.
func writeRecords(t *testing.T, client *kgo.Client, topic string, from, to int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for key := from; key < to; key++ {
		client.Produce(ctx, &kgo.Record{Topic: topic, Key: fmt.Append(nil, key)}, func(_ *kgo.Record, err error) {
			if err != nil {
				t.Errorf("produce: %v", err)
			}
		})
	}
	require.NoError(t, client.Flush(ctx))
}

// readRecords reads the topic from its start until it has seen that many keys, and
// says how often each was there.
func readRecords(t *testing.T, bootstrap, topic string, keys int) map[string]int {
	t.Helper()
	client := newClient(t, bootstrap, kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	times := make(map[string]int)
	for len(times) < keys {
		fetches := client.PollFetches(ctx)
		require.NoError(t, fetches.Err0(), "%d of %d keys were there", len(times), keys)
		fetches.EachRecord(func(record *kgo.Record) { times[string(record.Key)]++ })
	}
	return times
}

// waitInSync returns when every partition of the topic has that many replicas
// that have everything.
func waitInSync(t *testing.T, bootstrap, topic string, replicas int) {
	t.Helper()
	client := newClient(t, bootstrap)
	require.Eventually(t, func() bool {
		request := kmsg.NewPtrMetadataRequest()
		wanted := kmsg.NewMetadataRequestTopic()
		wanted.Topic = &topic
		request.Topics = append(request.Topics, wanted)
		response, err := request.RequestWith(t.Context(), client)
		if err != nil || len(response.Topics) != 1 {
			return false
		}
		for _, partition := range response.Topics[0].Partitions {
			if len(partition.ISR) != replicas {
				return false
			}
		}
		return len(response.Topics[0].Partitions) > 0
	}, time.Minute, 50*time.Millisecond)
}

// writer writes records one after the other, acknowledged by all replicas in
// sync, and notes which were.
type writer struct {
	cancel context.CancelFunc
	done   chan struct{}

	mutex        sync.Mutex
	acknowledged []string
	fault        error
}

func startWriter(t *testing.T, bootstrap, topic string) *writer {
	t.Helper()
	// It learns of a new leader soon, and does not wait long for a broker that hangs.
	client := newClient(t, bootstrap, kgo.RequiredAcks(kgo.AllISRAcks()), kgo.MetadataMinAge(100*time.Millisecond),
		kgo.ProduceRequestTimeout(3*time.Second), kgo.RequestTimeoutOverhead(time.Second))
	ctx, cancel := context.WithCancel(t.Context())
	w := &writer{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(w.done)
		for n := 0; ctx.Err() == nil; n++ {
			key := fmt.Sprint(n)
			// Once begun, a record is seen through: otherwise nobody knows whether it is there.
			err := client.ProduceSync(context.WithoutCancel(ctx), &kgo.Record{Topic: topic, Key: []byte(key)}).FirstErr()
			w.mutex.Lock()
			if err != nil {
				w.fault = errors.Join(w.fault, err)
			} else {
				w.acknowledged = append(w.acknowledged, key)
			}
			w.mutex.Unlock()
		}
	}()
	t.Cleanup(func() { cancel(); <-w.done })
	return w
}

func (w *writer) count() int {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return len(w.acknowledged)
}

// waitFor waits for that many more records.
func (w *writer) waitFor(t *testing.T, more int) {
	t.Helper()
	want := w.count() + more
	require.Eventually(t, func() bool { return w.count() >= want }, time.Minute, 10*time.Millisecond)
}

func (w *writer) stop(t *testing.T) []string {
	t.Helper()
	w.cancel()
	<-w.done
	require.NoError(t, w.fault)
	return w.acknowledged
}

func askConnect(t *testing.T, url string) string {
	t.Helper()
	response, err := http.Get(url)
	require.NoError(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, response.StatusCode, string(body))
	return string(body)
}

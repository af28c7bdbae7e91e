package supervisor

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// createTopics makes the missing topics on brokers that are not ours, with the
// brokers' own replication factor. Those that are there are left as they are.
func createTopics(ctx context.Context, brokers string, partitions int) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(brokers, ",")...))
	if err != nil {
		return fmt.Errorf("KAFKA_BROKERS: %w", err)
	}
	defer client.Close()

	request := kmsg.NewPtrCreateTopicsRequest()
	for _, name := range topics {
		topic := kmsg.NewCreateTopicsRequestTopic()
		topic.Topic = name
		topic.NumPartitions = int32(partitions)
		topic.ReplicationFactor = -1
		request.Topics = append(request.Topics, topic)
	}
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	response, err := request.RequestWith(ctx, client)
	if err != nil {
		return fmt.Errorf("KAFKA_BROKERS: reach %s: %w", brokers, err)
	}
	for _, topic := range response.Topics {
		err := kerr.ErrorForCode(topic.ErrorCode)
		if err != nil && !errors.Is(err, kerr.TopicAlreadyExists) {
			return fmt.Errorf("create topic %s: %w", topic.Topic, err)
		}
	}
	return nil
}

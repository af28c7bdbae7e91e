package kafka

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/confluentinc/confluent-kafka-go/v2/kafka"
)

// TopicSpec is a topic as it should be.
type TopicSpec struct {
	Name              string
	Partitions        int
	ReplicationFactor int
	Config            map[string]string // such as {"retention.ms": "604800000"}
}

// EnsureTopics makes the topics that are missing. What exists stays as it is;
// if it has fewer partitions than wanted that is an error, since adding some
// moves keys to other partitions and is for a person to decide.
func EnsureTopics(ctx context.Context, brokers string, topics []TopicSpec) error {
	return withAdmin(brokers, func(admin *kafka.AdminClient) error {
		partitions, err := countPartitions(ctx, admin, topics)
		if err != nil {
			return err
		}
		var missing []kafka.TopicSpecification
		var faults []error
		for _, topic := range topics {
			if partitions[topic.Name] == 0 {
				missing = append(missing, kafka.TopicSpecification{
					Topic:             topic.Name,
					NumPartitions:     topic.Partitions,
					ReplicationFactor: topic.ReplicationFactor,
					Config:            topic.Config,
				})
			} else if err := topic.checkPartitions(partitions[topic.Name]); err != nil {
				faults = append(faults, err)
			}
		}
		if len(missing) == 0 {
			return errors.Join(faults...)
		}
		results, err := admin.CreateTopics(ctx, missing)
		if err != nil {
			return fmt.Errorf("make topics: %w", err)
		}
		for _, result := range results {
			code := result.Error.Code()
			if code != kafka.ErrNoError && code != kafka.ErrTopicAlreadyExists { // another process was quicker
				faults = append(faults, fmt.Errorf("make topic %s: %w", result.Topic, result.Error))
			}
		}
		return errors.Join(faults...)
	})
}

// CheckTopics says what is wrong with the brokers and with topics that are to be
// there, and what to do: the brokers are too old or send their clients to an
// address that leads nowhere; a topic is missing, has fewer partitions than
// wanted, another cleanup.policy than its Config asks for (default delete: a
// compacted topic keeps but the last event of an order), or a min.insync.replicas
// with which it takes no record or may lose one.
func CheckTopics(ctx context.Context, brokers string, topics []TopicSpec) error {
	if err := checkVersions(ctx, brokers); err != nil {
		return err
	}
	return withAdmin(brokers, func(admin *kafka.AdminClient) error {
		if err := checkAdvertised(ctx, admin, brokers); err != nil {
			return err
		}
		described, err := describeTopics(ctx, admin, topics)
		if err != nil {
			return err
		}
		var faults []error
		for _, topic := range topics {
			partitions := described[topic.Name]
			if len(partitions) == 0 {
				faults = append(faults, fmt.Errorf("topic %[1]s is missing: make it with kafka-topics.sh "+
					"--create --topic %[1]s --partitions %[2]d --config cleanup.policy=%[3]s", topic.Name, topic.Partitions, topic.cleanupPolicy()))
				continue
			}
			settings, err := topicSettings(ctx, admin, topic.Name)
			if err != nil {
				return err
			}
			faults = append(faults, topic.checkPartitions(len(partitions)), topic.checkPolicy(settings["cleanup.policy"].Value),
				topic.checkReplicas(len(partitions[0].Replicas), settings["min.insync.replicas"].Value))
		}
		return errors.Join(faults...)
	})
}

// TopicRetention is how old the records of each topic may get: retention.ms counts
// from the youngest record of a segment, and a segment takes records for
// segment.ms. Below zero it is for ever.
func TopicRetention(ctx context.Context, brokers string, topics ...string) (map[string]time.Duration, error) {
	retention := make(map[string]time.Duration)
	err := withAdmin(brokers, func(admin *kafka.AdminClient) error {
		for _, topic := range topics {
			settings, err := topicSettings(ctx, admin, topic)
			if err != nil {
				return err
			}
			var sum time.Duration
			for _, name := range []string{"retention.ms", "segment.ms"} {
				value, err := strconv.ParseInt(settings[name].Value, 10, 64)
				if err != nil {
					return fmt.Errorf("read %s of topic %s: %w", name, topic, err)
				}
				if value < 0 || value > int64(math.MaxInt64/2/time.Millisecond) {
					sum = -1 // for ever, or as good as that
					break
				}
				sum += time.Duration(value) * time.Millisecond
			}
			retention[topic] = sum
		}
		return nil
	})
	return retention, err
}

// GroupLag is how far a group has committed in each partition of a topic, and
// where each partition ends at this moment for a reader of committed records.
// A partition of which nothing is committed is not in committed.
func GroupLag(ctx context.Context, brokers, group, topic string) (committed, end map[int32]int64, err error) {
	committed, end = make(map[int32]int64), make(map[int32]int64)
	err = withAdmin(brokers, func(admin *kafka.AdminClient) error {
		count, err := countPartitions(ctx, admin, []TopicSpec{{Name: topic}})
		if err != nil {
			return err
		}
		if count[topic] == 0 {
			return fmt.Errorf("topic %s is missing", topic)
		}
		var partitions []kafka.TopicPartition
		latest := make(map[kafka.TopicPartition]kafka.OffsetSpec)
		for partition := range int32(count[topic]) {
			at := kafka.TopicPartition{Topic: &topic, Partition: partition}
			partitions = append(partitions, at)
			latest[at] = kafka.LatestOffsetSpec
		}

		// The commits first: they are then not ahead of the ends.
		if committed, err = groupOffsets(brokers, group, partitions); err != nil {
			return err
		}

		ends, err := admin.ListOffsets(ctx, latest, kafka.SetAdminIsolationLevel(kafka.IsolationLevelReadCommitted))
		if err != nil {
			return fmt.Errorf("read end of topic %s: %w", topic, err)
		}
		for at, result := range ends.ResultInfos {
			if result.Error.Code() != kafka.ErrNoError {
				return fmt.Errorf("read end of %s[%d]: %w", topic, at.Partition, result.Error)
			}
			end[at.Partition] = int64(result.Offset)
		}
		return nil
	})
	return committed, end, err
}

// Reachable asks the brokers for a sign of life.
func Reachable(ctx context.Context, brokers string) error {
	return withAdmin(brokers, func(admin *kafka.AdminClient) error {
		_, err := admin.DescribeCluster(ctx)
		return err
	})
}

func withAdmin(brokers string, use func(*kafka.AdminClient) error) error {
	admin, err := kafka.NewAdminClient(&kafka.ConfigMap{
		"bootstrap.servers":   brokers,
		"client.id":           "onceledger-admin",
		"socket.timeout.ms":   10_000,
		"enable.metrics.push": false,
		"log_level":           0, // what goes wrong is in the errors
	})
	if err != nil {
		return fmt.Errorf("Kafka admin client: %w", err)
	}
	defer admin.Close()

	err = use(admin)
	fault, ok := errors.AsType[kafka.Error](err)
	if ok && (fault.IsTimeout() || fault.Code() == kafka.ErrTransport || fault.Code() == kafka.ErrAllBrokersDown) || errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("no Kafka broker answers at %s: %w", brokers, err)
	}
	return err
}

// countPartitions counts each topic's partitions. A missing topic has none.
func countPartitions(ctx context.Context, admin *kafka.AdminClient, topics []TopicSpec) (map[string]int, error) {
	described, err := describeTopics(ctx, admin, topics)
	partitions := make(map[string]int)
	for name, of := range described {
		partitions[name] = len(of)
	}
	return partitions, err
}

// describeTopics lists each topic's partitions. A missing topic has none.
func describeTopics(ctx context.Context, admin *kafka.AdminClient, topics []TopicSpec) (map[string][]kafka.TopicPartitionInfo, error) {
	var names []string
	for _, topic := range topics {
		names = append(names, topic.Name)
	}
	described, err := admin.DescribeTopics(ctx, kafka.NewTopicCollectionOfTopicNames(names))
	if err != nil {
		return nil, fmt.Errorf("look for topics %s: %w", strings.Join(names, ", "), err)
	}
	partitions := make(map[string][]kafka.TopicPartitionInfo)
	for _, topic := range described.TopicDescriptions {
		switch topic.Error.Code() {
		case kafka.ErrNoError:
			partitions[topic.Name] = topic.Partitions
		case kafka.ErrUnknownTopicOrPart, kafka.ErrUnknownTopic:
		default:
			return nil, fmt.Errorf("look for topic %s: %w", topic.Name, topic.Error)
		}
	}
	return partitions, nil
}

func topicSettings(ctx context.Context, admin *kafka.AdminClient, topic string) (map[string]kafka.ConfigEntryResult, error) {
	results, err := admin.DescribeConfigs(ctx, []kafka.ConfigResource{{Type: kafka.ResourceTopic, Name: topic}})
	if err != nil {
		return nil, fmt.Errorf("read settings of topic %s: %w", topic, err)
	}
	if code := results[0].Error.Code(); code != kafka.ErrNoError {
		return nil, fmt.Errorf("read settings of topic %s: %w", topic, results[0].Error)
	}
	return results[0].Config, nil
}

func (s TopicSpec) checkPartitions(count int) error {
	if count >= s.Partitions {
		return nil
	}
	return fmt.Errorf("topic %[1]s has %[2]d partitions and %[3]d are wanted: ask for %[2]d, or stop the writers, "+
		"let the readers catch up and add some with kafka-topics.sh --alter --topic %[1]s --partitions %[3]d",
		s.Name, count, s.Partitions)
}

func (s TopicSpec) cleanupPolicy() string {
	if policy := s.Config["cleanup.policy"]; policy != "" {
		return policy
	}
	return "delete"
}

func (s TopicSpec) checkPolicy(policy string) error {
	wanted := s.cleanupPolicy()
	if policy == wanted {
		return nil
	}
	loses := "events"
	if wanted == "compact" {
		loses = "the last value of a key that rests"
	}
	return fmt.Errorf("topic %[1]s has cleanup.policy=%[2]s, which loses %[3]s: set it with "+
		"kafka-configs.sh --alter --topic %[1]s --add-config cleanup.policy=%[4]s", s.Name, policy, loses, wanted)
}

// checkReplicas compares how many brokers must have a record (acks=all) with how
// many there are to have it. The loss of one broker is to cost neither a record
// nor, where there are three, the service.
func (s TopicSpec) checkReplicas(replicas int, minInsync string) error {
	needed, err := strconv.Atoi(minInsync)
	if err != nil {
		return fmt.Errorf("read min.insync.replicas of topic %s: %w", s.Name, err)
	}
	alter := fmt.Sprintf("kafka-configs.sh --alter --topic %s --add-config min.insync.replicas", s.Name)
	switch {
	case needed > replicas:
		return fmt.Errorf("topic %[1]s has %[2]d replicas and min.insync.replicas=%[3]d, so that no record is ever accepted: "+
			"set it with %[4]s=%[5]d, or add replicas with kafka-reassign-partitions.sh", s.Name, replicas, needed, alter, max(1, replicas-1))
	case needed == 1 && replicas >= 3:
		return fmt.Errorf("topic %[1]s has %[2]d replicas and min.insync.replicas=1, so that a record may be on one broker only "+
			"when it is acknowledged, and lost with it: set it with %[3]s=2", s.Name, replicas, alter)
	}
	return nil
}

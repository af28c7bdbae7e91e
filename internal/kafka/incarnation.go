package kafka

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/confluentinc/confluent-kafka-go/v2/kafka"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// A topic that is deleted and made again has its old name, and offsets that begin
// again. An offset of the earlier one says nothing about it, and Kafka does not
// always notice: once the new topic has grown past the offset, reading goes on
// there, and what lies before it is never read. But the new topic has another id.
//
// So every offset is committed with the id of the topic that it is of (in the
// commit's metadata), and a partition whose commit is of another id begins at its
// beginning. A consumer that runs looks every few seconds whether an id has
// changed, and then ends its membership; the next one finds what was committed to
// be of an earlier topic. What comes twice by that, the handler knows.
//
// The id is always read before the position that it is committed with. So it may
// be that of an earlier topic than the position's, and a record is then read
// twice; it is never that of a later one, which would lose some.

// errStartOver ends a membership whose positions are not to be relied on. Like
// errExpelled it is followed by another one.
var errStartOver = errors.New("positions in the topics are to be found anew")

// joinsAgain tells whether the consumer goes on with another membership.
func joinsAgain(end error) bool {
	return errors.Is(end, errExpelled) || errors.Is(end, errStartOver)
}

// topicIDs are the ids of a consumer's topics, and those that its group's commits
// name, as of the last look. A topic has none that is not there, and none at
// brokers that know no ids (before Kafka 2.8).
type topicIDs struct {
	mutex     sync.Mutex
	ids       map[string]string
	committed map[place]string
	looked    chan struct{} // closed when there was a look
	once      sync.Once
}

// lookEvery is how often the ids are looked at.
const lookEvery = 5 * time.Second

func newTopicIDs() *topicIDs {
	return &topicIDs{ids: make(map[string]string), looked: make(chan struct{})}
}

// learn takes in a look. An id stays while its topic is not there.
func (t *topicIDs) learn(ids map[string]string, committed map[place]string) {
	t.mutex.Lock()
	maps.Copy(t.ids, ids)
	t.committed = committed
	t.mutex.Unlock()
	t.once.Do(func() { close(t.looked) })
}

// await waits for the first look, but not for long: without it the group's
// offsets are taken at their word.
func (t *topicIDs) await(ctx context.Context) {
	select {
	case <-t.looked:
	case <-ctx.Done():
	case <-time.After(patience):
	}
}

func (t *topicIDs) known() (present map[string]string, committed map[place]string) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	return maps.Clone(t.ids), t.committed
}

// watchTopics looks at the ids until ctx is done. It has a client of its own, so
// that neither reading, commits nor rebalances wait for it.
func (c *Consumer) watchTopics(ctx context.Context) {
	client, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(c.config.Brokers, ",")...), kgo.ClientID("onceledger-admin"))
	if err != nil {
		c.config.Log.Error("topics are not watched for being made anew", "error", err)
		return
	}
	defer client.Close()
	ticker := time.NewTicker(c.lookEvery)
	defer ticker.Stop()
	for {
		if err := c.look(ctx, kadm.NewClient(client)); err != nil {
			c.config.Log.Debug("ids of topics not read", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// look reads the topics' ids before what is committed: a commit may be of a later
// topic than it knows, and then the partition is read from its beginning twice.
func (c *Consumer) look(ctx context.Context, admin *kadm.Client) error {
	ctx, cancel := context.WithTimeout(ctx, 2*patience)
	defer cancel()
	ids, err := readTopicIDs(ctx, admin, c.config.Topics)
	if err != nil {
		return err
	}
	committed := make(map[place]string)
	offsets, err := admin.FetchOffsets(ctx, c.config.Group)
	if err != nil && !errors.Is(err, kerr.GroupIDNotFound) {
		return fmt.Errorf("read offsets of group %s: %w", c.config.Group, err)
	}
	offsets.Each(func(offset kadm.OffsetResponse) {
		if offset.Err == nil && offset.At >= 0 {
			committed[place{offset.Topic, offset.Partition}] = offset.Metadata
		}
	})
	c.topicIDs.learn(ids, committed)
	return nil
}

func readTopicIDs(ctx context.Context, admin *kadm.Client, names []string) (map[string]string, error) {
	topics, err := admin.ListTopics(ctx, names...)
	if err != nil {
		return nil, fmt.Errorf("read ids of topics: %w", err)
	}
	ids := make(map[string]string)
	for name, topic := range topics {
		if topic.Err == nil && topic.ID != (kadm.TopicID{}) {
			ids[name] = base64.RawURLEncoding.EncodeToString(topic.ID[:]) // as Kafka's own tools show it
		}
	}
	return ids, nil
}

// origins are the ids of the topics that a member's positions are of.
type origins struct {
	mutex sync.Mutex
	ids   map[place]string
}

func (o *origins) set(at place, id string) {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	o.ids[at] = id
}

func (o *origins) all() map[place]string {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	return maps.Clone(o.ids)
}

// begin says where partitions that are assigned begin: where the group goes on,
// which is the client's to find out, or at their beginning if what the group has
// committed is of an earlier topic. It asks nobody: a client that is kept waiting
// in a rebalance may miss the next one. What it knows may be older than the
// commit; an earlier topic's commit is then still told for what it is.
func (m *member) begin(assigned []kafka.TopicPartition) []kafka.TopicPartition {
	present, committed := m.topicIDs.known()
	begins := slices.Clone(assigned)
	for i, partition := range assigned {
		at := place{*partition.Topic, partition.Partition}
		now, was := present[at.topic], committed[at]
		m.origins.set(at, cmp.Or(now, was))
		// A transactor's state says where it goes on, and in which topic that is.
		if m.transactor == nil && now != "" && was != "" && now != was {
			m.tellRemade(at.topic, was, now)
			begins[i].Offset = kafka.OffsetBeginning
		}
	}
	return begins
}

// leaveForGood has the group forget a static member. It would be given what it had
// when it comes back, whatever partitions the topic has by now.
func (c *Consumer) leaveForGood(ctx context.Context) {
	if c.config.InstanceID == "" {
		return // it has left already
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	client, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(c.config.Brokers, ",")...), kgo.ClientID("onceledger-admin"))
	if err == nil {
		defer client.Close()
		leaving := kadm.LeaveGroup(c.config.Group).InstanceIDs(c.config.InstanceID).Reason("its topic was made anew")
		_, err = kadm.NewClient(client).LeaveGroup(ctx, leaving)
	}
	if err != nil {
		c.config.Log.Warn("static member not removed from its group", "error", err)
	}
}

// checkTopics ends the membership if a topic was made anew since its partitions
// were assigned. It is called between two batches.
func (m *member) checkTopics() {
	if m.end != nil {
		return
	}
	present, _ := m.topicIDs.known()
	origins := m.origins.all()
	for _, at := range m.tracker.partitions() {
		switch was, now := origins[at], present[at.topic]; {
		case now == "" || now == was:
		case was == "":
			m.origins.set(at, now)
		default:
			m.tellRemade(at.topic, was, now)
			m.end = fmt.Errorf("%w: topic %s was made anew", errStartOver, at.topic)
			return
		}
	}
}

// tellRemade tells of each new topic once.
func (c *Consumer) tellRemade(topic, was, now string) {
	if c.told[topic] == now {
		return
	}
	c.told[topic] = now
	c.metrics.remade.Inc()
	c.config.Log.Error("topic was deleted and made again: it is read from its beginning; what was not read of the earlier one is gone unless it is sent again",
		"topic", topic, "was", was, "is", now)
}

package devstack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"
)

// Topic is a topic the broker makes if it is missing.
type Topic struct {
	Name       string
	Partitions int32
	// Configs are Kafka's topic settings, such as {"retention.ms": "86400000"}.
	Configs map[string]string
}

// BrokerConfig describes a broker.
type BrokerConfig struct {
	// Dir is the broker's folder. Absent, it is made.
	Dir string
	// Port to listen on, at 127.0.0.1. 0 means the one of last time, or a free
	// one; then a taken port is replaced by another.
	Port   int
	Topics []Topic
	// MaintainEvery is how often old records are dropped and compacted topics
	// are compacted. 0 means once a minute.
	MaintainEvery time.Duration
	// Derived are topics that are written in transactions and can be made again
	// from others. After an unclean stop they are emptied, since their
	// transactions may be half visible: whoever keeps them finds them empty and
	// begins anew.
	Derived []string

	// Ready is called once with the address clients connect to.
	Ready func(addr string)
	Logf  Logf
}

// RunBroker runs a Kafka-protocol broker in this process until ctx is done,
// then saves its state and returns nil.
//
// An acknowledged record is on disk. A process killed with -9 loses none of
// them, but the broker is a stand-in and not Kafka: after such an end records
// may be there twice, and transactions may be half visible. The next start
// says so. Where that matters, use Apache Kafka.
func RunBroker(ctx context.Context, config BrokerConfig) error {
	if err := os.MkdirAll(config.Dir, 0o700); err != nil {
		return fmt.Errorf("make the broker's folder: %w", err)
	}
	// The broker itself would let a second one write to the same files.
	lock, err := Lock(filepath.Join(config.Dir, "lock"))
	if err != nil {
		return fmt.Errorf("start broker: %w", err)
	}
	defer lock.Unlock()

	marker := filepath.Join(config.Dir, "running")
	_, err = os.Stat(marker)
	unclean := err == nil
	if unclean {
		config.Logf.printf("the broker was not stopped in order last time: no acknowledged record is lost, " +
			"but records may be there twice (consumers deduplicate by event id), Kafka transactions may be half visible, " +
			"and topics derived from other topics must be rebuilt")
	}
	if err := os.WriteFile(marker, nil, 0o600); err != nil {
		return fmt.Errorf("mark the broker as running: %w", err)
	}

	cluster, err := openCluster(ctx, config)
	if err != nil {
		if !unclean {
			_ = os.Remove(marker)
		}
		return fmt.Errorf("start broker: %w", err)
	}
	if unclean {
		err = emptyDerived(cluster, config)
	}
	if err == nil {
		err = ensureTopics(cluster, config)
	}
	if err == nil {
		if config.Ready != nil {
			config.Ready(cluster.ListenAddrs()[0])
		}
		maintain(ctx, cluster, config.MaintainEvery)
	}

	cluster.Close()
	if err := os.Remove(marker); err != nil {
		return fmt.Errorf("mark the broker as stopped: %w", err)
	}
	return err
}

// openCluster opens the broker on the configured port, or on the remembered
// one, or on a free one.
func openCluster(ctx context.Context, config BrokerConfig) (*kfake.Cluster, error) {
	open := func(port int) (*kfake.Cluster, error) {
		return kfake.NewCluster(
			kfake.NumBrokers(1),
			kfake.Ports(port),
			kfake.ClusterID("onceledger"),
			kfake.DataDir(filepath.Join(config.Dir, "data")),
			kfake.SyncWrites(),
			kfake.MaxVersions(BrokerVersions()),
			kfake.WithLogger(brokerLog{config.Logf}),
		)
	}
	if config.Port != 0 {
		return open(config.Port)
	}

	portFile := filepath.Join(config.Dir, "port")
	port := rememberedPort(portFile)
	for attempt := 0; ; attempt++ {
		if port == 0 {
			free, err := FreePort(ctx)
			if err != nil {
				return nil, err
			}
			port = free
		}
		cluster, err := open(port)
		if err == nil {
			if err := rememberPort(portFile, port); err != nil {
				cluster.Close()
				return nil, err
			}
			return cluster, nil
		}
		if !errors.Is(err, syscall.EADDRINUSE) || attempt == 10 {
			return nil, err
		}
		config.Logf.printf("port %d is taken, choosing another for the broker", port)
		port = 0
	}
}

// BrokerVersions is what the embedded broker says it understands: what Apache Kafka 4.2
// does, without two things it answers so that Java clients, and with them Kafka
// Connect, fail. Where these are not on offer, clients use what was there before.
func BrokerVersions() *kversion.Versions {
	versions := kversion.V4_2_0()
	versions.SetMaxKeyVersion(kmsg.CreateTopics.Int16(), 4)             // from 5 on with settings of no source
	versions.SetMaxKeyVersion(kmsg.DescribeTopicPartitions.Int16(), -1) // with null where a list must be
	return versions
}

// ensureTopics makes the missing topics. The partitions of one that is there
// are left alone: another number would send an aggregate's next event to
// another partition than its last.
func ensureTopics(cluster *kfake.Cluster, config BrokerConfig) error {
	for _, topic := range config.Topics {
		if info := cluster.TopicInfo(topic.Name); info != nil {
			if got := len(cluster.PartitionInfos(topic.Name)); got != int(topic.Partitions) {
				config.Logf.printf("topic %s keeps its %d partitions, though %d are configured", topic.Name, got, topic.Partitions)
			}
			continue
		}
		if err := cluster.CreateTopic(topic.Name, topic.Partitions, topic.Configs); err != nil {
			return fmt.Errorf("create topic %s: %w", topic.Name, err)
		}
	}
	return nil
}

// emptyDerived makes the derived topics that are there anew.
func emptyDerived(cluster *kfake.Cluster, config BrokerConfig) error {
	for _, name := range config.Derived {
		info := cluster.TopicInfo(name)
		if info == nil {
			continue
		}
		partitions := len(cluster.PartitionInfos(name))
		settings := make(map[string]string)
		for key, value := range info.Configs {
			if value != nil {
				settings[key] = *value
			}
		}
		config.Logf.printf("topic %s is emptied and will be rebuilt, since its transactions may be half visible", name)
		if err := cluster.DeleteTopic(name); err != nil {
			return fmt.Errorf("empty topic %s: %w", name, err)
		}
		if err := cluster.CreateTopic(name, int32(partitions), settings); err != nil {
			return fmt.Errorf("make topic %s again: %w", name, err)
		}
	}
	return nil
}

// maintain returns when ctx is done. The broker's own timers do not run after
// a restart.
func maintain(ctx context.Context, cluster *kfake.Cluster, every time.Duration) {
	if every == 0 {
		every = time.Minute
	}
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			cluster.ApplyRetention()
			cluster.Compact()
		}
	}
}

// brokerLog passes on what the broker has to say to its operator.
type brokerLog struct{ logf Logf }

func (l brokerLog) Logf(level kfake.LogLevel, format string, args ...any) {
	slow := strings.Contains(format, "EndTxn slow") // said of all that takes as long as an fsync
	if level <= kfake.LogLevelWarn && !slow {
		l.logf.printf("broker: "+format, args...)
	}
}

package stack

import (
	"context"
	"os"
	"path/filepath"
	"time"

	"github.com/onceledger/onceledger/internal/devstack"
)

// StartApache is Start with one broker of Apache Kafka. It needs Java.
func StartApache(ctx context.Context) (*Stack, func(), error) {
	return start(ctx, (*Stack).startKafka)
}

func (s *Stack) startKafka(ctx context.Context, stops *[]func()) error {
	kafka, err := devstack.StartKafka(ctx, devstack.KafkaConfig{
		Dir: filepath.Join(s.Dir, "kafka"), JavaHome: os.Getenv("JAVA_HOME"), FallbackDir: s.Dir, Logf: say,
	})
	if err != nil {
		return err
	}
	*stops = append(*stops, func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
		defer cancel()
		_ = kafka.Stop(ctx)
	})
	s.Broker, s.Brokers = kafka.Pid(1), kafka.Bootstrap()
	return nil
}

// Connect starts a Kafka Connect worker with Debezium, with settings over those
// of deploy/connect/worker.properties, and returns what stops it. Workers of
// different names know nothing of each other.
func (s *Stack) Connect(ctx context.Context, name, heap string, settings map[string]string) (*devstack.Connect, func(), error) {
	own := map[string]string{
		"group.id":             name,
		"config.storage.topic": name + "-configs",
		"offset.storage.topic": name + "-offsets",
		"status.storage.topic": name + "-status",
	}
	for key, value := range settings {
		own[key] = value
	}
	connect, err := devstack.StartConnect(ctx, devstack.ConnectConfig{
		Dir: filepath.Join(s.Dir, name), Bootstrap: s.Brokers, Settings: own, Heap: heap,
		JavaHome: os.Getenv("JAVA_HOME"), FallbackDir: s.Dir, Logf: say,
	})
	if err != nil {
		return nil, nil, err
	}
	return connect, func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
		defer cancel()
		_ = connect.Stop(ctx)
	}, nil
}

//go:build apache

package debezium_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/devstack"
)

// services are the broker and the Connect worker of this test program.
type services struct {
	dir     string
	kafka   *devstack.Kafka
	connect *devstack.Connect
}

var shared = sync.OnceValues(startServices)

func startServices() (s services, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute) // a first time fetches them
	defer cancel()
	if s.dir, err = os.MkdirTemp("", "onceledger-debezium-"); err != nil {
		return s, err
	}
	java, fallback := os.Getenv("JAVA_HOME"), filepath.Join(os.TempDir(), "onceledger-jars")
	s.kafka, err = devstack.StartKafka(ctx, devstack.KafkaConfig{
		Dir: filepath.Join(s.dir, "kafka"), JavaHome: java, FallbackDir: fallback,
	})
	if err != nil {
		return s, err
	}
	s.connect, err = devstack.StartConnect(ctx, devstack.ConnectConfig{
		Dir: filepath.Join(s.dir, "connect"), Bootstrap: s.kafka.Bootstrap(), JavaHome: java, FallbackDir: fallback,
	})
	return s, err
}

func sharedServices(t *testing.T) services {
	t.Helper()
	s, err := shared()
	require.NoError(t, err, "start Apache Kafka and Connect for this test program")
	return s
}

// TestMain stops the services, whose processes would end with this one anyway,
// and removes their folder; that of a failed run stays, for its logs.
func TestMain(m *testing.M) {
	code := m.Run()
	if s, _ := shared(); s.dir != "" {
		if s.connect != nil {
			s.connect.Kill()
		}
		if s.kafka != nil {
			s.kafka.Kill(1)
		}
		if code == 0 {
			_ = os.RemoveAll(s.dir)
		} else {
			fmt.Fprintln(os.Stderr, "the logs of Kafka and Connect are in", s.dir)
		}
	}
	os.Exit(code)
}

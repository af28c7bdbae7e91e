package supervisor

import (
	"context"
	"fmt"
	"path/filepath"

	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/debezium"
	"github.com/onceledger/onceledger/internal/devstack"
	"github.com/onceledger/onceledger/internal/relay"
	"github.com/onceledger/onceledger/internal/switchover"
)

// checkRelay looks at what was asked for, before anything is started.
func (c Config) checkRelay() error {
	if c.Relay == "" {
		return nil
	}
	if _, err := relay.ParseKind(c.Relay); err != nil {
		return fmt.Errorf("--relay: %w", err)
	}
	return nil
}

// checkJava says that Java is missing before anything else has been fetched and
// started.
func (s *supervisor) checkJava(ctx context.Context) error {
	var what string
	switch {
	case s.config.Kafka == KafkaApache:
		what = "--kafka=apache"
	case s.config.Relay == string(relay.KindDebezium):
		what = "--relay=debezium"
	default:
		return nil
	}
	if _, err := devstack.FindJava(ctx, devstack.JavaConfig{Home: s.config.JavaHome}); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// useRelay has the wanted relay carry the outbox, or the one that did so far. It
// returns the address of Kafka Connect if that runs, which it does for Debezium.
func (s *supervisor) useRelay(ctx context.Context, databases Databases, brokers string) (connectURL string, err error) {
	conn, err := pgx.Connect(ctx, databases.Relay)
	if err != nil {
		return "", fmt.Errorf("look for the relay: %w", err)
	}
	assigned, err := relay.Assigned(ctx, conn, s.config.RelaySlot)
	_ = conn.Close(ctx)
	if err != nil {
		return "", err
	}
	wanted := assigned
	if s.config.Relay != "" {
		wanted = relay.Kind(s.config.Relay)
	}

	config := switchover.Config{
		URL: databases.Relay, Slot: s.config.RelaySlot, Publication: relay.DefaultPublication, Say: s.say,
	}
	// To leave Debezium takes Connect as well: it knows how far that was.
	if assigned == relay.KindDebezium || wanted == relay.KindDebezium {
		if connectURL, err = s.startConnect(ctx, brokers); err != nil {
			return "", err
		}
		if config.Connect, err = debezium.NewClient(debezium.ClientConfig{URL: connectURL}); err != nil {
			return "", err
		}
	}
	if wanted == assigned {
		return connectURL, nil
	}
	s.say("switching from the relay %s to %s", assigned, wanted)
	if _, err := switchover.Switch(ctx, config, wanted); err != nil {
		return "", fmt.Errorf("--relay=%s: %w", wanted, err)
	}
	return connectURL, nil
}

// startConnect starts Kafka Connect, which Debezium is a part of, and keeps it
// running.
func (s *supervisor) startConnect(ctx context.Context, brokers string) (string, error) {
	s.say("starting Kafka Connect")
	worker, err := devstack.StartConnect(ctx, devstack.ConnectConfig{
		Dir:         filepath.Join(s.config.Home, "connect"),
		Bootstrap:   brokers,
		JavaHome:    s.config.JavaHome,
		FallbackDir: s.config.Home,
		Logf:        s.say,
	})
	if err != nil {
		return "", err
	}
	s.keep(ctx, &keeper{
		name:        "connect",
		stopTimeout: connectStopTimeout,
		start: func(ctx context.Context) (<-chan struct{}, func() string, error) {
			if err := worker.Start(ctx); err != nil { // one that runs goes on
				return nil, nil, err
			}
			return worker.Done(), func() string {
				return fmt.Sprintf("%v; its log is %s", worker.Err(), worker.LogFile())
			}, nil
		},
		stop: worker.Stop,
	})
	return worker.URL(), nil
}

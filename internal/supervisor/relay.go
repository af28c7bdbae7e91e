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

// relaySwitch is what there is to do until the wanted relay carries the outbox.
type relaySwitch struct {
	from, to   relay.Kind
	connectURL string // of Kafka Connect, if it runs
	config     switchover.Config
}

// prepareRelay starts what the wanted relay needs, which is the one that did the
// job so far if none was asked for.
func (s *supervisor) prepareRelay(ctx context.Context, databases Databases, brokers string) (relaySwitch, error) {
	conn, err := pgx.Connect(ctx, databases.Relay)
	if err != nil {
		return relaySwitch{}, fmt.Errorf("look for the relay: %w", err)
	}
	assigned, err := relay.Assigned(ctx, conn, s.config.RelaySlot)
	_ = conn.Close(ctx)
	if err != nil {
		return relaySwitch{}, err
	}
	sw := relaySwitch{from: assigned, to: assigned, config: switchover.Config{
		URL: databases.Relay, Slot: s.config.RelaySlot, Publication: relay.DefaultPublication, Say: s.say,
	}}
	if s.config.Relay != "" {
		sw.to = relay.Kind(s.config.Relay)
	}
	// To leave Debezium takes Connect as well: it knows how far that was.
	if sw.from == relay.KindDebezium || sw.to == relay.KindDebezium {
		if sw.connectURL, err = s.startConnect(ctx, brokers); err != nil {
			return relaySwitch{}, err
		}
		if sw.config.Connect, err = debezium.NewClient(debezium.ClientConfig{URL: sw.connectURL}); err != nil {
			return relaySwitch{}, err
		}
	}
	return sw, nil
}

// switchRelay has the wanted relay carry the outbox. The worker runs by then: it
// takes part.
func (s *supervisor) switchRelay(ctx context.Context, sw relaySwitch) error {
	if sw.from == sw.to {
		return nil
	}
	s.say("switching from the relay %s to %s", sw.from, sw.to)
	if _, err := switchover.Switch(ctx, sw.config, sw.to); err != nil {
		return fmt.Errorf("--relay=%s: %w", sw.to, err)
	}
	return nil
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

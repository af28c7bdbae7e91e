package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"time"

	"github.com/onceledger/onceledger/bench/drain"
	"github.com/onceledger/onceledger/internal/debezium"
	"github.com/onceledger/onceledger/internal/relay"
)

// contender is a relay, and how it is set up.
type contender struct {
	name string
	kind relay.Kind
	// settings go over those of deploy/debezium/connector.json; "" takes one out.
	settings map[string]string
}

var (
	wal  = contender{name: "wal", kind: relay.KindWAL}
	poll = contender{name: "poll", kind: relay.KindPoll}

	shipped  = contender{name: "debezium", kind: relay.KindDebezium}
	tuned    = contender{name: "debezium, tuned", kind: relay.KindDebezium, settings: tuning}
	cold     = contender{name: "debezium, tuned, cold", kind: relay.KindDebezium, settings: tuning}
	defaults = contender{name: "debezium, its defaults", kind: relay.KindDebezium, settings: map[string]string{
		"poll.interval.ms": "", "max.queue.size.in.bytes": "",
	}}
	// plain is for a worker without exactly-once support.
	plain = contender{name: "debezium, tuned, at least once", kind: relay.KindDebezium, settings: with(tuning, "exactly.once.support", "requested")}
)

// tuning is for throughput and latency both: it looks often, and takes much at
// once when there is much. A batch is a Kafka transaction, so fewer are cheaper.
var tuning = map[string]string{
	"poll.interval.ms":                "5",
	"max.batch.size":                  "8192",
	"max.queue.size":                  "32768",
	"max.queue.size.in.bytes":         "67108864",
	"producer.override.batch.size":    "262144",
	"producer.override.linger.ms":     "0",
	"producer.override.buffer.memory": "67108864",
}

func with(settings map[string]string, name, value string) map[string]string {
	settings = maps.Clone(settings)
	settings[name] = value
	return settings
}

// running is a contender at work.
type running struct {
	pid int
	// fault says why nothing more will come, if it is known.
	fault func(ctx context.Context) error
	stop  func(ctx context.Context) error
}

// start starts a contender on its slot, from where the slot is.
func (b *bench) start(ctx context.Context, c contender) (*running, error) {
	if c.kind == relay.KindDebezium {
		return b.register(ctx, c)
	}
	process, err := drain.Start(drain.Config{
		Kind: drain.Relay, URL: b.URL(database, "relay"), Slot: slot, Brokers: b.Brokers,
	})
	if err != nil {
		return nil, err
	}
	return &running{
		pid:   process.Pid(),
		fault: func(context.Context) error { return process.Fault() },
		stop:  func(context.Context) error { return process.Stop() },
	}, nil
}

// register has Connect run the connector. Its name is new each time, and so is
// its source's: Connect remembers no position of it.
func (b *bench) register(ctx context.Context, c contender) (*running, error) {
	b.connectors++
	name := fmt.Sprintf("bench-%d", b.connectors)
	config, err := debezium.ConnectorConfig(debezium.Params{
		DatabaseURL: b.URL(database, "relay"), Slot: slot, Publication: relay.DefaultPublication, TopicPrefix: name,
	})
	if err != nil {
		return nil, err
	}
	config["snapshot.mode"] = "no_data" // the slot has all of it
	for setting, value := range c.settings {
		if value == "" {
			delete(config, setting)
		} else {
			config[setting] = value
		}
	}
	client, err := debezium.NewClient(debezium.ClientConfig{URL: b.connect.URL(), Connector: name})
	if err != nil {
		return nil, err
	}
	r := &running{
		pid: b.connect.Pid(),
		fault: func(ctx context.Context) error {
			status, err := client.Status(ctx)
			if err == nil && status.Fault() != "" {
				err = errors.New(status.Fault())
			}
			return err
		},
		stop: client.Remove,
	}
	if err := put(ctx, b.connect.URL()+"/connectors/"+name+"/config", config); err != nil {
		return nil, fmt.Errorf("register the connector: %w", err)
	}
	err = until(ctx, time.Minute, func() (bool, error) {
		status, err := client.Status(ctx)
		if err == nil && (status.Connector == "FAILED" || status.Task == "FAILED") {
			err = errors.New(status.Fault())
		}
		return status.Running(), err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("wait for the connector to run: %w", err), r.stop(context.WithoutCancel(ctx)))
	}
	return r, nil
}

func put(ctx context.Context, url string, body any) error {
	encoded, err := json.Marshal(body)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodPut, url, bytes.NewReader(encoded))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode >= 300 {
		err = fmt.Errorf("%s: %s", response.Status, answer)
	}
	return err
}

// worker starts a Connect worker in place of the one there was. It is cold.
func (b *bench) worker(ctx context.Context, exactlyOnce bool) (err error) {
	b.stopConnect()
	b.stopConnect = func() {}
	settings := map[string]string{"exactly.once.source.support": "enabled"}
	if !exactlyOnce {
		settings["exactly.once.source.support"] = "disabled"
	}
	b.workers++
	connect, stop, err := b.Connect(ctx, fmt.Sprintf("connect-%d", b.workers), b.heap, settings)
	if err != nil {
		return err
	}
	b.connect, b.stopConnect = connect, stop
	return nil
}

// until asks every 20 ms until the answer is yes, for so long at most.
func until(ctx context.Context, patience time.Duration, ask func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		done, err := ask()
		if done || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

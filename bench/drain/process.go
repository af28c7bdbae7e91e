// Package drain is what the benchmarks of the relay have in common: a backlog in
// the outbox behind a slot, the relay as a process of its own that drains it, and
// the check of what is on the topic afterwards.
package drain

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/onceledger/onceledger/internal/devstack"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/relay"
)

// What a process is.
const (
	Relay  = "relay"  // the product's, as wal or poll, as relay_assignment says
	Reader = "reader" // reads the slot and throws everything away
)

// Config says what a process is to do.
type Config struct {
	Kind    string
	URL     string
	Slot    string
	Brokers string
	Events  int // after which it reports; it goes on until it is stopped
}

// Result is what a process reports.
type Result struct {
	Seconds float64
	Records int
}

// Process is a running relay or reader. It is there until Stop, so that it and
// its walsender can be looked at.
type Process struct {
	process *devstack.Process
	out     *json.Decoder
}

const variable = "ONCELEDGER_BENCH_DRAIN"

// Start runs this program again as a relay or reader (see Be).
func Start(config Config) (*Process, error) {
	encoded, err := json.Marshal(config)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), variable+"="+string(encoded))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	process, err := devstack.StartProcess(cmd, syscall.SIGKILL)
	if err != nil {
		return nil, err
	}
	return &Process{process: process, out: json.NewDecoder(out)}, nil
}

// Result waits for the report. When ctx is done the process is killed.
func (p *Process) Result(ctx context.Context) (result Result, err error) {
	defer context.AfterFunc(ctx, p.process.Kill)()
	if err := p.out.Decode(&result); err != nil {
		return result, errors.Join(ctx.Err(), fmt.Errorf("the drain ended early: %w", err))
	}
	return result, nil
}

// Pid is the process id.
func (p *Process) Pid() int { return p.process.Pid() }

// Fault says why the process has ended, if it has.
func (p *Process) Fault() error {
	select {
	case <-p.process.Done():
		return errors.Join(errors.New("the relay has ended"), p.process.Err())
	default:
		return nil
	}
}

// Stop ends the process in order.
func (p *Process) Stop() error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	return errors.Join(p.process.Stop(ctx, syscall.SIGTERM), p.process.Err())
}

// Be makes this process a relay or reader if Start started it. Call it first in
// main.
func Be() {
	encoded := os.Getenv(variable)
	if encoded == "" {
		return
	}
	err := func() error {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		var config Config
		if err := json.Unmarshal([]byte(encoded), &config); err != nil {
			return err
		}
		if config.Kind == Reader {
			return read(ctx, config)
		}
		return drain(ctx, config)
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, "drain:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

func report(result Result) { _ = json.NewEncoder(os.Stdout).Encode(result) }

// drain runs the product's relay.
func drain(ctx context.Context, config Config) error {
	var start time.Time
	var delivered atomic.Int64
	r, err := relay.NewRelay(relay.Config{
		URL:  config.URL,
		Slot: config.Slot,
		Log:  slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
		NewPublisher: func(reports relay.Reports) (relay.Publisher, error) {
			start = time.Now()
			return kafka.NewProducer(kafka.ProducerConfig{
				Brokers:   config.Brokers,
				Log:       slog.New(slog.DiscardHandler),
				Reachable: reports.Reachable,
				Delivered: func(seq uint64, err error) {
					reports.Delivered(seq, err)
					if err == nil && int(delivered.Add(1)) == config.Events {
						report(Result{Seconds: time.Since(start).Seconds(), Records: config.Events})
					}
				},
			})
		},
	})
	if err != nil {
		return err
	}
	return r.Run(ctx)
}

// read reads the slot as plainly as can be: no decoding but of what kind a
// message is, the position confirmed once a second.
func read(ctx context.Context, config Config) error {
	parsed, err := pgconn.ParseConfig(config.URL)
	if err != nil {
		return err
	}
	parsed.RuntimeParams["replication"] = "database"
	conn, err := pgconn.ConnectConfig(ctx, parsed)
	if err != nil {
		return err
	}
	start := time.Now()
	err = pglogrepl.StartReplication(ctx, conn, config.Slot, 0, pglogrepl.StartReplicationOptions{
		PluginArgs: []string{"proto_version '1'", "publication_names '" + relay.DefaultPublication + "'"},
	})
	if err != nil {
		return err
	}
	records, confirmed := 0, time.Now()
	var position pglogrepl.LSN
	for records < config.Events || position == 0 {
		raw, err := conn.ReceiveMessage(context.Background())
		if err != nil {
			return err
		}
		data, ok := raw.(*pgproto3.CopyData)
		if !ok {
			return fmt.Errorf("unexpected %T", raw)
		}
		if data.Data[0] != pglogrepl.XLogDataByteID {
			continue
		}
		log, err := pglogrepl.ParseXLogData(data.Data[1:])
		if err != nil {
			return err
		}
		switch pglogrepl.MessageType(log.WALData[0]) {
		case pglogrepl.MessageTypeInsert:
			records++
		case pglogrepl.MessageTypeCommit:
			position = log.WALStart
			if time.Since(confirmed) >= time.Second {
				confirmed = time.Now()
				err := pglogrepl.SendStandbyStatusUpdate(ctx, conn, pglogrepl.StandbyStatusUpdate{WALWritePosition: position})
				if err != nil {
					return err
				}
			}
		}
	}
	report(Result{Seconds: time.Since(start).Seconds(), Records: records})
	<-ctx.Done()
	return nil
}

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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

	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/relay"
)

// A drain is one process that reads a slot to the end of the backlog: the relay,
// or a reader that throws everything away. It says how long it took and waits to
// be told to go, so that it and its walsender can be looked at while they live.

const drainVariable = "ONCELEDGER_BENCH_DRAIN"

type drainConfig struct {
	Kind    string
	URL     string
	Slot    string
	Brokers string
	Events  int
}

type drainResult struct {
	Seconds float64
	Records int
}

// beDrain makes this process a drain if it was started to be one.
func beDrain() {
	encoded := os.Getenv(drainVariable)
	if encoded == "" {
		return
	}
	err := func() error {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		var config drainConfig
		if err := json.Unmarshal([]byte(encoded), &config); err != nil {
			return err
		}
		if config.Kind == "reader" {
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

func report(result drainResult) { _ = json.NewEncoder(os.Stdout).Encode(result) }

// drain runs the product's relay.
func drain(ctx context.Context, config drainConfig) error {
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
						report(drainResult{Seconds: time.Since(start).Seconds(), Records: config.Events})
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
func read(ctx context.Context, config drainConfig) error {
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
	report(drainResult{Seconds: time.Since(start).Seconds(), Records: records})
	<-ctx.Done()
	return nil
}

// startDrain runs a drain and returns its result while it still lives; end lets
// it go.
func startDrain(config drainConfig) (result drainResult, pid int, end func() error, err error) {
	encoded, err := json.Marshal(config)
	if err != nil {
		return result, 0, nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return result, 0, nil, err
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), drainVariable+"="+string(encoded))
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return result, 0, nil, err
	}
	if err := cmd.Start(); err != nil {
		return result, 0, nil, err
	}
	end = func() error {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		return cmd.Wait()
	}
	if err := json.NewDecoder(out).Decode(&result); err != nil {
		if errors.Is(err, io.EOF) {
			err = errors.New("the drain ended early")
		}
		return result, 0, nil, errors.Join(err, end())
	}
	return result, cmd.Process.Pid, end, nil
}

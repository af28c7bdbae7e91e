// Command latency measures how long it takes from an order's commit to the
// commit of its ledger entry while orders come at a steady rate, and how much
// memory api and worker hold meanwhile. It runs the real programs of bin/ and
// takes both times from Postgres' own commit timestamps.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/bench/stack"
	"github.com/onceledger/onceledger/internal/devstack"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/kafka"
	"github.com/onceledger/onceledger/internal/tenants"
)

const database = "latency"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	stack.BeBroker(ctx)
	rate := flag.Int("rate", 100, "orders a second, each created and paid")
	seconds := flag.Int("seconds", 30, "how long")
	bin := flag.String("bin", "bin", "the folder with api and worker")
	flag.Parse()
	if err := run(ctx, *rate, *seconds, *bin); err != nil {
		fmt.Fprintln(os.Stderr, "bench/latency:", err)
		os.Exit(1)
	}
}

type bench struct {
	*stack.Stack
	client *http.Client
	url    string
	key    string
}

// result is what the run came to. Latencies are milliseconds.
type result struct {
	Rate       int       `json:"orders_per_second"`
	Orders     int       `json:"orders"`
	P50        float64   `json:"commit_to_ledger_p50_ms"`
	P90        float64   `json:"commit_to_ledger_p90_ms"`
	P99        float64   `json:"commit_to_ledger_p99_ms"`
	Max        float64   `json:"commit_to_ledger_max_ms"`
	APIRSS     int64     `json:"api_rss_bytes"`
	WorkerRSS  int64     `json:"worker_rss_bytes"`
	APICPU     float64   `json:"api_cpu_seconds"`
	WorkerCPU  float64   `json:"worker_cpu_seconds"`
	MeasuredAt time.Time `json:"measured_at"`
}

func run(ctx context.Context, rate, seconds int, bin string) error {
	s, stop, err := stack.Start(ctx)
	if err != nil {
		return err
	}
	defer stop()
	if err := s.Database(ctx, database); err != nil {
		return err
	}
	topics := []kafka.TopicSpec{
		{Name: event.OrderEvents, Partitions: 6, ReplicationFactor: 1},
		{Name: event.BillingEvents, Partitions: 6, ReplicationFactor: 1},
	}
	if err := kafka.EnsureTopics(ctx, s.Brokers, topics); err != nil {
		return err
	}
	owner, err := pgx.Connect(ctx, s.Postgres.AdminURL(database))
	if err != nil {
		return err
	}
	defer owner.Close(context.WithoutCancel(ctx))

	b := &bench{Stack: s, client: &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: 64}}}
	if b.key, err = tenants.CreateKey(ctx, owner, "bench", "bench"); err != nil {
		return err
	}
	apiPort, workerPort, err := twoPorts(ctx)
	if err != nil {
		return err
	}
	b.url = fmt.Sprintf("http://127.0.0.1:%d", apiPort)
	worker, stopWorker, err := start(filepath.Join(bin, "worker"),
		"DATABASE_URL="+s.URL(database, "worker"), "RELAY_DATABASE_URL="+s.URL(database, "relay"),
		"JANITOR_DATABASE_URL="+s.URL(database, "janitor"), "KAFKA_BROKERS="+s.Brokers,
		fmt.Sprintf("WORKER_ADDR=127.0.0.1:%d", workerPort), "WORKER_ID=bench", "LOG_LEVEL=warn")
	if err != nil {
		return err
	}
	defer stopWorker()
	api, stopAPI, err := start(filepath.Join(bin, "api"),
		"DATABASE_URL="+s.URL(database, "api"), fmt.Sprintf("ONCELEDGER_ADDR=127.0.0.1:%d", apiPort), "LOG_LEVEL=warn")
	if err != nil {
		return err
	}
	defer stopAPI()
	if err := errors.Join(b.ready(ctx, workerPort), b.ready(ctx, apiPort)); err != nil {
		return err
	}

	if err := stack.AtRate(ctx, rate, 5, b.order); err != nil { // caches, connections, statements
		return err
	}
	from := time.Now()
	if err := stack.AtRate(ctx, rate, seconds, b.order); err != nil {
		return err
	}
	if err := settled(ctx, owner); err != nil {
		return err
	}

	r := result{Rate: rate, MeasuredAt: time.Now().UTC(),
		APIRSS: stack.RSS(api), WorkerRSS: stack.RSS(worker), APICPU: stack.CPU(api), WorkerCPU: stack.CPU(worker)}
	err = owner.QueryRow(ctx, `
		WITH applied AS (
			SELECT 1000 * extract(epoch FROM
				pg_xact_commit_timestamp(entry.xmin) - pg_xact_commit_timestamp(fact.xmin))::float8 AS took
			FROM outbox_events AS fact
			JOIN ledger_entries AS entry ON entry.event_id = fact.id
			WHERE fact.event_type = 'OrderPaid' AND fact.occurred_at >= $1)
		SELECT count(*),
			percentile_cont(0.5) WITHIN GROUP (ORDER BY took), percentile_cont(0.9) WITHIN GROUP (ORDER BY took),
			percentile_cont(0.99) WITHIN GROUP (ORDER BY took), max(took)
		FROM applied`, from).Scan(&r.Orders, &r.P50, &r.P90, &r.P99, &r.Max)
	if err != nil {
		return err
	}
	fmt.Printf("%d orders at %d/s: commit to ledger p50 %.1f ms, p90 %.1f, p99 %.1f (goal 25), max %.1f\n",
		r.Orders, rate, r.P50, r.P90, r.P99, r.Max)
	fmt.Printf("RSS: api %d MB (goal 100), worker %d MB (goal 200)\n", r.APIRSS>>20, r.WorkerRSS>>20)
	return stack.Save("latency.json", r)
}

func twoPorts(ctx context.Context) (a, b int, err error) {
	first, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return 0, 0, err
	}
	defer first.Close()
	b, err = devstack.FreePort(ctx)
	return first.Addr().(*net.TCPAddr).Port, b, err
}

func start(path string, env ...string) (pid int, stop func(), err error) {
	cmd := exec.Command(path)
	cmd.Env = env
	cmd.Stderr = os.Stderr
	process, err := devstack.StartProcess(cmd, syscall.SIGTERM)
	if err != nil {
		return 0, nil, fmt.Errorf("%w (make build makes it)", err)
	}
	return process.Pid(), func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		_ = process.Stop(ctx, syscall.SIGTERM)
	}, nil
}

func (b *bench) ready(ctx context.Context, port int) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d/readyz", port), nil)
		if err != nil {
			return err
		}
		if response, err := b.client.Do(request); err == nil {
			_ = response.Body.Close()
			if response.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("port %d did not become ready: %w", port, ctx.Err())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

var idForm = regexp.MustCompile(`"id":"([0-9a-f-]{36})"`)

// order places an order and pays for it.
func (b *bench) order(ctx context.Context) error {
	created, err := b.post(ctx, "/v1/orders", `{"customer_id":"c-42","customer_email":"a@example.com","currency":"EUR",`+
		`"lines":[{"sku":"book","description":"A book","quantity":2,"unit_amount":1250,"tax_rate":"0.19"}]}`)
	if err != nil {
		return err
	}
	id := idForm.FindStringSubmatch(created)
	if id == nil {
		return fmt.Errorf("no order id in %s", created)
	}
	_, err = b.post(ctx, "/v1/orders/"+id[1]+"/pay", `{"payment_reference":"`+id[1]+`"}`)
	return err
}

func (b *bench) post(ctx context.Context, path, body string) (string, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, b.url+path, strings.NewReader(body))
	if err != nil {
		return "", err
	}
	request.Header.Set("Authorization", "Bearer "+b.key)
	request.Header.Set("Idempotency-Key", uuid.NewString())
	response, err := b.client.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode >= 300 {
		err = fmt.Errorf("%s: %s: %s", path, response.Status, answer)
	}
	return string(answer), err
}

// settled waits until every paid order has its ledger entry.
func settled(ctx context.Context, conn *pgx.Conn) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		var waiting int
		err := conn.QueryRow(ctx, `
			SELECT count(*) FROM outbox_events AS fact
			WHERE event_type = 'OrderPaid' AND NOT EXISTS (SELECT FROM ledger_entries WHERE event_id = fact.id)`).Scan(&waiting)
		if err != nil || waiting == 0 {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
}

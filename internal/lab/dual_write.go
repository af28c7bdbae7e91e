package lab

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/crash"
	"github.com/onceledger/onceledger/internal/devstack"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/tenants"
)

// databaseFirst is a service that stores an order and then tells Kafka.
func databaseFirst(ctx context.Context, c *consumer) error {
	return c.eachOrder(func(n int) error {
		if err := c.storeOrder(ctx, n); err != nil {
			return err
		}
		c.crashPointAt(n) // WRONG: an order without an event
		return c.tellKafka(ctx, n)
	})
}

// kafkaFirst is the other way round.
func kafkaFirst(ctx context.Context, c *consumer) error {
	return c.eachOrder(func(n int) error {
		if err := c.tellKafka(ctx, n); err != nil {
			return err
		}
		c.crashPointAt(n) // WRONG: an event without an order
		return c.storeOrder(ctx, n)
	})
}

func (c *consumer) eachOrder(place func(n int) error) error {
	for n := 1; n <= c.Until; n++ {
		if err := place(n); err != nil {
			return fmt.Errorf("order-%d: %w", n, err)
		}
	}
	return nil
}

func (c *consumer) storeOrder(ctx context.Context, n int) error {
	order := fmt.Sprintf("order-%d", n)
	if _, err := c.db.Exec(ctx, "INSERT INTO shop_orders (way, order_name) VALUES ($1, $2)", c.Way, order); err != nil {
		return err
	}
	c.say("%s: committed in Postgres", order)
	return nil
}

func (c *consumer) tellKafka(ctx context.Context, n int) error {
	producer, err := kgo.NewClient(kgo.SeedBrokers(strings.Split(c.Brokers, ",")...))
	if err != nil {
		return err
	}
	defer producer.Close()
	record := toKafka(paid(n))
	record.Topic = c.Topic
	if err := producer.ProduceSync(ctx, record).FirstErr(); err != nil {
		return err
	}
	c.say("order-%d: acknowledged by Kafka", n)
	return nil
}

func runDualWrite(ctx context.Context, r *room) error {
	if err := r.exec(ctx, `CREATE TABLE asked_for (way text, order_name text); CREATE TABLE shop_orders (way text, order_name text);
		CREATE TABLE shop_events (way text, order_name text);
		INSERT INTO asked_for VALUES ('Postgres, then Kafka', 'order-1'), ('Postgres, then Kafka', 'order-2'), ('Kafka, then Postgres', 'order-1'),
		  ('Kafka, then Postgres', 'order-2'), ('the outbox', 'order-1'), ('the outbox', 'order-2'), ('the outbox', 'order-3')`); err != nil {
		return err
	}
	for i, way := range []spec{{Role: "database-first", Way: "Postgres, then Kafka"}, {Role: "kafka-first", Way: "Kafka, then Postgres"}} {
		r.part(way.Way + ": killed between the two, at order-2")
		way.Name, way.CrashAt, way.Until, way.Topic = string(rune('A'+i)), 2, 2, way.Role+".events"
		if err := r.topic(ctx, way.Topic, nil); err != nil {
			return err
		}
		service, err := r.start(ctx, way)
		if err != nil {
			return err
		}
		if err := service.killed(ctx); err != nil {
			return err
		}
		records, err := r.records(ctx, way.Topic, kgo.ReadUncommitted())
		if err != nil {
			return err
		}
		for _, record := range records {
			if _, err := r.db.Exec(ctx, "INSERT INTO shop_events VALUES ($1, $2)", way.Way, orderOf(record)); err != nil {
				return fmt.Errorf("note events: %w", err)
			}
		}
	}
	r.part("the product: api writes order and outbox row in one transaction, worker carries the row to Kafka")
	if err := r.outbox(ctx); err != nil {
		return err
	}
	if err := r.query(ctx, `
		SELECT way, order_name AS "order", CASE WHEN stored THEN 'yes' ELSE 'no' END AS "in Postgres", CASE WHEN told THEN 'yes' ELSE 'no' END AS "on Kafka",
		       CASE WHEN stored AND NOT told THEN 'ORDER WITHOUT EVENT' WHEN told AND NOT stored THEN 'EVENT WITHOUT ORDER' WHEN stored THEN '' ELSE 'neither' END AS verdict
		FROM asked_for, LATERAL (SELECT (way, order_name) IN (SELECT way, order_name FROM shop_orders) AS stored,
		                                (way, order_name) IN (SELECT way, order_name FROM shop_events) AS told)
		ORDER BY asked_for.ctid`); err != nil {
		return err
	}
	r.why("two systems commit one after the other, and a crash between leaves what the first one has; the outbox is a row " +
		"in the order's own transaction, so there is one commit, and what the relay has not carried yet it carries later.")
	return nil
}

// outbox has the product's own programs take three orders: the API is killed before the commit of the second, and
// between the commit of the third and its answer.
func (r *room) outbox(ctx context.Context) error {
	const way = "the outbox"
	if err := r.migrate(ctx); err != nil {
		return err
	}
	for _, topic := range []string{event.OrderEvents, event.BillingEvents} {
		if err := r.topic(ctx, topic, nil); err != nil {
			return err
		}
	}
	key, err := tenants.CreateKey(ctx, r.db, "lab", "lab")
	if err != nil {
		return err
	}
	relayURL, err := r.roleURL(ctx, "relay")
	if err != nil {
		return err
	}
	worker := &child{room: r, spec: spec{Name: "worker"}, quiet: true}
	if err := r.startCommand(ctx, worker, command(ctx, filepath.Join(r.config.Programs, "worker")), "RELAY_DATABASE_URL="+relayURL, "KAFKA_BROKERS="+r.brokers,
		"WORKER_ROLES=relay", "WORKER_ADDR=127.0.0.1:0"); err != nil {
		return err
	}
	for _, run := range []struct {
		crash, what string
		orders      []int
	}{
		{crash.APIBeforeCommit + ":2", "before it commits the second order", []int{1, 2}},
		{crash.APICommittedNotAnswered, "between the commit and the answer", []int{3}},
	} {
		api, address, err := r.startAPI(ctx, run.crash)
		if err != nil {
			return err
		}
		r.step("start api and worker; the api is to die %s", run.what)
		for _, n := range run.orders {
			if answer := post(ctx, address, key, n); answer != "" {
				r.line("     POST order-%d: %s", n, answer)
			} else {
				r.line("     POST order-%d: no answer, the connection is gone", n)
			}
		}
		if err := api.killed(ctx); err != nil {
			return err
		}
	}
	if err := r.wait(ctx, "the relay has published the outbox", func(ctx context.Context) (bool, error) {
		var rows int64
		if err := r.db.QueryRow(ctx, "SELECT count(*) FROM outbox_events").Scan(&rows); err != nil {
			return false, err
		}
		ends, err := r.admin.ListEndOffsets(ctx, event.OrderEvents)
		end, _ := ends.Lookup(event.OrderEvents, 0)
		return end.Offset >= rows, err
	}); err != nil {
		return err
	}
	r.step("the worker has carried every row of the outbox to Kafka")

	records, err := r.records(ctx, event.OrderEvents, kgo.ReadCommitted())
	if err != nil {
		return err
	}
	if _, err := r.db.Exec(ctx, "INSERT INTO shop_orders SELECT $1, customer_id FROM orders", way); err != nil {
		return fmt.Errorf("note orders: %w", err)
	}
	for _, record := range records {
		created, err := event.Decode(fromKafka(record))
		if err != nil {
			return err
		}
		if _, err := r.db.Exec(ctx, "INSERT INTO shop_events SELECT $1, customer_id FROM orders WHERE id = $2 UNION ALL SELECT $1, 'unknown' WHERE NOT EXISTS (SELECT FROM orders WHERE id = $2)",
			way, created.AggregateID); err != nil {
			return fmt.Errorf("note events: %w", err)
		}
	}
	return nil
}

// startAPI starts the product's API, armed to die, and waits until it takes orders.
func (r *room) startAPI(ctx context.Context, crashPoint string) (*child, string, error) {
	url, err := r.roleURL(ctx, "api")
	if err != nil {
		return nil, "", err
	}
	port, err := devstack.FreePort(ctx)
	if err != nil {
		return nil, "", err
	}
	address := net.JoinHostPort("127.0.0.1", fmt.Sprint(port))
	api := &child{room: r, spec: spec{Name: "api"}, quiet: true}
	if err := r.startCommand(ctx, api, command(ctx, filepath.Join(r.config.Programs, "api")), "DATABASE_URL="+url, "ONCELEDGER_ADDR="+address, "ONCELEDGER_CRASH="+crashPoint); err != nil {
		return nil, "", err
	}
	err = r.wait(ctx, "the api is ready", func(ctx context.Context) (bool, error) {
		select {
		case <-api.process.Done():
			return false, fmt.Errorf("the api ended: %s", api.errors())
		default:
		}
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/readyz", nil)
		if err != nil {
			return false, err
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return false, nil //nolint:nilerr // not there yet
		}
		return response.StatusCode == http.StatusOK, response.Body.Close()
	})
	return api, address, err
}

// post places an order. "" is no answer: nothing is known of it.
func post(ctx context.Context, address, key string, n int) string {
	body := fmt.Sprintf(`{"customer_id":"order-%d","customer_email":"a@example.com","currency":"EUR","metadata":{},
		"lines":[{"sku":"book","description":"A book","quantity":1,"unit_amount":2500,"tax_rate":"0.19"}]}`, n)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+address+"/v1/orders", bytes.NewReader([]byte(body)))
	if err != nil {
		return err.Error()
	}
	request.Header.Set("Authorization", "Bearer "+key)
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Idempotency-Key", fmt.Sprintf("lab-%d", n))
	response, err := (&http.Client{Timeout: 30 * time.Second}).Do(request)
	if err != nil {
		return ""
	}
	defer response.Body.Close()
	return response.Status
}

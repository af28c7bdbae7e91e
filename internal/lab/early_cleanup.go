package lab

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"

	"github.com/onceledger/onceledger/internal/event"
)

const (
	day            = 24 * time.Hour
	topicRetention = 7 * day
	marksKept      = 3 * day
	replayBack     = 5 * day
)

func runEarlyCleanup(ctx context.Context, r *room) error {
	if err := r.exec(ctx, invoicesTable+";"+marksTable+`;
		ALTER TABLE marks ADD COLUMN processed_at timestamptz NOT NULL DEFAULT now()`); err != nil {
		return err
	}
	retention := fmt.Sprint(topicRetention.Milliseconds())
	if err := r.topic(ctx, "payments", map[string]*string{"retention.ms": &retention}); err != nil {
		return err
	}
	now := time.Now()
	var events []event.Event
	for i := range 7 {
		events = append(events, paidAt(i+1, now.Add(-6*day-12*time.Hour+time.Duration(i)*day)))
	}
	if err := r.publish(ctx, "payments", events...); err != nil {
		return err
	}
	r.step("seven orders, paid one a day over the last seven days, on a topic that keeps records for seven days; " +
		"the clock is not turned: the records carry the time of their day, and the marks are given it")
	s := spec{Role: "dedupe", Way: "3 days", Topic: "payments", Name: "A", Until: 7}
	first, err := r.startChild(ctx, s, true)
	if err != nil {
		return err
	}
	if err := first.finished(ctx); err != nil {
		return err
	}
	r.step("the consumer of the experiment dedupe applies them: seven marks, seven invoices")
	for _, e := range events {
		if _, err := r.db.Exec(ctx, "UPDATE marks SET processed_at = $2 WHERE event_id = $1", e.ID.String(), e.OccurredAt); err != nil {
			return fmt.Errorf("age the marks: %w", err)
		}
	}

	r.part("marks that go after 3 days")
	tag, err := r.db.Exec(ctx, "DELETE FROM marks WHERE processed_at < $1", now.Add(-marksKept)) // WRONG: the topic still has those events
	if err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	r.step("the clean-up: DELETE FROM marks WHERE processed_at < now() - '3 days': %s", tag)
	offset, err := r.resetTo(ctx, first.spec, now.Add(-replayBack))
	if err != nil {
		return err
	}
	r.step("somebody sets the group back to 5 days ago, which is offset %d, and starts the consumer", offset)
	s.Name = "B"
	second, err := r.start(ctx, s)
	if err != nil {
		return err
	}
	if err := second.finished(ctx); err != nil {
		return err
	}
	if err := r.query(ctx, `
		SELECT order_name AS "order", (7 - substr(order_name, 7)::int) || '.5 days ago' AS paid, count(*) AS invoices,
		       CASE count(*) WHEN 1 THEN '' ELSE 'TWICE' END AS verdict
		FROM order_invoices GROUP BY order_name ORDER BY order_name`); err != nil {
		return err
	}

	r.part("the product's worker, told to do the same: DEDUPE_WINDOW=72h")
	if err := r.workerRefuses(ctx, retention); err != nil {
		return err
	}
	r.why("an event can come again for as long as anything still holds it, so its mark has to outlive the outbox, the " +
		"topic and the longest replay together; that is arithmetic, and a program that does it at the start cannot forget it.")
	return nil
}

// resetTo sets a group without members back to the first record of a moment.
func (r *room) resetTo(ctx context.Context, s spec, at time.Time) (int64, error) {
	left, err := r.admin.LeaveGroup(ctx, kadm.LeaveGroup(s.Group).InstanceIDs(s.Member))
	if err = errors.Join(err, left.Error()); err != nil {
		return 0, fmt.Errorf("take the member out of group %s: %w", s.Group, err)
	}
	listed, err := r.admin.ListOffsetsAfterMilli(ctx, at.UnixMilli(), s.Topic)
	if err = errors.Join(err, listed.Error()); err != nil {
		return 0, fmt.Errorf("look for the offset of %s: %w", at, err)
	}
	if err := r.admin.CommitAllOffsets(ctx, s.Group, listed.Offsets()); err != nil {
		return 0, fmt.Errorf("set group %s back: %w", s.Group, err)
	}
	found, _ := listed.Lookup(s.Topic, 0)
	return found.Offset, nil
}

// workerRefuses starts the product's own worker on its own tables and topics.
func (r *room) workerRefuses(ctx context.Context, retention string) error {
	if err := r.migrate(ctx); err != nil {
		return err
	}
	url, err := r.roleURL(ctx, "worker")
	if err != nil {
		return err
	}
	for _, topic := range []string{event.OrderEvents, event.BillingEvents} {
		if err := r.topic(ctx, topic, map[string]*string{"retention.ms": &retention}); err != nil {
			return err
		}
	}
	worker := &child{room: r, spec: spec{Name: "worker"}, quiet: true}
	if err := r.startCommand(ctx, worker, command(ctx, filepath.Join(r.config.Programs, "worker")), "DATABASE_URL="+url, "KAFKA_BROKERS="+r.brokers,
		"WORKER_ROLES=billing", "WORKER_ADDR=127.0.0.1:0", "DEDUPE_WINDOW=72h"); err != nil {
		return err
	}
	if err := worker.ended(ctx); err != nil {
		return err
	}
	if worker.process.Err() == nil {
		return errors.New("the worker was to refuse, and ended well")
	}
	log := worker.errors()
	r.line("%s", wrap("  ", "  ", log[strings.LastIndexByte(log, '\n')+1:]))
	r.step("it has ended (%s); not one event was applied", worker.process.Err())
	return nil
}

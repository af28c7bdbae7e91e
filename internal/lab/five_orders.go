package lab

import (
	"context"
	"fmt"
	"strings"

	"github.com/onceledger/onceledger/internal/event"
)

// fiveOrders is the story that at-most-once, naive and dedupe share: some orders are paid, the consumer is killed in
// the middle of one of them and started again. What differs is the consumer.
func (r *room) fiveOrders(ctx context.Context, way, order string) error {
	events, crashAfter := r.config.Events, r.config.CrashAfter
	if err := r.exec(ctx, invoicesTable); err != nil {
		return err
	}
	if err := r.publishOrders(ctx, events); err != nil {
		return err
	}
	r.step("start consumer A: %s; it is killed in the middle of order-%d", order, crashAfter)
	s := spec{Role: way, Way: way, Name: "A", CrashAt: crashAfter, Until: events}
	first, err := r.start(ctx, s)
	if err != nil {
		return err
	}
	if err := first.killed(ctx); err != nil {
		return err
	}
	second, err := r.again(ctx, s)
	if err != nil {
		return err
	}
	errors := 0
	if log := second.errors(); log != "" {
		errors = strings.Count(log, "\n") + 1
	}
	r.step("B has read everything and ended well; lines with an error in its log: %d", errors)
	if err := r.query(ctx, `
		SELECT order_name AS "order", count(way) AS invoices,
		       CASE count(way) WHEN 0 THEN 'LOST' WHEN 1 THEN '' ELSE 'TWICE' END AS verdict
		FROM paid_orders LEFT JOIN order_invoices USING (order_name)
		GROUP BY order_name ORDER BY length(order_name), order_name`); err != nil {
		return err
	}
	var total int
	if err := r.db.QueryRow(ctx, "SELECT count(*) FROM order_invoices").Scan(&total); err != nil {
		return fmt.Errorf("count invoices: %w", err)
	}
	r.line("%s paid, %s", counted(events, "order"), counted(total, "invoice"))
	return nil
}

func counted(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// publishOrders writes OrderPaid for order-1 to order-n.
func (r *room) publishOrders(ctx context.Context, n int) error {
	if err := r.topic(ctx, orderEvents, nil); err != nil {
		return err
	}
	var events []event.Event
	for i := range n {
		events = append(events, paid(i+1))
	}
	if err := r.publish(ctx, orderEvents, events...); err != nil {
		return err
	}
	if _, err := r.db.Exec(ctx, "INSERT INTO paid_orders SELECT 'order-' || i FROM generate_series(1, $1::int) AS i", n); err != nil {
		return fmt.Errorf("insert orders: %w", err)
	}
	switch n {
	case 1:
		r.step("publish OrderPaid for order-1: one topic, one partition")
	default:
		r.step("publish OrderPaid for order-1 to order-%d: one topic, one partition, offsets 0 to %d", n, n-1)
	}
	return nil
}

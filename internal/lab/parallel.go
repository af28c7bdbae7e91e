package lab

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/onceledger/onceledger/internal/postgres"
)

// withIndex has the unique index decide: of two transactions that insert the same mark at once, the second waits for
// the first.
func withIndex(ctx context.Context, c *consumer, record *kgo.Record) error {
	isNew := false
	err := postgres.InTx(ctx, c.db, func(tx pgx.Tx) error {
		c.say("reads %s, inserts the mark …", orderOf(record))
		var err error
		isNew, err = markTx(ctx, tx, "with-index", idOf(record)) // RIGHT: INSERT … ON CONFLICT DO NOTHING waits for who was first
		if err != nil || !isNew {
			return err
		}
		c.say("INSERT 0 1: it is ours")
		return c.invoiceTx(ctx, tx, record)
	})
	if err == nil && !isNew {
		c.say("INSERT 0 0: duplicate, skipped")
	}
	return c.endOf(ctx, record, err)
}

// lookThenInsert asks first whether the event was applied. There is no index to hold it to the answer.
func lookThenInsert(ctx context.Context, c *consumer, record *kgo.Record) error {
	err := postgres.InTx(ctx, c.db, func(tx pgx.Tx) error {
		c.say("reads %s, looks for the mark …", orderOf(record))
		var known bool
		err := tx.QueryRow(ctx, "SELECT EXISTS (SELECT FROM marks_without_index WHERE event_id = $1)", idOf(record)).Scan(&known)
		if err != nil || known {
			return err
		}
		c.say("there is none: it is ours") // WRONG: nobody else's is, as far as it is committed
		if _, err := tx.Exec(ctx, "INSERT INTO marks_without_index VALUES ($1)", idOf(record)); err != nil {
			return err
		}
		return c.invoiceTx(ctx, tx, record)
	})
	return c.endOf(ctx, record, err)
}

func (c *consumer) invoiceTx(ctx context.Context, tx pgx.Tx, record *kgo.Record) error {
	if err := insertInvoice(ctx, tx, c.Way, orderOf(record)); err != nil {
		return err
	}
	if c.HoldAt > 0 {
		// Postgres would end a transaction that is left alone for longer.
		if _, err := tx.Exec(ctx, "SET LOCAL idle_in_transaction_session_timeout = 0"); err != nil {
			return err
		}
		woken := make(chan os.Signal, 1)
		signal.Notify(woken, syscall.SIGCONT)
		c.say("invoice written, not committed; stops here (SIGSTOP)")
		if err := syscall.Kill(os.Getpid(), syscall.SIGSTOP); err != nil {
			return err
		}
		<-woken // the signal stops one thread after the other
	}
	c.say("commits the invoice")
	return nil
}

func (c *consumer) endOf(ctx context.Context, record *kgo.Record, err error) error {
	if err != nil {
		return err
	}
	if err := c.commitOffset(ctx, record); err != nil {
		c.say("Kafka refuses its offset: the partition is not its any more")
		return nil //nolint:nilerr // the invoice is committed, and the offset is somebody else's to move
	}
	c.say("offset %d committed", record.Offset)
	return nil
}

func runParallel(ctx context.Context, r *room) error {
	if err := r.exec(ctx, invoicesTable+";"+marksTable+"; CREATE TABLE marks_without_index (event_id text)"); err != nil {
		return err
	}
	if err := r.publishOrders(ctx, 1); err != nil {
		return err
	}
	r.part("INSERT … ON CONFLICT DO NOTHING on a unique index")
	if err := r.twoAtOnce(ctx, spec{Role: "with-index", Way: "unique index"}, true); err != nil {
		return err
	}
	r.part("look, then insert; no unique index")
	if err := r.twoAtOnce(ctx, spec{Role: "look-then-insert", Way: "look, then insert"}, false); err != nil {
		return err
	}
	if err := r.query(ctx, "SELECT way, order_name AS \"order\", count(*) AS invoices FROM order_invoices GROUP BY way, order_name ORDER BY min(id)"); err != nil {
		return err
	}
	r.why("two members of a group are on one event whenever the first has lost its partition without knowing; a question " +
		"sees what is committed and misses what is not yet, and only a unique index makes the second wait and then know.")
	return nil
}

// twoAtOnce stops A in its transaction until its session is over, and has B read the same record meanwhile.
func (r *room) twoAtOnce(ctx context.Context, s spec, waits bool) error {
	a, b := s, s
	a.Name, a.Member, a.HoldAt, a.Until = "A", "a", 1, 1
	b.Name, b.Member, b.Until = "B", "b", 1
	first, err := r.start(ctx, a)
	if err != nil {
		return err
	}
	if err := first.waitLine(ctx, "SIGSTOP"); err != nil {
		return err
	}
	if err := r.wait(ctx, "A is stopped", func(context.Context) (bool, error) { return stopped(first.process.Pid()) }); err != nil {
		return err
	}
	if err := r.wait(ctx, "the group has no member", func(ctx context.Context) (bool, error) {
		groups, err := r.admin.DescribeGroups(ctx, first.spec.Group)
		return err == nil && len(groups[first.spec.Group].Members) == 0, err
	}); err != nil {
		return err
	}
	r.step("A sends no heartbeat; after its session timeout of %s the group is without a member; start B", sessionTimeout)
	second, err := r.startChild(ctx, b, true)
	if err != nil {
		return err
	}
	if waits {
		if err := r.wait(ctx, "B waits for A", func(ctx context.Context) (waiting bool, err error) {
			err = r.db.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name = 'consumer B')").Scan(&waiting)
			return waiting, err
		}); err != nil {
			return err
		}
		second.show()
		r.step("and waits; what Postgres says of the two (pg_stat_activity, pg_locks):")
		if err := r.query(ctx, `
			SELECT application_name AS who, state, wait_event_type || ': ' || wait_event AS waits_for,
			       (SELECT string_agg(blocker.application_name, ',') FROM pg_stat_activity AS blocker
			        WHERE blocker.pid = ANY (pg_blocking_pids(activity.pid))) AS blocked_by,
			       (SELECT string_agg(locktype || ' ' || mode, ',') FROM pg_locks WHERE pg_locks.pid = activity.pid AND NOT granted) AS lock
			FROM pg_stat_activity AS activity
			WHERE application_name LIKE 'consumer _' AND state <> 'idle' ORDER BY application_name`); err != nil {
			return err
		}
	} else {
		if err := second.finished(ctx); err != nil {
			return err
		}
		second.show()
	}
	r.step("wake A up (SIGCONT)")
	if err := first.signal(syscall.SIGCONT); err != nil {
		return err
	}
	if err := first.finished(ctx); err != nil {
		return err
	}
	if err := second.finished(ctx); err != nil {
		return err
	}
	second.show()
	return nil
}

// stopped says whether a process is stopped by a signal.
func stopped(pid int) (bool, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false, fmt.Errorf("look at process %d: %w", pid, err)
	}
	_, state, _ := strings.Cut(string(stat), ") ") // behind the name, which is in brackets
	return strings.HasPrefix(state, "T"), nil
}

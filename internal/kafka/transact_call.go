package kafka

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/confluentinc/confluent-kafka-go/v2/kafka"
)

// maxAbandoned is with how many abandoned writers a process is no good any more.
const maxAbandoned = 3

var errUnanswered = errors.New("the Kafka client does not come back from it")

// call makes a call of the writer's client that waits for Kafka. ctx has a
// deadline, which the client is told.
//
// The client does not always keep to it: asked to send offsets to a group whose
// coordinator was killed, it may go on for ever (librdkafka issues 5456 and
// 5511), and no context reaches it there. So each call has a goroutine of its
// own. When one is not back some time after its deadline, its writer is
// abandoned: the next one begins under the same transactional id, which ends the
// transaction that was left open and fences whatever the old one still sends. A
// client must not be closed with a call in it; it is closed when the call comes
// back, if it does.
func (t *Transactor) call(ctx context.Context, name string, do func(*kafka.Producer) error) error {
	w := t.writer
	started := time.Now()
	answered := make(chan error, 1)
	go func() {
		answered <- t.around(name, func() error { return do(w.client) })
	}()
	select {
	case err := <-answered:
		return err
	case <-ctx.Done():
	}
	grace := time.NewTimer(t.grace)
	defer grace.Stop()
	select {
	case err := <-answered:
		return err
	case <-grace.C:
	}

	w.abandoned = true
	count := t.abandoned.Add(1)
	t.metrics.unanswered.WithLabelValues(name).Inc()
	t.metrics.abandoned.Set(float64(count))
	took := time.Since(started).Round(time.Millisecond)
	t.silent.Store(new(fmt.Sprintf("the Kafka client did not come back from %s in %s; its writer was abandoned", name, took)))
	t.config.Log.Error("the Kafka client does not come back from a call; its writer is abandoned and another takes its place",
		"call", name, "waited", took, "abandoned", count, "transactional_id", t.config.TransactionalID)
	go func() {
		outcome := <-answered // what it came to shows in the state
		w.close()
		t.metrics.abandoned.Set(float64(t.abandoned.Add(-1)))
		t.config.Log.Warn("an abandoned writer has come back and is closed", "call", name, "after", time.Since(started).Round(time.Millisecond), "outcome", outcome)
	}()
	return fmt.Errorf("%s: %w (waited %s)", name, errUnanswered, took)
}

// tooManyAbandoned is why the process must end, if it must: each abandoned
// writer keeps its threads and what was in its queue.
func (t *Transactor) tooManyAbandoned() error {
	count := t.abandoned.Load()
	if count < maxAbandoned {
		return nil
	}
	return fmt.Errorf("the Kafka client has not come back from calls of %d transactional producers of group %s; "+
		"they can be got rid of only with this process, which must be started afresh", count, t.config.Group)
}

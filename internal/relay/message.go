package relay

import (
	"context"
	"time"

	"github.com/onceledger/onceledger/internal/event"
)

// source is where a session's events come from: the log or the table.
type source interface {
	// read brings messages until ctx is done or it fails.
	read(ctx context.Context, batches chan<- []message) error

	// confirm records that everything before now.confirmable is delivered, if there
	// is reason to, and reports whether it did. It is called at each tick, and so
	// shows the server that this relay is alive. urgent is at the end, or when the
	// server wants to know; silent when nothing was heard from it for a while.
	confirm(ctx context.Context, now summary, urgent, silent bool) (moved bool, err error)

	// lag is how much log the server keeps for this relay, in bytes.
	lag(now summary) float64

	close(ctx context.Context)
}

// message is what a source brings. Kind 0 is nothing of interest.
type message struct {
	kind      messageKind
	event     *event.Event // of an insert
	committed time.Time    // of a begin
	at        position     // of a commit: its end; of a keepalive: all before it was brought
	asked     bool         // of a keepalive: the server wants an answer
}

type messageKind int

const (
	kindBegin messageKind = iota + 1
	kindInsert
	kindCommit
	kindKeepalive
)

// maxBatch bounds a batch. One of the largest events possible has 90 MB.
const maxBatch = 100

// bringTo is how a source hands a batch over.
func bringTo(ctx context.Context, batches chan<- []message) func([]message) error {
	return func(batch []message) error {
		select {
		case batches <- batch:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

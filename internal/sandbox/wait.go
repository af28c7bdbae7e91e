package sandbox

import (
	"context"
	"errors"
	"time"
)

// Patience is for what must happen; nothing waits so long when all is well.
const Patience = 2 * time.Minute

// between is how long to wait before asking again.
const between = 10 * time.Millisecond

// hopelessError is an error that asking again will not mend: Wait gives up at once.
type hopelessError struct{ error }

func (h hopelessError) Unwrap() error { return h.error }

// Hopeless marks an error as one that asking again will not mend.
func Hopeless(err error) error { return hopelessError{err} }

// Wait asks until the answer is yes. What was wrong last is in the error, if the
// time is up before that.
func Wait(ctx context.Context, is func() (bool, error)) error {
	return WaitAtMost(ctx, Patience, is)
}

// WaitAtMost is Wait with a patience of the caller's.
func WaitAtMost(ctx context.Context, patience time.Duration, is func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	ticker := time.NewTicker(between)
	defer ticker.Stop()
	for {
		ok, err := is()
		if ok {
			return nil
		}
		if _, no := errors.AsType[hopelessError](err); no {
			return err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		}
	}
}

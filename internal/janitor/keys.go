package janitor

import (
	"context"
	"fmt"
	"time"

	"github.com/onceledger/onceledger/internal/db"
)

// keyBatch is how many keys one statement deletes, and keyBatches how many
// statements one round has. What is left waits for the next round.
const (
	keyBatch   = 1_000
	keyBatches = 200
)

// DeleteKeys deletes the idempotency keys that are older than keep, the oldest
// first, and says how many. A key lives for a day at least, whatever keep is.
func DeleteKeys(ctx context.Context, conn db.DBTX, keep time.Duration) (deleted int64, err error) {
	for range keyBatches {
		n, err := db.New().IdempotencyKeyDeleteExpired(ctx, conn, keep.Seconds(), keyBatch)
		if err != nil {
			return deleted, fmt.Errorf("delete idempotency keys: %w", err)
		}
		deleted += n
		if n < keyBatch {
			break
		}
	}
	return deleted, nil
}

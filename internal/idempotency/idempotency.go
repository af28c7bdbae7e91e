// Package idempotency makes a request safe to send again: the first one with a
// key is done, and every later one gets the first one's answer, byte for byte.
//
// The answer is stored in the transaction that does the work. So there is no
// moment in which the work is done and the answer is not known, whatever
// crashes.
package idempotency

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/failure"
	"github.com/onceledger/onceledger/internal/postgres"
)

// What a caller can do about a key that does not help.
var (
	ErrKeyMissing = failure.New(failure.Invalid, "idempotency-key-missing", "The request needs an Idempotency-Key header.")
	ErrKeyInvalid = failure.New(failure.Invalid, "idempotency-key-invalid", "The Idempotency-Key is not one header of 1 to 255 visible ASCII characters.")
	ErrKeyReused  = failure.New(failure.RuleViolated, "idempotency-key-reused", "The Idempotency-Key was used for another request.")
	ErrInProgress = failure.New(failure.Conflict, "request-in-progress", "The first request with this Idempotency-Key is still being done.")
)

const longestKey = 255 // bytes

// Request is what a key stands for. Two requests are the same if method, path
// and body are the same bytes: the same JSON with its members in another order
// is another request.
type Request struct {
	Key    string
	Method string
	Path   string
	Body   []byte
}

// Answer is what a request was answered.
type Answer struct {
	Status      int
	ContentType string
	Location    string
	Body        []byte
}

// ParseKey takes the key from the values of the Idempotency-Key headers. Quotes
// are part of a key.
func ParseKey(values []string) (string, error) {
	if len(values) == 0 {
		return "", ErrKeyMissing
	}
	key := values[0]
	if len(values) > 1 {
		return "", ErrKeyInvalid.Withf("The header was sent %d times.", len(values))
	}
	if key == "" || len(key) > longestKey {
		return "", ErrKeyInvalid.Withf("It has %d bytes.", len(key))
	}
	for _, b := range []byte(key) {
		if b <= ' ' || b > '~' {
			return "", ErrKeyInvalid.Withf("It has the byte 0x%02X.", b)
		}
	}
	return key, nil
}

// OnceTx runs do if the key has not been used, and stores its answer; otherwise
// it gives the stored answer and says that it is a replay. do's writes, the
// claim of the key and the answer are in tx: all or none.
//
// It must be a transaction's first call: the claim comes before any lock that
// two requests with one key would both want. While another transaction holds the
// key this one waits, up to its lock_timeout: then it is ErrInProgress.
func OnceTx(ctx context.Context, tx pgx.Tx, tenantID uuid.UUID, request Request, do func() (Answer, error)) (answer Answer, replayed bool, err error) {
	queries := db.New()
	keyHash := hashKey(request.Key)
	fingerprint := request.fingerprint()

	claimed, err := queries.IdempotencyKeyClaim(ctx, tx, tenantID, keyHash, fingerprint)
	if postgres.LockTimedOut(err) {
		return Answer{}, false, ErrInProgress
	}
	if err != nil {
		return Answer{}, false, fmt.Errorf("claim idempotency key: %w", err)
	}
	if claimed == 0 {
		answer, err := stored(ctx, tx, tenantID, keyHash, fingerprint)
		return answer, true, err
	}

	answer, err = do()
	if err != nil {
		return Answer{}, false, err
	}
	err = queries.IdempotencyKeyAnswer(ctx, tx, db.IdempotencyKeyAnswerParams{
		TenantID:    tenantID,
		KeyHash:     keyHash,
		Status:      int32(answer.Status),
		ContentType: answer.ContentType,
		Location:    answer.Location,
		Body:        answer.Body,
	})
	if err != nil {
		return Answer{}, false, fmt.Errorf("store answer: %w", err)
	}
	return answer, false, nil
}

func stored(ctx context.Context, tx pgx.Tx, tenantID uuid.UUID, keyHash, fingerprint []byte) (Answer, error) {
	row, err := db.New().IdempotencyKeyGet(ctx, tx, tenantID, keyHash)
	if errors.Is(err, pgx.ErrNoRows) {
		return Answer{}, ErrInProgress // it expired this moment: the next try is the first again
	}
	if err != nil {
		return Answer{}, fmt.Errorf("read stored answer: %w", err)
	}
	if string(row.Fingerprint) != string(fingerprint) {
		return Answer{}, ErrKeyReused
	}
	if row.Status == nil {
		return Answer{}, ErrInProgress
	}
	return Answer{
		Status:      int(*row.Status),
		ContentType: row.ContentType,
		Location:    row.Location,
		Body:        row.Body,
	}, nil
}

// hashKey makes a key of any length 16 bytes; nobody gains by making two of his
// own keys collide.
func hashKey(key string) []byte {
	sum := sha256.Sum256([]byte(key))
	return sum[:16]
}

func (r Request) fingerprint() []byte {
	hash := sha256.New()
	fmt.Fprintf(hash, "%s\n%s\n", r.Method, r.Path)
	hash.Write(r.Body)
	return hash.Sum(nil)
}

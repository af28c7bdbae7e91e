// Package operators is for those who see to the service while it runs: their keys,
// and what they may ask of a worker over HTTP.
//
// A key of theirs is no tenant's, and no tenant's key is one of theirs. They see
// the dead letters of every tenant.
package operators

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/failure"
)

// ErrUnauthorized says that a request came without a valid key. It does not say
// which of the two, nor whether the key was valid once.
var ErrUnauthorized = failure.New(failure.Unauthorized, "operator-unauthorized",
	"The request needs the header 'Authorization: Bearer <key>' with a valid operator's key.")

// ErrName says that a key cannot be called that.
var ErrName = errors.New("an operator's name has 1 to 100 characters")

// keyPrefix makes a key recognisable where it should not be, and tells it from a
// tenant's.
const keyPrefix = "olo_"

const secretBytes = 32

// CreateKey makes a key for an operator of this name, under which what is decided
// with it is written down. The key is returned and stored nowhere: its id and its
// secret's hash are.
func CreateKey(ctx context.Context, conn db.DBTX, name string) (key string, err error) {
	if name = strings.TrimSpace(name); name == "" || len([]rune(name)) > 100 {
		return "", ErrName
	}
	id, secret := uuid.Must(uuid.NewV7()), make([]byte, secretBytes)
	_, _ = rand.Read(secret) // never fails: crypto/rand ends the program instead
	if err := db.New().OperatorKeyInsert(ctx, conn, id, name, hash(secret)); err != nil {
		return "", fmt.Errorf("insert operator's key: %w", err)
	}
	return keyPrefix + base64.RawURLEncoding.EncodeToString(append(id[:], secret...)), nil
}

// Authenticate finds whose key an Authorization header has. The key is looked up
// by its id, which is no secret, and the rest is compared in constant time.
func Authenticate(ctx context.Context, conn db.DBTX, header string) (name string, err error) {
	scheme, key, _ := strings.Cut(header, " ")
	encoded, is := strings.CutPrefix(key, keyPrefix)
	if !strings.EqualFold(scheme, "Bearer") || !is {
		return "", ErrUnauthorized
	}
	var id uuid.UUID
	raw, err := base64.RawURLEncoding.Strict().DecodeString(encoded)
	if err != nil || len(raw) != len(id)+secretBytes {
		return "", ErrUnauthorized
	}
	copy(id[:], raw)
	row, err := db.New().OperatorKeyGet(ctx, conn, id)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", ErrUnauthorized
	}
	if err != nil {
		return "", fmt.Errorf("read operator's key: %w", err)
	}
	if subtle.ConstantTimeCompare(row.KeyHash, hash(raw[len(id):])) != 1 {
		return "", ErrUnauthorized
	}
	return row.Name, nil
}

func hash(secret []byte) []byte {
	sum := sha256.Sum256(secret)
	return sum[:]
}

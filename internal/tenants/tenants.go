// Package tenants knows who uses the service: tenants, their API keys, and
// transactions that see one tenant's rows alone.
package tenants

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/failure"
	"github.com/onceledger/onceledger/internal/postgres"
)

// ErrUnauthorized says that a request came without a valid key. It does not say
// which of the two, nor whether the key was valid once.
var ErrUnauthorized = failure.New(failure.Unauthorized, "unauthorized",
	"The request needs the header 'Authorization: Bearer <key>' with a valid API key.")

// keyPrefix makes a key recognisable where it should not be: in a log, in a
// commit.
const keyPrefix = "olk_"

// CreateKey makes a key for the tenant of this name, which it makes too if it
// is not there. The secret is returned and stored nowhere: only its hash is.
func CreateKey(ctx context.Context, conn db.DBTX, tenantName, keyName string) (secret string, err error) {
	queries := db.New()
	if err := queries.TenantInsert(ctx, conn, uuid.Must(uuid.NewV7()), tenantName); err != nil {
		return "", fmt.Errorf("insert tenant: %w", err)
	}
	tenant, err := queries.TenantGetByName(ctx, conn, tenantName)
	if err != nil {
		return "", fmt.Errorf("read tenant: %w", err)
	}

	random := make([]byte, 32)
	_, _ = rand.Read(random) // never fails: crypto/rand ends the program instead
	secret = keyPrefix + base64.RawURLEncoding.EncodeToString(random)
	err = queries.APIKeyInsert(ctx, conn, db.APIKeyInsertParams{
		ID:       uuid.Must(uuid.NewV7()),
		TenantID: tenant.ID,
		Name:     keyName,
		KeyHash:  hash(secret),
	})
	if err != nil {
		return "", fmt.Errorf("insert API key: %w", err)
	}
	return secret, nil
}

// Authenticate finds the tenant that an Authorization header's key works for.
func Authenticate(ctx context.Context, conn db.DBTX, header string) (uuid.UUID, error) {
	scheme, secret, _ := strings.Cut(header, " ")
	if !strings.EqualFold(scheme, "Bearer") || !strings.HasPrefix(secret, keyPrefix) {
		return uuid.Nil, ErrUnauthorized
	}
	tenantID, err := db.New().APIKeyTenant(ctx, conn, hash(secret))
	if errors.Is(err, pgx.ErrNoRows) {
		return uuid.Nil, ErrUnauthorized
	}
	if err != nil {
		return uuid.Nil, fmt.Errorf("read API key: %w", err)
	}
	return tenantID, nil
}

func hash(secret string) []byte {
	sum := sha256.Sum256([]byte(secret))
	return sum[:]
}

// InTx is postgres.InTx for one tenant: row security lets the transaction see
// and write this tenant's rows and no others. The tenant is set by the statement
// that begins the transaction and ends with it, so a pooled connection never
// carries it on.
func InTx(ctx context.Context, conn postgres.Beginner, tenantID uuid.UUID, fn func(tx pgx.Tx) error) error {
	return inTx(ctx, conn, "begin", tenantID, fn)
}

// ReadTx is InTx for reading: each statement sees the same moment.
func ReadTx(ctx context.Context, conn postgres.Beginner, tenantID uuid.UUID, fn func(tx pgx.Tx) error) error {
	return inTx(ctx, conn, "begin isolation level repeatable read read only", tenantID, fn)
}

func inTx(ctx context.Context, conn postgres.Beginner, begin string, tenantID uuid.UUID, fn func(tx pgx.Tx) error) error {
	// A UUID in text is hexadecimal digits and hyphens: nothing to quote.
	options := pgx.TxOptions{
		BeginQuery: begin + "; set local onceledger.tenant_id = '" + tenantID.String() + "'",
	}
	return postgres.InTxOptions(ctx, conn, options, fn)
}

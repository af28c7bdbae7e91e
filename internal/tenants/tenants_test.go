package tenants_test

import (
	"crypto/sha256"
	"encoding/base64"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/pgtest"
	"github.com/onceledger/onceledger/internal/tenants"
)

func TestKeys(t *testing.T) {
	t.Parallel()

	type testBundle struct {
		owner, api *pgxpool.Pool
	}
	setup := func(t *testing.T) *testBundle {
		t.Helper()
		database := pgtest.New(t)
		return &testBundle{owner: database.Pool(t, ""), api: database.Pool(t, "api")}
	}
	create := func(t *testing.T, bundle *testBundle, tenant, name string) string {
		t.Helper()
		secret, err := tenants.CreateKey(t.Context(), bundle.owner, tenant, name)
		require.NoError(t, err)
		return secret
	}

	t.Run("WorkForTheirTenant", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		acme, other := create(t, bundle, "acme", "first"), create(t, bundle, "other", "first")
		second := create(t, bundle, "acme", "second")
		require.NotEqual(t, acme, second)

		id, err := tenants.Authenticate(t.Context(), bundle.api, "Bearer "+acme)
		require.NoError(t, err)
		tenant, err := db.New().TenantGetByName(t.Context(), bundle.owner, "acme")
		require.NoError(t, err)
		require.Equal(t, tenant.ID, id)

		same, err := tenants.Authenticate(t.Context(), bundle.api, "bearer "+second)
		require.NoError(t, err, "the scheme is not case-sensitive")
		require.Equal(t, id, same, "a second key does not make a second tenant")
		different, err := tenants.Authenticate(t.Context(), bundle.api, "Bearer "+other)
		require.NoError(t, err)
		require.NotEqual(t, id, different)
	})

	t.Run("AreStoredAsAHashAlone", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		secret := create(t, bundle, "acme", "first")
		require.True(t, strings.HasPrefix(secret, "olk_"))
		random, err := base64.RawURLEncoding.DecodeString(strings.TrimPrefix(secret, "olk_"))
		require.NoError(t, err)
		require.Len(t, random, 32)

		var row string
		var hash []byte
		require.NoError(t, bundle.owner.QueryRow(t.Context(), "SELECT k::text, key_hash FROM api_keys AS k").Scan(&row, &hash))
		require.NotContains(t, row, secret)
		require.NotContains(t, row, strings.TrimPrefix(secret, "olk_"))
		want := sha256.Sum256([]byte(secret))
		require.Equal(t, want[:], hash)
	})

	t.Run("EndWhenTheyAreRevoked", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		revoked, kept := create(t, bundle, "acme", "revoked"), create(t, bundle, "acme", "kept")
		keys, err := db.New().APIKeyList(t.Context(), bundle.owner)
		require.NoError(t, err)
		for _, key := range keys {
			if key.Name == "revoked" {
				n, err := db.New().APIKeyRevoke(t.Context(), bundle.owner, key.ID)
				require.NoError(t, err)
				require.EqualValues(t, 1, n)
				n, err = db.New().APIKeyRevoke(t.Context(), bundle.owner, key.ID)
				require.NoError(t, err)
				require.Zero(t, n, "it ended before")
			}
		}
		_, err = tenants.Authenticate(t.Context(), bundle.api, "Bearer "+revoked)
		require.ErrorIs(t, err, tenants.ErrUnauthorized)
		_, err = tenants.Authenticate(t.Context(), bundle.api, "Bearer "+kept)
		require.NoError(t, err)
	})

	t.Run("AreRefusedInAnyOtherForm", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		secret := create(t, bundle, "acme", "first")
		unknown := "olk_" + base64.RawURLEncoding.EncodeToString(make([]byte, 32))
		for _, header := range []string{
			"", "Bearer", "Bearer ", secret, "Basic " + secret, "Token " + secret, "Bearer  " + secret, "Bearer " + secret + " ",
			"Bearer " + secret + "x", "Bearer " + secret[:len(secret)-1], "Bearer " + strings.ToUpper(secret),
			"Bearer " + strings.TrimPrefix(secret, "olk_"), "Bearer " + unknown, "Bearer olk_", "Bearer olk_\x00", "Bearer olk_\xff",
			"Bearer " + secret + "," + secret, "Bearer olk_' OR true --", "Bearer olk_" + strings.Repeat("x", 1<<16),
		} {
			_, err := tenants.Authenticate(t.Context(), bundle.api, header)
			require.ErrorIs(t, err, tenants.ErrUnauthorized, "%.80q", header)
		}
	})

	t.Run("CannotBeMadeOrChangedByTheAPI", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		create(t, bundle, "acme", "first")
		for _, statement := range []string{
			"SELECT name FROM api_keys", "SELECT name FROM tenants", "INSERT INTO tenants (id, name) VALUES (uuidv7(), 'x')",
			"INSERT INTO api_keys (id, tenant_id, name, key_hash) VALUES (uuidv7(), uuidv7(), 'k', sha256('k'))",
			"UPDATE api_keys SET revoked_at = NULL", "DELETE FROM api_keys", "TRUNCATE api_keys",
		} {
			_, err := bundle.api.Exec(t.Context(), statement)
			requireDenied(t, err, statement)
		}
	})

	t.Run("TellAnOutageFromAWrongKey", func(t *testing.T) {
		t.Parallel()
		bundle := setup(t)

		secret := create(t, bundle, "acme", "first")
		bundle.api.Close()
		_, err := tenants.Authenticate(t.Context(), bundle.api, "Bearer "+secret)
		require.Error(t, err)
		require.NotErrorIs(t, err, tenants.ErrUnauthorized)
	})
}

func TestInTx(t *testing.T) {
	t.Parallel()

	seen := func(t *testing.T, conn db.DBTX) (tenant *uuid.UUID) {
		t.Helper()
		require.NoError(t, conn.QueryRow(t.Context(), "SELECT current_tenant_id()").Scan(&tenant))
		return tenant
	}
	one := func(config *pgxpool.Config) { config.MaxConns = 1 }

	t.Run("SetsTheTenantForTheTransactionAlone", func(t *testing.T) {
		t.Parallel()

		pool := pgtest.New(t).Pool(t, "api", one) // the one connection is used each time
		require.Nil(t, seen(t, pool))
		first, second := uuid.Must(uuid.NewV7()), uuid.Must(uuid.NewV7())
		for _, tenant := range []uuid.UUID{first, second, first} {
			require.NoError(t, tenants.InTx(t.Context(), pool, tenant, func(tx pgx.Tx) error {
				require.Equal(t, tenant, *seen(t, tx))
				return nil
			}))
			require.Nil(t, seen(t, pool), "after a commit")

			err := tenants.InTx(t.Context(), pool, tenant, func(tx pgx.Tx) error {
				require.Equal(t, tenant, *seen(t, tx))
				return pgx.ErrNoRows
			})
			require.ErrorIs(t, err, pgx.ErrNoRows)
			require.Nil(t, seen(t, pool), "after a rollback")

			require.Panics(t, func() {
				_ = tenants.InTx(t.Context(), pool, tenant, func(pgx.Tx) error { panic("bang") })
			})
			require.Nil(t, seen(t, pool), "after a panic")

			require.NoError(t, tenants.ReadTx(t.Context(), pool, tenant, func(tx pgx.Tx) error {
				require.Equal(t, tenant, *seen(t, tx))
				return nil
			}))
			require.Nil(t, seen(t, pool), "after reading")
		}
	})

	t.Run("ReadsOneMomentAndWritesNothing", func(t *testing.T) {
		t.Parallel()

		database := pgtest.New(t)
		owner := database.Pool(t, "")
		tenant := uuid.Must(uuid.NewV7())
		count := func(conn db.DBTX) (n int) {
			require.NoError(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM relay_status").Scan(&n))
			return n
		}
		require.NoError(t, tenants.ReadTx(t.Context(), database.Pool(t, "api"), tenant, func(tx pgx.Tx) error {
			require.Zero(t, count(tx))
			_, err := owner.Exec(t.Context(), "INSERT INTO relay_status (slot_name, state) VALUES ('s', 'starting')")
			require.NoError(t, err)
			require.Zero(t, count(tx), "what was committed since is not seen")
			return nil
		}))
		require.Equal(t, 1, count(owner))

		err := tenants.ReadTx(t.Context(), database.Pool(t, "api"), tenant, func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), "INSERT INTO idempotency_keys (tenant_id, key_hash, fingerprint) VALUES ($1, decode(repeat('00', 16), 'hex'), sha256('x'))", tenant)
			return err
		})
		require.ErrorContains(t, err, "read-only")
	})
}

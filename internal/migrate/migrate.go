// Package migrate brings a database to the schema that this build carries.
package migrate

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"time"

	"github.com/golang-migrate/migrate/v4"
	_ "github.com/golang-migrate/migrate/v4/database/pgx/v5" // the scheme pgx5://
	"github.com/golang-migrate/migrate/v4/source/iofs"
	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/db/migrations"
	"github.com/onceledger/onceledger/internal/janitor"
)

// Status is where a database stands.
type Status struct {
	Version uint // the newest migration applied, 0 for none
	Newest  uint // the newest that this build has
	Dirty   bool // the last one failed half-way and wants a person
}

// Up applies the migrations that are missing and makes the partitions of the
// days around today, so that the first order finds a place. It needs a login
// that may create roles (REPLICATION among them) and owns the schema.
func Up(ctx context.Context, databaseURL string) error {
	err := with(databaseURL, func(m *migrate.Migrate) error {
		if err := m.Up(); err != nil && !errors.Is(err, migrate.ErrNoChange) {
			return explain(err)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("migrate up: %w", err)
	}

	conn, err := pgx.Connect(ctx, databaseURL)
	if err != nil {
		return fmt.Errorf("migrate up: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := janitor.MakePartitions(ctx, conn, time.Now()); err != nil {
		return fmt.Errorf("migrate up: %w", err)
	}
	return nil
}

// Down takes back the last steps migrations, with the data in them.
func Down(databaseURL string, steps int) error {
	err := with(databaseURL, func(m *migrate.Migrate) error {
		if err := m.Steps(-steps); err != nil && !errors.Is(err, migrate.ErrNoChange) {
			return explain(err)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("migrate down: %w", err)
	}
	return nil
}

// ReadStatus tells where a database stands.
func ReadStatus(databaseURL string) (Status, error) {
	var status Status
	err := with(databaseURL, func(m *migrate.Migrate) error {
		version, dirty, err := m.Version()
		if err != nil && !errors.Is(err, migrate.ErrNilVersion) {
			return err
		}
		status = Status{Version: version, Newest: newest(), Dirty: dirty}
		return nil
	})
	return status, err
}

func newest() uint {
	source, err := iofs.New(migrations.FS, ".")
	if err != nil {
		return 0
	}
	version, err := source.First()
	for err == nil {
		var next uint
		if next, err = source.Next(version); err == nil {
			version = next
		}
	}
	return version
}

func with(databaseURL string, fn func(*migrate.Migrate) error) error {
	source, err := iofs.New(migrations.FS, ".")
	if err != nil {
		return fmt.Errorf("read migrations: %w", err)
	}
	address, err := url.Parse(databaseURL)
	if err != nil {
		return errors.New("the database address is not a URL like postgres://user:password@host:5432/name")
	}
	address.Scheme = "pgx5"
	m, err := migrate.NewWithSourceInstance("iofs", source, address.String())
	if err != nil {
		return fmt.Errorf("reach database: %w", err)
	}
	defer m.Close()
	return fn(m)
}

func explain(err error) error {
	var dirty migrate.ErrDirty
	if errors.As(err, &dirty) {
		return fmt.Errorf("migration %d failed half-way earlier: mend the schema by hand, then set schema_migrations.dirty to false (%w)", dirty.Version, err)
	}
	return err
}

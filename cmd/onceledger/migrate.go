package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/spf13/cobra"

	"github.com/onceledger/onceledger/internal/migrate"
	"github.com/onceledger/onceledger/internal/supervisor"
)

func newMigrateCommand() *cobra.Command {
	command := &cobra.Command{
		Use:   "migrate",
		Short: "Bring the database to this build's schema",
		Long: `Bring the database to this build's schema.

DATABASE_URL names the database, with a login that owns it and may create roles
with REPLICATION (a superuser, or CREATEROLE and REPLICATION); unset, it is the one
that "onceledger up" runs. Migrate before the
services start: the publication has to be there before the relay's slot, and the
slot before the first order.`,
	}

	up := &cobra.Command{
		Use:   "up",
		Short: "Apply the migrations that are missing and make the first partitions",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			url, err := databaseURL()
			if err != nil {
				return err
			}
			if err := migrate.Up(cmd.Context(), url); err != nil {
				return fmt.Errorf("DATABASE_URL: %w", err)
			}
			return printStatus(cmd, url)
		},
	}

	var steps int
	var yes bool
	down := &cobra.Command{
		Use:   "down",
		Short: "Take back migrations, with the data in them",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			url, err := databaseURL()
			if err != nil {
				return err
			}
			if !yes {
				return errors.New("this deletes the tables of those migrations and all that is in them: say --yes if that is meant")
			}
			if err := migrate.Down(url, steps); err != nil {
				return fmt.Errorf("DATABASE_URL: %w", err)
			}
			return printStatus(cmd, url)
		},
	}
	down.Flags().IntVar(&steps, "steps", 1, "how many migrations")
	down.Flags().BoolVar(&yes, "yes", false, "delete the data")

	status := &cobra.Command{
		Use:   "status",
		Short: "Tell where the database stands",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			url, err := databaseURL()
			if err != nil {
				return err
			}
			return printStatus(cmd, url)
		},
	}
	return group(command, up, down, status)
}

func printStatus(cmd *cobra.Command, url string) error {
	status, err := migrate.ReadStatus(url)
	if err != nil {
		return fmt.Errorf("DATABASE_URL: %w", err)
	}
	state := "up to date"
	switch {
	case status.Dirty:
		state = "DIRTY: the last migration failed half-way"
	case status.Version < status.Newest:
		state = "behind"
	case status.Version > status.Newest:
		state = "newer than this build"
	}
	fmt.Fprintf(cmd.OutOrStdout(), "schema version %d of %d: %s\n", status.Version, status.Newest, state)
	return nil
}

// databaseURL is where the commands work: what the environment says, or else
// what runs in the home folder.
func databaseURL() (string, error) {
	if url := os.Getenv("DATABASE_URL"); url != "" {
		return url, nil
	}
	connections, err := supervisor.ReadConnections(homeFolder())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	if connections.Databases.Admin == "" {
		return "", fmt.Errorf("DATABASE_URL is not set, and nothing was started in %s (onceledger up): "+
			"want postgres://user:password@host:5432/name of a login that owns the database", homeFolder())
	}
	return connections.Databases.Admin, nil
}

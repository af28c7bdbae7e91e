package main

import (
	"context"
	"errors"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/operators"
	"github.com/onceledger/onceledger/internal/tenants"
)

func newKeysCommand() *cobra.Command {
	command := &cobra.Command{
		Use:   "keys",
		Short: "Make, list and revoke API keys",
		Long: `Make, list and revoke API keys.

DATABASE_URL names the database, with the login that owns it; unset, it is the
one that "onceledger up" runs.`,
	}

	var tenant, name, operator string
	create := &cobra.Command{
		Use:   "create (--tenant NAME | --operator NAME)",
		Short: "Make a key, and its tenant if that is new; print the key once",
		Long: `Make a key, and print it once.

A tenant's key is for the API, and for that tenant's orders alone; the tenant is made
if it is new. An operator's key is for the dead letters of all tenants, which a
worker with the role billing serves at WORKER_ADDR, under /v1/operator/.`,
		Args: cobra.NoArgs,
		RunE: withConn(func(cmd *cobra.Command, conn *pgx.Conn, _ []string) error {
			var secret string
			var err error
			if cmd.Flags().Changed("operator") {
				secret, err = operators.CreateKey(cmd.Context(), conn, operator)
			} else {
				secret, err = tenants.CreateKey(cmd.Context(), conn, tenant, name)
			}
			if err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), secret)
			fmt.Fprintln(cmd.ErrOrStderr(), "This is the only time that the key is shown: only its hash is stored.")
			return nil
		}),
	}
	create.Flags().StringVar(&tenant, "tenant", "", "the tenant that the key works for")
	create.Flags().StringVar(&operator, "operator", "", "who sees to dead letters with the key")
	create.Flags().StringVar(&name, "name", "key", "what a tenant's key is for")
	create.MarkFlagsOneRequired("tenant", "operator")
	create.MarkFlagsMutuallyExclusive("tenant", "operator")
	create.MarkFlagsMutuallyExclusive("name", "operator")

	list := &cobra.Command{
		Use:   "list",
		Short: "List keys",
		Args:  cobra.NoArgs,
		RunE: withConn(func(cmd *cobra.Command, conn *pgx.Conn, _ []string) error {
			keys, err := db.New().APIKeyList(cmd.Context(), conn)
			if err != nil {
				return fmt.Errorf("list keys: %w", err)
			}
			ofOperators, err := db.New().OperatorKeyList(cmd.Context(), conn)
			if err != nil {
				return fmt.Errorf("list operators' keys: %w", err)
			}
			table := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
			fmt.Fprintln(table, "ID\tTENANT\tNAME\tCREATED\tREVOKED")
			row := func(id uuid.UUID, tenant, name string, createdAt time.Time, revokedAt *time.Time) {
				revoked := "-"
				if revokedAt != nil {
					revoked = revokedAt.UTC().Format(time.RFC3339)
				}
				fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\n", id, tenant, name, createdAt.UTC().Format(time.RFC3339), revoked)
			}
			for _, key := range keys {
				row(key.ID, key.Tenant, key.Name, key.CreatedAt, key.RevokedAt)
			}
			for _, key := range ofOperators {
				row(key.ID, "(operator)", key.Name, key.CreatedAt, key.RevokedAt)
			}
			return table.Flush()
		}),
	}

	revoke := &cobra.Command{
		Use:   "revoke ID",
		Short: "End a key, from its next request on",
		Args:  cobra.ExactArgs(1),
		RunE: withConn(func(cmd *cobra.Command, conn *pgx.Conn, args []string) error {
			id, err := uuid.Parse(args[0])
			if err != nil {
				return fmt.Errorf("%q is not the id of a key: see onceledger keys list", args[0])
			}
			revoked, err := db.New().APIKeyRevoke(cmd.Context(), conn, id)
			if err == nil && revoked == 0 {
				revoked, err = db.New().OperatorKeyRevoke(cmd.Context(), conn, id)
			}
			if err != nil {
				return fmt.Errorf("revoke key: %w", err)
			}
			if revoked == 0 {
				return errors.New("there is no such key, or it was revoked before: see onceledger keys list")
			}
			fmt.Fprintln(cmd.OutOrStdout(), "revoked", id)
			return nil
		}),
	}
	return group(command, create, list, revoke)
}

// withConn gives a command a connection to the database, as its owner.
func withConn(fn func(cmd *cobra.Command, conn *pgx.Conn, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		url, err := databaseURL()
		if err != nil {
			return err
		}
		conn, err := pgx.Connect(cmd.Context(), url)
		if err != nil {
			return fmt.Errorf("DATABASE_URL: reach database: %w", err)
		}
		defer conn.Close(context.WithoutCancel(cmd.Context()))
		return fn(cmd, conn, args)
	}
}

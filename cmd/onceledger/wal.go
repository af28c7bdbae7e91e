package main

import (
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/onceledger/onceledger/internal/walreport"
)

func newWALCommand() *cobra.Command {
	command := &cobra.Command{
		Use:   "wal",
		Short: "Tell what the service writes to the write-ahead log",
	}
	return group(command, newWALReportCommand())
}

func newWALReportCommand() *cobra.Command {
	var config walreport.Config
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "report",
		Short: "Measure the bytes of log per order, by table, and what of them is the outbox",
		Long: `Measure the bytes of write-ahead log per order, by table, and what of them is the
outbox.

It makes a database of its own on the server, has the API's and the worker's code
place, pay and bill so many orders in it, reads the log of exactly these
transactions, and drops the database again. The service may run meanwhile: it is
neither counted nor touched, but shares the server. The relay's own record of how
far it has got, one row a second at the most, is not in the account.

Environment:
  DATABASE_URL     any database of the server, for a superuser: reading the log takes
                   one, and the contrib module pg_walinspect. Unset: the server that
                   "onceledger up" runs
  ONCELEDGER_HOME  the folder of "onceledger up" (.onceledger)
`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if config.URL, err = databaseURL(); err != nil {
				return err
			}
			report, err := walreport.Run(cmd.Context(), config)
			if err != nil {
				return fmt.Errorf("wal report: %w", err)
			}
			if asJSON {
				encoder := json.NewEncoder(cmd.OutOrStdout())
				encoder.SetIndent("", "  ")
				return encoder.Encode(report)
			}
			return report.WriteText(cmd.OutOrStdout())
		},
	}
	cmd.Flags().IntVar(&config.Orders, "orders", 1000, "orders to place and pay, up to 20000")
	cmd.Flags().IntVar(&config.Batch, "batch", 2000, "events that the worker takes at once at most")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON document")
	return cmd
}

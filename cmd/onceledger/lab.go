package main

import (
	"fmt"
	"os"
	"path/filepath"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/onceledger/onceledger/internal/lab"
)

func newLabCommand() *cobra.Command {
	var config lab.Config
	cmd := &cobra.Command{
		Use:   "lab NAME",
		Short: "Run an experiment: what is lost, what is twice, and why",
		Long: `Run an experiment: what is lost, what is twice, and why.

"onceledger lab list" names them in reading order, "onceledger lab all" runs all
that need no Java. Each starts a Postgres and a broker of its own in a temporary
folder, kills what it says it kills, and prints what is left. docs/lab has a page
for each.

Environment:
  ONCELEDGER_POSTGRES_BIN  a folder with Postgres' programs, instead of looking
  JAVA_HOME                where Java is, for --kafka=apache
`,
		Args: func(_ *cobra.Command, args []string) error {
			switch {
			case len(args) == 0:
				return fmt.Errorf("which experiment? onceledger lab list has all of them")
			case len(args) > 1:
				return fmt.Errorf("one experiment at a time: %q is too much", args[1])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if args[0] == "list" {
				return listExperiments(cmd)
			}
			for name, value := range map[string]int{"events": config.Events, "crash-after": config.CrashAfter} {
				if cmd.Flags().Changed(name) && value < 1 {
					return fmt.Errorf("--%s is %d: want 1 or more", name, value)
				}
			}
			executable, err := os.Executable()
			if err != nil {
				return fmt.Errorf("find this program: %w", err)
			}
			config.Command, config.Programs = executable, filepath.Dir(executable)
			config.PostgresBin, config.JavaHome = os.Getenv("ONCELEDGER_POSTGRES_BIN"), os.Getenv("JAVA_HOME")
			config.Environ = os.Environ()
			config.Stdout, config.Stderr = cmd.OutOrStdout(), cmd.ErrOrStderr()
			if args[0] == "all" {
				return lab.RunAll(cmd.Context(), config)
			}
			experiment, err := lab.Find(args[0])
			if err != nil {
				return err
			}
			return lab.Run(cmd.Context(), experiment, config)
		},
	}
	cmd.Flags().StringVar(&config.Kafka, "kafka", "", "which broker to start: embedded or apache (default embedded, or what the experiment needs)")
	cmd.Flags().BoolVar(&config.Keep, "keep", false, "keep the experiment's folder")
	cmd.Flags().IntVar(&config.Events, "events", 0, "at-most-once, naive, dedupe: how many orders are paid (default 5)")
	cmd.Flags().IntVar(&config.CrashAfter, "crash-after", 0, "at-most-once, naive, dedupe: the order in whose middle the consumer dies (default 3)")
	return cmd
}

func listExperiments(cmd *cobra.Command) error {
	table := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	for _, experiment := range lab.Experiments {
		fmt.Fprintf(table, "%s\t%s\n", experiment.Name, experiment.Summary)
	}
	return table.Flush()
}

// newLabConsumerCommand is a process for an experiment to kill.
func newLabConsumerCommand() *cobra.Command {
	var child lab.Child
	cmd := &cobra.Command{
		Use:    "lab-consumer ROLE",
		Short:  "Be a process of an experiment (started by lab)",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			child.DatabaseURL, child.Brokers = os.Getenv("DATABASE_URL"), os.Getenv("KAFKA_BROKERS")
			child.Stdout = cmd.OutOrStdout()
			return lab.RunChild(cmd.Context(), args[0], child)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&child.Name, "name", "", "what it is called")
	flags.StringVar(&child.Way, "way", "", "which way of the experiment")
	flags.StringVar(&child.Topic, "topic", "", "the topic to read")
	flags.StringVar(&child.Group, "group", "", "the consumer group")
	flags.StringVar(&child.Member, "member", "", "the static member of the group")
	flags.IntVar(&child.CrashAt, "crash-at", 0, "the record in whose middle to die")
	flags.IntVar(&child.HoldAt, "hold-at", 0, "the record or batch in whose middle to wait")
	flags.IntVar(&child.Until, "until", 0, "the number of records to read")
	flags.StringVar(&child.Redis, "redis", "", "the filter")
	return cmd
}

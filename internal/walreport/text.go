package walreport

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
)

// WriteText writes the report as a table of bytes per order.
func (r *Report) WriteText(w io.Writer) error {
	var settings []string
	for _, name := range slices.Sorted(maps.Keys(r.Settings)) {
		settings = append(settings, name+"="+r.Settings[name])
	}
	fmt.Fprintf(w, "%d orders of one line, each placed and paid; events applied in batches of up to %d.\n%s\n\n",
		r.Orders, r.Batch, strings.Join(settings, " "))
	fmt.Fprintln(w, "Bytes of write-ahead log per order, without page images:")

	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	per := func(bytes int64) string { return fmt.Sprintf("%.0f", float64(bytes)/float64(r.Orders)) }
	total := r.API.Records + r.Worker.Records
	share := func(bytes int64) string { return fmt.Sprintf("%.1f%%", 100*float64(bytes)/float64(max(1, total))) }
	longest := 0
	for _, t := range r.Tables {
		longest = max(longest, len(t.Name))
	}
	line := func(name, api, worker, both, share string) {
		fmt.Fprintf(table, "%-*s\t%s\t%s\t%s\t%s\t\n", longest, name, api, worker, both, share)
	}
	line("table", "API", "worker", "both", "share")
	for _, t := range r.Tables {
		line(t.Name, per(t.API.Records), per(t.Worker.Records), per(t.records()), share(t.records()))
	}
	line("all", per(r.API.Records), per(r.Worker.Records), per(total), share(total))
	line("page images", per(r.API.Images), per(r.Worker.Images), per(r.API.Images+r.Worker.Images), "")
	if err := table.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "\nThe outbox adds %s bytes per order, %s of all. Transactions: %d of the API, %d of the worker.\n",
		per(r.OutboxBytes), share(r.OutboxBytes), r.API.Transactions, r.Worker.Transactions)
	return err
}

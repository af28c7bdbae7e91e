package conformance_test

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var tableFile = flag.String("table", "", "append the table of what was seen to this file")

// result is what was seen of a relay at a broker.
type result struct {
	relay, broker string
	backlog       int // events that wait for a relay which was never there

	mutex      sync.Mutex
	cases      int
	passed     int
	events     int
	duplicates int
	lost       int
	takeOver   time.Duration // the longest
}

func (r *result) add(_ string, passed bool, w *world) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.cases++
	if passed {
		r.passed++
	}
	r.events += len(w.order)
	r.duplicates += w.duplicates()
	r.lost += w.expected() - len(w.order)
}

func (r *result) tookOver(after time.Duration) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.takeOver = max(r.takeOver, after)
}

// printTable shows results when a test and all below it have ended.
func printTable(t *testing.T, results *[]*result) {
	t.Cleanup(func() {
		slices.SortStableFunc(*results, func(a, b *result) int { return cmp.Compare(a.broker, b.broker) })
		var table strings.Builder
		table.WriteString("| relay | broker | cases passed | events | duplicates | lost | take-over |\n|---|---|---|---|---|---|---|\n")
		for _, r := range *results {
			takeOver := "-"
			if r.takeOver > 0 {
				takeOver = fmt.Sprintf("%.1f s", r.takeOver.Seconds())
			}
			fmt.Fprintf(&table, "| %s | %s | %d of %d | %d | %d | %d | %s |\n",
				r.relay, r.broker, r.passed, r.cases, r.events, r.duplicates, r.lost, takeOver)
		}
		t.Log("\n" + table.String())
		if *tableFile == "" {
			return
		}
		file, err := os.OpenFile(*tableFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
		require.NoError(t, err)
		_, err = file.WriteString(table.String())
		require.NoError(t, err)
		require.NoError(t, file.Close())
	})
}

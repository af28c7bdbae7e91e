package main

import (
	"fmt"
	"slices"

	"github.com/onceledger/onceledger/bench/stack"
)

// goals are what wal is to reach, by contender and rows per transaction.
var (
	speedGoals = map[string]map[int]float64{
		tuned.name: {1: 2.5, 100: 3},
		poll.name:  {1: 2, 100: 2},
	}
	cpuGoals = map[string]float64{tuned.name: 1. / 3}
	rssGoals = map[string]float64{tuned.name: 1. / 8}
	p99Goals = map[string]float64{shipped.name: 8, poll.name: 12}
)

// print writes the tables of docs/benchmarks.md.
func print(r result) {
	fmt.Printf("Drain of %d events, wal divided by each: min / **median** / max, with its goal.\n\n", r.Events)
	fmt.Println("| rows/tx | wal ÷ | pairs | events/s | goal | CPU | goal | memory | goal |")
	fmt.Println("|---|---|---|---|---|---|---|---|---|")
	for _, s := range r.Series {
		for _, ratio := range s.Ratios {
			fmt.Printf("| %d | %s | %d | %s | %s | %s | %s | %s | %s |\n", s.RowsPerTransaction, ratio.Against, ratio.Pairs,
				spread(ratio.Speed, 2), goal("≥", speedGoals[ratio.Against][s.RowsPerTransaction]),
				spread(ratio.CPU, 2), goal("≤", cpuGoals[ratio.Against]), spread(ratio.RSS, 3), goal("≤", rssGoals[ratio.Against]))
		}
	}

	fmt.Printf("\nEach contender's legs, medians. CPU-seconds are for a million events.\n\n")
	fmt.Println("| rows/tx | | legs | events/s | to first record | CPU | Postgres CPU | broker CPU | memory |")
	fmt.Println("|---|---|---|---|---|---|---|---|---|")
	for _, s := range r.Series {
		for _, name := range contenders(s.Legs, func(l leg) string { return l.Contender }) {
			middle := func(value func(leg) float64) float64 { return medianOf(s.Legs, name, value) }
			fmt.Printf("| %d | %s | %d | %.1fk | %.1f s | %.1f | %.1f | %.1f | %.0f MB |\n", s.RowsPerTransaction, name, count(s.Legs, name),
				middle(func(l leg) float64 { return l.EventsPerSecond / 1000 }), middle(func(l leg) float64 { return l.Start }),
				middle(func(l leg) float64 { return l.CPU }), middle(func(l leg) float64 { return l.PostgresCPU }),
				middle(func(l leg) float64 { return l.BrokerCPU }), middle(func(l leg) float64 { return float64(l.RSS) / (1 << 20) }))
		}
	}

	if r.Latency.Rounds == 0 {
		return
	}
	fmt.Printf("\nCommit to arrival at %d events a second for %d s, %d rounds: medians, and divided by wal's of the round.\n\n",
		r.Latency.Rate, r.Latency.Seconds, r.Latency.Rounds)
	fmt.Println("| | p50 | p90 | p99 | max | CPU | p50 ÷ wal | p99 ÷ wal | goal |")
	fmt.Println("|---|---|---|---|---|---|---|---|---|")
	legs := r.Latency.Legs
	for _, c := range []contender{wal, shipped, tuned, poll} {
		middle := func(value func(latencyLeg) float64) float64 {
			var values []float64
			for _, l := range legs {
				if l.Contender == c.name {
					values = append(values, value(l))
				}
			}
			return stack.SpreadOf(values).Median
		}
		against := [2]string{"", ""}
		for _, ratio := range r.Latency.Ratios {
			if ratio.Of == c.name {
				against = [2]string{spread(ratio.P50, 1), spread(ratio.P99, 1)}
			}
		}
		fmt.Printf("| %s | %.1f ms | %.1f ms | %.1f ms | %.1f ms | %.1f s | %s | %s | %s |\n", c.name,
			middle(func(l latencyLeg) float64 { return l.P50 }), middle(func(l latencyLeg) float64 { return l.P90 }),
			middle(func(l latencyLeg) float64 { return l.P99 }), middle(func(l latencyLeg) float64 { return l.Max }),
			middle(func(l latencyLeg) float64 { return l.CPU }), against[0], against[1], goal("≥", p99Goals[c.name]))
	}
}

func spread(s stack.Spread, digits int) string {
	return fmt.Sprintf("%.*f / **%.*f** / %.*f", digits, s.Min, digits, s.Median, digits, s.Max)
}

func goal(sign string, value float64) string {
	if value == 0 {
		return ""
	}
	return fmt.Sprintf("%s %.3g", sign, value)
}

// contenders are those of the legs, in order of appearance.
func contenders[T any](legs []T, name func(T) string) (names []string) {
	for _, l := range legs {
		if !slices.Contains(names, name(l)) {
			names = append(names, name(l))
		}
	}
	return names
}

func count(legs []leg, name string) (n int) {
	for _, l := range legs {
		if l.Contender == name {
			n++
		}
	}
	return n
}

func medianOf(legs []leg, name string, value func(leg) float64) float64 {
	var values []float64
	for _, l := range legs {
		if l.Contender == name {
			values = append(values, value(l))
		}
	}
	return stack.SpreadOf(values).Median
}

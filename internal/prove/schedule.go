package prove

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
)

// groups are the groups that a cell is in: those it names, and the first word of
// its name.
func (c Cell) groups() []string {
	first, _, _ := strings.Cut(c.Name, "-")
	return append(slices.Clone(c.Groups), first)
}

func (c Cell) matches(pattern string) (bool, error) {
	for _, name := range append(c.groups(), c.Name) {
		if ok, err := path.Match(pattern, name); ok || err != nil {
			return ok, err
		}
	}
	return false, nil
}

// Choose picks cells by patterns: a name, a group, either with * in it, and with !
// in front what is left out again. Without a pattern that takes anything in, it is
// all of them. A pattern that is about no cell is an error.
func Choose(cells []Cell, patterns []string) ([]Cell, error) {
	chosen := make(map[string]bool)
	takesIn := slices.ContainsFunc(patterns, func(pattern string) bool { return !strings.HasPrefix(pattern, "!") })
	for _, cell := range cells {
		chosen[cell.Name] = !takesIn
	}
	var faults []error
	for _, pattern := range patterns {
		pattern, out := strings.CutPrefix(strings.TrimSpace(pattern), "!")
		found := false
		for _, cell := range cells {
			ok, err := cell.matches(pattern)
			if err != nil {
				return nil, fmt.Errorf("--cells: %q is not a pattern: %w", pattern, err)
			}
			if ok {
				found = true
				chosen[cell.Name] = !out
			}
		}
		if !found {
			faults = append(faults, fmt.Errorf("--cells: there is no cell %q%s; onceledger prove --list shows them", pattern, near(cells, pattern)))
		}
	}
	if len(faults) > 0 {
		return nil, errors.Join(faults...)
	}
	picked := slices.DeleteFunc(slices.Clone(cells), func(cell Cell) bool { return !chosen[cell.Name] })
	if len(picked) == 0 {
		return nil, errors.New("--cells leaves no cell over; onceledger prove --list shows them")
	}
	return picked, nil
}

// near names cells and groups that somebody may have meant.
func near(cells []Cell, pattern string) string {
	type guess struct {
		name     string
		distance int
	}
	var guesses []guess
	seen := make(map[string]bool)
	for _, cell := range cells {
		for _, name := range append(cell.groups(), cell.Name) {
			if seen[name] {
				continue
			}
			seen[name] = true
			distance := editDistance(pattern, name)
			if strings.Contains(name, pattern) || strings.Contains(pattern, name) {
				distance = min(distance, 2)
			}
			if distance <= max(2, len(pattern)/3) {
				guesses = append(guesses, guess{name, distance})
			}
		}
	}
	slices.SortStableFunc(guesses, func(a, b guess) int { return cmp.Compare(a.distance, b.distance) })
	var names []string
	for _, guess := range guesses[:min(3, len(guesses))] {
		names = append(names, guess.name)
	}
	if len(names) == 0 {
		return ""
	}
	return " (did you mean " + strings.Join(names, ", ") + "?)"
}

// editDistance is how many letters have to be changed, added or left out.
func editDistance(a, b string) int {
	previous := make([]int, len(b)+1)
	for i := range previous {
		previous[i] = i
	}
	for i := range len(a) {
		current := []int{i + 1}
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			current = append(current, min(previous[j]+cost, previous[j+1]+1, current[j]+1))
		}
		previous = current
	}
	return previous[len(b)]
}

// missing are the needs of a cell that are not met.
func (c Cell) missing(has map[Need]bool) []string {
	var missing []string
	for _, need := range c.Needs {
		if !has[need] {
			missing = append(missing, string(need))
		}
	}
	return missing
}

// Schedule says which cell each fault is, by number from 0. Each cell comes as
// often as the others, give or take one, in an order by the seed. It depends on
// the seed, the cells and the number, and on nothing else.
func Schedule(cells []Cell, faults int, seed uint64) []Cell {
	cells = slices.SortedFunc(slices.Values(cells), func(a, b Cell) int { return cmp.Compare(a.Name, b.Name) })
	var schedule []Cell
	for round := uint64(0); len(schedule) < faults; round++ {
		random := rand.New(rand.NewPCG(seed, round))
		shuffled := slices.Clone(cells)
		random.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		schedule = append(schedule, shuffled...)
	}
	return schedule[:faults]
}

// ScheduleDigest is the SHA-256 of a schedule, written a name a line.
func ScheduleDigest(schedule []Cell) string {
	hash := sha256.New()
	for _, cell := range schedule {
		fmt.Fprintln(hash, cell.Name)
	}
	return hex.EncodeToString(hash.Sum(nil))
}

// faultRandom is for the choices of one fault.
func faultRandom(seed uint64, fault int) *rand.Rand {
	return rand.New(rand.NewPCG(seed, 1<<32|uint64(fault)))
}

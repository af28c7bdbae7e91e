package prove

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Violation is something that must not be.
type Violation struct {
	// Invariant is which of the ten is broken: I1 no loss, I2 no duplicate, I3 no
	// phantom, I4 balance, I5 append only, I6 order, I7 HTTP, I8 bounded, I9
	// isolation, I10 honest. V is what the product's own verify says.
	Invariant string `json:"invariant"`
	Kind      string `json:"kind"`
	Detail    string `json:"detail"`

	Order   string   `json:"order,omitempty"`
	Events  []string `json:"events,omitempty"`
	Request int64    `json:"request,omitempty"`
	Key     string   `json:"idempotency_key,omitempty"`
	// Fault is the last fault that was over when it was found.
	Fault int    `json:"found_after_fault"`
	Cell  string `json:"cell,omitempty"`
}

func (v Violation) String() string {
	return fmt.Sprintf("%s %s: %s", v.Invariant, v.Kind, v.Detail)
}

// same reports whether two are about one thing, so that it is told once.
func (v Violation) key() string {
	return strings.Join([]string{v.Invariant, v.Kind, v.Detail}, "\x00")
}

// Invariants are what each is called.
var Invariants = map[string]string{
	"I1": "no loss", "I2": "no duplicate", "I3": "no phantom", "I4": "balance", "I5": "append only",
	"I6": "order", "I7": "HTTP", "I8": "bounded", "I9": "isolation", "I10": "honest", "V": "verify",
}

// tally counts violations of the four kinds that are counted by themselves, and
// the rest.
func tally(violations []Violation) map[string]int {
	counts := map[string]int{"lost": 0, "duplicated": 0, "phantom": 0, "unbalanced": 0, "other": 0}
	names := map[string]string{"I1": "lost", "I2": "duplicated", "I3": "phantom", "I4": "unbalanced"}
	for _, v := range violations {
		counts[cmp.Or(names[v.Invariant], "other")]++
	}
	return counts
}

// sorted puts the invariants in their order.
func sorted(violations []Violation) []Violation {
	number := func(v Violation) int {
		n := len(Invariants) // what has none comes last
		_, _ = fmt.Sscanf(v.Invariant, "I%d", &n)
		return n
	}
	return slices.SortedStableFunc(slices.Values(violations), func(a, b Violation) int {
		return cmp.Or(cmp.Compare(number(a), number(b)), cmp.Compare(a.Kind, b.Kind))
	})
}

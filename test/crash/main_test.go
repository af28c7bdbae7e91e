// Package crash_test kills the service where it hurts and then checks the
// books. Each test states its goal and method at its top; test/stack says what
// "the books are right" covers.
package crash_test

import (
	"flag"
	"math/rand/v2"
	"testing"

	"github.com/onceledger/onceledger/test/stack"
)

// For longer runs, such as
//
//	go test ./test/crash -run Soak -orders 5000 -kills 200 -seed 7
var (
	seed   = flag.Uint64("seed", 0, "what is bought, what is broken, and when; 0 picks one")
	orders = flag.Int("orders", 500, "orders in the soak, at least")
	kills  = flag.Int("kills", 20, "kills in the soak")
	rounds = flag.Int("rounds", 1, "how often the other tests repeat what they do")
)

func TestMain(m *testing.M) { stack.Main(m) }

// seedOf is the seed of one test.
func seedOf() uint64 {
	if *seed == 0 {
		return 1 + rand.Uint64N(1_000_000)
	}
	return *seed
}

package prove_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/crash"
	"github.com/onceledger/onceledger/internal/prove"
)

// TestCells holds the list of faults against what there is to break.
func TestCells(t *testing.T) {
	t.Parallel()

	name := regexp.MustCompile(`^[a-z0-9]+(-[a-z0-9]+)+$`)
	cells := make(map[string]prove.Cell)
	for _, cell := range prove.Cells() {
		require.Regexp(t, name, cell.Name)
		require.NotContains(t, cells, cell.Name, "two have one name")
		require.NotEmpty(t, cell.About, cell.Name)
		require.NotNil(t, cell.Run, cell.Name)
		cells[cell.Name] = cell
	}
	for _, point := range crash.Points() {
		require.Contains(t, cells, "at-"+strings.ReplaceAll(point, ".", "-"), "no cell kills at %s", point)
	}
	// What kills a broker is not for the embedded one.
	for _, cell := range cells {
		for _, need := range cell.Needs {
			if need == prove.NeedThree {
				require.Contains(t, cell.Needs, prove.NeedApache, cell.Name)
			}
		}
	}
}

//go:build apache

package lab_test

import (
	"testing"

	"github.com/onceledger/onceledger/internal/lab"
)

// Goal: the experiments show the same on Apache Kafka, and the one that needs it shows what its page says.
func TestPagesOnApacheKafka(t *testing.T) {
	t.Parallel()

	for _, experiment := range lab.Experiments {
		t.Run(experiment.Name, func(t *testing.T) {
			t.Parallel()
			comparePage(t, experiment.Name, "--kafka=apache")
		})
	}
}

//go:build apache

package crash_test

import (
	"os"
	"testing"

	"github.com/onceledger/onceledger/internal/prove"
)

// Goal: brokers that are killed, frozen, lost and too few cost time and nothing
// else; so does a topic that is deleted and made again. Method: prove, on three
// brokers of Apache Kafka.
func TestBrokersFail(t *testing.T) {
	t.Parallel()
	proveEach(t, prove.Options{Kafka: "apache", Brokers: 3, JavaHome: os.Getenv("JAVA_HOME")}, "apache", "topic-recreated")
}

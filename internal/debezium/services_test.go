//go:build apache

package debezium_test

import (
	"os"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// services are the broker and the Connect worker of this test program.
type services struct {
	brokers, connect string
}

var start = sync.OnceValues(func() (services, error) {
	return services{os.Getenv("X_BROKERS"), os.Getenv("X_CONNECT")}, nil
})

func shared(t *testing.T) services {
	t.Helper()
	s, err := start()
	require.NoError(t, err)
	return s
}

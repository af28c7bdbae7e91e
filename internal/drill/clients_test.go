package drill

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// What keeps the clients from their work is said, and is not waited for longer
// than need be.
func TestClients(t *testing.T) {
	t.Parallel()

	begin := func(t *testing.T, status int, patience time.Duration) (*clients, <-chan struct{}) {
		t.Helper()
		asked := make(chan struct{}, 1000)
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			asked <- struct{}{}
			w.WriteHeader(status)
		}))
		t.Cleanup(server.Close)
		c := newClients(Config{API: server.URL, Key: "key", Orders: 10, Wait: patience})
		c.start(t.Context())
		t.Cleanup(c.stop)
		return c, asked
	}

	t.Run("RefusalEndsThemAtOnce", func(t *testing.T) {
		t.Parallel()
		c, _ := begin(t, http.StatusUnauthorized, time.Hour)
		require.ErrorContains(t, c.finish(), "answered 401")
		require.ErrorContains(t, c.failed(), "answered 401")
		require.ErrorContains(t, c.fault(), "answered 401")
	})

	t.Run("OutageEndsThemInTime", func(t *testing.T) {
		t.Parallel()
		c, _ := begin(t, http.StatusServiceUnavailable, 50*time.Millisecond)
		require.ErrorContains(t, c.finish(), "place an order")
		require.ErrorContains(t, c.failed(), "place an order")
	})

	t.Run("OutageIsToldWhileItLasts", func(t *testing.T) {
		t.Parallel()
		c, asked := begin(t, http.StatusServiceUnavailable, time.Hour)
		for range atOnce + 1 {
			<-asked // by the last one, some client has had its answer
		}
		require.NoError(t, c.failed())
		require.ErrorContains(t, c.fault(), "answered 503")
	})
}

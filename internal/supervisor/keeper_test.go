package supervisor

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestKeeper(t *testing.T) {
	t.Parallel()

	// keep runs a part that ends at once, until it was started so many times.
	keep := func(t *testing.T, backOff backOff, starts int, startErr error) (lines []string, stops int) {
		t.Helper()
		enough := make(chan struct{})
		started := 0
		ended := make(chan struct{})
		close(ended)
		part := &keeper{
			name: "part",
			start: func(context.Context) (<-chan struct{}, func() string, error) {
				if started++; started == starts {
					close(enough)
					return make(chan struct{}), nil, nil
				}
				return ended, func() string { return "it fell over" }, startErr
			},
			stop:        func(context.Context) error { stops++; return nil },
			stopTimeout: time.Minute,
			backOff:     backOff,
			say:         func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) },
		}
		part.keep(t.Context())
		<-enough
		require.NoError(t, part.end(t.Context()))
		return lines, stops
	}

	t.Run("WaitsTwiceAsLongEachTimeUpToTheMost", func(t *testing.T) {
		t.Parallel()

		lines, stops := keep(t, backOff{first: time.Microsecond, most: 3 * time.Microsecond, steady: time.Hour}, 5, nil)
		require.Equal(t, []string{
			"part ended (it fell over); starting it again in 1µs",
			"part ended (it fell over); starting it again in 2µs",
			"part ended (it fell over); starting it again in 3µs",
			"part ended (it fell over); starting it again in 3µs",
		}, lines)
		require.Equal(t, 1, stops)
	})

	t.Run("BeginsAtTheFirstAgainAfterASteadyRun", func(t *testing.T) {
		t.Parallel()

		lines, _ := keep(t, backOff{first: time.Microsecond, most: time.Hour, steady: 0}, 3, nil)
		require.Equal(t, "part ended (it fell over); starting it again in 1µs", lines[1])
	})

	t.Run("TriesAgainWhatDoesNotStart", func(t *testing.T) {
		t.Parallel()

		lines, _ := keep(t, backOff{first: time.Microsecond, most: time.Microsecond, steady: time.Hour}, 2, errors.New("no such file"))
		require.Equal(t, []string{"part did not start (no such file); trying again in 1µs"}, lines)
	})

	t.Run("StopsWhatWaitsToBeStartedAgain", func(t *testing.T) {
		t.Parallel()

		waiting := make(chan struct{})
		stopped := false
		part := &keeper{
			name: "part",
			start: func(context.Context) (<-chan struct{}, func() string, error) {
				return nil, nil, errors.New("not today")
			},
			stop:        func(context.Context) error { stopped = true; return errors.New("stuck") },
			stopTimeout: time.Minute,
			backOff:     backOff{first: time.Hour, most: time.Hour},
			say:         func(string, ...any) { close(waiting) },
		}
		part.keep(t.Context())
		<-waiting
		require.EqualError(t, part.end(t.Context()), "stop part: stuck")
		require.True(t, stopped)
	})
}

func TestForTerminal(t *testing.T) {
	t.Parallel()

	for line, want := range map[string]string{
		`{"time":"2026-01-01T00:00:00Z","level":"INFO","msg":"ready"}`:                   "",
		`{"level":"DEBUG","msg":"ready"}`:                                                "",
		`{"time":"x","level":"ERROR","msg":"lost the broker","error":"EOF","attempt":2}`: "error: lost the broker attempt=2 error=EOF",
		`{"level":"WARN","msg":"slow"}`:                                                  "warn: slow",
		`time=x level=INFO msg=ready`:                                                    "",
		`time=x level=WARN msg=slow`:                                                     "time=x level=WARN msg=slow",
		`panic: runtime error`:                                                           "panic: runtime error",
		``:                                                                               "",
	} {
		require.Equal(t, want, forTerminal([]byte(line)), line)
	}
}

func TestBaseURL(t *testing.T) {
	t.Parallel()

	for addr, want := range map[string]string{
		"127.0.0.1:8080": "http://127.0.0.1:8080",
		":8080":          "http://127.0.0.1:8080",
		"0.0.0.0:80":     "http://127.0.0.1:80",
		"[::]:80":        "http://127.0.0.1:80",
		"10.1.2.3:80":    "http://10.1.2.3:80",
	} {
		require.Equal(t, want, baseURL(addr))
	}
}

func TestShellQuoted(t *testing.T) {
	t.Parallel()

	for path, want := range map[string]string{
		"/home/a-b/.onceledger/api-key": "/home/a-b/.onceledger/api-key",
		"/my work/key":                  "'/my work/key'",
		"/it's/$(key)":                  `'/it'\''s/$(key)'`,
	} {
		require.Equal(t, want, shellQuoted(path))
	}
}

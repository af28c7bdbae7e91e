// Package telemetry sets up logs and metrics the same way in each process, and
// serves what a process says of itself.
package telemetry

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// NewLogger writes one JSON object a line.
func NewLogger(w io.Writer, level slog.Level, process string) *slog.Logger {
	options := &slog.HandlerOptions{Level: level, ReplaceAttr: func(_ []string, attr slog.Attr) slog.Attr {
		if attr.Value.Kind() == slog.KindDuration {
			attr.Value = slog.StringValue(attr.Value.Duration().Round(time.Microsecond).String())
		}
		return attr
	}}
	return slog.New(slog.NewJSONHandler(w, options)).With("process", process)
}

// NewRegistry holds a process's metrics, the runtime's among them.
func NewRegistry() *prometheus.Registry {
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	return registry
}

// Check tells whether one part is ready, and if not why. One that has a Note and
// nothing to Ask is shown and has no say.
type Check struct {
	Name string
	Ask  func(ctx context.Context) error
	Note func(ctx context.Context) string
}

const checkTimeout = 2 * time.Second

// Ready answers 200 if every check passes and 503 otherwise, with what each said
// in either case.
func Ready(checks []Check) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), checkTimeout)
		defer cancel()

		answer := struct {
			Ready  bool              `json:"ready"`
			Checks map[string]string `json:"checks"`
			Notes  map[string]string `json:"notes,omitempty"`
		}{Ready: true, Checks: make(map[string]string), Notes: make(map[string]string)}
		for _, check := range checks {
			if check.Note != nil {
				answer.Notes[check.Name] = check.Note(ctx)
			}
			if check.Ask == nil {
				continue
			}
			answer.Checks[check.Name] = "ok"
			if err := check.Ask(ctx); err != nil {
				answer.Ready = false
				answer.Checks[check.Name] = err.Error()
			}
		}

		w.Header().Set("Content-Type", "application/json")
		if !answer.Ready {
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_ = json.NewEncoder(w).Encode(answer)
	})
}

// Handler serves /healthz, /readyz and /metrics.
func Handler(registry *prometheus.Registry, checks []Check) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "ok\n")
	})
	mux.Handle("GET /readyz", Ready(checks))
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	return mux
}

// Serve answers requests on listener until ctx is done, then finishes those in
// hand, for at most drain.
func Serve(ctx context.Context, listener net.Listener, handler http.Handler, drain time.Duration) error {
	server := &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       15 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()

	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	finish, cancel := context.WithTimeout(context.WithoutCancel(ctx), drain)
	defer cancel()
	err := server.Shutdown(finish)
	if errors.Is(err, context.DeadlineExceeded) {
		return errors.Join(errors.New("requests were still in hand when the time to stop ran out"), server.Close())
	}
	return err
}

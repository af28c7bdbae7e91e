package debezium_test

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/debezium"
)

const class = "io.debezium.connector.postgresql.PostgresConnector"

// fakeConnect answers as Kafka Connect 4.3 was seen to, for one connector.
type fakeConnect struct {
	*httptest.Server

	mutex    sync.Mutex
	exists   bool
	state    string // of the connector
	task     string
	trace    string
	config   map[string]string
	offsets  bool
	patch    map[string]any // of the offsets
	requests []string

	// answers come before anything else, each once: by method and path.
	answers map[string][]answer
	// onResume is what becomes of the task. RUNNING when it is "".
	onResume string
	// fault is what validation says.
	fault string
	// stuck keeps the task when the connector is stopped.
	stuck bool
}

type answer struct {
	status  int
	message string
	// breakOff closes the connection in place of an answer.
	breakOff bool
}

func newFake(t *testing.T) *fakeConnect {
	t.Helper()
	fake := &fakeConnect{answers: make(map[string][]answer)}
	fake.Server = httptest.NewServer(fake)
	t.Cleanup(fake.Close)
	return fake
}

func (f *fakeConnect) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mutex.Lock()
	defer f.mutex.Unlock()

	const connector = "/connectors/" + debezium.DefaultConnector
	request := r.Method + " " + strings.Replace(r.URL.Path, connector, "x", 1)
	f.requests = append(f.requests, request)
	if planned := f.answers[request]; len(planned) > 0 {
		f.answers[request] = planned[1:]
		if planned[0].breakOff {
			panic(http.ErrAbortHandler)
		}
		refuse(w, planned[0].status, planned[0].message)
		return
	}
	if strings.Contains(request, " x") && !f.exists {
		refuse(w, http.StatusNotFound, "Connector "+debezium.DefaultConnector+" not found")
		return
	}
	body := func(into any) { _ = json.NewDecoder(r.Body).Decode(into) }

	switch request {
	case "GET /connector-plugins":
		reply(w, []map[string]string{{"class": "org.example.Other"}, {"class": class}})
	case "PUT /connector-plugins/" + class + "/config/validate":
		errs := []string{}
		if f.fault != "" {
			errs = append(errs, f.fault)
		}
		reply(w, map[string]any{"configs": []map[string]any{
			{"definition": map[string]string{"name": "internal.setting"}, "value": nil},
			{"value": map[string]any{"name": "database.hostname", "errors": errs}},
		}})
	case "POST /connectors":
		var sent struct {
			Config       map[string]string `json:"config"`
			InitialState string            `json:"initial_state"`
		}
		body(&sent)
		if f.exists {
			refuse(w, http.StatusConflict, "Connector "+debezium.DefaultConnector+" already exists")
			return
		}
		f.exists, f.config, f.state = true, sent.Config, sent.InitialState
		w.WriteHeader(http.StatusCreated)
	case "GET x":
		reply(w, map[string]any{"config": f.config})
	case "PUT x/config":
		f.config = nil
		body(&f.config)
		reply(w, map[string]any{})
	case "GET x/status":
		tasks := []map[string]string{}
		if f.task != "" {
			tasks = append(tasks, map[string]string{"state": f.task, "trace": f.trace})
		}
		reply(w, map[string]any{"connector": map[string]string{"state": f.state}, "tasks": tasks})
	case "PUT x/resume":
		if f.state != "RUNNING" {
			f.state, f.task = "RUNNING", "RUNNING"
			if f.onResume != "" {
				f.task = f.onResume
			}
		}
		w.WriteHeader(http.StatusAccepted)
	case "POST x/restart":
		if f.task == "FAILED" && f.onResume == "" {
			f.task, f.trace = "RUNNING", ""
		}
		w.WriteHeader(http.StatusAccepted)
	case "PUT x/stop":
		f.state = "STOPPED"
		if !f.stuck {
			f.task = ""
		}
		w.WriteHeader(http.StatusNoContent)
	case "DELETE x/offsets":
		if f.state != "STOPPED" {
			refuse(w, http.StatusBadRequest, "Connectors must be in the STOPPED state before their offsets can be modified.")
			return
		}
		f.offsets = false
		reply(w, map[string]string{"message": "reset"})
	case "PATCH x/offsets":
		f.patch = nil
		body(&f.patch)
		reply(w, map[string]string{"message": "altered"})
	case "DELETE x":
		f.exists, f.config = false, nil
		w.WriteHeader(http.StatusNoContent)
	default:
		refuse(w, http.StatusNotFound, "HTTP 404 Not Found")
	}
}

func reply(w http.ResponseWriter, body any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(body)
}

func refuse(w http.ResponseWriter, status int, message string) {
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]any{"error_code": status, "message": message})
}

func (f *fakeConnect) client(t *testing.T, change ...func(*debezium.ClientConfig)) *debezium.Client {
	t.Helper()
	config := debezium.ClientConfig{URL: f.URL + "/", Wait: 10 * time.Second}
	for _, change := range change {
		change(&config)
	}
	client, err := debezium.NewClient(config)
	require.NoError(t, err)
	return client
}

func impatient(config *debezium.ClientConfig) { config.Wait = 300 * time.Millisecond }

func TestNewClient(t *testing.T) {
	t.Parallel()

	for _, url := range []string{"", "127.0.0.1:8083", "localhost", "ftp://connect", "http://", "http://[::1"} {
		_, err := debezium.NewClient(debezium.ClientConfig{URL: url})
		require.ErrorContains(t, err, "like http://127.0.0.1:8083", url)
	}
}

func TestRegister(t *testing.T) {
	t.Parallel()

	t.Run("StartsOneThatRemembersNothing", func(t *testing.T) {
		t.Parallel()

		fake := newFake(t)
		fake.offsets = true // of one that was deleted by hand
		client := fake.client(t)
		require.NoError(t, client.Register(t.Context(), params()))
		require.False(t, fake.offsets)
		require.Equal(t, "a_slot", fake.config["slot.name"])
		status, err := client.Status(t.Context())
		require.NoError(t, err)
		require.True(t, status.Running())
		require.Empty(t, status.Fault())
	})

	t.Run("StartsOneAtThePositionOfItsSlot", func(t *testing.T) {
		t.Parallel()

		fake := newFake(t)
		given := params()
		given.From, given.TopicPrefix = 1<<53-1, "mine"
		require.NoError(t, fake.client(t).Register(t.Context(), given))
		text, err := json.Marshal(fake.patch)
		require.NoError(t, err)
		require.JSONEq(t, `{"offsets":[{"partition":{"server":"mine"},"offset":{"lsn":9007199254740991,"txId":0,"ts_usec":0}}]}`, string(text))
		reset, set := slices.Index(fake.requests, "DELETE x/offsets"), slices.Index(fake.requests, "PATCH x/offsets")
		require.True(t, reset >= 0 && reset < set && set < slices.Index(fake.requests, "PUT x/resume"))
	})

	t.Run("KeepsThePositionOfOneThatRuns", func(t *testing.T) {
		t.Parallel()

		fake := newFake(t)
		client := fake.client(t)
		require.NoError(t, client.Register(t.Context(), params()))
		fake.offsets = true
		given := params()
		given.Since = 42
		require.NoError(t, client.Register(t.Context(), given))
		require.True(t, fake.offsets)
		require.Contains(t, fake.config["snapshot.select.statement.overrides.public.outbox_events"], "'42'")
	})

	t.Run("FinishesWhatAnEarlierOneLeftHalfDone", func(t *testing.T) {
		t.Parallel()

		fake := newFake(t)
		fake.exists, fake.state, fake.offsets = true, "STOPPED", true
		require.NoError(t, fake.client(t).Register(t.Context(), params()))
		require.False(t, fake.offsets)
		require.Equal(t, "RUNNING", fake.task)
	})

	t.Run("StartsAgainWhatHasFailed", func(t *testing.T) {
		t.Parallel()

		fake := newFake(t)
		fake.exists, fake.state, fake.task, fake.trace, fake.offsets = true, "RUNNING", "FAILED", "the database was away", true
		require.NoError(t, fake.client(t).Register(t.Context(), params()))
		require.True(t, fake.offsets)
	})

	t.Run("TriesAgainWhatConnectCannotDoJustNow", func(t *testing.T) {
		t.Parallel()

		fake := newFake(t)
		rebalance := answer{status: http.StatusConflict, message: "Cannot complete request temporarily: a rebalance is expected"}
		starting := answer{status: http.StatusServiceUnavailable, message: "Worker is starting"}
		slow := answer{status: http.StatusInternalServerError, message: "Request timed out. The worker is currently polling"}
		fake.answers = map[string][]answer{
			"GET /connector-plugins": {starting, slow},
			"POST /connectors":       {rebalance, {breakOff: true}},
			"GET x/status":           {{breakOff: true}},
			"DELETE x/offsets":       {{status: http.StatusBadRequest, message: "Connectors must be in the STOPPED state"}},
			"PUT x/resume":           {rebalance},
		}
		require.NoError(t, fake.client(t).Register(t.Context(), params()))
		for request, left := range fake.answers {
			require.Empty(t, left, request)
		}
	})

	t.Run("TakesAConnectorThatWasMadeMeanwhile", func(t *testing.T) {
		t.Parallel()

		fake := newFake(t)
		fake.exists, fake.state = true, "STOPPED"
		fake.answers["GET x"] = []answer{{status: http.StatusNotFound, message: "not found"}} // as it was a moment ago
		require.NoError(t, fake.client(t).Register(t.Context(), params()))
		require.Equal(t, "a_slot", fake.config["slot.name"])
	})

	t.Run("SaysThatThePluginIsMissing", func(t *testing.T) {
		t.Parallel()

		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			reply(w, []map[string]string{{"class": "org.example.Other"}})
		}))
		t.Cleanup(server.Close)
		client, err := debezium.NewClient(debezium.ClientConfig{URL: server.URL})
		require.NoError(t, err)
		err = client.Register(t.Context(), params())
		require.ErrorIs(t, err, debezium.ErrNoPlugin)
		require.ErrorContains(t, err, "plugin.path")
	})

	t.Run("TellsWhatTheConnectorSaysButNoPassword", func(t *testing.T) {
		t.Parallel()

		fake := newFake(t)
		fake.fault = "FATAL: password authentication failed,\n with s@cret/%:${SLOT} for user \"onceledger_relay\""
		err := fake.client(t).Register(t.Context(), params())
		require.ErrorIs(t, err, debezium.ErrRefused)
		require.ErrorContains(t, err, `database.hostname: FATAL: password authentication failed, with *** for user "onceledger_relay"`)
		require.False(t, fake.exists)
	})

	t.Run("TellsWhatConnectSaysInOneLine", func(t *testing.T) {
		t.Parallel()

		fake := newFake(t)
		fake.answers["POST /connectors"] = []answer{{status: http.StatusBadRequest, message: "This worker\n does not support it " + strings.Repeat("ä", 10_000)}}
		err := fake.client(t).Register(t.Context(), params())
		require.ErrorContains(t, err, "register connector onceledger-outbox: Kafka Connect answered 400: This worker does not support it")
		require.Less(t, len(err.Error()), 700)
	})

	t.Run("TellsWhyTheTaskHasFailed", func(t *testing.T) {
		t.Parallel()

		fake := newFake(t)
		fake.onResume = "FAILED"
		fake.trace = "org.apache.kafka.connect.errors.ConnectException: no stream\n\tat io.debezium.A.b(A.java:1)\n" +
			"Caused by: java.lang.RuntimeException: x\n\tat A\nCaused by: org.postgresql.util.PSQLException: must have REPLICATION\n\t... 8 more\n"
		err := fake.client(t).Register(t.Context(), params())
		require.ErrorContains(t, err, "the connector's task has failed: org.apache.kafka.connect.errors.ConnectException: no stream "+
			"(org.postgresql.util.PSQLException: must have REPLICATION)")
		require.NotContains(t, err.Error(), "A.java")
	})

	t.Run("WaitsForTheTaskButNotForEver", func(t *testing.T) {
		t.Parallel()

		fake := newFake(t)
		fake.onResume = "UNASSIGNED"
		err := fake.client(t, impatient).Register(t.Context(), params())
		require.ErrorContains(t, err, "after 300ms the connector's task is UNASSIGNED")
	})

	t.Run("GivesUpOnARebalanceThatDoesNotEnd", func(t *testing.T) {
		t.Parallel()

		fake := newFake(t)
		for range 1000 {
			fake.answers["PUT x/resume"] = append(fake.answers["PUT x/resume"], answer{status: http.StatusConflict, message: "a rebalance is expected"})
		}
		require.ErrorContains(t, fake.client(t, impatient).Register(t.Context(), params()), "409: a rebalance is expected")
	})

	t.Run("SaysThatNobodyIsThere", func(t *testing.T) {
		t.Parallel()

		listener, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // closed at once
		require.NoError(t, err)
		require.NoError(t, listener.Close())
		client, err := debezium.NewClient(debezium.ClientConfig{URL: "http://" + listener.Addr().String()})
		require.NoError(t, err)
		for name, err := range map[string]error{
			"register": client.Register(t.Context(), params()),
			"remove":   client.Remove(t.Context()),
			"status":   func() error { _, err := client.Status(t.Context()); return err }(),
		} {
			require.ErrorIs(t, err, debezium.ErrUnreachable, name)
			require.ErrorContains(t, err, "connection refused")
			require.NotContains(t, err.Error(), "s@cret")
		}
	})

	t.Run("SaysThatAnAnswerDoesNotCome", func(t *testing.T) {
		t.Parallel()

		release := make(chan struct{})
		server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body)
			<-release
		}))
		t.Cleanup(server.Close)
		t.Cleanup(func() { close(release) })
		client, err := debezium.NewClient(debezium.ClientConfig{
			URL: server.URL, Wait: 300 * time.Millisecond, HTTP: &http.Client{Timeout: 50 * time.Millisecond},
		})
		require.NoError(t, err)
		require.ErrorIs(t, client.Register(t.Context(), params()), debezium.ErrUnreachable)
	})

	t.Run("SaysThatItIsSomethingElse", func(t *testing.T) {
		t.Parallel()

		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "<html>welcome</html>")
		}))
		t.Cleanup(server.Close)
		client, err := debezium.NewClient(debezium.ClientConfig{URL: server.URL})
		require.NoError(t, err)
		require.ErrorContains(t, client.Register(t.Context(), params()), "is no Kafka Connect")
	})

	t.Run("RefusesParametersBeforeItAsks", func(t *testing.T) {
		t.Parallel()

		fake := newFake(t)
		given := params()
		given.DatabaseURL = "postgres:///onceledger?host=/run"
		require.ErrorContains(t, fake.client(t).Register(t.Context(), given), "register connector onceledger-outbox: the relay's database URL")
		require.Empty(t, fake.requests)
	})
}

func TestRemoveConnector(t *testing.T) {
	t.Parallel()

	t.Run("LeavesNothing", func(t *testing.T) {
		t.Parallel()

		fake := newFake(t)
		client := fake.client(t)
		require.NoError(t, client.Register(t.Context(), params()))
		fake.offsets = true
		require.NoError(t, client.Remove(t.Context()))
		require.False(t, fake.exists)
		require.False(t, fake.offsets)
		require.NoError(t, client.Remove(t.Context()), "a second time")
		require.NoError(t, client.Register(t.Context(), params()))
	})

	t.Run("FinishesWhatAnEarlierOneLeftHalfDone", func(t *testing.T) {
		t.Parallel()

		fake := newFake(t)
		client := fake.client(t)
		require.NoError(t, client.Register(t.Context(), params()))
		fake.offsets = true
		fake.answers["DELETE x/offsets"] = []answer{{status: http.StatusForbidden, message: "no"}}
		require.ErrorContains(t, client.Remove(t.Context()), "remove connector onceledger-outbox: Kafka Connect answered 403: no")
		require.True(t, fake.exists, "without the connector nobody could delete its offsets")
		require.NoError(t, client.Remove(t.Context()))
		require.False(t, fake.exists)
		require.False(t, fake.offsets)
	})

	t.Run("DoesNotWaitForEverForATask", func(t *testing.T) {
		t.Parallel()

		fake := newFake(t)
		require.NoError(t, fake.client(t).Register(t.Context(), params()))
		fake.offsets, fake.stuck = true, true
		require.ErrorContains(t, fake.client(t, impatient).Remove(t.Context()), "remove connector onceledger-outbox: ")
		require.True(t, fake.offsets, "the task may write them again")
	})
}

func TestStatus(t *testing.T) {
	t.Parallel()

	for _, test := range []struct{ connector, task, fault string }{
		{"RUNNING", "RUNNING", ""},
		{"", "", "the connector is not registered"},
		{"RUNNING", "", "the connector has no task"},
		{"RUNNING", "UNASSIGNED", "the connector's task is UNASSIGNED"},
		{"RUNNING", "FAILED", "the connector's task has failed: why"},
		{"FAILED", "RUNNING", "the connector has failed: why"},
		{"PAUSED", "PAUSED", "the connector is PAUSED"},
		{"STOPPED", "", "the connector is STOPPED"},
	} {
		status := debezium.Status{Connector: test.connector, Task: test.task, Trace: "why"}
		require.Equal(t, test.fault, status.Fault())
		require.Equal(t, test.fault == "", status.Running())
	}

	t.Run("IsNotThatOfAnotherError", func(t *testing.T) {
		t.Parallel()

		fake := newFake(t)
		fake.answers["GET x/status"] = []answer{{status: http.StatusUnauthorized, message: "who are you"}}
		_, err := fake.client(t).Status(t.Context())
		require.ErrorContains(t, err, "ask for the state of connector onceledger-outbox: Kafka Connect answered 401: who are you")
		require.NotErrorIs(t, err, debezium.ErrUnreachable)
	})
}

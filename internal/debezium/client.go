package debezium

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"syscall"
	"time"
)

// DefaultConnector is the connector's name in Connect.
const DefaultConnector = "onceledger-outbox"

var (
	// ErrUnreachable is why nothing could be done: no Connect answers there.
	ErrUnreachable = errors.New("Kafka Connect is not reachable") //nolint:staticcheck // a name
	// ErrRefused is why the configuration is not taken, with the connector's reasons.
	ErrRefused = errors.New("the connector refuses its configuration")
	// ErrNoPlugin says that Connect runs without Debezium.
	ErrNoPlugin = errors.New("Kafka Connect has no Debezium connector for Postgres: put the plugin in its plugin.path and restart it") //nolint:staticcheck // a name
)

// ClientConfig says which connector of which Connect.
type ClientConfig struct {
	// URL is Connect's REST interface, such as http://127.0.0.1:8083.
	URL string
	// Connector is DefaultConnector when it is "".
	Connector string
	// Wait bounds how long Register and Remove wait for Connect to have done
	// what it was asked. 0 means a minute.
	Wait time.Duration
	// HTTP is used for the requests. nil means one that gives up a request that
	// is not answered in 20 seconds.
	HTTP *http.Client
}

// Client speaks to Connect's REST interface. It is safe for concurrent use.
type Client struct {
	config ClientConfig
}

// NewClient makes a client. It does not connect yet.
func NewClient(config ClientConfig) (*Client, error) {
	parsed, err := url.Parse(config.URL)
	if err != nil || (parsed.Scheme != "http" && parsed.Scheme != "https") || parsed.Host == "" {
		return nil, errors.New("the address of Kafka Connect must be a URL, like http://127.0.0.1:8083")
	}
	config.URL = strings.TrimSuffix(config.URL, "/")
	if config.Connector == "" {
		config.Connector = DefaultConnector
	}
	if config.Wait == 0 {
		config.Wait = time.Minute
	}
	if config.HTTP == nil {
		config.HTTP = &http.Client{Timeout: 20 * time.Second}
	}
	return &Client{config: config}, nil
}

// The states that Connect tells of connectors and tasks.
const (
	stateRunning = "RUNNING"
	stateFailed  = "FAILED"
	stateStopped = "STOPPED"
)

// Status is what Connect says of the connector.
type Status struct {
	// Connector and Task are states, such as RUNNING, PAUSED or FAILED. "" means
	// that there is none.
	Connector, Task string
	// Trace says why one of them is FAILED.
	Trace string
}

// Running tells whether the connector and its task run. A connector without a
// task runs nothing.
func (s Status) Running() bool { return s.Connector == stateRunning && s.Task == stateRunning }

// Fault says why nothing is published, as far as Connect knows; "" if it knows
// of nothing.
func (s Status) Fault() string {
	switch {
	case s.Running():
		return ""
	case s.Connector == "":
		return "the connector is not registered"
	case s.Connector == stateFailed:
		return "the connector has failed: " + s.Trace
	case s.Task == stateFailed:
		return "the connector's task has failed: " + s.Trace
	case s.Connector != stateRunning:
		return "the connector is " + s.Connector
	case s.Task == "":
		return "the connector has no task"
	default:
		return "the connector's task is " + s.Task
	}
}

// Status asks for the connector's state. A connector that is not registered is
// no error.
func (c *Client) Status(ctx context.Context) (Status, error) {
	status, err := c.status(ctx)
	if err == nil && status.Connector != "" && !status.Running() {
		// Connect tells of one that was deleted for a while.
		if err = c.do(ctx, http.MethodGet, c.path(""), nil, nil); isMissing(err) {
			return Status{}, nil
		}
	}
	if err != nil {
		return Status{}, fmt.Errorf("ask for the state of connector %s: %w", c.config.Connector, err)
	}
	return status, nil
}

func (c *Client) status(ctx context.Context) (Status, error) {
	type state struct {
		State string `json:"state"`
		Trace string `json:"trace"`
	}
	var answer struct {
		Connector state   `json:"connector"`
		Tasks     []state `json:"tasks"`
	}
	err := c.do(ctx, http.MethodGet, c.path("/status"), nil, &answer)
	if isMissing(err) {
		return Status{}, nil
	}
	if err != nil {
		return Status{}, err
	}
	status := Status{Connector: answer.Connector.State, Trace: reason(answer.Connector.Trace)}
	if len(answer.Tasks) > 0 {
		status.Task = answer.Tasks[0].State
		if status.Trace == "" {
			status.Trace = reason(answer.Tasks[0].Trace)
		}
	}
	return status, nil
}

// reason is a stack trace's first line, and the last cause that it names.
func reason(trace string) string {
	var first, cause string
	for line := range strings.Lines(trace) {
		line = strings.TrimSpace(line)
		if first == "" {
			first = line
		}
		if text, ok := strings.CutPrefix(line, "Caused by: "); ok {
			cause = text
		}
	}
	if cause != "" && !strings.Contains(first, cause) {
		return first + " (" + cause + ")"
	}
	return first
}

// Register has Connect run the connector, and returns when its task runs: it
// then makes or takes the slot, publishes what Params.Since asks for, and goes on
// with the log.
//
// A connector that is not there, or that a Register or Remove left half-done
// (STOPPED), starts without a memory of where it once was, whatever Connect has
// kept, or with Params.From for its memory. One that is there gets the configuration, is started if it was paused or
// has failed, and goes on from where it is; Since is then for the case that it
// finds its slot gone.
func (c *Client) Register(ctx context.Context, params Params) error {
	config, password, err := connectorConfig(params)
	if err != nil {
		return fmt.Errorf("register connector %s: %w", c.config.Connector, err)
	}
	ctx, cancel := context.WithTimeout(ctx, c.config.Wait)
	defer cancel()
	if err := c.register(ctx, config, params.From); err != nil {
		return fmt.Errorf("register connector %s: %w", c.config.Connector, redact(err, password))
	}
	return nil
}

func (c *Client) register(ctx context.Context, config map[string]string, from uint64) error {
	if err := c.validate(ctx, config); err != nil {
		return err
	}
	exists, before, err := c.find(ctx)
	if err != nil {
		return err
	}
	if !exists || before.Connector == stateStopped {
		err = c.startAnew(ctx, config, from, !exists)
	} else {
		err = c.carryOn(ctx, config)
	}
	if err != nil {
		return err
	}

	failed := before.Connector == stateFailed || before.Task == stateFailed
	return c.wait(ctx, func(now Status) (bool, error) {
		if now.Running() {
			return true, nil
		}
		// What had failed before is still told for a moment.
		if !failed && (now.Connector == stateFailed || now.Task == stateFailed) {
			return false, errors.New(now.Fault())
		}
		return false, nil
	})
}

// validate has the plugin look at the configuration, which includes a login to
// the database. Connect does the same before it takes one, but what it says of
// what is wrong is a list of all classes, or nothing that helps.
func (c *Client) validate(ctx context.Context, config map[string]string) error {
	var answer struct {
		Configs []struct {
			Value struct {
				Name   string   `json:"name"`
				Errors []string `json:"errors"`
			} `json:"value"`
		} `json:"configs"`
	}
	err := c.try(ctx, func() error {
		class := config["connector.class"]
		var plugins []struct {
			Class string `json:"class"`
		}
		if err := c.do(ctx, http.MethodGet, "/connector-plugins", nil, &plugins); err != nil {
			return err
		}
		for _, plugin := range plugins {
			if plugin.Class == class {
				named := maps.Clone(config)
				named["name"] = c.config.Connector
				return c.do(ctx, http.MethodPut, "/connector-plugins/"+class+"/config/validate", named, &answer)
			}
		}
		return ErrNoPlugin
	})
	if err != nil {
		return err
	}
	var faults []string
	for _, setting := range answer.Configs {
		for _, fault := range setting.Value.Errors {
			faults = append(faults, setting.Value.Name+": "+oneLine(fault))
		}
	}
	if len(faults) > 0 {
		return fmt.Errorf("%w: %s", ErrRefused, strings.Join(faults, "; "))
	}
	return nil
}

// find asks whether the connector is there, and for its state. A state alone
// would not do: it is told for a while after a connector was deleted.
func (c *Client) find(ctx context.Context) (exists bool, status Status, err error) {
	err = c.try(ctx, func() error {
		err := c.do(ctx, http.MethodGet, c.path(""), nil, nil)
		if exists = err == nil; isMissing(err) {
			return nil
		}
		if err == nil {
			status, err = c.status(ctx)
		}
		return err
	})
	return exists, status, err
}

// startAnew lets the connector exist before it runs, for only then can what
// Connect has kept of an earlier one be deleted.
func (c *Client) startAnew(ctx context.Context, config map[string]string, from uint64, create bool) error {
	err := c.try(ctx, func() error {
		if create {
			err := c.do(ctx, http.MethodPost, "/connectors",
				map[string]any{"name": c.config.Connector, "config": config, "initial_state": stateStopped}, nil)
			// An answer that got lost, or somebody else at the same time.
			if err == nil || !isStatus(err, http.StatusConflict) || !strings.Contains(err.Error(), "already exists") {
				return err
			}
			create = false
		}
		return c.do(ctx, http.MethodPut, c.path("/config"), config, nil)
	})
	if err != nil {
		return err
	}
	if err := c.forgetOffsets(ctx); err != nil {
		return err
	}
	if from != 0 {
		err := c.try(ctx, func() error {
			return c.do(ctx, http.MethodPatch, c.path("/offsets"), startingAt(config["topic.prefix"], from), nil)
		})
		if err != nil {
			return err
		}
	}
	return c.try(ctx, func() error { return c.do(ctx, http.MethodPut, c.path("/resume"), nil, nil) })
}

// startingAt is what a connector stores that has read the log up to a position
// and nothing yet from there on.
func startingAt(topicPrefix string, lsn uint64) any {
	type object map[string]any
	return object{"offsets": []object{{
		"partition": object{"server": topicPrefix},
		"offset":    object{"lsn": lsn, "txId": 0, "ts_usec": 0},
	}}}
}

func (c *Client) carryOn(ctx context.Context, config map[string]string) error {
	for _, step := range []struct {
		method, path string
		body         any
	}{
		{http.MethodPut, c.path("/config"), config},
		{http.MethodPut, c.path("/resume"), nil},
		// The same configuration again starts nothing that has failed.
		{http.MethodPost, c.path("/restart?includeTasks=true&onlyFailed=true"), nil},
	} {
		err := c.try(ctx, func() error { return c.do(ctx, step.method, step.path, step.body, nil) })
		if err != nil && !isMissing(err) { // a connector that has no state yet cannot be restarted
			return err
		}
	}
	return nil
}

// Remove stops the connector, has Connect forget how far it was, and deletes it.
// The slot stays, and may be in use for a moment longer.
func (c *Client) Remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, c.config.Wait)
	defer cancel()
	if err := c.remove(ctx); err != nil && !isMissing(err) {
		return fmt.Errorf("remove connector %s: %w", c.config.Connector, err)
	}
	return nil
}

func (c *Client) remove(ctx context.Context) error {
	err := c.try(ctx, func() error { return c.do(ctx, http.MethodPut, c.path("/stop"), nil, nil) })
	if err != nil {
		return err
	}
	if err := c.forgetOffsets(ctx); err != nil {
		return err
	}
	return c.try(ctx, func() error { return c.do(ctx, http.MethodDelete, c.path(""), nil, nil) })
}

// forgetOffsets is for a connector that is stopped or about to be.
func (c *Client) forgetOffsets(ctx context.Context) error {
	err := c.wait(ctx, func(now Status) (bool, error) {
		// One that was made just now has no state yet, but no task either.
		return (now.Connector == stateStopped || now.Connector == "") && now.Task == "", nil
	})
	if err != nil {
		return err
	}
	return c.try(ctx, func() error { return c.do(ctx, http.MethodDelete, c.path("/offsets"), nil, nil) })
}

func (c *Client) path(rest string) string {
	return "/connectors/" + url.PathEscape(c.config.Connector) + rest
}

// pollEvery is how often is asked while waiting.
const pollEvery = 100 * time.Millisecond

// try repeats what Connect may be able to do a moment later, until ctx is done.
func (c *Client) try(ctx context.Context, request func() error) error {
	for {
		err := request()
		if err == nil || !isTransient(err) {
			return err
		}
		if pause(ctx) != nil {
			return err
		}
	}
}

// wait asks for the state until done says that it is reached, or cannot be.
func (c *Client) wait(ctx context.Context, done func(Status) (bool, error)) error {
	var last Status
	for {
		err := c.try(ctx, func() (err error) {
			last, err = c.status(ctx)
			return err
		})
		if err != nil {
			return err
		}
		reached, err := done(last)
		if err != nil || reached {
			return err
		}
		if err := pause(ctx); err != nil {
			return fmt.Errorf("after %v %s: %w", c.config.Wait, last.waitedFor(), err)
		}
	}
}

// waitedFor describes a state that stays.
func (s Status) waitedFor() string {
	if s.Connector == stateStopped && s.Task != "" {
		return "the connector is STOPPED and has a task that is " + s.Task
	}
	if fault := s.Fault(); fault != "" {
		return fault
	}
	return "the connector still runs"
}

func pause(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(pollEvery):
		return nil
	}
}

// answerError is a refusal by Connect.
type answerError struct {
	status  int
	message string
}

func (e *answerError) Error() string {
	return fmt.Sprintf("Kafka Connect answered %d: %s", e.status, e.message)
}

func isStatus(err error, status int) bool {
	var answer *answerError
	return errors.As(err, &answer) && answer.status == status
}

func isMissing(err error) bool { return isStatus(err, http.StatusNotFound) }

// transient are parts of Connect's messages with status 500 (a rebalance or a
// start under way) and 400 (a task that is still ending).
var transient = []string{"timed out", "momentarily", "stale", "zombie fencing", "STOPPED state"}

func isTransient(err error) bool {
	var answer *answerError
	if !errors.As(err, &answer) {
		// Nobody there is told at once. An answer that does not come is asked for
		// again: each request may be repeated.
		var broken net.Error
		return errors.As(err, &broken) && broken.Timeout() ||
			errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET)
	}
	if answer.status == http.StatusConflict || answer.status == http.StatusServiceUnavailable {
		return true
	}
	return slices.ContainsFunc(transient, func(part string) bool { return strings.Contains(answer.message, part) })
}

// do sends one request. Its error is an answerError if Connect has refused it.
func (c *Client) do(ctx context.Context, method, path string, body, answer any) error {
	var content io.Reader
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return err
		}
		content = bytes.NewReader(text)
	}
	request, err := http.NewRequestWithContext(ctx, method, c.config.URL+path, content)
	if err != nil {
		return err
	}
	if body != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	response, err := c.config.HTTP.Do(request)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUnreachable, err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(io.LimitReader(response.Body, 1<<20))
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUnreachable, err)
	}
	if response.StatusCode >= 300 {
		return &answerError{response.StatusCode, message(text)}
	}
	if answer == nil {
		return nil
	}
	if err := json.Unmarshal(text, answer); err != nil {
		return fmt.Errorf("%s is no Kafka Connect: its answer is not the JSON of one: %w", c.config.URL, err)
	}
	return nil
}

// message is what Connect says in a refusal, in one line.
func message(text []byte) string {
	var refusal struct {
		Message string `json:"message"`
	}
	said := string(text)
	if json.Unmarshal(text, &refusal) == nil && refusal.Message != "" {
		said = refusal.Message
	}
	return oneLine(said)
}

func oneLine(said string) string {
	said = strings.Join(strings.Fields(said), " ")
	const enough = 500
	if len(said) > enough {
		said = strings.ToValidUTF8(said[:enough], "") + " …"
	}
	return said
}

// redacted is an error whose text has lost the password.
type redacted struct {
	error

	password string
}

func redact(err error, password string) error {
	if password == "" {
		return err
	}
	return &redacted{err, password}
}

func (r *redacted) Error() string {
	return strings.ReplaceAll(r.error.Error(), r.password, "***")
}

func (r *redacted) Unwrap() error { return r.error }

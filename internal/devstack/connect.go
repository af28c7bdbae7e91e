package devstack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/onceledger/onceledger/deploy"
)

// connectReadyTimeout bounds a start, which takes some eight seconds on a
// machine that is idle.
const connectReadyTimeout = 5 * time.Minute

// ConnectConfig describes a Kafka Connect worker.
type ConnectConfig struct {
	// Dir is the worker's folder: settings, port and log. What its connectors
	// are and how far they got is in Kafka. Absent, it is made.
	Dir string
	// Bootstrap is where Kafka is, as host:port separated by commas.
	Bootstrap string
	// Settings are further settings, over those of
	// deploy/connect/worker.properties.
	Settings map[string]string
	// Heap is the most memory for the worker's objects. "" means 512m.
	Heap string

	// JavaHome is a Java installation (JAVA_HOME). "" means the java on PATH.
	JavaHome string
	// FallbackDir holds the jars when there is no user cache folder that can be
	// written to. "" means Dir.
	FallbackDir string

	Logf Logf
}

// Connect is a Kafka Connect worker with the Debezium connector for Postgres as
// a plugin. It is for one goroutine at a time, except URL.
type Connect struct {
	config    ConnectConfig
	java      string
	jars      string
	connector string // folder with the plugin's folder
	port      int
	lock      *FileLock

	mutex   sync.Mutex
	process *Process
}

// StartConnect starts a worker and returns when its REST interface answers. The
// worker ends when this process does. A second start on a folder in use fails
// with ErrLocked.
func StartConnect(ctx context.Context, config ConnectConfig) (_ *Connect, err error) {
	if config.Heap == "" {
		config.Heap = "512m"
	}
	if config.Dir, err = filepath.Abs(config.Dir); err != nil {
		return nil, err
	}
	if config.FallbackDir == "" {
		config.FallbackDir = config.Dir
	}
	c := &Connect{config: config}
	javaConfig := JavaConfig{Home: config.JavaHome, FallbackDir: config.FallbackDir, Logf: config.Logf}
	if c.java, err = FindJava(ctx, javaConfig); err != nil {
		return nil, err
	}
	if c.jars, err = FetchJars(ctx, javaConfig, ConnectJars); err != nil {
		return nil, err
	}
	if c.connector, err = FetchJars(ctx, javaConfig, DebeziumJars); err != nil {
		return nil, err
	}

	if err := os.MkdirAll(config.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make Connect's folder: %w", err)
	}
	if c.lock, err = Lock(filepath.Join(config.Dir, "lock")); err != nil {
		return nil, fmt.Errorf("start Connect: %w", err)
	}
	defer func() {
		if err != nil {
			c.Kill()
			_ = c.lock.Unlock()
		}
	}()
	if err := os.WriteFile(c.loggingFile(), []byte(deploy.JavaLogging), 0o600); err != nil {
		return nil, fmt.Errorf("write the log's settings: %w", err)
	}
	if err := c.startAnyPort(ctx); err != nil {
		return nil, err
	}
	return c, nil
}

// URL is the worker's REST interface, with no slash at the end.
func (c *Connect) URL() string {
	return "http://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(c.port))
}

// LogFile is where the worker and its connectors write what they have to say.
func (c *Connect) LogFile() string { return filepath.Join(c.config.Dir, "connect.log") }

// Pid is the process id of the worker, or of the last process that was it.
func (c *Connect) Pid() int { return c.current().Pid() }

// Done is closed when the process has ended, wanted or not. Start makes another
// one.
func (c *Connect) Done() <-chan struct{} { return c.current().Done() }

// Err says how the process ended. Only after Done.
func (c *Connect) Err() error { return c.current().Err() }

// Kill ends the worker as a crash would, and returns when it is gone.
func (c *Connect) Kill() {
	if process := c.current(); process.running() {
		process.Kill()
	}
}

// Start starts the worker again on the same port, if it has ended, and returns
// when it answers. Connectors and their tasks come up after that.
func (c *Connect) Start(ctx context.Context) error {
	if !c.current().running() {
		if err := c.startProcess(ctx); err != nil {
			return err
		}
	}
	return c.waitReady(ctx)
}

// Stop ends the worker in order, or by force when ctx is done first. The folder
// is free afterwards.
func (c *Connect) Stop(ctx context.Context) error {
	defer c.lock.Unlock()
	process := c.current()
	if !process.running() {
		return nil
	}
	if err := process.Stop(ctx, syscall.SIGTERM); err != nil {
		return fmt.Errorf("stop Connect: %w", err)
	}
	return nil
}

func (c *Connect) current() *Process {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return c.process
}

func (c *Connect) loggingFile() string { return filepath.Join(c.config.Dir, "log4j2.properties") }
func (c *Connect) portFile() string    { return filepath.Join(c.config.Dir, "port") }

// startAnyPort starts the worker on the remembered port, or on a free one.
func (c *Connect) startAnyPort(ctx context.Context) error {
	c.port = rememberedPort(c.portFile())
	for attempt := 0; ; attempt++ {
		port, err := keepOrChoosePort(ctx, c.port, nil)
		if err != nil {
			return err
		}
		if c.port != 0 && port != c.port {
			c.config.Logf.printf("port %d is taken, choosing another for Connect", c.port)
		}
		c.port = port
		if err := rememberPort(c.portFile(), port); err != nil {
			return err
		}
		err = c.Start(ctx)
		if err == nil || ctx.Err() != nil || attempt == 3 {
			return err
		}
		c.Kill()
		if portIsFree(ctx, port) { // then it was something else
			return err
		}
	}
}

func (c *Connect) startProcess(ctx context.Context) error {
	settings := map[string]string{
		"bootstrap.servers": c.config.Bootstrap,
		"listeners":         c.URL(),
		"plugin.path":       c.connector,
	}
	for name, value := range c.config.Settings {
		settings[name] = value
	}
	file := filepath.Join(c.config.Dir, "worker.properties")
	if err := os.WriteFile(file, properties(deploy.ConnectWorker, settings), 0o600); err != nil {
		return fmt.Errorf("write Connect's settings: %w", err)
	}
	program := javaProgram{
		java: c.java, jars: c.jars, logging: c.loggingFile(), heap: c.config.Heap,
		main: "org.apache.kafka.connect.cli.ConnectDistributed",
	}
	process, err := program.start(ctx, c.LogFile(), file)
	if err != nil {
		return fmt.Errorf("start Connect: %w", err)
	}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.process = process
	return nil
}

// waitReady returns when the worker lists its connectors: it does that only
// once it is a member of its group and has read its topics.
func (c *Connect) waitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, connectReadyTimeout)
	defer cancel()
	process := c.current()
	for {
		err := c.ask(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-process.Done():
			return fmt.Errorf("start Connect: it ended (%w); its log ends with (%s):\n%s",
				process.Err(), c.LogFile(), lastLines(c.LogFile()))
		case <-ctx.Done():
			return fmt.Errorf("start Connect: %w: %w (its log is %s)", ctx.Err(), err, c.LogFile())
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (c *Connect) ask(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.URL()+"/connectors", nil)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(response.Body, 2000))
	if err == nil && response.StatusCode != http.StatusOK {
		err = errors.New(response.Status + ": " + strings.TrimSpace(string(answer)))
	}
	return err
}

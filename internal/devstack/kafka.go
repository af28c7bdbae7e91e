package devstack

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/onceledger/onceledger/deploy"
)

const (
	// kafkaReadyTimeout bounds a start. A broker takes four seconds on a machine
	// that is idle, three take fifteen; recovery after a crash takes longer.
	kafkaReadyTimeout = 5 * time.Minute
	// portHeldTimeout is how long a port may be held by a process whose parent
	// was killed just now.
	portHeldTimeout = 3 * time.Second
	// maxJavaLog is when a log file is set aside at the next start.
	maxJavaLog = 16 << 20
)

// KafkaConfig describes a cluster of Apache Kafka.
type KafkaConfig struct {
	// Dir is the cluster's folder: each broker's data, ports and log. Absent, it
	// is made.
	Dir string
	// Brokers is 1, or 3 with replication 3 and min.insync.replicas 2. 0 means 1.
	// A folder keeps the number it was made with.
	Brokers int
	// Settings are further broker settings, over those of
	// deploy/kafka/server.properties, such as {"log.retention.hours": "1"}.
	Settings map[string]string
	// Heap is the most memory for each broker's objects. "" means 256m.
	Heap string

	// JavaHome is a Java installation (JAVA_HOME). "" means the java on PATH.
	JavaHome string
	// FallbackDir holds the jars when there is no user cache folder that can be
	// written to. "" means Dir.
	FallbackDir string

	Logf Logf
}

// Kafka is a cluster of Apache Kafka, whose nodes are numbered from 1. Each is
// broker and controller. Its methods may be called by several goroutines.
type Kafka struct {
	config  KafkaConfig
	java    string
	jars    string
	cluster string // the cluster's id
	lock    *FileLock
	nodes   []*kafkaNode
}

type kafkaNode struct {
	id         int
	dir        string
	port       int // for clients
	controller int // port for the other nodes' controllers

	mutex   sync.Mutex
	process *Process // the last one started; nil before the first
	paused  bool
}

// StartKafka starts a cluster and returns when every broker says that all of
// them are there. The first start in a folder formats the storage. Ports are
// those of last time, or free ones. What was acknowledged is there after a
// crash too.
//
// The brokers end when this process does. A second start on a folder in use
// fails with ErrLocked.
func StartKafka(ctx context.Context, config KafkaConfig) (_ *Kafka, err error) {
	if config.Brokers == 0 {
		config.Brokers = 1
	}
	if config.Brokers != 1 && config.Brokers != 3 {
		return nil, fmt.Errorf("start Kafka: %d brokers are wanted: one, or three", config.Brokers)
	}
	if config.Heap == "" {
		config.Heap = "256m"
	}
	if config.Dir, err = filepath.Abs(config.Dir); err != nil {
		return nil, err
	}
	if config.FallbackDir == "" {
		config.FallbackDir = config.Dir
	}
	k := &Kafka{config: config}
	javaConfig := JavaConfig{Home: config.JavaHome, FallbackDir: config.FallbackDir, Logf: config.Logf}
	if k.java, err = FindJava(ctx, javaConfig); err != nil {
		return nil, err
	}
	if k.jars, err = FetchJars(ctx, javaConfig, KafkaJars); err != nil {
		return nil, err
	}

	if err := os.MkdirAll(config.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the cluster's folder: %w", err)
	}
	if k.lock, err = Lock(filepath.Join(config.Dir, "lock")); err != nil {
		return nil, fmt.Errorf("start Kafka: %w", err)
	}
	defer func() {
		if err != nil {
			k.killAll()
			_ = k.lock.Unlock()
		}
	}()
	if err := k.load(); err != nil {
		return nil, err
	}
	if err := os.WriteFile(k.loggingFile(), []byte(deploy.JavaLogging), 0o600); err != nil {
		return nil, fmt.Errorf("write the log's settings: %w", err)
	}
	if err := k.startAnyPorts(ctx); err != nil {
		return nil, fmt.Errorf("start Kafka: %w", err)
	}
	return k, nil
}

// Bootstrap is what clients connect to: host:port of each broker, separated by
// commas.
func (k *Kafka) Bootstrap() string {
	var addrs []string
	for _, node := range k.nodes {
		addrs = append(addrs, node.addr())
	}
	return strings.Join(addrs, ",")
}

// Brokers is the number of nodes, which run or not.
func (k *Kafka) Brokers() int { return len(k.nodes) }

// Addr is where a node listens for clients.
func (k *Kafka) Addr(node int) string { return k.node(node).addr() }

// Pid is the process id of a node, or of the last process that was one.
func (k *Kafka) Pid(node int) int {
	n := k.node(node)
	n.mutex.Lock()
	defer n.mutex.Unlock()
	return n.process.Pid()
}

// Done is closed when a node's process has ended, wanted or not. Start makes
// another one.
func (k *Kafka) Done(node int) <-chan struct{} {
	n := k.node(node)
	n.mutex.Lock()
	defer n.mutex.Unlock()
	return n.process.Done()
}

// Err says how a node's process ended. Only after Done.
func (k *Kafka) Err(node int) error {
	n := k.node(node)
	n.mutex.Lock()
	defer n.mutex.Unlock()
	return n.process.Err()
}

// LogFile is where a node writes what it has to say.
func (k *Kafka) LogFile(node int) string { return k.node(node).logFile() }

// Kill ends a node as a crash would, and returns when it is gone.
func (k *Kafka) Kill(node int) {
	n := k.node(node)
	n.mutex.Lock()
	defer n.mutex.Unlock()
	n.process.Kill()
}

// Pause stops a node's process in its tracks: to the others it is gone, and it
// does not know. Resume lets it go on.
func (k *Kafka) Pause(node int) error { return k.node(node).pause(true) }

// Resume ends a Pause.
func (k *Kafka) Resume(node int) error { return k.node(node).pause(false) }

// Start starts a node that ended, and returns when it is part of the cluster
// again, with all others that run. It is no error when the node runs.
func (k *Kafka) Start(ctx context.Context, node int) error {
	n := k.node(node)
	if err := k.startNode(ctx, n); err != nil {
		return err
	}
	return k.waitReady(ctx, n)
}

// StartAll starts those nodes that have ended, and returns when all are part of
// the cluster.
func (k *Kafka) StartAll(ctx context.Context) error {
	for _, node := range k.nodes {
		if err := k.startNode(ctx, node); err != nil {
			return err
		}
	}
	return k.waitReady(ctx, k.nodes...)
}

// WaitReady returns when every node that runs says that all of them are there.
func (k *Kafka) WaitReady(ctx context.Context) error {
	return k.waitReady(ctx, k.nodes...)
}

// Stop ends all nodes in order, those that have not ended when ctx is done by
// force. The folder is free afterwards. A cluster of which nodes were killed
// before has no quorum to say goodbye to, and waits for ctx.
func (k *Kafka) Stop(ctx context.Context) error {
	defer k.lock.Unlock()
	faults := make([]error, len(k.nodes))
	var stops sync.WaitGroup
	for i, node := range k.nodes {
		stops.Go(func() { faults[i] = node.stop(ctx) })
	}
	stops.Wait()
	return errors.Join(faults...)
}

func (k *Kafka) node(id int) *kafkaNode { return k.nodes[id-1] }

func (k *Kafka) loggingFile() string { return filepath.Join(k.config.Dir, "log4j2.properties") }

func (n *kafkaNode) addr() string {
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(n.port))
}

func (n *kafkaNode) dataDir() string        { return filepath.Join(n.dir, "data") }
func (n *kafkaNode) logFile() string        { return filepath.Join(n.dir, "kafka.log") }
func (n *kafkaNode) settingsFile() string   { return filepath.Join(n.dir, "server.properties") }
func (n *kafkaNode) portFile() string       { return filepath.Join(n.dir, "port") }
func (n *kafkaNode) controllerFile() string { return filepath.Join(n.dir, "controller-port") }

func (n *kafkaNode) running() bool {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	return n.process.running()
}

func (n *kafkaNode) pause(wanted bool) error {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	signal := syscall.SIGCONT
	if wanted {
		signal = syscall.SIGSTOP
	}
	if err := syscall.Kill(n.process.Pid(), signal); err != nil {
		return fmt.Errorf("signal broker %d: %w", n.id, err)
	}
	n.paused = wanted
	return nil
}

func (n *kafkaNode) stop(ctx context.Context) error {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	if !n.process.running() {
		return nil
	}
	if n.paused { // it could not hear us
		_ = syscall.Kill(n.process.Pid(), syscall.SIGCONT)
		n.paused = false
	}
	if err := n.process.Stop(ctx, syscall.SIGTERM); err != nil {
		return fmt.Errorf("stop broker %d: %w", n.id, err)
	}
	return nil
}

// killAll leaves nothing running, and nothing remembered of what ran.
func (k *Kafka) killAll() {
	for _, node := range k.nodes {
		node.mutex.Lock()
		if node.process.running() {
			node.process.Kill()
		}
		node.process = nil
		node.mutex.Unlock()
	}
}

// load reads the cluster's id and the nodes' ports, making an id for a new
// folder.
func (k *Kafka) load() error {
	// The id is written before anything is formatted with it.
	file := filepath.Join(k.config.Dir, "cluster")
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		text = fmt.Appendf(nil, "%s %d\n", newKafkaID(), k.config.Brokers)
		err = writeAndRename(file, text)
	}
	if err != nil {
		return fmt.Errorf("read the cluster's id: %w", err)
	}
	var brokers int
	if _, err := fmt.Sscan(string(text), &k.cluster, &brokers); err != nil {
		return fmt.Errorf("read the cluster's id: %s holds %q: %w", file, text, err)
	}
	if brokers != k.config.Brokers {
		return fmt.Errorf("%s holds a cluster of %d, and %d are wanted: its topics would not become replicated by that; "+
			"ask for %d, or use another folder", k.config.Dir, brokers, k.config.Brokers, brokers)
	}
	for id := 1; id <= brokers; id++ {
		node := &kafkaNode{id: id, dir: filepath.Join(k.config.Dir, "broker-"+strconv.Itoa(id))}
		if err := os.MkdirAll(node.dir, 0o700); err != nil {
			return fmt.Errorf("make a broker's folder: %w", err)
		}
		node.port = rememberedPort(node.portFile())
		node.controller = rememberedPort(node.controllerFile())
		k.nodes = append(k.nodes, node)
	}
	return nil
}

// newKafkaID is an id as Kafka makes them: 16 bytes in base64 for URLs, with no
// dash in front, which some tool would take for a flag.
func newKafkaID() string {
	var id [16]byte
	for {
		_, _ = rand.Read(id[:])
		if text := base64.RawURLEncoding.EncodeToString(id[:]); text[0] != '-' {
			return text
		}
	}
}

func writeAndRename(path string, text []byte) error {
	if err := os.WriteFile(path+".new", text, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// startAnyPorts starts all nodes on the remembered ports, or on free ones.
func (k *Kafka) startAnyPorts(ctx context.Context) error {
	for attempt := 0; ; attempt++ {
		if err := k.choosePorts(ctx); err != nil {
			return err
		}
		err := k.formatAndStart(ctx)
		if err == nil || ctx.Err() != nil || attempt == 3 {
			return err
		}
		k.killAll()
		// Was it a port that somebody else took since it was chosen?
		taken := slices.ContainsFunc(k.ports(), func(port int) bool { return !portIsFree(ctx, port) })
		if !taken {
			return err
		}
	}
}

func (k *Kafka) ports() []int {
	var ports []int
	for _, node := range k.nodes {
		ports = append(ports, node.port, node.controller)
	}
	return ports
}

// choosePorts gives each node its two ports, which all nodes are told.
func (k *Kafka) choosePorts(ctx context.Context) error {
	chosen := k.ports()
	choose := func(port *int, file string) error {
		free, err := keepOrChoosePort(ctx, *port, chosen)
		if err != nil {
			return err
		}
		if *port != 0 && free != *port {
			k.config.Logf.printf("port %d is taken, choosing another for Kafka", *port)
		}
		*port = free
		chosen = append(chosen, free)
		return rememberPort(file, free)
	}
	for _, node := range k.nodes {
		if err := choose(&node.port, node.portFile()); err != nil {
			return err
		}
		if err := choose(&node.controller, node.controllerFile()); err != nil {
			return err
		}
	}
	return nil
}

// keepOrChoosePort returns the remembered port, once nobody holds it any more,
// or else a free one that is not among others.
func keepOrChoosePort(ctx context.Context, remembered int, others []int) (int, error) {
	for deadline := time.Now().Add(portHeldTimeout); remembered != 0; {
		if portIsFree(ctx, remembered) {
			return remembered, nil
		}
		if time.Now().After(deadline) {
			break
		}
		if err := pause(ctx, 50*time.Millisecond); err != nil {
			return 0, err
		}
	}
	for {
		free, err := FreePort(ctx)
		if err != nil || !slices.Contains(others, free) {
			return free, err
		}
	}
}

func portIsFree(ctx context.Context, port int) bool {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	if err != nil {
		return false
	}
	return listener.Close() == nil
}

func (k *Kafka) formatAndStart(ctx context.Context) error {
	for _, node := range k.nodes {
		if err := k.format(ctx, node); err != nil {
			return err
		}
	}
	return k.StartAll(ctx)
}

// format makes a node's storage if there is none. It works aside and renames,
// so that a folder named data is always a whole one.
func (k *Kafka) format(ctx context.Context, node *kafkaNode) error {
	if _, err := os.Stat(node.dataDir()); err == nil {
		return nil
	}
	k.config.Logf.printf("formatting the storage of Kafka broker %d in %s", node.id, node.dir)
	fresh := node.dataDir() + ".new"
	if err := os.RemoveAll(fresh); err != nil {
		return fmt.Errorf("remove half-made storage: %w", err)
	}
	if err := k.writeSettings(node, fresh); err != nil {
		return err
	}
	tool := k.program("kafka.tools.StorageTool")
	out, err := tool.command(ctx, "format", "--cluster-id", k.cluster, "--config", node.settingsFile()).CombinedOutput()
	if err != nil {
		return fmt.Errorf("format the storage of broker %d: %w: %s", node.id, err, strings.TrimSpace(string(out)))
	}
	return os.Rename(fresh, node.dataDir())
}

func (k *Kafka) program(main string) javaProgram {
	return javaProgram{java: k.java, jars: k.jars, logging: k.loggingFile(), heap: k.config.Heap, main: main}
}

// writeSettings writes what is common, and below it what is of the place: the
// later line of a name holds.
func (k *Kafka) writeSettings(node *kafkaNode, dataDir string) error {
	var voters []string
	for _, each := range k.nodes {
		voters = append(voters, fmt.Sprintf("%d@127.0.0.1:%d", each.id, each.controller))
	}
	place := map[string]string{
		"node.id":                  strconv.Itoa(node.id),
		"listeners":                fmt.Sprintf("PLAINTEXT://%s,CONTROLLER://127.0.0.1:%d", node.addr(), node.controller),
		"advertised.listeners":     "PLAINTEXT://" + node.addr(),
		"controller.quorum.voters": strings.Join(voters, ","),
		"log.dirs":                 dataDir,
	}
	if len(k.nodes) > 1 {
		maps.Copy(place, replicated)
	}
	maps.Copy(place, k.config.Settings)
	text := properties(deploy.KafkaServer, place)
	if err := os.WriteFile(node.settingsFile(), text, 0o600); err != nil {
		return fmt.Errorf("write the settings of broker %d: %w", node.id, err)
	}
	return nil
}

// replicated is what a cluster of three has otherwise than one broker: it loses
// nothing acknowledged, and goes on, when one of them is lost.
var replicated = map[string]string{
	"default.replication.factor":                       "3",
	"min.insync.replicas":                              "2",
	"offsets.topic.replication.factor":                 "3",
	"transaction.state.log.replication.factor":         "3",
	"transaction.state.log.min.isr":                    "2",
	"share.coordinator.state.topic.replication.factor": "3",
	"share.coordinator.state.topic.min.isr":            "2",
}

// properties appends settings to those of a file, escaped as Java reads them.
func properties(file string, settings map[string]string) []byte {
	text := []byte(file + "\n# Of this place.\n")
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		text = fmt.Appendf(text, "%s=%s\n", name, strings.ReplaceAll(settings[name], `\`, `\\`))
	}
	return text
}

// startNode starts a node's process, if it does not run.
func (k *Kafka) startNode(ctx context.Context, node *kafkaNode) error {
	node.mutex.Lock()
	defer node.mutex.Unlock()
	if node.process.running() {
		return nil
	}
	if err := k.writeSettings(node, node.dataDir()); err != nil {
		return err
	}
	process, err := k.program("kafka.Kafka").start(ctx, node.logFile(), node.settingsFile())
	if err != nil {
		return fmt.Errorf("start broker %d: %w", node.id, err)
	}
	node.process, node.paused = process, false
	return nil
}

// waitReady returns when each of the nodes says that all nodes which run are
// there. It fails when one of them ends instead.
func (k *Kafka) waitReady(ctx context.Context, nodes ...*kafkaNode) error {
	ctx, cancel := context.WithTimeout(ctx, kafkaReadyTimeout)
	defer cancel()
	for _, node := range nodes {
		node.mutex.Lock()
		process, paused := node.process, node.paused
		node.mutex.Unlock()
		if paused {
			continue
		}
		for {
			err := k.askNode(ctx, node)
			if err == nil {
				break
			}
			select {
			case <-process.Done():
				return fmt.Errorf("broker %d ended (%w); its log ends with (%s):\n%s",
					node.id, process.Err(), node.logFile(), lastLines(node.logFile()))
			case <-ctx.Done():
				return fmt.Errorf("broker %d is not ready: %w: %w (its log is %s)", node.id, ctx.Err(), err, node.logFile())
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
	return nil
}

// askNode asks a node for the cluster as it sees it.
func (k *Kafka) askNode(ctx context.Context, node *kafkaNode) error {
	client, err := kgo.NewClient(kgo.SeedBrokers(node.addr()))
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	request := kmsg.NewPtrMetadataRequest()
	request.Topics = []kmsg.MetadataRequestTopic{} // none, where nil would be all
	answer, err := client.SeedBrokers()[0].Request(ctx, request)
	if err != nil {
		return err
	}
	metadata := answer.(*kmsg.MetadataResponse)
	if metadata.ClusterID == nil || *metadata.ClusterID != k.cluster {
		return fmt.Errorf("another cluster answers at %s", node.addr())
	}
	if metadata.ControllerID < 0 {
		return errors.New("there is no controller")
	}
	for _, other := range k.nodes {
		listed := slices.ContainsFunc(metadata.Brokers, func(broker kmsg.MetadataResponseBroker) bool {
			return int(broker.NodeID) == other.id
		})
		if !listed && (other == node || other.running() && !other.isPaused()) {
			return fmt.Errorf("broker %d is not registered", other.id)
		}
	}
	return nil
}

func (n *kafkaNode) isPaused() bool {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	return n.paused
}

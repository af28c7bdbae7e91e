package devstack

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"

	"github.com/onceledger/onceledger/deploy"
)

// minJava is the oldest Java that Apache Kafka's brokers run on.
const minJava = 17

// JavaConfig says where to look for Java, and where to keep what it runs.
type JavaConfig struct {
	// Home is a Java installation (JAVA_HOME). "" means the java on PATH.
	Home string
	// FallbackDir holds the downloads when there is no user cache folder that
	// can be written to.
	FallbackDir string

	Logf Logf
}

// FindJava returns the java program of a version that is new enough. An error
// says what is missing and what can be done.
func FindJava(ctx context.Context, config JavaConfig) (string, error) {
	where, java := "JAVA_HOME", filepath.Join(config.Home, "bin", "java")
	if config.Home == "" {
		found, err := exec.LookPath("java")
		if err != nil {
			return "", javaMissing("Java is not installed (no java on PATH, JAVA_HOME is not set)")
		}
		where, java = "PATH", found
	}
	version, err := javaVersion(ctx, java)
	if errors.Is(err, fs.ErrNotExist) {
		return "", javaMissing(fmt.Sprintf("JAVA_HOME is %s, which has no bin/java", config.Home))
	}
	if err != nil {
		return "", err
	}
	if version < minJava {
		return "", javaMissing(fmt.Sprintf("%s (by %s) is Java %d", java, where, version))
	}
	return java, nil
}

func javaMissing(what string) error {
	return fmt.Errorf("%s: Apache Kafka needs Java %d or later: install one (Debian: apt-get install openjdk-17-jre-headless), "+
		"or set JAVA_HOME to one", what, minJava)
}

// javaVersionPattern finds 17 in "17.0.15", and 8 in "1.8.0_442".
var javaVersionPattern = regexp.MustCompile(`version "(?:1\.)?(\d+)`)

func javaVersion(ctx context.Context, java string) (int, error) {
	out, err := exec.CommandContext(ctx, java, "-version").CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("ask %s for its version: %w: %s", java, err, bytes.TrimSpace(out))
	}
	match := javaVersionPattern.FindSubmatch(out)
	if match == nil {
		return 0, fmt.Errorf("%s gives no version: %q", java, out)
	}
	return strconv.Atoi(string(match[1]))
}

// Jars are the files that one Java program is made of.
type Jars struct {
	title string
	name  string // its folder in deploy/java
}

// What can be run, or be plugged in.
var (
	KafkaJars    = Jars{title: "Apache Kafka", name: "kafka"}
	ConnectJars  = Jars{title: "Kafka Connect", name: "connect"}
	DebeziumJars = Jars{title: "Debezium", name: "debezium"}
)

// jar is a file as it was pinned.
type jar struct {
	digest string // sha-256
	size   int64
	name   string
}

func (j jar) String() string { return fmt.Sprintf("%s %9d %s", j.digest, j.size, j.name) }

// jarsDir is the folder inside a cached one that has the files. Connect looks
// for plugins in the folders of a folder.
const jarsDir = "lib"

// FetchJars returns a folder that holds the jars in its folder lib: the one
// fetched earlier, or one fetched now with Maven. Every file is compared with
// what is pinned in deploy/java when it comes, and its size at every use. A
// folder that is not whole is fetched again.
func FetchJars(ctx context.Context, config JavaConfig, jars Jars) (string, error) {
	pom, pinned, err := jars.read()
	if err != nil {
		return "", err
	}
	cache, err := CacheDir(config.FallbackDir)
	if err != nil {
		return "", err
	}
	maven, _ := exec.LookPath("mvn")
	return jars.fetch(ctx, config, cache, maven, pom, pinned)
}

func (jars Jars) fetch(ctx context.Context, config JavaConfig, cache, maven string, pom []byte, pinned []jar) (string, error) {
	target := filepath.Join(cache, jars.name+"-"+jars.key(pom, pinned))
	if checkSizes(filepath.Join(target, jarsDir), pinned) == nil {
		return target, nil
	}

	// Many test programs may start at once with an empty cache: one fetches.
	lock, err := WaitLock(ctx, target+".lock")
	if err != nil {
		return "", err
	}
	defer lock.Unlock()
	err = checkSizes(filepath.Join(target, jarsDir), pinned)
	if err == nil {
		return target, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		config.Logf.printf("%s is not whole (%v), fetching it again", target, err)
	}
	work, err := downloadFolder(target)
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(work)

	if err := jars.download(ctx, config, work, maven, pom, pinned); err != nil {
		return "", fmt.Errorf("fetch %s: %w", jars.title, err)
	}
	if err := checkDigests(filepath.Join(work, jarsDir), pinned); err != nil {
		return "", fmt.Errorf("fetch %s: %w: not used (the local Maven repository may have a damaged copy)", jars.title, err)
	}
	if err := os.RemoveAll(target); err != nil {
		return "", err
	}
	return target, os.Rename(work, target)
}

// downloadFolder makes a folder beside target, and removes those of downloads
// that were interrupted. The caller holds the lock: nobody works in them.
func downloadFolder(target string) (string, error) {
	leftovers, _ := filepath.Glob(target + ".tmp-*")
	for _, dir := range leftovers {
		_ = os.RemoveAll(dir)
	}
	work, err := os.MkdirTemp(filepath.Dir(target), filepath.Base(target)+".tmp-")
	if err != nil {
		return "", fmt.Errorf("make a download folder: %w", err)
	}
	return work, nil
}

// download lets Maven put the jars into work.
func (jars Jars) download(ctx context.Context, config JavaConfig, work, maven string, pom []byte, pinned []jar) error {
	if maven == "" {
		return errors.New("Maven is needed for it, once, and is not installed (no mvn on PATH): install it (Debian: apt-get install maven)")
	}
	if err := os.WriteFile(filepath.Join(work, "pom.xml"), pom, 0o600); err != nil {
		return err
	}
	size := int64(0)
	for _, jar := range pinned {
		size += jar.size
	}
	config.Logf.printf("fetching %s with Maven: %d jars, %.1f MB, only this once", jars.title, len(pinned), float64(size)/1e6)

	cmd := exec.CommandContext(ctx, maven, "--batch-mode", "--strict-checksums",
		"dependency:copy-dependencies", "-DoutputDirectory="+jarsDir)
	cmd.Dir = work
	cmd.Env = os.Environ()
	if config.Home != "" {
		cmd.Env = append(cmd.Env, "JAVA_HOME="+config.Home)
	}
	progress := &mavenProgress{logf: config.Logf}
	cmd.Stdout = progress
	cmd.Stderr = progress
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return fmt.Errorf("mvn dependency:copy-dependencies: %w: %s", err, progress.faults())
	}
	return nil
}

// mavenProgress reads what Maven says.
type mavenProgress struct {
	logf    Logf
	line    []byte // begun and not ended yet
	files   int
	wrong   []string
	lastOne string
}

func (p *mavenProgress) Write(text []byte) (int, error) {
	p.line = append(p.line, text...)
	for {
		line, rest, whole := bytes.Cut(p.line, []byte("\n"))
		if !whole {
			return len(text), nil
		}
		p.read(strings.TrimSpace(string(line)))
		p.line = append(p.line[:0], rest...)
	}
}

func (p *mavenProgress) read(line string) {
	if line != "" {
		p.lastOne = line
	}
	switch {
	case strings.Contains(line, "Downloaded from "):
		// More files than jars: Maven's own plugins, and a description of each.
		if p.files++; p.files%50 == 0 {
			p.logf.printf("Maven has fetched %d files so far", p.files)
		}
	case strings.HasPrefix(line, "[ERROR]") && len(p.wrong) < 5:
		p.wrong = append(p.wrong, strings.TrimSpace(strings.TrimPrefix(line, "[ERROR]")))
	}
}

func (p *mavenProgress) faults() string {
	if len(p.wrong) == 0 {
		return p.lastOne
	}
	return strings.Join(p.wrong, "\n")
}

// read returns the coordinates, and what they come to.
func (jars Jars) read() (pom []byte, pinned []jar, err error) {
	pom, err = deploy.Java.ReadFile(path.Join("java", jars.name, "pom.xml"))
	if err != nil {
		return nil, nil, err
	}
	list, err := deploy.Java.ReadFile(path.Join("java", jars.name, "jars.txt"))
	if err != nil {
		return nil, nil, err
	}
	pinned, err = parseJars(list)
	if err != nil {
		return nil, nil, fmt.Errorf("read deploy/java/%s/jars.txt: %w", jars.name, err)
	}
	return pom, pinned, nil
}

func parseJars(list []byte) ([]jar, error) {
	var pinned []jar
	for line := range strings.Lines(string(list)) {
		var j jar
		if _, err := fmt.Sscan(line, &j.digest, &j.size, &j.name); err != nil {
			return nil, fmt.Errorf("line %q: %w", line, err)
		}
		pinned = append(pinned, j)
	}
	return pinned, nil
}

// key tells one set of files from another.
func (jars Jars) key(pom []byte, pinned []jar) string {
	hash := sha256.New()
	_, _ = hash.Write(pom)
	for _, jar := range pinned {
		_, _ = fmt.Fprintln(hash, jar)
	}
	return hex.EncodeToString(hash.Sum(nil))[:16]
}

// checkSizes makes sure that dir holds the pinned files, whole, and no others:
// another version of a jar beside the pinned one would be run as well.
func checkSizes(dir string, pinned []jar) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	sizes := make(map[string]int64)
	for _, entry := range entries {
		info, err := entry.Info()
		if err != nil {
			return err
		}
		sizes[entry.Name()] = info.Size()
	}
	for _, jar := range pinned {
		size, ok := sizes[jar.name]
		if !ok {
			return fmt.Errorf("%s is missing", jar.name)
		}
		if size != jar.size {
			return fmt.Errorf("%s has %d bytes, expected %d", jar.name, size, jar.size)
		}
		delete(sizes, jar.name)
	}
	for name := range sizes {
		return fmt.Errorf("%s does not belong there", name)
	}
	return nil
}

func checkDigests(dir string, pinned []jar) error {
	if err := checkSizes(dir, pinned); err != nil {
		return err
	}
	for _, want := range pinned {
		got, err := readJar(filepath.Join(dir, want.name))
		if err != nil {
			return err
		}
		if got.digest != want.digest {
			return fmt.Errorf("%s has digest %s, expected %s", want.name, got.digest, want.digest)
		}
	}
	return nil
}

// readJar measures a file.
func readJar(path string) (jar, error) {
	file, err := os.Open(path)
	if err != nil {
		return jar{}, err
	}
	defer file.Close()
	hash := sha256.New()
	size, err := io.Copy(hash, bufio.NewReader(file))
	return jar{digest: hex.EncodeToString(hash.Sum(nil)), size: size, name: filepath.Base(path)}, err
}

// javaProgram is a JVM that is to be started.
type javaProgram struct {
	java    string
	jars    string // what FetchJars returned
	logging string // file with the settings of the log
	heap    string // such as "256m"
	main    string
}

func (p javaProgram) command(ctx context.Context, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, p.java, append([]string{
		"-Xmx" + p.heap,
		"-XX:+ExitOnOutOfMemoryError", // a JVM that lives on without memory is worse than one that is gone
		"-Dlog4j2.configurationFile=" + p.logging,
		"-cp", filepath.Join(p.jars, jarsDir, "*"), p.main,
	}, args...)...)
}

// start runs the program with its log in a file. The process outlives ctx,
// which only bounds the start; it does not outlive this process.
func (p javaProgram) start(ctx context.Context, logFile string, args ...string) (*Process, error) {
	if info, err := os.Stat(logFile); err == nil && info.Size() > maxJavaLog {
		if err := os.Rename(logFile, logFile+".1"); err != nil {
			return nil, fmt.Errorf("set a log aside: %w", err)
		}
	}
	log, err := os.OpenFile(logFile, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open a log: %w", err)
	}
	defer log.Close()
	cmd := p.command(context.WithoutCancel(ctx), args...)
	cmd.Dir = filepath.Dir(logFile)
	cmd.Stdout = log
	cmd.Stderr = log
	return StartProcess(cmd, syscall.SIGKILL)
}

// lastLines is the end of a log, for an error message.
func lastLines(logFile string) string {
	text, err := os.ReadFile(logFile)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-15):], "\n")
}

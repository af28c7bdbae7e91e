package devstack

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestFindJava(t *testing.T) {
	t.Parallel()

	for said, want := range map[string]string{
		`openjdk version "17.0.15" 2025-04-15`:    "",
		`openjdk version "25" 2025-09-16 LTS`:     "",
		`openjdk version "11.0.2" 2019-01-15`:     "is Java 11: Apache Kafka needs Java 17 or later: install one",
		`java version "1.8.0_442"`:                "is Java 8: Apache Kafka needs Java 17 or later: install one",
		`The command "java" can be found in snap`: "gives no version",
	} {
		home := t.TempDir()
		java := program(t, filepath.Join(home, "bin", "java"), "echo '"+said+"' >&2")
		got, err := FindJava(t.Context(), JavaConfig{Home: home})
		if want == "" {
			require.NoError(t, err)
			require.Equal(t, java, got)
			continue
		}
		require.ErrorContains(t, err, want, said)
	}

	empty := t.TempDir()
	_, err := FindJava(t.Context(), JavaConfig{Home: empty})
	require.ErrorContains(t, err, "JAVA_HOME is "+empty+", which has no bin/java")
	require.ErrorContains(t, err, "install")
}

func TestWithoutJava(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	dir := filepath.Join(t.TempDir(), "kafka")

	_, err := StartKafka(t.Context(), KafkaConfig{Dir: dir})
	require.ErrorContains(t, err, "Java is not installed (no java on PATH, JAVA_HOME is not set): "+
		"Apache Kafka needs Java 17 or later: install one (Debian: apt-get install openjdk-17-jre-headless), or set JAVA_HOME to one")
	_, err = StartConnect(t.Context(), ConnectConfig{Dir: dir})
	require.ErrorContains(t, err, "Java is not installed")

	home := t.TempDir()
	program(t, filepath.Join(home, "bin", "java"), `echo 'openjdk version "21.0.1"' >&2`)
	_, err = StartKafka(t.Context(), KafkaConfig{Dir: dir, JavaHome: home})
	require.ErrorContains(t, err, "fetch Apache Kafka: Maven is needed for it, once, and is not installed (no mvn on PATH): install it")
	require.NoDirExists(t, dir, "nothing was begun")

	_, err = StartKafka(t.Context(), KafkaConfig{Dir: dir, JavaHome: home, Brokers: 2})
	require.ErrorContains(t, err, "2 brokers are wanted: one, or three")
}

func TestFetchJars(t *testing.T) {
	t.Parallel()

	t.Run("OnceForAllWhoAskAtOnce", func(t *testing.T) {
		t.Parallel()

		w := newMaven(t, map[string]string{"a.jar": "first", "b.jar": "second"})
		var group sync.WaitGroup
		dirs, faults := make([]string, 4), make([]error, 4)
		for i := range dirs {
			group.Go(func() { dirs[i], faults[i] = w.fetch(t.Context(), nil) })
		}
		group.Wait()
		for i := range dirs {
			require.NoError(t, faults[i])
			require.Equal(t, dirs[0], dirs[i])
		}
		require.Equal(t, 1, w.runs(t))
		content, err := os.ReadFile(filepath.Join(dirs[0], "lib", "b.jar"))
		require.NoError(t, err)
		require.Equal(t, "second", string(content))
	})

	t.Run("AgainWhenTheFolderIsNotWhole", func(t *testing.T) {
		t.Parallel()

		w := newMaven(t, map[string]string{"a.jar": "first", "b.jar": "second"})
		dir, err := w.fetch(t.Context(), nil)
		require.NoError(t, err)
		for i, harm := range []struct {
			do   func(lib string) error
			said string
		}{
			{func(lib string) error { return os.Remove(filepath.Join(lib, "a.jar")) }, "a.jar is missing"},
			{func(lib string) error { return os.Truncate(filepath.Join(lib, "b.jar"), 3) }, "b.jar has 3 bytes, expected 6"},
			{func(lib string) error { return os.WriteFile(filepath.Join(lib, "c.jar"), nil, 0o600) }, "c.jar does not belong there"},
		} {
			require.NoError(t, harm.do(filepath.Join(dir, "lib")))
			var log logLines
			again, err := w.fetch(t.Context(), log.logf)
			require.NoError(t, err)
			require.Equal(t, dir, again)
			require.Contains(t, log.String(), "is not whole ("+harm.said+"), fetching it again")
			require.NoError(t, checkDigests(filepath.Join(dir, "lib"), w.pinned))
			require.Equal(t, i+2, w.runs(t))
		}
	})

	t.Run("RefusesWhatIsNotPinned", func(t *testing.T) {
		t.Parallel()

		w := newMaven(t, map[string]string{"a.jar": "first"})
		require.NoError(t, os.WriteFile(filepath.Join(w.repository, "a.jar"), []byte("forge"), 0o600))
		_, err := w.fetch(t.Context(), nil)
		require.ErrorContains(t, err, "fetch Apache Kafka: a.jar has digest")
		require.ErrorContains(t, err, "not used")
		w.requireNothingKept(t)
	})

	t.Run("SaysWhatMavenSaid", func(t *testing.T) {
		t.Parallel()

		w := newMaven(t, map[string]string{"a.jar": "first"})
		program(t, w.program, "echo '[INFO] Scanning'; echo '[ERROR] Could not transfer artifact'; exit 1")
		_, err := w.fetch(t.Context(), nil)
		require.ErrorContains(t, err, "exit status 1: Could not transfer artifact")
		w.requireNothingKept(t)
	})

	t.Run("TellsItsProgress", func(t *testing.T) {
		t.Parallel()

		w := newMaven(t, map[string]string{"a.jar": "first"})
		program(t, w.program, "for i in $(seq 120); do echo 'Downloaded from central: x'; done; cp -r "+w.repository+" lib")
		var log logLines
		_, err := w.fetch(t.Context(), log.logf)
		require.NoError(t, err)
		require.Equal(t, []string{
			"fetching Apache Kafka with Maven: 1 jars, 0.0 MB, only this once",
			"Maven has fetched 50 files so far",
			"Maven has fetched 100 files so far",
		}, log.lines)
	})

	t.Run("SweepsUpAnInterruptedOne", func(t *testing.T) {
		t.Parallel()

		w := newMaven(t, map[string]string{"a.jar": "first"})
		target := filepath.Join(w.cache, "kafka-"+KafkaJars.key([]byte("pom"), w.pinned))
		require.NoError(t, os.MkdirAll(target+".tmp-1/lib", 0o700))
		got, err := w.fetch(t.Context(), nil)
		require.NoError(t, err)
		require.Equal(t, target, got)
		require.NoDirExists(t, target+".tmp-1")
	})
}

// TestPinnedJars: what is pinned is what the coordinates name.
func TestPinnedJars(t *testing.T) {
	t.Parallel()

	for _, jars := range []Jars{KafkaJars, ConnectJars, DebeziumJars} {
		pom, pinned, err := jars.read()
		require.NoError(t, err)
		names := make(map[string]bool)
		for _, jar := range pinned {
			require.Regexp(t, `^[0-9a-f]{64}$`, jar.digest)
			require.Positive(t, jar.size)
			names[jar.name] = true
		}
		version := ""
		if match := regexp.MustCompile(`<kafka\.version>(.+)</kafka\.version>`).FindSubmatch(pom); match != nil {
			version = string(match[1])
		}
		named := regexp.MustCompile(`(?s)<dependency>.*?<artifactId>(.+?)</artifactId>\s*<version>(.+?)</version>`).FindAllSubmatch(pom, -1)
		require.NotEmpty(t, named)
		for _, match := range named {
			name := fmt.Sprintf("%s-%s.jar", match[1], strings.ReplaceAll(string(match[2]), "${kafka.version}", version))
			require.True(t, names[name], "%s of deploy/java/%s/pom.xml is not in jars.txt", name, jars.name)
		}
	}
}

func TestKeepOrChoosePort(t *testing.T) {
	t.Parallel()

	free, err := FreePort(t.Context())
	require.NoError(t, err)
	kept, err := keepOrChoosePort(t.Context(), free, nil)
	require.NoError(t, err)
	require.Equal(t, free, kept)

	listener, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", free))
	require.NoError(t, err)
	other, err := keepOrChoosePort(t.Context(), free, nil)
	require.NoError(t, err)
	require.NotEqual(t, free, other, "somebody listens there for good")

	// One that its holder lets go of is waited for.
	waited := make(chan int)
	go func() {
		port, _ := keepOrChoosePort(t.Context(), free, nil)
		waited <- port
	}()
	require.NoError(t, listener.Close())
	require.Equal(t, free, <-waited)
}

// maven is a stand-in for Maven, and what it has to give.
type maven struct {
	program    string
	repository string
	cache      string
	pinned     []jar
}

func newMaven(t *testing.T, jars map[string]string) *maven {
	t.Helper()
	dir := t.TempDir()
	w := &maven{program: filepath.Join(dir, "mvn"), repository: filepath.Join(dir, "repository"), cache: filepath.Join(dir, "cache")}
	require.NoError(t, os.MkdirAll(w.repository, 0o700))
	require.NoError(t, os.MkdirAll(w.cache, 0o700))
	for name, content := range jars {
		require.NoError(t, os.WriteFile(filepath.Join(w.repository, name), []byte(content), 0o600))
		digest := sha256.Sum256([]byte(content))
		w.pinned = append(w.pinned, jar{digest: hex.EncodeToString(digest[:]), size: int64(len(content)), name: name})
	}
	// It works where it is started, from the pom there, as Maven does.
	program(t, w.program, fmt.Sprintf("echo run >>%s/runs; grep -q pom pom.xml && cp -r %s lib", dir, w.repository))
	return w
}

func (w *maven) fetch(ctx context.Context, logf Logf) (string, error) {
	return KafkaJars.fetch(ctx, JavaConfig{Logf: logf}, w.cache, w.program, []byte("pom"), w.pinned)
}

func (w *maven) runs(t *testing.T) int {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(filepath.Dir(w.program), "runs"))
	require.NoError(t, err)
	return strings.Count(string(text), "run\n")
}

func (w *maven) requireNothingKept(t *testing.T) {
	t.Helper()
	left, err := filepath.Glob(filepath.Join(w.cache, "*"))
	require.NoError(t, err)
	require.Len(t, left, 1)
	require.Equal(t, ".lock", filepath.Ext(left[0]))
}

// program writes a shell script and returns its path.
func program(t *testing.T, path, script string) string {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	// A program that a child of another test is just being started with open for
	// writing cannot be run.
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), 0o755))
	return path
}

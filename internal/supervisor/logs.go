package supervisor

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/onceledger/onceledger/internal/devstack"
)

// maxLogSize is when a log file is set aside at the next start.
const maxLogSize = 16 << 20

func (s *supervisor) logFile(name string) string {
	return filepath.Join(s.config.Home, "logs", name+".log")
}

// childLog keeps a child's log lines in a file, and shows those that are
// warnings or worse on the terminal.
type childLog struct {
	name string
	say  devstack.Logf

	mutex sync.Mutex
	file  *os.File
	line  []byte // begun and not ended yet
}

func openLog(path, name string, say devstack.Logf) (*childLog, error) {
	if info, err := os.Stat(path); err == nil && info.Size() > maxLogSize {
		if err := os.Rename(path, path+".1"); err != nil {
			return nil, fmt.Errorf("set a log aside: %w", err)
		}
	}
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open a log: %w", err)
	}
	return &childLog{name: name, say: say, file: file}, nil
}

func (l *childLog) Write(p []byte) (int, error) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	// A full disk must not stop the child by its log: the lines still go to
	// the terminal.
	_, _ = l.file.Write(p)
	l.line = append(l.line, p...)
	for {
		line, rest, whole := bytes.Cut(l.line, []byte("\n"))
		if !whole {
			return len(p), nil
		}
		if text := forTerminal(line); text != "" {
			l.say("%s: %s", l.name, text)
		}
		l.line = append(l.line[:0], rest...)
	}
}

func (l *childLog) Close() error {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	return l.file.Close()
}

// forTerminal shortens a log line, or returns "" for one below a warning. What
// is no log line, such as a panic, is shown as it is.
func forTerminal(line []byte) string {
	var entry map[string]any
	if err := json.Unmarshal(line, &entry); err != nil || entry["level"] == nil {
		text := string(line)
		if strings.Contains(text, "level=INFO") || strings.Contains(text, "level=DEBUG") {
			return ""
		}
		return text
	}
	level := strings.ToLower(fmt.Sprint(entry["level"]))
	if level == "info" || level == "debug" {
		return ""
	}
	text := fmt.Sprintf("%s: %v", level, entry["msg"])
	for _, known := range []string{"time", "level", "msg"} {
		delete(entry, known)
	}
	for _, name := range slices.Sorted(maps.Keys(entry)) {
		text += fmt.Sprintf(" %s=%v", name, entry[name])
	}
	return text
}

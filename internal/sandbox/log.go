package sandbox

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"sync"
)

// keptLog is how much of a log is kept in memory at least: a long proof logs a
// line for each request.
const keptLog = 4 << 20

// processLog keeps what a process says, and finds in it where it listens: api and
// worker log their address, `onceledger up` prints a line when all is ready.
type processLog struct {
	path string

	mutex  sync.Mutex
	file   *os.File
	buffer bytes.Buffer
	line   []byte // what was said of a line that is not whole yet
	addr   string
}

func (l *processLog) Write(p []byte) (int, error) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if l.path != "" && l.file == nil {
		l.file, _ = os.OpenFile(l.path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	}
	if l.file != nil {
		_, _ = l.file.Write(p) // a full disk is no reason to end the process
	}
	l.keep(p)
	if l.addr == "" {
		l.look(p)
	}
	return len(p), nil
}

// keep adds to what is in memory. Where a file has it all, only the last part is.
func (l *processLog) keep(p []byte) {
	l.buffer.Write(p)
	if l.file != nil && l.buffer.Len() > 2*keptLog {
		rest := bytes.Clone(l.buffer.Bytes()[l.buffer.Len()-keptLog:])
		l.buffer.Reset()
		l.buffer.Write(rest)
	}
}

func (l *processLog) look(p []byte) {
	l.line = append(l.line, p...)
	for l.addr == "" {
		line, rest, whole := bytes.Cut(l.line, []byte("\n"))
		if !whole {
			return
		}
		var said struct {
			Message string `json:"msg"`
			Address string `json:"address"`
		}
		if url, ok := bytes.CutPrefix(line, []byte("ready http://")); ok {
			l.addr = string(url)
		} else if json.Unmarshal(line, &said) == nil && (said.Message == "listening" || said.Message == "working") {
			l.addr = said.Address
		}
		l.line = rest
	}
}

// startOver forgets where the last life listened.
func (l *processLog) startOver() {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.line, l.addr = nil, ""
}

func (l *processLog) address() string {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	return l.addr
}

func (l *processLog) text() string {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	return l.buffer.String()
}

// close lets the file go.
func (l *processLog) close() {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	if l.file != nil {
		_ = l.file.Close()
		l.file, l.path = nil, ""
	}
}

// WithoutRequests is a log without what went well a thousand times.
func WithoutRequests(log string) string {
	var kept strings.Builder
	for line := range strings.Lines(log) {
		if !strings.Contains(line, `"level":"INFO","msg":"request"`) {
			kept.WriteString(line)
		}
	}
	return kept.String()
}

// Tail is the last lines of a text.
func Tail(text string, lines int) string {
	at := len(text)
	for range lines {
		if at = strings.LastIndexByte(text[:max(at-1, 0)], '\n'); at < 0 {
			return text
		}
	}
	return text[at+1:]
}

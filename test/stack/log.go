package stack

import (
	"bytes"
	"encoding/json"
	"strings"
	"sync"
)

// processLog keeps what a process says, and finds in it where it listens: api and
// worker log their address, `onceledger up` prints a line when all is ready.
type processLog struct {
	mutex  sync.Mutex
	buffer bytes.Buffer
	parsed int // the beginning of the line that is read next
	addr   string
}

func (l *processLog) Write(p []byte) (int, error) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.buffer.Write(p)
	for l.addr == "" {
		line, _, whole := bytes.Cut(l.buffer.Bytes()[l.parsed:], []byte("\n"))
		if !whole {
			break
		}
		l.parsed += len(line) + 1
		var said struct {
			Message string `json:"msg"`
			Address string `json:"address"`
		}
		if url, ok := bytes.CutPrefix(line, []byte("ready http://")); ok {
			l.addr = string(url)
		} else if json.Unmarshal(line, &said) == nil && (said.Message == "listening" || said.Message == "working") {
			l.addr = said.Address
		}
	}
	return len(p), nil
}

// startOver forgets where the last life listened.
func (l *processLog) startOver() {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.parsed, l.addr = l.buffer.Len(), ""
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

// withoutRequests is a log without what went well a thousand times.
func withoutRequests(log string) string {
	var kept strings.Builder
	for line := range strings.Lines(log) {
		if !strings.Contains(line, `"level":"INFO","msg":"request"`) {
			kept.WriteString(line)
		}
	}
	return kept.String()
}

// tail is the last lines of a text.
func tail(text string, lines int) string {
	at := len(text)
	for range lines {
		if at = strings.LastIndexByte(text[:max(at-1, 0)], '\n'); at < 0 {
			return text
		}
	}
	return text[at+1:]
}

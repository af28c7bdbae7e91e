package prove

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// The kinds of journal entries.
const (
	entryBegin    = "begin"    // the first: what is run
	entryResume   = "resume"   // a run that was broken off goes on
	entrySend     = "send"     // a request is about to be sent
	entryAnswer   = "answer"   // what it was answered
	entryNothing  = "nothing"  // no answer came
	entryFault    = "fault"    // a fault is about to begin
	entryRecovery = "recovery" // it is over
	entryInject   = "inject"   // a record is about to be put on a topic
	entryInjected = "injected" // and lies there
	entryRemade   = "remade"   // a topic was made anew, and this is what was read of it
	entryLife     = "life"     // a client is done with an order
	entryViolated = "violated" // something was found that must not be
	entryEnd      = "end"      // the account is made, nothing follows
)

// entry is a line of the journal. Which members it has depends on its kind.
type entry struct {
	Seq  int64  `json:"seq"`
	At   int64  `json:"at"` // nanoseconds since 1970
	Kind string `json:"kind"`

	Begin *beginning `json:"begin,omitempty"`

	// Of requests: Op is its number, Attempt counts from 1. Request is with the
	// first attempt only.
	Op      int64    `json:"op,omitempty"`
	Attempt int      `json:"attempt,omitempty"`
	Request *request `json:"request,omitempty"`
	Answer  *answer  `json:"answer,omitempty"`
	// NotSent says of "nothing" that the request reached nobody.
	NotSent bool   `json:"not_sent,omitempty"`
	Why     string `json:"why,omitempty"`

	Order string `json:"order,omitempty"` // of "life"

	// Of faults.
	Fault    int            `json:"fault,omitempty"`
	Cell     string         `json:"cell,omitempty"`
	Recovery *recovery      `json:"recovery,omitempty"`
	Bites    map[Bite]int64 `json:"bites,omitempty"` // so far, over all

	Violation *Violation `json:"violation,omitempty"`

	// Of injected records: Number is in the record's header.
	Number   int       `json:"number,omitempty"`
	Injected *Injected `json:"injected,omitempty"`
	Place    *Place    `json:"place,omitempty"`

	Topic  string   `json:"topic,omitempty"`
	Events []string `json:"events,omitempty"`
}

// beginning is what a run is: a resumed one must be the same.
type beginning struct {
	Schema   int      `json:"schema"`
	Seed     uint64   `json:"seed"`
	Cells    []string `json:"cells"`
	Faults   int      `json:"faults"`
	Schedule string   `json:"schedule_sha256"`
	Clients  int      `json:"clients"`
	Kafka    string   `json:"kafka"`
	Brokers  int      `json:"brokers"`
	Relay    string   `json:"relay"`
	Tmpfs    int64    `json:"tmpfs,omitempty"`
	Tenants  []string `json:"tenants"` // their names
}

// request is what a client asks for.
type request struct {
	Client int    `json:"client"`
	Tenant int    `json:"tenant"` // its place in beginning.Tenants
	Action action `json:"action"`
	Method string `json:"method"`
	Path   string `json:"path"`
	Key    string `json:"key,omitempty"`
	Body   string `json:"body,omitempty"`
	// Order is the order that it is about, unless it makes one; Amount is what a
	// refund asks for; Probe that it measures a recovery.
	Order  string `json:"order,omitempty"`
	Amount int64  `json:"amount,omitempty"`
	Probe  bool   `json:"probe,omitempty"`
}

// answer is what came back.
type answer struct {
	Status      int    `json:"status"`
	Replayed    bool   `json:"replayed,omitempty"`
	Location    string `json:"location,omitempty"`
	ContentType string `json:"content_type,omitempty"`
	Body        string `json:"body"`
}

// journal is a file of entries that is written before anything is done that it
// tells of. Its methods may be called by several goroutines.
type journal struct {
	file *os.File

	mutex   sync.Mutex
	seq     int64
	last    int64 // time of the last entry: time does not go back in a journal
	waiting []byte
	written *sync.Cond
	done    int64 // every entry up to this one is on the disk
	fault   error
	closed  bool
	writer  chan struct{} // closed when nothing is written any more
}

// createJournal makes a new one.
func createJournal(path string) (*journal, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make the journal: %w", err)
	}
	return startJournal(file, 0, 0), nil
}

// openJournal reads what a journal holds, and goes on with it. A last line that
// was not written whole is cut off: nothing was done after it.
func openJournal(path string, use func(entry) error) (_ *journal, torn bool, err error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return nil, false, fmt.Errorf("open the journal: %w", err)
	}
	defer func() {
		if err != nil {
			_ = file.Close()
		}
	}()
	var seq, last int64
	whole, torn, err := readJournal(file, func(e entry) error {
		seq, last = e.Seq, max(last, e.At)
		return use(e)
	})
	if err != nil {
		return nil, false, err
	}
	if torn {
		if err := file.Truncate(whole); err != nil {
			return nil, false, fmt.Errorf("cut off the journal's last line: %w", err)
		}
	}
	return startJournal(file, seq, last), torn, nil
}

// readJournal reads entries up to the end, or up to a last line that is torn. It
// returns how many bytes are whole lines.
func readJournal(from io.Reader, use func(entry) error) (whole int64, torn bool, err error) {
	reader := bufio.NewReaderSize(from, 1<<20)
	var seq int64
	for {
		line, err := reader.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return whole, len(line) > 0, nil
		}
		if err != nil {
			return whole, false, fmt.Errorf("read the journal: %w", err)
		}
		var e entry
		if err := json.Unmarshal(line, &e); err != nil {
			if _, err := reader.Peek(1); errors.Is(err, io.EOF) {
				return whole, true, nil
			}
			return whole, false, fmt.Errorf("read the journal: line %d is damaged: %w", seq+1, err)
		}
		if e.Seq != seq+1 {
			return whole, false, fmt.Errorf("read the journal: entry %d follows entry %d: lines are missing", e.Seq, seq)
		}
		seq = e.Seq
		whole += int64(len(line))
		if err := use(e); err != nil {
			return whole, false, err
		}
	}
}

func startJournal(file *os.File, seq, last int64) *journal {
	j := &journal{file: file, seq: seq, done: seq, last: last, writer: make(chan struct{})}
	j.written = sync.NewCond(&j.mutex)
	go j.write()
	return j
}

// add writes an entry and returns it when it is on the disk.
func (j *journal) add(e entry) (entry, error) {
	e, err := j.put(e)
	if err != nil {
		return e, err
	}
	j.mutex.Lock()
	defer j.mutex.Unlock()
	for j.done < e.Seq && j.fault == nil {
		j.written.Wait()
	}
	return e, j.fault
}

// put writes an entry that nothing depends on: it is on the disk before the next
// one for which add has returned.
func (j *journal) put(e entry) (entry, error) {
	j.mutex.Lock()
	defer j.mutex.Unlock()
	if j.closed {
		return e, errors.New("write the journal: it is closed")
	}
	if j.fault != nil {
		return e, j.fault
	}
	j.seq++
	j.last = max(j.last+1, time.Now().UnixNano())
	e.Seq, e.At = j.seq, j.last
	line, err := json.Marshal(e)
	if err != nil {
		return e, fmt.Errorf("write the journal: %w", err)
	}
	j.waiting = append(append(j.waiting, line...), '\n')
	j.written.Broadcast()
	return e, nil
}

// write puts what is waiting on the disk, all of it at once, and again.
func (j *journal) write() {
	defer close(j.writer)
	j.mutex.Lock()
	defer j.mutex.Unlock()
	for {
		for len(j.waiting) == 0 {
			if j.closed || j.fault != nil {
				return
			}
			j.written.Wait()
		}
		lines, upTo := j.waiting, j.seq
		j.waiting = nil
		j.mutex.Unlock()
		_, err := j.file.Write(lines)
		if err == nil {
			err = j.file.Sync()
		}
		j.mutex.Lock()
		if err != nil {
			j.fault = fmt.Errorf("write the journal: %w", err)
		} else {
			j.done = upTo
		}
		j.written.Broadcast()
	}
}

// close writes what is waiting, and lets the file go.
func (j *journal) close() error {
	j.mutex.Lock()
	j.closed = true
	j.written.Broadcast()
	j.mutex.Unlock()
	<-j.writer
	return errors.Join(j.fault, j.file.Close())
}

// digest is the SHA-256 of a journal as it lies on the disk, and its length.
func digest(path string) (sum string, size int64, err error) {
	file, err := os.Open(path)
	if err != nil {
		return "", 0, err
	}
	defer file.Close()
	hash := sha256.New()
	size, err = io.Copy(hash, file)
	return hex.EncodeToString(hash.Sum(nil)), size, err
}

// firstEntry reads what a journal begins with.
func firstEntry(path string) (entry, error) {
	file, err := os.Open(path)
	if err != nil {
		return entry{}, err
	}
	defer file.Close()
	line, err := bufio.NewReader(file).ReadBytes('\n')
	var e entry
	if err == nil {
		err = json.Unmarshal(bytes.TrimSpace(line), &e)
	}
	if err == nil && (e.Kind != entryBegin || e.Begin == nil) {
		err = fmt.Errorf("it begins with %q", e.Kind)
	}
	if err != nil {
		return entry{}, fmt.Errorf("read %s: %w", path, err)
	}
	return e, nil
}

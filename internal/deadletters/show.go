package deadletters

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/inbox"
)

// Details is all that there is about a letter.
type Details struct {
	Letter
	Record    Record     `json:"record"`
	Decisions []Decision `json:"decisions"`
	Behind    []Letter   `json:"parked_behind"` // what waits for it, in order
	BehindAll int        `json:"parked_behind_count"`
}

// Record is the record as it came.
type Record struct {
	Time    time.Time `json:"time"`
	Key     Bytes     `json:"key"`
	Headers []Header  `json:"headers"`
	Value   Bytes     `json:"value"`
}

// Header is one of the record's headers.
type Header struct {
	Name  string `json:"name"`
	Value Bytes  `json:"value"`
}

// Bytes are bytes in a form that can be read: JSON if they are, else text, else
// hexadecimal digits.
type Bytes struct {
	Size      int             `json:"size"`
	JSON      json.RawMessage `json:"json,omitempty"`
	Text      *string         `json:"text,omitempty"`
	Hex       *string         `json:"hex,omitempty"`
	Truncated bool            `json:"truncated,omitempty"` // the beginning alone
}

// Decision is what somebody decided of a letter.
type Decision struct {
	ID        uuid.UUID     `json:"id"`
	Action    string        `json:"action"`
	Outcome   inbox.Outcome `json:"outcome"`
	Class     *inbox.Class  `json:"class,omitempty"`
	Detail    *string       `json:"detail,omitempty"`
	Reason    *string       `json:"reason,omitempty"`
	DecidedBy string        `json:"decided_by"`
	DecidedAt time.Time     `json:"decided_at"`
}

const (
	shownBytes  = 64 << 10 // of a value
	shownBehind = 100      // letters that wait for one
)

// Show is a letter with its record, what was decided of it, and what waits for it.
func (s *Service) Show(ctx context.Context, id uuid.UUID) (Details, error) {
	row, err := s.get(ctx, id)
	if err != nil {
		return Details{}, err
	}
	headers, err := inbox.DecodeHeaders(row.RecordHeaders)
	if err != nil {
		return Details{}, err
	}
	details := Details{
		Letter:    letterOf(row),
		Record:    Record{Time: row.RecordTime.UTC(), Key: readable(row.RecordKey), Value: readable(row.RecordValue), Headers: []Header{}},
		Decisions: []Decision{}, Behind: []Letter{},
	}
	for _, header := range headers {
		details.Record.Headers = append(details.Record.Headers, Header{header.Key, readable(header.Value)})
	}

	decisions, err := db.New().DeadLetterDecisionList(ctx, s.pool, id)
	if err != nil {
		return Details{}, fmt.Errorf("list decisions: %w", err)
	}
	for _, d := range decisions {
		details.Decisions = append(details.Decisions, Decision{
			ID: d.ID, Action: d.Action, Outcome: inbox.Outcome(d.Outcome), Class: (*inbox.Class)(d.Class), Detail: d.Detail,
			Reason: d.Reason, DecidedBy: d.DecidedBy, DecidedAt: d.DecidedAt.UTC(),
		})
	}

	if row.State != StateOpen || row.TenantID == nil || row.AggregateID == nil || !details.Class.Parks() {
		return details, nil
	}
	open, err := db.New().DeadLetterListOpen(ctx, s.pool, row.Consumer, row.TenantID, row.AggregateID)
	if err != nil {
		return Details{}, fmt.Errorf("list open dead letters: %w", err)
	}
	behind := false
	for _, other := range open {
		if behind && inbox.Class(other.Class).Parks() {
			if details.BehindAll++; len(details.Behind) < shownBehind {
				details.Behind = append(details.Behind, letterOf(other))
			}
		}
		behind = behind || other.ID == id
	}
	return details, nil
}

func readable(value []byte) Bytes {
	shown := Bytes{Size: len(value)}
	if value == nil {
		return shown
	}
	var compact bytes.Buffer
	if len(value) <= shownBytes && json.Compact(&compact, value) == nil {
		shown.JSON = compact.Bytes()
		return shown
	}
	if len(value) > shownBytes {
		value, shown.Truncated = value[:shownBytes], true
		for cut := 0; cut < utf8.UTFMax && len(value) > 0 && !utf8.Valid(value[max(0, len(value)-utf8.UTFMax):]); cut++ {
			value = value[:len(value)-1] // not in the middle of a character
		}
	}
	if utf8.Valid(value) && bytes.IndexFunc(value, func(r rune) bool { return r < ' ' && r != '\n' && r != '\t' && r != '\r' || r == 0x7f }) < 0 {
		text := string(value)
		shown.Text = &text
		return shown
	}
	digits := hex.EncodeToString(value)
	shown.Hex = &digits
	return shown
}

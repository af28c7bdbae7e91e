// Package failure declares the errors that a caller can act on. Each has a kind,
// which decides what a caller may do about it, and a code, which is its name in
// public (docs/problems has a page for each). There is no HTTP here: the edge
// turns kinds into statuses. Every other error is a bug or an outage.
package failure

import "fmt"

// Kind says what sort of failure it is, and with that what a caller can do.
type Kind int

// The kinds.
const (
	Invalid      Kind = iota + 1 // malformed: no state of the system makes it right
	RuleViolated                 // well-formed, but against a rule
	Unauthorized                 // no key, or not a valid one
	NotFound                     // names something that is not there
	Conflict                     // does not fit the present state
	Unavailable                  // would work later: send it again
)

// Error is a failure that a caller can act on. Compare with errors.Is against
// the declared variable; Detail and Fields differ from one occurrence to the
// next and take no part in the comparison.
type Error struct {
	Kind   Kind
	Code   string // kebab-case, stable, public
	Title  string // the same sentence each time
	Detail string // this occurrence
	Fields []Field
}

// Field names a part of the request that is at fault, in the request's own
// terms: lines[0].quantity.
type Field struct {
	Field  string `json:"field"`
	Detail string `json:"detail"`
}

// New declares a failure. Declare once, as a package variable.
func New(kind Kind, code, title string) *Error {
	return &Error{Kind: kind, Code: code, Title: title}
}

// Withf is the same failure with this occurrence's detail.
func (e *Error) Withf(format string, args ...any) *Error {
	occurrence := *e
	occurrence.Detail = fmt.Sprintf(format, args...)
	return &occurrence
}

// WithFields is the same failure, naming the fields at fault.
func (e *Error) WithFields(fields ...Field) *Error {
	occurrence := *e
	occurrence.Fields = fields
	return &occurrence
}

func (e *Error) Error() string {
	text := e.Code + ": " + e.Title
	if e.Detail != "" {
		text += " " + e.Detail
	}
	for _, field := range e.Fields {
		text += fmt.Sprintf(" [%s: %s]", field.Field, field.Detail)
	}
	return text
}

// Is reports whether target is the same declared failure.
func (e *Error) Is(target error) bool {
	other, ok := target.(*Error)
	return ok && other.Code == e.Code
}

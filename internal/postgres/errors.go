package postgres

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// Code is the SQLSTATE of a server's error, or "".
func Code(err error) string {
	if server, ok := errors.AsType[*pgconn.PgError](err); ok {
		return server.Code
	}
	return ""
}

// LostToAnother reports a serialization failure or a deadlock: the transaction
// as a whole is worth running again at once.
func LostToAnother(err error) bool {
	code := Code(err)
	return code == "40001" || code == "40P01"
}

// LockTimedOut reports that a lock was not had within lock_timeout.
func LockTimedOut(err error) bool { return Code(err) == "55P03" }

// MissingPartition reports that no partition takes the row. Postgres says so
// with a check violation that names no constraint. The row is right and the
// table is not: it is to be tried again once the partition is made.
func MissingPartition(err error) bool {
	server, ok := errors.AsType[*pgconn.PgError](err)
	return ok && server.Code == "23514" && server.ConstraintName == ""
}

// DataFault reports an error that lies in the values themselves, so that the
// same statement fails again whenever it is sent: a value out of range, a text
// that cannot be stored, a constraint, an index row too large.
func DataFault(err error) bool {
	code := Code(err)
	if code == "" || MissingPartition(err) {
		return false
	}
	return strings.HasPrefix(code, "22") || strings.HasPrefix(code, "23") ||
		strings.HasPrefix(code, "54") || strings.HasPrefix(code, "21")
}

// Unavailable reports that the database cannot do it now and may do it later:
// no connection, going down, out of resources, a time limit, a lock, a
// partition that is not made yet.
func Unavailable(err error) bool {
	if MissingPartition(err) || LostToAnother(err) {
		return true
	}
	if _, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		return true // whatever the server said, be it of a password that is just being changed
	}
	code := Code(err)
	switch {
	case code == "":
		return connectionFault(err)
	case strings.HasPrefix(code, "08"), strings.HasPrefix(code, "53"), strings.HasPrefix(code, "57"):
		return true // connection, resources, operator (57014 is a time-out)
	case code == "55P03", code == "25P03", code == "25P04", code == "25006", code == "58030":
		return true // lock, idle and transaction time-outs, read-only, I/O
	}
	return false
}

func connectionFault(err error) bool {
	if _, ok := errors.AsType[net.Error](err); ok {
		return true
	}
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, context.DeadlineExceeded) || pgconn.SafeToRetry(err) ||
		errors.Is(err, pgconn.ErrConnClosed) || errors.Is(err, net.ErrClosed)
}

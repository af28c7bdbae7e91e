// Package migrations holds the schema as golang-migrate files, embedded, so
// that each binary carries the schema it was built for.
//
// A migration that has landed is never edited; the next one changes it. Each
// opens with a comment that says why it is there.
package migrations

import "embed"

// FS holds the *.sql files of this folder.
//
//go:embed *.sql
var FS embed.FS

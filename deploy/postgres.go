package deploy

import _ "embed" // for the variable

// PostgresSettings is a Postgres server's configuration file, without what is of
// the place.
//
//go:embed postgres/postgresql.conf
var PostgresSettings []byte

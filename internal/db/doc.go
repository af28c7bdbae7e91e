// Package db is what sqlc makes of db/queries: one method for each query, one
// struct for each table. Nobody edits the rest of it; `make generate` does.
package db

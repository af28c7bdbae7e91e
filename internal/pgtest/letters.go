package pgtest

import "fmt"

// CloseLetters is the statement that closes open dead letters as resolved or
// discarded, with the decision that the database wants for each.
func CloseLetters(state, where string) string {
	action, outcome := "retried", "skipped"
	if state == "discarded" {
		action, outcome = "discarded", "discarded"
	}
	return fmt.Sprintf(`
		WITH closed AS (UPDATE dead_letters SET state = '%s' WHERE state = 'open' AND (%s) RETURNING id)
		INSERT INTO dead_letter_decisions (id, dead_letter_id, action, outcome, reason, decided_by)
		SELECT uuidv7(), id, '%s', '%s', 'for a test', 'test' FROM closed`, state, where, action, outcome)
}

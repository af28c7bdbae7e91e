package lab

import (
	"context"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
)

// width is that of a terminal; what is longer is wrapped.
const width = 100

func (r *room) line(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	r.blank = text == ""
	fmt.Fprintln(r.config.Stdout, text)
}

// gap leaves a line empty, unless the last one is.
func (r *room) gap() {
	if !r.blank {
		r.line("")
	}
}

// step says what the lab does now.
func (r *room) step(format string, args ...any) {
	r.line("%s", wrap("# ", "# ", fmt.Sprintf(format, args...)))
}

// part begins another part of the experiment.
func (r *room) part(title string) {
	r.gap()
	r.line("== %s", title)
}

// why is the sentence at the end.
func (r *room) why(text string) {
	r.gap()
	r.line("%s", wrap("Why: ", "     ", text))
}

// query prints a question to the database and its answer, as psql would.
func (r *room) query(ctx context.Context, sql string, args ...any) error {
	rows, err := r.db.Query(ctx, sql, args...)
	if err != nil {
		return fmt.Errorf("query: %w", err)
	}
	var header []string
	for _, field := range rows.FieldDescriptions() {
		header = append(header, field.Name)
	}
	cells, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) ([]any, error) { return row.Values() })
	if err != nil {
		return fmt.Errorf("query: %w", err)
	}
	r.table(header, cells)
	return nil
}

// table prints rows as psql does: numbers to the right, the rest to the left.
func (r *room) table(header []string, rows [][]any) {
	widths := make([]int, len(header))
	for i, title := range header {
		widths[i] = utf8.RuneCountInString(title)
		for _, row := range rows {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell(row[i])))
		}
	}
	heads, rule := make([]string, len(header)), make([]string, len(header))
	for i, title := range header {
		heads[i] = fmt.Sprintf(" %-*s ", widths[i], title)
		rule[i] = strings.Repeat("-", widths[i]+2)
	}
	r.gap()
	r.line("%s", strings.TrimRight(strings.Join(heads, "|"), " "))
	r.line("%s", strings.Join(rule, "+"))
	for _, row := range rows {
		cells := make([]string, len(header))
		for i, value := range row {
			switch value.(type) {
			case int, int32, int64:
				cells[i] = fmt.Sprintf(" %*s ", widths[i], cell(value))
			default:
				cells[i] = fmt.Sprintf(" %-*s ", widths[i], cell(value))
			}
		}
		r.line("%s", strings.TrimRight(strings.Join(cells, "|"), " "))
	}
	r.line("")
}

func cell(value any) string {
	if value == nil {
		return "-"
	}
	return fmt.Sprint(value)
}

// wrap breaks text at spaces so that no line is wider than a terminal.
func wrap(first, next, text string) string {
	var lines []string
	line := first
	for word := range strings.FieldsSeq(text) {
		if line != first && line != next {
			if utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > width {
				lines = append(lines, line)
				line = next
			} else {
				line += " "
			}
		}
		line += word
	}
	return strings.Join(append(lines, line), "\n")
}

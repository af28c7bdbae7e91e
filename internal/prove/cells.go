package prove

import "slices"

// Cells are all kinds of faults, in the order in which they are listed. The order
// is part of the schedule: what is new goes to the end of its file's list.
func Cells() []Cell {
	return slices.Concat(
		processCells(),
		killCells(),
		lifeCells(),
		postgresCells(),
		networkCells(),
		kafkaCells(),
		topicCells(),
		groupCells(),
		mixedCells(),
		deadLetterCells(),
		windowCells(),
	)
}

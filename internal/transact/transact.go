// Package transact says what a stage between Kafka and Kafka is, so that a stage
// needs no knowledge of Kafka and Kafka none of the stage. kafka.Transactor runs
// one.
package transact

import "github.com/onceledger/onceledger/internal/event"

// Stage turns records into other records, and has a state that it keeps in
// compacted topics. All its methods are called by one goroutine.
//
// The state of a partition comes with the partition: Begin, Load for every
// record that the state topics hold, Resume. Forget ends it. Begin may come
// again before Resume.
type Stage interface {
	// Begin starts a partition with nothing known.
	Begin(partition int32)
	// Load takes a record of the state, in the order of its topic partition. No
	// value means that the key is gone.
	Load(record event.Record) error
	// Resume says at which offset of its source the partition goes on.
	Resume(partition int32, source Source) (next int64, err error)
	// Forget drops all that is known of a partition, if anything is.
	Forget(partition int32)

	// Process says what a batch comes to. It changes nothing by itself: the
	// transaction may be aborted, and the same records then come again.
	Process(batch []event.Record) (Output, error)
}

// Source is what Kafka knows of a partition of the source.
type Source struct {
	Committed int64 // where the group goes on; -1 when it has committed nothing
	First     int64 // the oldest record that is left

	// Topic is the id of the topic, which one that is made anew does not share
	// with the earlier one of its name; "" when it is not known. A stage keeps it
	// with its position: in another topic the position, and what was committed,
	// say nothing.
	Topic string
}

// Output is what a batch comes to.
type Output struct {
	// Records are written to the partitions that they name.
	Records []event.Record
	// Stops are partitions that cannot go on from an offset, and why. What is
	// before the offset is committed. They stay stopped until they are assigned
	// anew; others go on.
	Stops map[int32]Stop
	// Committed makes what was written the stage's state.
	Committed func()
}

// Stop is why a partition cannot go on.
type Stop struct {
	Offset int64
	Reason string
}

// Package debezium runs the Debezium connector that can take the relay's place:
// it registers the connector with Kafka Connect, tells how it is, and removes it.
//
// The connector is configuration only, deploy/debezium/connector.json, and
// publishes what the package event makes of a row: the same topic, partition,
// key, value and headers. Two things are not the same. An event without a trace
// has a traceparent header that is null, which counts as none; and the order of
// the headers is another. It publishes within Kafka transactions: who reads
// committed records sees nothing twice because a worker was killed.
//
// It loses nothing, with one exception that its user has to keep from happening:
// Debezium reads the table as of one moment and the log from a later one on if the
// slot is there already. Params.From, a slot made beforehand, does without reading
// the table. What is left is a connector whose slot was lost, which makes another
// and reads the table, and is killed before it has read all of it.
//
// Register and Remove may be called again after a success or a failure and then
// finish the work. What is left to the caller: the topics, which must be there;
// the slot, which Connect keeps in use for a moment after Remove and which nobody
// else drops; and an alarm on that slot, since a connector whose slot is lost
// waits for half an hour without failing.
//
// Kafka Connect shows the database's password to whoever can reach its REST
// interface or read its topics. Neither is for the public.
package debezium

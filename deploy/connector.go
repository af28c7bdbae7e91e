package deploy

import _ "embed" // for the variable

// DebeziumConnector is the Debezium connector's configuration. What is of the
// place stands in it as ${NAME}; package debezium fills it in.
//
//go:embed debezium/connector.json
var DebeziumConnector []byte

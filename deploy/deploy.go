// Package deploy holds the settings that the system is deployed with: the files
// in this folder, which docker-compose.yml mounts, and which package devstack
// runs Apache Kafka and Connect with on this machine. One copy serves both.
package deploy

import (
	"embed"
	_ "embed" // for the variables
)

// KafkaServer is a broker's server.properties, without what is of the place.
//
//go:embed kafka/server.properties
var KafkaServer string

// ConnectWorker is a Connect worker's settings, without what is of the place.
//
//go:embed connect/worker.properties
var ConnectWorker string

// JavaLogging is what the Java programs log, for log4j 2.
//
//go:embed kafka/log4j2.properties
var JavaLogging string

// Java says what the Java programs are made of: a folder each, with Maven's
// coordinates in pom.xml, and in jars.txt every file that these come to, with
// size and digest.
//
//go:embed java
var Java embed.FS

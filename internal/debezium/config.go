package debezium

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strconv"
	"strings"

	"github.com/onceledger/onceledger/deploy"
)

// DefaultTopicPrefix names the connector's own topic, of heartbeats, and the
// source in its stored position.
const DefaultTopicPrefix = "onceledger"

// Params is what of the connector's configuration is of the place.
type Params struct {
	// DatabaseURL is the login of the relay's role as Connect reaches the
	// server, with sslmode if it is not "prefer".
	DatabaseURL string
	// Slot is made by the connector if it is not there, unless From is set.
	Slot string
	// Publication must be there.
	Publication string
	// Since bounds what is published before the log: of the rows that are in the
	// outbox already, those with a tx_id of Since or more. Another relay has
	// delivered the others.
	Since uint64
	// From is the position (confirmed_flush_lsn) of a slot that was made for the
	// connector: it begins there, and without reading the table. Whoever made the
	// slot saw to it that all that is not in the log from there on is delivered. 0
	// means that the connector makes the slot and reads the table as of then.
	//
	// It must not be 0 when the slot is there: Debezium then reads the table as of
	// one moment and the log as of a later one, and publishes nothing of what was
	// being committed in between.
	From uint64
	// TopicPrefix is DefaultTopicPrefix when it is "".
	TopicPrefix string
}

// ConnectorConfig is deploy/debezium/connector.json with the parameters filled
// in. An error does not tell the password.
func ConnectorConfig(params Params) (map[string]string, error) {
	config, _, err := connectorConfig(params)
	return config, err
}

func connectorConfig(params Params) (config map[string]string, password string, err error) {
	address, err := parseDatabaseURL(params.DatabaseURL)
	if err != nil {
		return nil, "", fmt.Errorf("the relay's database URL: %w", err)
	}
	for name, value := range map[string]string{"slot": params.Slot, "publication": params.Publication} {
		if value == "" {
			return nil, "", fmt.Errorf("the connector needs a %s", name)
		}
	}
	if params.TopicPrefix == "" {
		params.TopicPrefix = DefaultTopicPrefix
	}

	// In one pass, so that a value that looks like a placeholder stays as it is.
	// What is no placeholder of ours, the router has a use for.
	fill := strings.NewReplacer(
		"${DATABASE_HOST}", address.host,
		"${DATABASE_PORT}", address.port,
		"${DATABASE_USER}", address.user,
		"${DATABASE_PASSWORD}", address.password,
		"${DATABASE_NAME}", address.name,
		"${DATABASE_SSLMODE}", address.sslmode,
		"${SLOT}", params.Slot,
		"${PUBLICATION}", params.Publication,
		"${SINCE}", strconv.FormatUint(params.Since, 10),
		"${TOPIC_PREFIX}", params.TopicPrefix,
	)
	if err := json.Unmarshal(deploy.DebeziumConnector, &config); err != nil {
		return nil, "", fmt.Errorf("read debezium/connector.json: %w", err)
	}
	for name, value := range config {
		config[name] = fill.Replace(value)
	}
	return config, address.password, nil
}

type databaseAddress struct {
	host, port, user, password, name, sslmode string
}

// plainName is a database name that means the same in every kind of URL.
var plainName = regexp.MustCompile(`^[A-Za-z0-9_$.-]+$`)

// elsewhere are parameters of a URL that Connect would not get to see, and that
// matter too much to be left out.
var elsewhere = []string{
	"hostaddr", "port", "user", "password", "dbname", "service", "passfile",
	"sslrootcert", "sslcert", "sslkey", "sslpassword", "sslcrl",
}

// parseDatabaseURL takes apart what JDBC wants in parts. Its errors quote
// nothing that could be a password.
func parseDatabaseURL(text string) (databaseAddress, error) {
	const form = "give a URL like postgres://user:password@host:5432/name"
	noHost := errors.New("it names no host before the database's name, as one with a Unix socket does not: " +
		"Debezium connects over TCP only; " + form)
	parsed, err := url.Parse(text)
	if lower := strings.ToLower(text); err != nil && (strings.Contains(lower, "@%2f") || strings.Contains(lower, "//%2f")) {
		return databaseAddress{}, noHost // libpq's way to write a socket's folder
	}
	if err != nil {
		return databaseAddress{}, errors.New("it is not a URL (characters such as @ : / % in a password must be percent-encoded): " + form)
	}
	if parsed.Scheme != "postgres" && parsed.Scheme != "postgresql" {
		return databaseAddress{}, errors.New("it is not a postgres:// URL: " + form)
	}
	query, err := url.ParseQuery(parsed.RawQuery)
	if err != nil {
		return databaseAddress{}, errors.New("what follows its ? is not readable: " + form)
	}
	if query.Has("host") || parsed.Hostname() == "" {
		return databaseAddress{}, noHost
	}
	if strings.Contains(parsed.Host, ",") {
		return databaseAddress{}, errors.New("it names several hosts: Debezium connects to one; " + form)
	}
	for _, name := range elsewhere {
		if query.Has(name) {
			return databaseAddress{}, fmt.Errorf("the parameter %s in it cannot be passed on to Debezium: %s", name, form)
		}
	}

	address := databaseAddress{
		host:    parsed.Hostname(),
		port:    parsed.Port(),
		name:    strings.TrimPrefix(parsed.Path, "/"),
		sslmode: query.Get("sslmode"),
	}
	if strings.Contains(address.host, ":") {
		address.host = "[" + address.host + "]" // it is put into a URL
	}
	if address.port == "" {
		address.port = "5432"
	}
	if address.sslmode == "" {
		address.sslmode = "prefer" // as libpq
	}
	if parsed.User != nil {
		address.user = parsed.User.Username()
		address.password, _ = parsed.User.Password()
	}
	if address.user == "" {
		return databaseAddress{}, errors.New("it names no user: " + form)
	}
	if !plainName.MatchString(address.name) {
		return databaseAddress{}, errors.New("the database's name is missing or has other characters than letters, digits, _ $ . -: " + form)
	}
	return address, nil
}

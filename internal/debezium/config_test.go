package debezium_test

import (
	"encoding/json"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/deploy"
	"github.com/onceledger/onceledger/internal/debezium"
	"github.com/onceledger/onceledger/internal/event"
)

var placeholder = regexp.MustCompile(`\$\{[^}]*\}`)

func params() debezium.Params {
	return debezium.Params{
		DatabaseURL: "postgres://onceledger_relay:s%40cret%2F%25%3A%24%7BSLOT%7D@db.example:6432/shop?sslmode=require",
		Slot:        "a_slot", Publication: "a_publication", Since: 18446744073709551615,
	}
}

func TestConnectorConfig(t *testing.T) {
	t.Parallel()

	t.Run("FillsInWhatIsOfThePlace", func(t *testing.T) {
		t.Parallel()

		config, err := debezium.ConnectorConfig(params())
		require.NoError(t, err)
		for name, want := range map[string]string{
			"database.hostname": "db.example", "database.port": "6432", "database.dbname": "shop",
			"database.user": "onceledger_relay", "database.password": "s@cret/%:${SLOT}", "database.sslmode": "require",
			"slot.name": "a_slot", "publication.name": "a_publication", "topic.prefix": "onceledger",
		} {
			require.Equal(t, want, config[name], name)
		}
		require.Contains(t, config["snapshot.select.statement.overrides.public.outbox_events"], "tx_id >= '18446744073709551615'::xid8")

		delete(config, "database.password")
		require.Equal(t, "${routedByValue}.events", config["transforms.router.route.topic.replacement"])
		delete(config, "transforms.router.route.topic.replacement")
		for name, value := range config {
			require.NotRegexp(t, placeholder, value, name)
		}
	})

	t.Run("LeavesNoPlaceholderUnused", func(t *testing.T) {
		t.Parallel()

		found := placeholder.FindAllString(string(deploy.DebeziumConnector), -1)
		require.ElementsMatch(t, []string{
			"${DATABASE_HOST}", "${DATABASE_PORT}", "${DATABASE_USER}", "${DATABASE_PASSWORD}", "${DATABASE_NAME}",
			"${DATABASE_SSLMODE}", "${SLOT}", "${PUBLICATION}", "${SINCE}", "${TOPIC_PREFIX}", "${routedByValue}",
		}, found)
	})

	t.Run("HasASourceForEachAggregateType", func(t *testing.T) {
		t.Parallel()

		config, err := debezium.ConnectorConfig(params())
		require.NoError(t, err)
		transforms := strings.Split(config["transforms"], ",")
		for _, aggregate := range []string{event.AggregateOrder, event.AggregateBilling} {
			require.Contains(t, transforms, aggregate)
			require.Equal(t, event.HeaderSource, config["transforms."+aggregate+".header"])
			require.Equal(t, event.Source(aggregate), config["transforms."+aggregate+".value.literal"])
			predicate := config["transforms."+aggregate+".predicate"]
			require.Regexp(t, "^"+config["predicates."+predicate+".pattern"]+"$", event.Topic(aggregate))
		}
	})

	t.Run("HasDefaults", func(t *testing.T) {
		t.Parallel()

		given := params()
		given.DatabaseURL, given.TopicPrefix = "postgresql://u@[::1]/d", "mine"
		config, err := debezium.ConnectorConfig(given)
		require.NoError(t, err)
		for name, want := range map[string]string{
			"database.hostname": "[::1]", "database.port": "5432", "database.user": "u", "database.password": "",
			"database.sslmode": "prefer", "topic.prefix": "mine",
		} {
			require.Equal(t, want, config[name], name)
		}
	})

	for name, test := range map[string]struct{ url, says string }{
		"Nothing":                 {"", "not a postgres:// URL"},
		"KeywordsAndValues":       {"host=db user=u password=hunter2", "not a postgres:// URL"},
		"AnotherScheme":           {"mysql://u:hunter2@db/d", "not a postgres:// URL"},
		"WhatIsNoURL":             {"postgres://u:hunter2%zz@db/d", "percent-encoded"},
		"APasswordThatLooksAHost": {"postgres://u:hunter2/x@db/d", "percent-encoded"},
		"NoHost":                  {"postgres://u:hunter2@/d", "names no host"},
		"ASocketInTheQuery":       {"postgres://u:hunter2@/d?host=/var/run/postgresql", "Unix socket"},
		"ASocketBesideAHost":      {"postgres://u:hunter2@db/d?host=/var/run/postgresql", "Unix socket"},
		"ASocketForAHost":         {"postgres://u:hunter2@%2Fvar%2Frun/d", "Unix socket"},
		"SeveralHosts":            {"postgres://u:hunter2@db1,db2/d", "several hosts"},
		"NoUser":                  {"postgres://db/d", "no user"},
		"NoDatabase":              {"postgres://u:hunter2@db", "the database's name"},
		"ADatabaseLikeAPath":      {"postgres://u:hunter2@db/a/b", "the database's name"},
		"AFileOfThisMachine":      {"postgres://u:hunter2@db/d?sslrootcert=/ca.pem", "sslrootcert"},
		"APasswordInTheQuery":     {"postgres://u@db/d?password=hunter2", "parameter password"},
	} {
		t.Run("Refuses"+name, func(t *testing.T) {
			t.Parallel()

			given := params()
			given.DatabaseURL = test.url
			_, err := debezium.ConnectorConfig(given)
			require.ErrorContains(t, err, test.says)
			require.NotContains(t, err.Error(), "hunter2")
		})
	}

	for name, change := range map[string]func(*debezium.Params){
		"slot":        func(p *debezium.Params) { p.Slot = "" },
		"publication": func(p *debezium.Params) { p.Publication = "" },
	} {
		t.Run("RefusesNo_"+name, func(t *testing.T) {
			t.Parallel()

			given := params()
			change(&given)
			_, err := debezium.ConnectorConfig(given)
			require.ErrorContains(t, err, "needs a "+name)
		})
	}
}

// TestConnectorFile: each name once, which a JSON reader would not say.
func TestConnectorFile(t *testing.T) {
	t.Parallel()

	var settings map[string]string
	require.NoError(t, json.Unmarshal(deploy.DebeziumConnector, &settings))
	names := regexp.MustCompile(`(?m)^  "([^"]+)":`).FindAllSubmatch(deploy.DebeziumConnector, -1)
	require.Len(t, names, len(settings))
}

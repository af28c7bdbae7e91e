package balances_test

import (
	"bytes"
	"encoding/json"
	"os"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/balances"
	"github.com/onceledger/onceledger/internal/event"
)

// TestRecordsKeepToTheSchema that docs/events.md points at.
func TestRecordsKeepToTheSchema(t *testing.T) {
	t.Parallel()

	text, err := os.ReadFile("balance.v1.json")
	require.NoError(t, err)
	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	require.NoError(t, err)
	compiler := jsonschema.NewCompiler()
	compiler.AssertFormat()
	require.NoError(t, compiler.AddResource("balance.v1.json", document))
	schema, err := compiler.Compile("balance.v1.json")
	require.NoError(t, err)

	b := newBench(t, balances.Config{})
	b.publish(b.issueMany(t, 50)...)
	require.Nil(t, b.run(t, 7))
	checked := 0
	for _, record := range b.state {
		if record.Topic != event.LedgerBalances {
			continue
		}
		value, err := jsonschema.UnmarshalJSON(bytes.NewReader(record.Value))
		require.NoError(t, err)
		require.NoError(t, schema.Validate(value), string(record.Value))
		require.Empty(t, record.Headers)
		checked++

		members := value.(map[string]any)
		for name := range members {
			fewer := make(map[string]any)
			for other, member := range members {
				if other != name {
					fewer[other] = member
				}
			}
			require.Error(t, schema.Validate(fewer), "%s is missing", name)
		}
		number := members["debit"]
		members["debit"] = json.Number("1")
		require.Error(t, schema.Validate(members), "a sum is a number")
		members["debit"] = number
	}
	require.Positive(t, checked)
}

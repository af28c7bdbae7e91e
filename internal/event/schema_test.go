package event_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
)

// compile reads the schema of a type with the parts that it refers to. Formats
// (uuid, date-time) are checked.
func compile(t *testing.T, typ event.Type) *jsonschema.Schema {
	t.Helper()
	compiler := jsonschema.NewCompiler()
	compiler.AssertFormat()
	var wanted string
	for _, name := range []string{"common", string(typ)} {
		text, err := os.ReadFile(filepath.Join("schemas", name+".v1.json"))
		require.NoError(t, err)
		document, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
		require.NoError(t, err)
		members := document.(map[string]any)
		require.Equal(t, "https://json-schema.org/draft/2020-12/schema", members["$schema"])
		wanted = members["$id"].(string)
		require.True(t, strings.HasSuffix(wanted, "/internal/event/schemas/"+name+".v1.json"), wanted)
		require.NoError(t, compiler.AddResource(wanted, document))
	}
	schema, err := compiler.Compile(wanted)
	require.NoError(t, err)
	return schema
}

func validate(t *testing.T, schema *jsonschema.Schema, payload []byte) error {
	t.Helper()
	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(payload))
	require.NoError(t, err)
	return schema.Validate(document)
}

// change gives a payload with one member set, or removed where value is "".
func change(t *testing.T, payload []byte, path, value string) []byte {
	t.Helper()
	name, rest, deeper := strings.Cut(path, ".")
	if name == "0" {
		var items []json.RawMessage
		require.NoError(t, json.Unmarshal(payload, &items))
		items[0] = change(t, items[0], rest, value)
		changed, err := json.Marshal(items)
		require.NoError(t, err)
		return changed
	}
	var members map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(payload, &members))
	switch {
	case deeper:
		members[name] = change(t, members[name], rest, value)
	case value == "":
		require.Contains(t, members, name)
		delete(members, name)
	default:
		members[name] = json.RawMessage(value)
	}
	changed, err := json.Marshal(members)
	require.NoError(t, err)
	return changed
}

func TestSchemas(t *testing.T) {
	t.Parallel()

	t.Run("AreThereForEachTypeAndNoOther", func(t *testing.T) {
		t.Parallel()

		files, err := filepath.Glob("schemas/*")
		require.NoError(t, err)
		want := []string{"schemas/common.v1.json"}
		for _, typ := range allTypes {
			want = append(want, "schemas/"+string(typ)+".v1.json")
		}
		require.ElementsMatch(t, want, files)
	})

	for _, typ := range allTypes {
		t.Run(string(typ), func(t *testing.T) {
			t.Parallel()
			schema := compile(t, typ)
			payload := sample(t, typ).Payload

			t.Run("TakesTheGoldenPayload", func(t *testing.T) {
				t.Parallel()

				golden, err := os.ReadFile(filepath.Join("testdata", string(typ)+".golden"))
				require.NoError(t, err)
				_, value, _ := bytes.Cut(golden, []byte("\n\n"))
				require.NoError(t, validate(t, schema, value))
			})

			t.Run("TakesUnknownMembers", func(t *testing.T) {
				t.Parallel()

				require.NoError(t, validate(t, schema, change(t, payload, "new", `{"x":[1]}`)))
				require.NoError(t, validate(t, schema, change(t, payload, "taxes.0.new", `"x"`)))
			})

			t.Run("NeedsEachMember", func(t *testing.T) {
				t.Parallel()

				var members map[string]json.RawMessage
				require.NoError(t, json.Unmarshal(payload, &members))
				for name := range members {
					require.Error(t, validate(t, schema, change(t, payload, name, "")), "%s is missing", name)
					require.Error(t, validate(t, schema, change(t, payload, name, "null")), "%s is null", name)
				}
				for _, name := range []string{"rate", "net_amount", "tax_amount"} {
					require.Error(t, validate(t, schema, change(t, payload, "taxes.0."+name, "")), "taxes[0].%s is missing", name)
				}
			})

			t.Run("TakesNoPayloadOfAnotherType", func(t *testing.T) {
				t.Parallel()

				for _, other := range allTypes {
					if other != typ {
						require.Error(t, validate(t, schema, sample(t, other).Payload), "an %s is not an %s", other, typ)
					}
				}
			})

			broken := []struct{ name, path, value string }{
				{"AnAmountWithDecimals", "net_amount", "34.99"},
				{"AnAmountAsText", "net_amount", `"3499"`},
				{"ANegativeAmount", "tax_amount", "-1"},
				{"AnAmountThatIsTooLarge", "total_amount", "9007199254740992"},
				{"ATotalOfZero", "total_amount", "0"},
				{"ALowerCaseCurrency", "currency", `"eur"`},
				{"ACurrencyWithABlank", "currency", `"EUR "`},
				{"AnIDThatIsNoUUID", "order_id", `"42"`},
				{"ARateAsANumber", "taxes.0.rate", "0.07"},
				{"ARateInPercent", "taxes.0.rate", `"7%"`},
				{"ARateAboveOne", "taxes.0.rate", `"1.1"`},
				{"NoTaxes", "taxes", "[]"},
				{"AnEmptyCustomer", "customer_id", `""`},
			}
			switch typ {
			case event.OrderRefunded:
				broken = append(broken, []struct{ name, path, value string }{
					{"ARefundOfNothing", "refund.amount", "0"},
					{"ARefundWithNoReason", "refund.reason", `""`},
					{"ARefundWithNoTaxes", "refund.taxes", "[]"},
					{"AnOrderOfWhichNothingIsRefunded", "refunded_amount", "0"},
					{"ATimeThatIsNone", "refund.refunded_at", `"2026-02-29T00:00:00Z"`},
				}...)
			case event.CreditNoteIssued:
				broken = append(broken, []struct{ name, path, value string }{
					{"AnInvoicesNumber", "number", `"INV-2026-000001"`},
					{"ATimeInMicroseconds", "refunded_at", "1755933141855875"},
				}...)
			case event.InvoiceIssued:
				broken = append(broken, []struct{ name, path, value string }{
					{"ABareNumber", "number", `"42"`},
					{"NoLines", "lines", "[]"},
					{"ATimeInAnotherZone", "issued_at", `"2026-03-04T06:06:07+01:00"`},
				}...)
			case event.OrderCreated, event.OrderPaid, event.OrderCancelled:
				broken = append(broken, []struct{ name, path, value string }{
					{"NoLines", "lines", "[]"},
					{"AQuantityOfZero", "lines.0.quantity", "0"},
					{"AQuantityWithDecimals", "lines.0.quantity", "1.5"},
					{"ALineWithNoUnitAmount", "lines.0.unit_amount", ""},
					{"AnUnknownStatus", "status", `"archived"`},
					{"VersionZero", "version", "0"},
					{"MetadataThatIsNoObject", "metadata", "[]"},
					{"ATimeThatIsADate", "created_at", `"2026-03-04"`},
				}...)
			}
			for _, test := range broken {
				t.Run("Refuses"+test.name, func(t *testing.T) {
					t.Parallel()

					require.Error(t, validate(t, schema, change(t, payload, test.path, test.value)))
				})
			}
		})
	}
}

package relay

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pglogrepl"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
)

func TestDecode(t *testing.T) {
	t.Parallel()

	columns := []string{
		"payload", "id", "tenant_id", "aggregate_type", "aggregate_id", "aggregate_version",
		"event_type", "schema_version", "tx_id", "traceparent", "occurred_at",
	}
	row := []any{
		`{"b":1e3, "a":"\u00e9"}`, "0190a5b1-0000-7000-8000-000000000001", "0190a5b1-0000-7000-8000-000000000002",
		"order", "0190a5b1-0000-7000-8000-000000000003", "7", "OrderPaid", "1", "12345", nil,
		"2026-01-02 03:04:05.6+00",
	}
	const relation = 16400
	setup := func(t *testing.T) *decoder {
		t.Helper()
		d := &decoder{relations: make(map[uint32][]column)}
		require.NoError(t, d.learn(relationOf(relation, "outbox_events", columns)))
		return d
	}

	t.Run("ReadsColumnsByName", func(t *testing.T) {
		t.Parallel()

		decoded, err := setup(t).decodeChange(insertOf(relation, row))
		require.NoError(t, err)
		require.Equal(t, message{kind: kindInsert, event: &event.Event{
			ID:               uuid.MustParse(row[1].(string)),
			TenantID:         uuid.MustParse(row[2].(string)),
			AggregateType:    "order",
			AggregateID:      uuid.MustParse(row[4].(string)),
			AggregateVersion: 7,
			Type:             event.OrderPaid,
			SchemaVersion:    1,
			OccurredAt:       time.Date(2026, 1, 2, 3, 4, 5, 600_000_000, time.UTC),
			Payload:          []byte(row[0].(string)),
		}}, utc(decoded))
	})

	t.Run("SkipsOtherTables", func(t *testing.T) {
		t.Parallel()

		d := setup(t)
		require.NoError(t, d.learn(relationOf(9, "other", []string{"a"})))
		decoded, err := d.decodeChange(insertOf(9, []any{"1"}))
		require.NoError(t, err)
		require.Zero(t, decoded.kind)
	})

	t.Run("RefusesATableThatLacksAColumn", func(t *testing.T) {
		t.Parallel()

		err := setup(t).learn(relationOf(relation, "outbox_events", columns[1:]))
		require.ErrorContains(t, err, "leaves out column payload")
		require.True(t, isSetupError(err))
	})

	t.Run("RefusesARowThatIsCutShort", func(t *testing.T) {
		t.Parallel()

		whole := insertOf(relation, row)
		d := setup(t)
		for n := range whole {
			_, err := d.decodeChange(whole[:n])
			require.Error(t, err, "%d bytes", n)
		}
	})

	t.Run("RefusesAValueThatIsNone", func(t *testing.T) {
		t.Parallel()

		for i, wrong := range map[int]string{1: "no-uuid", 5: "x", 7: "99999999999", 10: "yesterday"} {
			changed := append([]any(nil), row...)
			changed[i] = wrong
			_, err := setup(t).decodeChange(insertOf(relation, changed))
			require.ErrorContains(t, err, columns[i])
		}
	})
}

func utc(m message) message {
	m.event.OccurredAt = m.event.OccurredAt.UTC()
	return m
}

func relationOf(id uint32, name string, columns []string) *pglogrepl.RelationMessage {
	relation := &pglogrepl.RelationMessage{RelationID: id, RelationName: name}
	for _, column := range columns {
		relation.Columns = append(relation.Columns, &pglogrepl.RelationMessageColumn{Name: column})
	}
	return relation
}

func insertOf(relation uint32, values []any) []byte {
	data := binary.BigEndian.AppendUint32([]byte{'I'}, relation)
	data = append(data, 'N')
	data = binary.BigEndian.AppendUint16(data, uint16(len(values)))
	for _, value := range values {
		if value == nil {
			data = append(data, 'n')
			continue
		}
		text := value.(string)
		data = binary.BigEndian.AppendUint32(append(data, 't'), uint32(len(text)))
		data = append(data, text...)
	}
	return data
}

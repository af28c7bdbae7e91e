package outbox_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/failure"
	"github.com/onceledger/onceledger/internal/outbox"
	"github.com/onceledger/onceledger/internal/pgtest"
)

func TestAppend(t *testing.T) {
	t.Parallel()

	id, err := uuid.NewV7()
	require.NoError(t, err)
	tooLarge := event.Event{
		ID:               id,
		TenantID:         uuid.New(),
		AggregateType:    event.AggregateOrder,
		AggregateID:      uuid.New(),
		AggregateVersion: 1,
		Type:             event.OrderCreated,
		SchemaVersion:    event.SchemaVersion,
		OccurredAt:       time.Now(),
		Payload:          json.RawMessage(`{"a":"` + strings.Repeat("x", event.MaxPayload-7) + `"}`),
	}
	require.Len(t, tooLarge.Payload, event.MaxPayload+1)

	for name, write := range map[string]func(t *testing.T, tx pgx.Tx) error{
		"Append": func(t *testing.T, tx pgx.Tx) error { return outbox.Append(t.Context(), tx, tooLarge) },
		"AppendMany": func(t *testing.T, tx pgx.Tx) error {
			return outbox.AppendMany(t.Context(), tx, []event.Event{tooLarge})
		},
	} {
		t.Run(name+"RefusesAPayloadThatNoBrokerTakes", func(t *testing.T) {
			t.Parallel()
			require.ErrorIs(t, write(t, pgtest.Tx(t)), outbox.ErrPayloadTooLarge)
			require.Equal(t, failure.RuleViolated, outbox.ErrPayloadTooLarge.Kind)
		})
	}
}

package event_test

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/event"
)

var update = flag.Bool("update", false, "write the golden files anew")

// TestRecord holds the wire contract to the byte: what is in testdata is what
// other programs read. A file that changes here is a new schema version, or a
// break.
func TestRecord(t *testing.T) {
	t.Parallel()

	for _, typ := range allTypes {
		t.Run("OfAn"+string(typ)+"IsTheGoldenOne", func(t *testing.T) {
			t.Parallel()

			got := print(sample(t, typ).Record())
			path := filepath.Join("testdata", string(typ)+".golden")
			if *update {
				require.NoError(t, os.WriteFile(path, got, 0o600))
			}
			want, err := os.ReadFile(path)
			require.NoError(t, err)
			require.Equal(t, string(want), string(got), "go test ./internal/event -update writes it anew")
		})

		t.Run("OfAn"+string(typ)+"IsReadBackWhole", func(t *testing.T) {
			t.Parallel()

			e := sample(t, typ)
			got, err := event.Decode(e.Record())
			require.NoError(t, err)
			require.Equal(t, e, got)
		})
	}

	t.Run("HasNoHeaderForATraceThatIsNotThere", func(t *testing.T) {
		t.Parallel()

		e := sample(t, event.OrderPaid)
		e.Traceparent = ""
		for _, header := range e.Record().Headers {
			require.NotEqual(t, event.HeaderTraceparent, header.Key)
		}
	})

	t.Run("WritesTimesInUTCWithSixDecimals", func(t *testing.T) {
		t.Parallel()

		e := sample(t, event.OrderPaid)
		e.OccurredAt = time.Date(2026, time.January, 1, 0, 30, 0, 0, time.FixedZone("", 3600))
		require.Equal(t, "2025-12-31T23:30:00.000000Z", header(t, e.Record(), event.HeaderTime))
	})
}

// print shows a record as a text: topic and key, then the headers in order, an
// empty line, and the value to its last byte.
func print(record event.Record) []byte {
	var text bytes.Buffer
	fmt.Fprintf(&text, "topic: %s\nkey: %s\n", record.Topic, record.Key)
	for _, header := range record.Headers {
		fmt.Fprintf(&text, "%s: %s\n", header.Key, header.Value)
	}
	fmt.Fprintf(&text, "\n%s\n", record.Value)
	return text.Bytes()
}

func header(t *testing.T, record event.Record, key string) string {
	t.Helper()
	for _, header := range record.Headers {
		if header.Key == key {
			return string(header.Value)
		}
	}
	require.Fail(t, "no header "+key)
	return ""
}

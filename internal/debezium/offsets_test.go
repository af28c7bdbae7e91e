package debezium_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/debezium"
)

// TestPastSnapshot goes by answers that Connect was seen to give.
func TestPastSnapshot(t *testing.T) {
	t.Parallel()

	const confirmed = 30_709_000
	offset := func(text string) string {
		return `{"offsets":[{"partition":{"server":"onceledger"},"offset":` + text + `}]}`
	}
	for name, tt := range map[string]struct {
		status int
		answer string
		past   bool
		fails  bool
	}{
		"Streaming":         {answer: offset(`{"lsn_proc":30715776,"messageType":"INSERT","lsn_commit":30714656,"lsn":30715776,"txId":809,"ts_usec":1796069054308550}`), past: true},
		"AtItsEnd":          {answer: offset(`{"lsn":30709000,"txId":807,"ts_usec":1796069041327000}`), past: true},
		"UnderWay":          {answer: offset(`{"snapshot":"INITIAL","snapshot_completed":false,"last_snapshot_record":false,"lsn":30715776,"ts_usec":1}`)},
		"ItsLastRecord":     {answer: offset(`{"snapshot":"INITIAL","snapshot_completed":true,"last_snapshot_record":true,"lsn":30715776,"ts_usec":1}`)},
		"OfAnEarlierSlot":   {answer: offset(`{"lsn_proc":30708320,"messageType":"INSERT","lsn":30708320,"txId":809,"ts_usec":1}`)},
		"NothingYet":        {answer: `{"offsets":[]}`},
		"NoConnector":       {status: http.StatusNotFound, answer: `{"error_code":404,"message":"Connector c not found"}`},
		"ConnectIsInPieces": {status: http.StatusInternalServerError, answer: `{"error_code":500,"message":"boom"}`, fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path != "/connectors/c/offsets" {
					w.WriteHeader(http.StatusTeapot)
				} else if tt.status != 0 {
					w.WriteHeader(tt.status)
				}
				fmt.Fprint(w, tt.answer)
			}))
			t.Cleanup(server.Close)
			client, err := debezium.NewClient(debezium.ClientConfig{URL: server.URL, Connector: "c"})
			require.NoError(t, err)
			past, err := client.PastSnapshot(t.Context(), confirmed)
			require.Equal(t, tt.past, past)
			require.Equal(t, tt.fails, err != nil, "%v", err)
		})
	}
}

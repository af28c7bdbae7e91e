package deadletters

import (
	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/inbox"
)

// recordOf is a letter's record as it came: the same key, value and headers, from
// the same place.
func recordOf(row db.DeadLetter) (event.Record, error) {
	headers, err := inbox.DecodeHeaders(row.RecordHeaders)
	return event.Record{
		Topic: row.Topic, Partition: row.Partition, Offset: row.Offset, Time: row.RecordTime,
		Key: row.RecordKey, Value: row.RecordValue, Headers: headers,
	}, err
}

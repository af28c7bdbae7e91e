package inbox

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/db"
	"github.com/onceledger/onceledger/internal/event"
)

// lettersTx reads what dead letters have to say of a batch: which of its
// aggregates they hold, and which of its records were discarded, which it notes.
// The letters being tried hold nothing. The second statement sees what was
// discarded while the first waited.
func (in *Inbox) lettersTx(ctx context.Context, tx pgx.Tx, batch []*delivery, trying []uuid.UUID) (map[aggregate]bool, error) {
	lock := db.DeadLetterLockForBatchParams{Consumer: in.consumer, Trying: trying}
	if trying == nil {
		lock.Trying = []uuid.UUID{} // null would be equal to nothing, and different from nothing
	}
	params := db.DeadLetterListDiscardedParams{Consumer: in.consumer}
	type partition struct {
		topic  string
		number int32
	}
	spans := make(map[partition]int)
	for _, d := range batch {
		d.discarded = false
		if d.event.AggregateID != uuid.Nil {
			lock.TenantIds = append(lock.TenantIds, d.event.TenantID)
			lock.AggregateIds = append(lock.AggregateIds, d.event.AggregateID)
		}
		if d.event.ID != uuid.Nil {
			params.EventIds = append(params.EventIds, d.event.ID)
		}
		at, known := spans[partition{d.record.Topic, d.record.Partition}]
		if !known {
			spans[partition{d.record.Topic, d.record.Partition}] = len(params.Topics)
			params.Topics = append(params.Topics, d.record.Topic)
			params.Partitions = append(params.Partitions, d.record.Partition)
			params.FirstOffsets = append(params.FirstOffsets, d.record.Offset)
			params.LastOffsets = append(params.LastOffsets, d.record.Offset)
			continue
		}
		params.FirstOffsets[at] = min(params.FirstOffsets[at], d.record.Offset)
		params.LastOffsets[at] = max(params.LastOffsets[at], d.record.Offset)
	}
	lock.EventIds = params.EventIds
	open, err := db.New().DeadLetterLockForBatch(ctx, tx, lock)
	if err != nil {
		return nil, fmt.Errorf("lock dead letters: %w", err)
	}
	discarded, err := db.New().DeadLetterListDiscarded(ctx, tx, params)
	if err != nil {
		return nil, fmt.Errorf("read what was discarded: %w", err)
	}

	blocked := make(map[aggregate]bool, len(open))
	for _, row := range open {
		if Class(row.Class).parks() && row.AggregateID != uuid.Nil {
			blocked[aggregate{row.TenantID, row.AggregateID}] = true
		}
	}
	if len(discarded) > 0 {
		return blocked, noteDiscarded(batch, discarded)
	}
	return blocked, nil
}

// noteDiscarded finds the records that are what was discarded: the very record, or
// another one with the same event, to the byte. Its headers count as far as they
// say what the event is: a relay that sends twice may give another trace. An event
// that only has its id is judged by itself.
func noteDiscarded(batch []*delivery, discarded []db.DeadLetterListDiscardedRow) error {
	type place struct {
		topic     string
		partition int32
		offset    int64
	}
	type gone struct {
		db.DeadLetterListDiscardedRow
		headers       []event.Header
		schemaVersion string
	}
	at := make(map[place][]gone)
	of := make(map[uuid.UUID][]gone)
	for _, row := range discarded {
		headers, err := DecodeHeaders(row.RecordHeaders)
		if err != nil {
			return fmt.Errorf("read what was discarded: %w", err)
		}
		key, letter := place{row.Topic, row.Partition, row.Offset}, gone{row, headers, headerOf(headers, event.HeaderSchemaVersion)}
		at[key] = append(at[key], letter)
		of[row.EventID] = append(of[row.EventID], letter)
	}
	for _, d := range batch {
		for _, letter := range at[place{d.record.Topic, d.record.Partition, d.record.Offset}] {
			d.discarded = d.discarded || bytes.Equal(letter.RecordHash, hashRecord(d.record)) && sameHeaders(letter.headers, d.record.Headers)
		}
		if d.event.ID == uuid.Nil {
			continue
		}
		for _, letter := range of[d.event.ID] {
			d.discarded = d.discarded || letter.EventType == storable(string(d.event.Type)) &&
				letter.TenantID == d.event.TenantID && letter.AggregateID == d.event.AggregateID &&
				letter.AggregateVersion == d.event.AggregateVersion &&
				letter.schemaVersion == headerOf(d.record.Headers, event.HeaderSchemaVersion) &&
				bytes.Equal(letter.RecordHash, hashRecord(d.record))
		}
	}
	return nil
}

func headerOf(headers []event.Header, key string) string {
	for _, header := range headers {
		if header.Key == key {
			return string(header.Value)
		}
	}
	return ""
}

// sameHeaders compares headers that were stored with a record's.
func sameHeaders(stored, headers []event.Header) bool {
	return slices.EqualFunc(stored, headers, func(a, b event.Header) bool {
		return a.Key == storable(b.Key) && bytes.Equal(a.Value, b.Value)
	})
}

// markTx marks events as applied and tells which were not marked before. Another
// transaction that is marking one of them is waited for.
func (in *Inbox) markTx(ctx context.Context, tx pgx.Tx, events []*delivery) (map[uuid.UUID]bool, error) {
	if len(events) == 0 {
		return nil, nil
	}
	n := len(events)
	params := db.ProcessedEventInsertManyParams{
		Consumer:     in.consumer,
		EventIds:     make([]uuid.UUID, n),
		TenantIds:    make([]uuid.UUID, n),
		Fingerprints: make([][]byte, n),
		Topics:       make([]string, n),
		Partitions:   make([]int32, n),
		Offsets:      make([]int64, n),
	}
	for i, d := range events {
		params.EventIds[i] = d.event.ID
		params.TenantIds[i] = d.event.TenantID
		params.Fingerprints[i] = d.fingerprint
		params.Topics[i] = d.record.Topic
		params.Partitions[i] = d.record.Partition
		params.Offsets[i] = d.record.Offset
	}
	rows, err := db.New().ProcessedEventInsertMany(ctx, tx, params)
	if err != nil {
		return nil, fmt.Errorf("mark events as applied: %w", err)
	}
	marked := make(map[uuid.UUID]bool, len(rows))
	for _, id := range rows {
		marked[id] = true
	}
	return marked, nil
}

// fingerprintsTx reads what those of the events looked like that are marked as
// applied, by now.
func (in *Inbox) fingerprintsTx(ctx context.Context, tx pgx.Tx, events []*delivery) (map[uuid.UUID]string, error) {
	if len(events) == 0 {
		return nil, nil
	}
	ids := make([]uuid.UUID, len(events))
	for i, d := range events {
		ids[i] = d.event.ID
	}
	rows, err := db.New().ProcessedEventFingerprints(ctx, tx, in.consumer, ids)
	if err != nil {
		return nil, fmt.Errorf("read applied events: %w", err)
	}
	fingerprints := make(map[uuid.UUID]string, len(rows))
	for _, row := range rows {
		fingerprints[row.EventID] = string(row.Fingerprint)
	}
	return fingerprints, nil
}

// storeDeadTx stores records that could not be applied, with their bytes as they
// came, and returns those that were not there before. One that is stored already
// is left as it is.
func (in *Inbox) storeDeadTx(ctx context.Context, tx pgx.Tx, letters []dead) (stored []dead, err error) {
	slices.SortStableFunc(letters, func(a, b dead) int { // so that their ids ascend as they came
		return cmp.Or(cmp.Compare(a.record.Partition, b.record.Partition), cmp.Compare(a.record.Offset, b.record.Offset))
	})
	for _, letter := range letters {
		record, e := letter.record, letter.event
		headers, err := encodeHeaders(record.Headers)
		if err != nil {
			return nil, err
		}
		inserted, err := db.New().DeadLetterInsert(ctx, tx, db.DeadLetterInsertParams{
			ID:               uuid.Must(uuid.NewV7()),
			Consumer:         in.consumer,
			Topic:            record.Topic,
			Partition:        record.Partition,
			RecordOffset:     record.Offset,
			Class:            string(letter.fault.Class),
			Detail:           storable(letter.fault.Detail),
			EventID:          nonZero(e.ID),
			EventType:        nonZero(storable(string(e.Type))),
			TenantID:         nonZero(e.TenantID),
			AggregateID:      nonZero(e.AggregateID),
			AggregateVersion: nonZero(e.AggregateVersion),
			RecordHash:       hashRecord(record),
			RecordKey:        record.Key,
			RecordValue:      record.Value,
			RecordHeaders:    headers,
			RecordTime:       storableTime(record.Time),
		})
		if err != nil {
			return nil, fmt.Errorf("store dead letter: %w", err)
		}
		if inserted == 1 {
			stored = append(stored, letter)
		}
	}
	return stored, nil
}

// encodeHeaders keeps values byte for byte, and names as far as they are text.
func encodeHeaders(headers []event.Header) ([]byte, error) {
	named := slices.Clone(headers)
	for i := range named {
		named[i].Key = storable(named[i].Key)
	}
	encoded, err := json.Marshal(named)
	if err != nil {
		return nil, fmt.Errorf("encode headers: %w", err)
	}
	return encoded, nil
}

// hashRecord tells a record from another one that had its offset before the topic
// was made anew.
func hashRecord(record event.Record) []byte {
	hash := sha256.New()
	fmt.Fprintf(hash, "%d\n", len(record.Key))
	hash.Write(record.Key)
	hash.Write(record.Value)
	return hash.Sum(nil)
}

func nonZero[T comparable](value T) *T {
	var zero T
	if value == zero {
		return nil
	}
	return &value
}

// lastTime is the last that JSON and Postgres both can hold.
var lastTime = time.Date(9999, time.December, 31, 23, 59, 59, 999_999_000, time.UTC)

// storableTime makes any time one that can be stored and read back: a record
// with a time in a wrong unit must not keep its dead letter from being stored.
func storableTime(t time.Time) time.Time {
	switch {
	case t.Year() < 1:
		return time.Time{}
	case t.After(lastTime):
		return lastTime
	}
	return t
}

// storable makes any bytes a text that Postgres takes.
func storable(text string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(text, "\uFFFD"), "\x00", "\uFFFD")
}

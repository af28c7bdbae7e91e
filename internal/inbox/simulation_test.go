package inbox

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/onceledger/onceledger/internal/event"
)

// Ten thousand seeds of each simulation; -rapid.checks says otherwise.
func TestMain(m *testing.M) {
	if err := flag.Set("rapid.checks", "10000"); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// TestSimulatedBatches sorts out, splits and parks at random: whatever the
// batches are, wherever they are cut, and however often they come again after an
// outage, a crash or a commit whose outcome nobody knows, each record ends as it
// does in simModel, which takes one record at a time and never fails.
func TestSimulatedBatches(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		stream := rapid.SliceOfN(rapid.Custom(drawRecord), 1, 14).Draw(t, "stream")
		model := newSimModel()
		for offset, record := range stream {
			model.take(offset, record)
		}

		database := newSimDatabase()
		for position, committed := 0, 0; position < len(stream); {
			size := min(rapid.IntRange(1, 7).Draw(t, "batch"), len(stream)-position)
			if err := database.settle(t, deliveries(stream, position, size)); err != nil {
				require.ErrorIs(t, err, errOutage)
				continue // the same again, perhaps cut in another place
			}
			position += size
			switch rapid.IntRange(0, 3).Draw(t, "and then") {
			case 0: // its offsets are not committed, and the process dies
				position = committed
			case 1:
			default:
				committed = position
			}
			require.Less(t, database.transactions, 2000, "it does not come to an end")
		}

		require.Equal(t, model.effects, database.effects, "by aggregate, in order")
		require.Equal(t, model.letters, database.letters, "the first letter of each record")
		for offset := range stream {
			require.Equal(t, model.ends[offset], database.ends[offset], "the first end of record %d", offset)
		}
	})
}

// simRecord is a record and what is the matter with it.
type simRecord struct {
	id, content, aggregate int
	kind                   string
}

const (
	plain   = "plain"
	opening = "opening" // may happen once in an aggregate
	needing = "needing" // an opening before it
	ruled   = "ruled"   // against a rule of the domain, whatever came before
	spoilt  = "spoilt"  // the database refuses its values, and does not say whose they are
	newer   = "newer"   // of a schema that is not known
	alien   = "alien"   // not an event: no aggregate can be told
	nothing = "nothing" // a tombstone
)

func drawRecord(t *rapid.T) simRecord {
	return simRecord{
		id:        rapid.IntRange(1, 12).Draw(t, "id"), // some come twice
		content:   rapid.IntRange(0, 9).Draw(t, "content") / 8,
		aggregate: rapid.IntRange(1, 3).Draw(t, "aggregate"),
		kind:      rapid.SampledFrom([]string{plain, plain, opening, needing, ruled, spoilt, newer, alien, nothing}).Draw(t, "kind"),
	}
}

func (r simRecord) fingerprint() string { return fmt.Sprint(r.kind, r.content, r.aggregate) }

// deliveries are what judge makes of a part of the stream.
func deliveries(stream []simRecord, from, size int) []*delivery {
	batch := make([]*delivery, size)
	for i := range batch {
		r := stream[from+i]
		d := &delivery{record: event.Record{Offset: int64(from + i)}}
		switch r.kind {
		case nothing:
			d.skip = true
		case alien:
			d.fault = &Fault{ClassUndecodable, ""}
		default:
			d.event = event.Event{ID: uuid.UUID{15: byte(r.id)}, AggregateID: uuid.UUID{15: byte(r.aggregate)}, Type: event.Type(r.kind)}
			d.fingerprint = []byte(r.fingerprint())
			if r.kind == newer {
				d.fault = &Fault{ClassUnknownSchema, ""}
			}
		}
		batch[i] = d
	}
	return batch
}

// simModel is what is to become of each record.
type simModel struct {
	applied map[int]string // fingerprint by id
	opened  map[int]bool
	blocked map[int]bool
	effects map[int][]int64 // offsets, by aggregate
	letters map[int64]Class
	ends    []string
}

func newSimModel() *simModel {
	return &simModel{
		applied: make(map[int]string), opened: make(map[int]bool), blocked: make(map[int]bool),
		effects: make(map[int][]int64), letters: make(map[int64]Class),
	}
}

func (m *simModel) take(offset int, r simRecord) {
	before, isApplied := m.applied[r.id]
	die := func(class Class) {
		m.letters[int64(offset)] = class
		m.ends = append(m.ends, string(class))
		if class.parks() {
			m.blocked[r.aggregate] = true
		}
	}
	switch {
	case r.kind == nothing:
		m.ends = append(m.ends, "skipped")
	case r.kind == alien:
		die(ClassUndecodable)
	case r.kind == newer:
		die(ClassUnknownSchema)
	case isApplied && before == r.fingerprint():
		m.ends = append(m.ends, "duplicate")
	case isApplied:
		die(ClassIDReused)
	case m.blocked[r.aggregate]:
		die(ClassParked)
	case r.kind == ruled, r.kind == opening && m.opened[r.aggregate]:
		die(ClassRule)
	case r.kind == needing && !m.opened[r.aggregate]:
		die(ClassGap)
	case r.kind == spoilt:
		die(ClassData)
	default:
		m.applied[r.id] = r.fingerprint()
		m.opened[r.aggregate] = m.opened[r.aggregate] || r.kind == opening
		m.effects[r.aggregate] = append(m.effects[r.aggregate], int64(offset))
		m.ends = append(m.ends, "applied")
	}
}

// simDatabase is what the tables of a consumer hold.
type simDatabase struct {
	simTables
	ends         map[int]string // of each record the first
	transactions int
}

type simTables struct {
	processed map[uuid.UUID]string
	opened    map[uuid.UUID]bool
	blocked   map[aggregate]bool
	effects   map[int][]int64
	letters   map[int64]Class
}

func newSimDatabase() *simDatabase {
	return &simDatabase{ends: make(map[int]string), simTables: simTables{
		processed: make(map[uuid.UUID]string), opened: make(map[uuid.UUID]bool), blocked: make(map[aggregate]bool),
		effects: make(map[int][]int64), letters: make(map[int64]Class),
	}}
}

func (s simTables) clone() simTables {
	effects := make(map[int][]int64, len(s.effects))
	for aggregate, offsets := range s.effects {
		effects[aggregate] = slices.Clone(offsets)
	}
	return simTables{maps.Clone(s.processed), maps.Clone(s.opened), maps.Clone(s.blocked), effects, maps.Clone(s.letters)}
}

var errOutage = errors.New("the database is away")

// settle has a batch settled on this database.
func (db *simDatabase) settle(t *rapid.T, batch []*delivery) error {
	return settle(batch, func(part []*delivery) (outcome, error) {
		tx := db.clone()
		result, err := tx.apply(part)
		db.transactions++
		switch trouble := rapid.IntRange(0, 15).Draw(t, "trouble"); {
		case trouble == 1:
			return result, errOutage
		case err == nil:
			db.simTables = tx
			db.note(result)
			if trouble == 2 { // it is committed, and nobody knows
				return result, errOutage
			}
		}
		return result, err
	})
}

// apply is Inbox.applyTx.
func (s *simTables) apply(batch []*delivery) (outcome, error) {
	o := sortOut(batch, maps.Clone(s.blocked))
	marked := make(map[uuid.UUID]bool)
	for _, d := range o.candidates {
		if _, before := s.processed[d.event.ID]; !before {
			marked[d.event.ID] = true
			s.processed[d.event.ID] = string(d.fingerprint)
		}
	}
	o.mark(marked)
	fingerprints := make(map[uuid.UUID]string)
	for _, d := range o.suspects {
		if fingerprint, is := s.processed[d.event.ID]; is {
			fingerprints[d.event.ID] = fingerprint
		}
	}
	o.recognise(fingerprints)
	if err := s.handle(o.fresh); err != nil {
		return o, err
	}
	for _, letter := range o.dead {
		if _, stored := s.letters[letter.record.Offset]; stored {
			continue // it is left as it is
		}
		s.letters[letter.record.Offset] = letter.fault.Class
		if letter.fault.Class.parks() {
			s.blocked[letter.aggregate()] = true
		}
	}
	return o, nil
}

// handle is a handler: it names what is against the rules, all at once; the
// database names nobody.
func (s *simTables) handle(fresh []*delivery) error {
	var refused Rejections
	for _, d := range fresh {
		opened := s.opened[d.event.AggregateID]
		switch kind := string(d.event.Type); {
		case kind == ruled, kind == opening && opened:
			refused = append(refused, Rejection{d.event.ID, Fault{ClassRule, ""}})
		case kind == needing && !opened:
			refused = append(refused, Rejection{d.event.ID, Fault{ClassGap, ""}})
		case kind == opening:
			s.opened[d.event.AggregateID] = true
		}
	}
	if len(refused) > 0 {
		return refused
	}
	for _, d := range fresh {
		if string(d.event.Type) == spoilt {
			return fmt.Errorf("insert: %w", &pgconn.PgError{Code: "22003"})
		}
		s.effects[int(d.event.AggregateID[15])] = append(s.effects[int(d.event.AggregateID[15])], d.record.Offset)
	}
	return nil
}

// note keeps the first end of each record, of those that are committed.
func (db *simDatabase) note(o outcome) {
	end := func(d *delivery, what string) {
		if _, again := db.ends[int(d.record.Offset)]; !again {
			db.ends[int(d.record.Offset)] = what
		}
	}
	for _, d := range o.fresh {
		end(d, "applied")
	}
	for _, d := range o.duplicates {
		end(d, "duplicate")
	}
	for _, d := range o.skipped {
		end(d, "skipped")
	}
	for _, letter := range o.dead {
		end(letter.delivery, string(letter.fault.Class))
	}
}

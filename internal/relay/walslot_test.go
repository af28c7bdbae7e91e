package relay

import (
	"testing"

	"github.com/jackc/pglogrepl"
	"github.com/stretchr/testify/require"

	"github.com/onceledger/onceledger/internal/db"
)

func TestFindGap(t *testing.T) {
	t.Parallel()

	const xmin = 777
	type state struct {
		system   pglogrepl.IdentifySystemResult
		setup    db.RelaySetupRow
		position db.RelayPosition
	}
	for name, tt := range map[string]struct {
		change func(*state)
		reason string
		since  uint64
	}{
		"GoesOnWhereItLeftOff":      {func(s *state) {}, "", 0},
		"SlotIsBehindTheRecord":     {func(s *state) { s.setup.SlotConfirmed = 400 }, "", 0}, // a crash between the two
		"FirstStart":                {func(s *state) { s.position = db.RelayPosition{}; s.setup.SlotExists = false }, "there is no record of an earlier relay", 0},
		"SlotWithoutRecord":         {func(s *state) { s.position = db.RelayPosition{} }, "there is no record of an earlier relay", 0},
		"OtherServer":               {func(s *state) { s.system.SystemID = "2" }, "this is another database server than last time", 0},
		"OtherTimeline":             {func(s *state) { s.system.Timeline = 2 }, "the server was restored or failed over since last time", 0},
		"LogWentBack":               {func(s *state) { s.system.XLogPos = 499 }, "the server's log has gone back since last time", 0},
		"SlotGone":                  {func(s *state) { s.setup.SlotExists = false }, "the slot is gone", xmin},
		"SlotInvalidated":           {func(s *state) { s.setup.SlotLost = true }, "the slot was invalidated", xmin},
		"SlotMadeAnew":              {func(s *state) { s.setup.SlotConfirmed = 501 }, "the slot was made anew or moved", xmin},
		"PublicationMadeAnew":       {func(s *state) { s.setup.PublicationOid = 5 }, "the publication was made anew", xmin},
		"OtherServerAndNoSlot":      {func(s *state) { s.system.SystemID = "2"; s.setup.SlotExists = false }, "this is another database server than last time", 0},
		"GapThatWasNotYetSentToEnd": {func(s *state) { s.position.Lsn = 0; s.position.SnapshotXmin = 0 }, "the slot was made anew or moved", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			s := state{
				system:   pglogrepl.IdentifySystemResult{SystemID: "1", Timeline: 1, XLogPos: 1000},
				setup:    db.RelaySetupRow{PublicationOid: 4, SlotExists: true, SlotConfirmed: 500},
				position: db.RelayPosition{SlotName: "s", SystemID: "1", Timeline: 1, PublicationOid: 4, Lsn: 500, SnapshotXmin: xmin},
			}
			tt.change(&s)
			gap := findGap(s.system, s.setup, s.position)
			if tt.reason == "" {
				require.Nil(t, gap)
				return
			}
			require.NotNil(t, gap)
			require.Equal(t, tt.reason, gap.reason)
			require.Equal(t, tt.since, gap.since)
		})
	}
}

func TestMarkDue(t *testing.T) {
	t.Parallel()

	recorded := mark{
		position: db.RelayPositionStoreParams{Lsn: 1000},
		events:   5,
		next:     milestone{lsn: 1200, events: 5},
		covered:  5,
	}
	for name, tt := range map[string]struct {
		change func(*mark)
		now    summary
		asked  bool
		due    bool
	}{
		"NothingMoved":                    {now: summary{confirmable: 1000, delivered: 5}, asked: true},
		"EventsWereDelivered":             {now: summary{confirmable: 1001, delivered: 6}, due: true},
		"DeliveredButNotToTheEnd":         {now: summary{confirmable: 1000, delivered: 6}},
		"OthersWroteALittle":              {now: summary{confirmable: 1000 + idleAdvance - 1, delivered: 5}},
		"OthersWroteALot":                 {now: summary{confirmable: 1000 + idleAdvance, delivered: 5}, due: true},
		"TheServerAsks":                   {now: summary{confirmable: 1001, delivered: 5}, asked: true, due: true},
		"TheSlotIsNew":                    {change: func(m *mark) { m.position.Lsn = 0 }, now: summary{confirmable: 1}, due: true},
		"XminOfTheLastEventsIsNotReached": {change: func(m *mark) { m.covered = 4 }, now: summary{confirmable: 1199, delivered: 5}},
		"XminOfTheLastEventsIsReached":    {change: func(m *mark) { m.covered = 4 }, now: summary{confirmable: 1200, delivered: 5}, due: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			m := recorded
			if tt.change != nil {
				tt.change(&m)
			}
			require.Equal(t, tt.due, m.due(tt.now, tt.asked))
		})
	}
}

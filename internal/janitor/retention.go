package janitor

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"
)

// Unlimited is the retention of a topic that keeps its records for ever.
const Unlimited time.Duration = -1

// Retention is how long things are kept, and the contract between them: an event
// must be known to the dedupe table for as long as it can still arrive. It can
// come from the outbox (a slot that is lost), then stay on its topic, then be
// replayed from there.
type Retention struct {
	Dedupe time.Duration            // processed_events: DEDUPE_WINDOW
	Outbox time.Duration            // outbox_events: OUTBOX_RETENTION
	Replay time.Duration            // how far back somebody may replay: REPLAY_WINDOW
	Topics map[string]time.Duration // how old a record of a topic may get at most, or Unlimited
}

// ErrRetention is a contract that does not hold.
var ErrRetention = errors.New("what is kept does not fit together")

// Check is an error with all the numbers if an event could arrive that the
// dedupe table no longer knows. It is asked at the start, before each drop, and
// before a replay.
func (r Retention) Check() error {
	if len(r.Topics) == 0 {
		return fmt.Errorf("%w: no topic's retention is known", ErrRetention)
	}
	var faults []error
	for _, topic := range slices.Sorted(maps.Keys(r.Topics)) {
		kept := r.Topics[topic]
		if kept < 0 {
			faults = append(faults, fmt.Errorf("%w: topic %[2]s keeps records for ever (retention.ms=-1), and no DEDUPE_WINDOW is longer: "+
				"set it with kafka-configs.sh --alter --topic %[2]s --add-config retention.ms=604800000", ErrRetention, topic))
			continue
		}
		if needed := r.Outbox + kept + r.Replay; r.Dedupe <= needed {
			faults = append(faults, fmt.Errorf("%w: DEDUPE_WINDOW %s must be longer than OUTBOX_RETENTION %s + topic %s %s "+
				"(retention.ms + segment.ms) + REPLAY_WINDOW %s = %s: set DEDUPE_WINDOW above %s, or keep less of the others",
				ErrRetention, inHours(r.Dedupe), inHours(r.Outbox), topic, inHours(kept), inHours(r.Replay), inHours(needed), inHours(needed)))
		}
	}
	return errors.Join(faults...)
}

// inHours writes a duration as it is set: 720h.
func inHours(d time.Duration) string { return strconv.FormatFloat(d.Hours(), 'g', 6, 64) + "h" }

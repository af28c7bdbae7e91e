package replay

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Point is a place in a topic, as somebody names it.
type Point struct {
	text     string
	earliest bool
	at       time.Time       // a moment
	offset   int64           // in each partition, unless below zero
	offsets  map[int32]int64 // in some
}

// forms is what ParsePoint takes.
const forms = "an offset (1200), one for each partition (0:1200,3:900; the others are left out), " +
	"a time (2026-11-30T18:00:00Z), how long ago (6h), or earliest"

// ParsePoint reads a place: see forms.
func ParsePoint(text string, now time.Time) (Point, error) {
	p := Point{text: text, offset: -1}
	if text == "earliest" {
		p.earliest = true
		return p, nil
	}
	if offset, err := strconv.ParseInt(text, 10, 64); err == nil && offset >= 0 {
		p.offset = offset
		return p, nil
	}
	for _, layout := range []string{time.RFC3339Nano, time.DateTime, time.DateOnly} {
		if at, err := time.Parse(layout, text); err == nil {
			p.at = at.UTC()
			return p, nil
		}
	}
	if ago, err := time.ParseDuration(text); err == nil && ago > 0 {
		p.at = now.Add(-ago).UTC()
		return p, nil
	}
	if !strings.Contains(text, ":") {
		return Point{}, fmt.Errorf("%q is no place in a topic: want %s", text, forms)
	}
	p.offsets = make(map[int32]int64)
	for part := range strings.SplitSeq(text, ",") {
		before, after, _ := strings.Cut(strings.TrimSpace(part), ":")
		partition, partitionErr := strconv.ParseInt(before, 10, 32)
		offset, offsetErr := strconv.ParseInt(after, 10, 64)
		if partitionErr != nil || offsetErr != nil || partition < 0 || offset < 0 {
			return Point{}, fmt.Errorf("%q is no place in a topic: want %s", text, forms)
		}
		if _, twice := p.offsets[int32(partition)]; twice {
			return Point{}, fmt.Errorf("%q names partition %d twice", text, partition)
		}
		p.offsets[int32(partition)] = offset
	}
	return p, nil
}

// span is what there is of a partition that can be replayed: from its first record
// to where the group has committed.
type span struct{ first, committed int64 }

// resolve finds the point in each partition. A partition that is not in the answer
// is left out. byTime says where the records of a moment and later begin.
func (p Point) resolve(spans map[int32]span, byTime map[int32]int64) (map[int32]int64, error) {
	found := make(map[int32]int64)
	for _, partition := range slices.Sorted(maps.Keys(spans)) {
		s := spans[partition]
		switch {
		case p.earliest:
			found[partition] = s.first
		case !p.at.IsZero():
			offset, later := byTime[partition]
			if !later || offset > s.committed {
				offset = s.committed
			}
			found[partition] = max(offset, s.first)
		case p.offsets == nil:
			if err := s.check(partition, p.offset); err != nil {
				return nil, fmt.Errorf("%w; to leave partitions out, name the others as 0:%d,1:%[2]d", err, p.offset)
			}
			found[partition] = p.offset
		}
	}
	for _, partition := range slices.Sorted(maps.Keys(p.offsets)) {
		s, there := spans[partition]
		if !there {
			return nil, fmt.Errorf("there is no partition %d: the topic has %d", partition, len(spans))
		}
		if err := s.check(partition, p.offsets[partition]); err != nil {
			return nil, err
		}
		found[partition] = p.offsets[partition]
	}
	return found, nil
}

func (s span) check(partition int32, offset int64) error {
	if offset >= s.first && offset <= s.committed {
		return nil
	}
	return fmt.Errorf("offset %d is out of range: partition %d can be replayed from %d, its first record, to %d, where the group is",
		offset, partition, s.first, s.committed)
}

package replay

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
)

func TestPoint(t *testing.T) {
	t.Parallel()

	now := time.Date(2026, time.November, 30, 18, 0, 0, 0, time.UTC)
	spans := map[int32]span{0: {first: 10, committed: 100}, 1: {first: 0, committed: 50}, 2: {first: 7, committed: 7}}
	byTime := map[int32]int64{0: 40, 1: 60} // in 1 behind where the group is, in 2 nothing

	for text, want := range map[string]map[int32]int64{
		"earliest":             {0: 10, 1: 0, 2: 7},
		"2026-11-30T12:00:00Z": {0: 40, 1: 50, 2: 7},
		"2026-11-30 12:00:00":  {0: 40, 1: 50, 2: 7},
		"2026-11-30":           {0: 40, 1: 50, 2: 7},
		"6h":                   {0: 40, 1: 50, 2: 7},
		"0:10":                 {0: 10},
		"0:100, 1:0":           {0: 100, 1: 0},
	} {
		point, err := ParsePoint(text, now)
		require.NoError(t, err, text)
		found, err := point.resolve(spans, byTime)
		require.NoError(t, err, text)
		require.Equal(t, want, found, text)
	}
	point, err := ParsePoint("6h", now)
	require.NoError(t, err)
	require.Equal(t, now.Add(-6*time.Hour), point.at)

	for text, want := range map[string]string{
		"12":    "offset 12 is out of range: partition 2 can be replayed from 7, its first record, to 7, where the group is",
		"0:9":   "offset 9 is out of range: partition 0",
		"0:101": "offset 101 is out of range: partition 0",
		"3:0":   "there is no partition 3: the topic has 3",
	} {
		point, err := ParsePoint(text, now)
		require.NoError(t, err, text)
		_, err = point.resolve(spans, byTime)
		require.ErrorContains(t, err, want)
	}
	for _, text := range []string{"", "-1", "-6h", "latest", "1:", ":1", "1:2:3", "0:-1", "-1:0", "0:1,0:1", "99999999999999999999"} {
		_, err := ParsePoint(text, now)
		require.Error(t, err, text)
	}
}

func TestMadeAt(t *testing.T) {
	t.Parallel()

	before := time.Now().Truncate(time.Millisecond)
	made := madeAt(uuid.Must(uuid.NewV7()))
	require.False(t, made.Before(before))
	require.False(t, made.After(time.Now()))
}

package relay

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestProgress(t *testing.T) {
	t.Parallel()

	const start = position(100)
	setup := func() *progress { return newProgress(window{events: 8, bytes: 1000}, start) }
	transaction := func(p *progress, events int, lsn position) (seqs []uint64) {
		p.begin()
		for range events {
			seqs = append(seqs, p.event(1, time.Time{}))
		}
		p.commit(lsn)
		return seqs
	}

	t.Run("ConfirmsATransactionOnceAllItsEventsAreDelivered", func(t *testing.T) {
		t.Parallel()

		p := setup()
		seqs := transaction(p, 3, 200)
		for _, seq := range []uint64{seqs[2], seqs[0]} {
			p.delivered(seq)
			require.Equal(t, start, p.summary().confirmable)
		}
		p.delivered(seqs[1])
		require.EqualValues(t, 200, p.summary().confirmable)
		require.EqualValues(t, 3, p.summary().delivered)
	})

	t.Run("ConfirmsNothingBehindAnUndeliveredEvent", func(t *testing.T) {
		t.Parallel()

		p := setup()
		first, second := transaction(p, 1, 200), transaction(p, 1, 300)
		p.delivered(second[0])
		require.Equal(t, start, p.summary().confirmable)
		require.Equal(t, 2, p.summary().inFlight)
		p.delivered(first[0])
		require.EqualValues(t, 300, p.summary().confirmable)
	})

	t.Run("ConfirmsNothingOfAHalfReadTransaction", func(t *testing.T) {
		t.Parallel()

		p := setup()
		p.begin()
		p.delivered(p.event(1, time.Time{}))
		p.keepalive(250)
		require.Equal(t, start, p.summary().confirmable)
		p.commit(300)
		require.EqualValues(t, 300, p.summary().confirmable)
	})

	t.Run("TakesAKeepaliveWithNothingInFlight", func(t *testing.T) {
		t.Parallel()

		p := setup()
		seqs := transaction(p, 1, 200)
		p.keepalive(250)
		require.Equal(t, start, p.summary().confirmable)
		p.delivered(seqs[0])
		require.EqualValues(t, 200, p.summary().confirmable)
		p.keepalive(250)
		require.EqualValues(t, 250, p.summary().confirmable)
	})

	t.Run("ConfirmsATransactionWithoutEvents", func(t *testing.T) {
		t.Parallel()

		p := setup()
		seqs := transaction(p, 1, 200)
		transaction(p, 0, 300)
		require.Equal(t, start, p.summary().confirmable)
		p.delivered(seqs[0])
		require.EqualValues(t, 300, p.summary().confirmable)
	})

	t.Run("NeverGoesBack", func(t *testing.T) {
		t.Parallel()

		p := setup()
		p.keepalive(50)
		require.Equal(t, start, p.summary().confirmable)
		for _, seq := range transaction(p, 1, 60) { // sent again after a restart
			p.delivered(seq)
		}
		require.Equal(t, start, p.summary().confirmable)
	})

	t.Run("IgnoresAReportThatComesTwice", func(t *testing.T) {
		t.Parallel()

		p := setup()
		first := transaction(p, 1, 200)
		p.delivered(first[0])
		p.delivered(first[0])
		p.delivered(77)
		transaction(p, 1, 300)
		require.EqualValues(t, 200, p.summary().confirmable)
	})

	t.Run("IsCrowdedByEventsAndByBytes", func(t *testing.T) {
		t.Parallel()

		p := setup()
		seqs := transaction(p, 8, 200)
		require.True(t, p.crowded())
		for _, seq := range seqs[:3] {
			require.False(t, p.delivered(seq))
			require.True(t, p.crowded(), "until half is free")
		}
		require.True(t, p.delivered(seqs[3]))
		require.False(t, p.crowded())

		p = setup()
		huge := p.event(5000, time.Time{})
		require.True(t, p.crowded())
		require.True(t, p.delivered(huge))
		require.False(t, p.crowded())
	})

	t.Run("KnowsTheOldest", func(t *testing.T) {
		t.Parallel()

		p, early, late := setup(), time.Unix(1, 0), time.Unix(2, 0)
		first, _ := p.event(1, early), p.event(1, late)
		require.Equal(t, early, p.summary().oldest)
		p.delivered(first)
		require.Equal(t, late, p.summary().oldest)
	})
}

// TestProgressAgainstAModel compares with a model that keeps everything and
// looks through all of it: what is confirmable may never be behind an event
// that is not delivered, and is never less than what the rule allows.
func TestProgressAgainstAModel(t *testing.T) {
	t.Parallel()

	rapid.Check(t, func(t *rapid.T) {
		w := window{events: rapid.IntRange(1, 6).Draw(t, "events"), bytes: rapid.IntRange(1, 40).Draw(t, "bytes")}
		p := newProgress(w, 1)
		var model struct {
			delivered   []bool
			sizes       []int
			ends        []end
			inside      bool
			confirmable position
		}
		model.confirmable = 1
		lsn := position(1)
		undelivered := func() (seqs []int) {
			for seq, delivered := range model.delivered {
				if !delivered {
					seqs = append(seqs, seq)
				}
			}
			return seqs
		}
		allDelivered := func(n uint64) bool {
			for _, delivered := range model.delivered[:n] {
				if !delivered {
					return false
				}
			}
			return true
		}

		t.Repeat(map[string]func(*rapid.T){
			"event": func(t *rapid.T) {
				if p.crowded() {
					t.Skip()
				}
				if !model.inside {
					p.begin()
					model.inside = true
				}
				size := rapid.IntRange(0, 20).Draw(t, "size")
				require.EqualValues(t, len(model.delivered), p.event(size, time.Time{}))
				model.delivered, model.sizes = append(model.delivered, false), append(model.sizes, size)
			},
			"commit": func(t *rapid.T) {
				lsn += position(rapid.IntRange(1, 5).Draw(t, "lsn"))
				p.commit(lsn)
				model.inside = false
				model.ends = append(model.ends, end{events: uint64(len(model.delivered)), at: lsn})
			},
			"delivered": func(t *rapid.T) {
				seqs := undelivered()
				if len(seqs) == 0 {
					t.Skip()
				}
				seq := rapid.SampledFrom(seqs).Draw(t, "seq")
				p.delivered(uint64(seq))
				model.delivered[seq] = true
			},
			"keepalive": func(t *rapid.T) {
				lsn += position(rapid.IntRange(0, 5).Draw(t, "lsn"))
				p.keepalive(lsn)
				if len(undelivered()) == 0 && !model.inside {
					model.confirmable = max(model.confirmable, lsn)
				}
			},
			"": func(t *rapid.T) {
				for _, end := range model.ends {
					if allDelivered(end.events) {
						model.confirmable = max(model.confirmable, end.at)
					}
				}
				now := p.summary()
				require.Equal(t, model.confirmable, now.confirmable)

				head, bytes := len(model.delivered), 0
				if seqs := undelivered(); len(seqs) > 0 {
					head = seqs[0]
				}
				for _, size := range model.sizes[head:] {
					bytes += size
				}
				inFlight := len(model.delivered) - head
				require.EqualValues(t, head, now.delivered)
				require.Equal(t, inFlight, now.inFlight)
				require.LessOrEqual(t, inFlight, w.events)
				if inFlight >= w.events || inFlight > 0 && bytes >= w.bytes {
					require.True(t, p.crowded())
				} else if inFlight == 0 {
					require.False(t, p.crowded())
				}
			},
		})
	})
}

package prove

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func names(cells []Cell) []string {
	var names []string
	for _, cell := range cells {
		names = append(names, cell.Name)
	}
	return names
}

func someCells() []Cell {
	return []Cell{
		{Name: "kill-api", Groups: []string{"process"}}, {Name: "kill-billing", Groups: []string{"process"}},
		{Name: "postgres-kill", Needs: []Need{NeedPostgres}}, {Name: "kafka-kill", Groups: []string{"process"}, Needs: []Need{NeedApache}},
	}
}

func TestChoose(t *testing.T) {
	t.Parallel()

	tests := map[string]struct {
		patterns []string
		want     []string
	}{
		"All":             {nil, []string{"kill-api", "kill-billing", "postgres-kill", "kafka-kill"}},
		"ByName":          {[]string{"kill-billing"}, []string{"kill-billing"}},
		"ByPattern":       {[]string{"*-kill"}, []string{"postgres-kill", "kafka-kill"}},
		"ByGroup":         {[]string{"process"}, []string{"kill-api", "kill-billing", "kafka-kill"}},
		"ByFirstWord":     {[]string{"kill"}, []string{"kill-api", "kill-billing"}},
		"WithoutOne":      {[]string{"!kill-api"}, []string{"kill-billing", "postgres-kill", "kafka-kill"}},
		"GroupWithoutOne": {[]string{"process", "!kafka-*"}, []string{"kill-api", "kill-billing"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			chosen, err := Choose(someCells(), test.patterns)
			require.NoError(t, err)
			require.Equal(t, test.want, names(chosen))
		})
	}

	refusals := map[string]struct {
		patterns []string
		says     string
	}{
		"UnknownNamesNearOnes": {[]string{"kil-api"}, "did you mean kill-api"},
		"UnknownAltogether":    {[]string{"moonphase"}, `there is no cell "moonphase"`},
		"NothingLeft":          {[]string{"kill-api", "!kill"}, "leaves no cell over"},
		"BadPattern":           {[]string{"[a"}, "is not a pattern"},
	}
	for name, test := range refusals {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := Choose(someCells(), test.patterns)
			require.ErrorContains(t, err, test.says)
		})
	}
}

func TestPickLeavesOutWhatCannotBeRunHere(t *testing.T) {
	t.Parallel()

	given := Options{DatabaseURL: "postgres://there", KafkaBrokers: "there:9092"}
	chosen, left, err := given.pick(someCells())
	require.NoError(t, err)
	require.Equal(t, []string{"kill-api", "kill-billing"}, names(chosen))
	require.Equal(t, []string{"postgres-kill (needs postgres)", "kafka-kill (needs apache)"}, left)

	given.Cells = []string{"postgres"}
	_, _, err = given.pick(someCells())
	require.ErrorContains(t, err, "no cell can be run here: left out postgres-kill (needs postgres)")
}

// The digest is the schedule's: a program that makes another one from the same
// seed has changed what seeds mean, and a report can no longer be run again.
func TestSchedule(t *testing.T) {
	t.Parallel()

	const digest = "79d99962fd4927ce246ce18fe8273d8af1d2580a068b0181d8b4748fe4c81bd3"
	cells := someCells()
	schedule := Schedule(cells, 10, 42)
	require.Equal(t, names(schedule), names(Schedule(cells, 10, 42)))
	require.NotEqual(t, names(schedule), names(Schedule(cells, 10, 43)))

	reversed := []Cell{cells[3], cells[2], cells[1], cells[0]}
	require.Equal(t, names(schedule), names(Schedule(reversed, 10, 42)), "the order in which cells are listed does not matter")
	require.Equal(t, names(schedule), names(Schedule(cells, 100, 42))[:10], "a longer one begins in the same way")
	require.Equal(t, digest, ScheduleDigest(schedule), strings.Join(names(schedule), " "))

	counts := make(map[string]int)
	for _, cell := range Schedule(cells, 4*25+2, 7) {
		counts[cell.Name]++
	}
	for name, count := range counts {
		require.InDelta(t, 25, count, 1, name)
	}

	one, other := faultRandom(42, 3), faultRandom(42, 3)
	require.Equal(t, one.Uint64(), other.Uint64())
	require.NotEqual(t, faultRandom(42, 4).Uint64(), other.Uint64())
}

func TestCellsAreWhole(t *testing.T) {
	t.Parallel()

	seen := make(map[string]bool)
	for _, cell := range Cells() {
		require.False(t, seen[cell.Name], "%s is there twice", cell.Name)
		seen[cell.Name] = true
		require.NotEmpty(t, cell.About, cell.Name)
		require.NotNil(t, cell.Run, cell.Name)
	}
}

func TestOptions(t *testing.T) {
	t.Parallel()

	tests := map[string]struct {
		options Options
		says    string
	}{
		"NegativeFaults":       {Options{Faults: -1}, "--faults is -1"},
		"TooManyClients":       {Options{Clients: 1000}, "--clients is 1000"},
		"UnknownBroker":        {Options{Kafka: "rabbit"}, `--kafka is "rabbit"`},
		"ThreeOfTheEmbedded":   {Options{Brokers: 3}, "--brokers=3 needs --kafka=apache"},
		"TwoBrokers":           {Options{Kafka: "apache", Brokers: 2}, "--brokers is 2"},
		"UnknownRelay":         {Options{Relay: "pigeon"}, `--relay is "pigeon"`},
		"DatabaseAlone":        {Options{DatabaseURL: "postgres://x"}, "belong together"},
		"BrokersAlone":         {Options{KafkaBrokers: "x:1"}, "belong together"},
		"RealDataOfNobody":     {Options{OnRealData: true}, "--on-real-data is for --database"},
		"GivenAndOwnBrokers":   {Options{DatabaseURL: "postgres://x", KafkaBrokers: "x:1", Kafka: "apache"}, "leave --kafka and --brokers away"},
		"SmallTmpfs":           {Options{Tmpfs: 1 << 20}, "--tmpfs is 1 MB"},
		"TmpfsOfSomebodyElses": {Options{DatabaseURL: "postgres://x", KafkaBrokers: "x:1", Tmpfs: 1 << 30}, "leave --tmpfs away"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.ErrorContains(t, test.options.validate(), test.says)
		})
	}
	require.NoError(t, Options{}.validate())
	require.Equal(t, "onceledger prove --faults 7 --seed 3 --cells 'kill-*' --kafka apache --brokers 3 --relay poll",
		Options{Faults: 7, Seed: 3, Cells: []string{"kill-*"}, Kafka: "apache", Brokers: 3, Relay: "poll"}.withDefaults().Command())
}

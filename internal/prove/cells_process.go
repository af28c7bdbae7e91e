package prove

import (
	"context"

	"github.com/onceledger/onceledger/internal/sandbox"
)

// processCells are the plain ones: a process dies at a moment of its own choice.
func processCells() []Cell {
	kill := func(name, about string, of func(*World) *sandbox.Process, bites ...Bite) Cell {
		return Cell{
			Name: name, Groups: []string{"process"}, About: about, Bites: bites,
			Run: func(ctx context.Context, w *World) error {
				return w.Burst(func() error {
					if err := w.Advance(ctx, 1+w.Rand.IntN(30)); err != nil {
						return err
					}
					return w.Kill(of(w))
				})
			},
		}
	}
	return []Cell{
		kill("kill-api", "SIGKILL to the API in the middle of requests", func(w *World) *sandbox.Process { return w.API }, BiteCrash, BiteUnknown),
		kill("kill-relay", "SIGKILL to the relay while events are on their way", func(w *World) *sandbox.Process { return w.Relay }, BiteCrash),
		kill("kill-billing", "SIGKILL to billing, balances and janitor while they apply", func(w *World) *sandbox.Process { return w.Billing }, BiteCrash, BiteRebalance),
	}
}

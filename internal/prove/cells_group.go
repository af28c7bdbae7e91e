package prove

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"

	"github.com/onceledger/onceledger/internal/billing"
	"github.com/onceledger/onceledger/internal/event"
	"github.com/onceledger/onceledger/internal/sandbox"
)

// groupCells have members of billing's group come and go.
func groupCells() []Cell {
	return []Cell{
		{
			Name:  "group-rebalance-every-2s",
			About: "another member joins and leaves in order, a change every two seconds",
			Bites: []Bite{BiteRebalance},
			Run: func(ctx context.Context, w *World) error {
				return w.Burst(func() error {
					worker := w.Sandbox.Worker(fmt.Sprintf("extra-%d", w.Fault), "billing", "WORKER_ID=")
					defer worker.Kill() //nolint:errcheck // it is gone by then
					ticker := time.NewTicker(2 * time.Second)
					defer ticker.Stop()
					w.Begun()
					for range 2 {
						for _, change := range []func() error{func() error { return worker.Start() }, worker.Stop} {
							if err := change(); err != nil {
								return err
							}
							select {
							case <-ticker.C:
							case <-ctx.Done():
								return ctx.Err()
							}
						}
					}
					return nil
				})
			},
		},
		{
			Name:  "group-storm",
			About: "three more members join, leave in order and are killed, with no pause between",
			// The embedded broker waits for a member that dies in the middle of a
			// rebalance as long as it may take, two minutes.
			Needs: []Need{NeedApache},
			Bites: []Bite{BiteRebalance},
			Run: func(ctx context.Context, w *World) error {
				var extras []*sandbox.Process
				for i := range 3 {
					extras = append(extras, w.Sandbox.Worker(fmt.Sprintf("extra-%d-%d", w.Fault, i), "billing", "WORKER_ID="))
				}
				err := w.Burst(func() error {
					w.Begun()
					for range 9 {
						extra := extras[w.Rand.IntN(len(extras))]
						var err error
						switch {
						case !extra.Alive():
							err = extra.Start()
						case w.Rand.IntN(2) == 0 || extra.URL() == "": // it does not listen yet, to SIGTERM neither
							err = extra.Kill()
						default:
							err = extra.Stop()
						}
						if err != nil {
							return err
						}
						if err := w.Advance(ctx, 1+w.Rand.IntN(15)); err != nil {
							return err
						}
					}
					return nil
				})
				for _, extra := range extras { // in order, or the others wait for its session to end
					if extra.Alive() {
						err = errors.Join(err, extra.WaitReady(), extra.Stop())
					}
				}
				w.Ended()
				return errors.Join(err, until(ctx, "billing has all partitions again", func() (bool, error) { return w.groupOwns(ctx, 1) }))
			},
		},
	}
}

// group is how many partitions of order.events the members of billing's group
// have, and how many members there are; none while it is changing.
func (w *World) group(ctx context.Context) (partitions, members int, err error) {
	err = w.admin(func(admin *kadm.Client) error {
		described, err := admin.DescribeGroups(ctx, billing.Consumer)
		if err != nil {
			return err
		}
		group := described[billing.Consumer]
		if group.Err != nil || group.State != "Stable" {
			return group.Err
		}
		members = len(group.Members)
		partitions = len(group.AssignedPartitions()[event.OrderEvents])
		return nil
	})
	return partitions, members, err
}

// groupOwns reports whether billing's group is at rest, with so many members, and
// each partition has an owner.
func (w *World) groupOwns(ctx context.Context, members int) (bool, error) {
	owned, have, err := w.group(ctx)
	if err != nil || have != members {
		return false, err
	}
	all, err := w.partitions(ctx)
	return owned >= all, err
}

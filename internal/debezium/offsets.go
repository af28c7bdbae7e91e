package debezium

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
)

// Stop stops the connector and waits until it has. What it has published stays
// in Connect's memory until Remove. One that is not registered is no error.
func (c *Client) Stop(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, c.config.Wait)
	defer cancel()
	err := c.try(ctx, func() error { return c.do(ctx, http.MethodPut, c.path("/stop"), nil, nil) })
	if err == nil {
		err = c.wait(ctx, func(now Status) (bool, error) {
			return (now.Connector == stateStopped || now.Connector == "") && now.Task == "", nil
		})
	}
	if err != nil && !isMissing(err) {
		return fmt.Errorf("stop connector %s: %w", c.config.Connector, err)
	}
	return nil
}

// PastSnapshot reports whether the connector has published what its snapshot
// showed, so that all that is left is in the log from confirmed on, which is what
// its slot is confirmed to. Unless Connect says so it is not.
//
// A connector whose slot was lost makes another and takes a new snapshot, and
// until that is published Connect still tells of the position before. That one
// lies behind what a new slot begins with.
func (c *Client) PastSnapshot(ctx context.Context, confirmed uint64) (bool, error) {
	var answer struct {
		Offsets []struct {
			Offset map[string]json.RawMessage `json:"offset"`
		} `json:"offsets"`
	}
	err := c.do(ctx, http.MethodGet, c.path("/offsets"), nil, &answer)
	if isMissing(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read how far connector %s is: %w", c.config.Connector, err)
	}
	for _, partition := range answer.Offsets {
		// While a snapshot is under way, its kind stands there.
		if _, under := partition.Offset["snapshot"]; under {
			continue
		}
		reached, err := strconv.ParseUint(string(partition.Offset["lsn"]), 10, 64)
		if err == nil && reached >= confirmed {
			return true, nil
		}
	}
	return false, nil
}

package debezium

import (
	"context"
	"fmt"
	"net/http"
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
// showed, so that all that is left is in the log. Unless Connect says so it is
// not.
func (c *Client) PastSnapshot(ctx context.Context) (bool, error) {
	var answer struct {
		Offsets []struct {
			Offset map[string]any `json:"offset"`
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
		if _, streamed := partition.Offset["lsn"]; !streamed {
			continue
		}
		if _, snapshot := partition.Offset["snapshot"]; !snapshot || partition.Offset["snapshot_completed"] == true {
			return true, nil
		}
	}
	return false, nil
}

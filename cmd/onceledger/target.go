package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/onceledger/onceledger/internal/devstack"
	"github.com/onceledger/onceledger/internal/supervisor"
)

// homeConnections is what "onceledger up" runs, or ran last, in the home folder:
// for a command for which a variable is not set.
func homeConnections(variable string) (supervisor.Connections, error) {
	connections, err := supervisor.ReadConnections(homeFolder())
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%s is not set, and nothing was ever started in %s (onceledger up)", variable, homeFolder())
	}
	return connections, err
}

// unreached says of whose address it was that something was not reached: the
// variable's, or, as that is not set, that of the home folder, where nothing may
// run any more.
func unreached(variable string, err error) error {
	if os.Getenv(variable) != "" {
		return fmt.Errorf("%s: %w", variable, err)
	}
	lock, lockErr := devstack.Lock(filepath.Join(homeFolder(), "lock"))
	if lockErr != nil {
		return fmt.Errorf("what \"onceledger up\" runs in %s: %w", homeFolder(), err)
	}
	_ = lock.Unlock()
	return fmt.Errorf("%s is not set, and no \"onceledger up\" runs on %s: start it, or set %[1]s: %[3]w", variable, homeFolder(), err)
}

package devstack

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
)

// nobody is the uid and gid the server runs as when we are root: Postgres
// refuses root, and looks its user up in /etc/passwd, where this one is.
const nobody = 65534

// capDACOverride is CAP_DAC_OVERRIDE of linux/capability.h.
const capDACOverride = 1

// identity is who Postgres' programs run as.
type identity struct {
	name  string
	attr  syscall.SysProcAttr
	owner int // uid the files on disk must have; -1: leave them
}

// The ways to run a server that refuses root, best first.
var (
	// ourselves is for everybody but root.
	ourselves = identity{name: "this user", owner: -1}

	// userNamespace makes the server see itself as nobody while the host sees
	// root: files stay root's, and folders that only root may enter will do.
	userNamespace = identity{
		name: "user namespace",
		attr: syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: nobody, HostID: 0, Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: nobody, HostID: 0, Size: 1}},
		},
		owner: 0,
	}

	// setuidNobody is for containers, which often refuse user namespaces. The
	// capability lets the server reach its data below root's home folder.
	setuidNobody = identity{
		name: "setuid nobody",
		attr: syscall.SysProcAttr{
			Credential:  &syscall.Credential{Uid: nobody, Gid: nobody},
			AmbientCaps: []uintptr{capDACOverride},
		},
		owner: nobody,
	}
)

// serverIdentity picks the way that works here by trying it.
func serverIdentity(ctx context.Context, binDir string) (identity, error) {
	if os.Geteuid() != 0 {
		return ourselves, nil
	}
	var faults string
	for _, who := range []identity{userNamespace, setuidNobody} {
		out, err := who.command(ctx, filepath.Join(binDir, "postgres"), "--version").CombinedOutput()
		if err == nil {
			return who, nil
		}
		faults += fmt.Sprintf("; as %s: %v %s", who.name, err, out)
	}
	return identity{}, fmt.Errorf("postgres cannot run as root, and no other way works here (start as another user, or set DATABASE_URL)%s", faults)
}

// command is a program that will run with this identity.
func (who identity) command(ctx context.Context, path string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, path, args...)
	attr := who.attr
	cmd.SysProcAttr = &attr
	cmd.Dir = "/" // ours may be one the server cannot enter
	return cmd
}

// own gives everything below dir to the identity, which an earlier start may
// have given to another one.
func (who identity) own(dir string) error {
	if who.owner < 0 {
		return nil
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	if int(info.Sys().(*syscall.Stat_t).Uid) == who.owner {
		return nil
	}
	// The folder itself comes last: it is what the check above looks at.
	err = filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		return os.Lchown(path, who.owner, who.owner)
	})
	if err != nil {
		return fmt.Errorf("give %s to uid %d: %w", dir, who.owner, err)
	}
	return os.Lchown(dir, who.owner, who.owner)
}
